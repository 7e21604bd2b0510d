"""Properties that every row of the tables must have, in a whole objective.

Generated from the rows: a new one is tested as soon as it is written down.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is import ops
from rl_is.core.types import Batch, PolicyOutputs
from rl_is.objective import constants as constants_lib, presets
from rl_is.objective import spec as spec_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec
from rl_is.ops import diagnostics

B, T = 8, 5
# For constants without a default: the last word of the name decides.
VALUES = dict(eps_low=.2, eps_high=.3, cap=2., low=.5, high=2., delta=.5,
              beta=.5, tau=.1, upper=.5, max_lag=3., length=5.)
GIVEN = {"geometric_mask": dict(low=0.5, high=2.0), "clip_cov": dict(
    cov_ratio=0.5, cov_low=0.1), "kl_cov": dict(cov_ratio=0.5)}


def chain(name, num):
  own = Correction(name, num)
  if ops.CORRECTIONS[name].takes == "weights":
    return (Correction("tis", num), own)
  return (own,)


SPECS = {}
SPECS |= {f"surrogate {n}": Spec(n) for n in ops.SURROGATES}
SPECS |= {f"correction {n} {num}": Spec("pg", corrections=chain(n, num))
          for n in ops.CORRECTIONS for num in ("proximal", "current")}
SPECS |= {f"aggregation {n}": Spec("pg", aggregation=n) for n in ops.AGGREGATIONS}
SPECS |= {f"advantage {n}": Spec("pg", advantage=n)
          for n in ops.ADVANTAGES if n not in ("given", "remax")}
SPECS |= {f"norm {n}": Spec("pg", advantage_norm=n)
          for n in spec_lib.ADVANTAGE_NORMS}
SPECS |= {f"level {n}": Spec("ppo_clip", level=n) for n in ops.LEVELS}
SPECS |= {f"regularizer {n} {w}": Spec("pg", regularizer=n, kl_weight=w)
          for n, w in zip(ops.REGULARIZERS, spec_lib.KL_WEIGHTS * 2)}
SPECS |= {f"proximal {n}": Spec("ppo_clip", "proximal", proximal=n,
                                corrections=(Correction("tis"),))
          for n in spec_lib.PROXIMALS}
SPECS |= {"centering alone": Spec("pg", centering="score")}
SPECS |= {f"centering {n}": Spec("pg", centering="score", corrections=(
    Correction(n, "current"), Correction("ratio_mask", "proximal")))
          for n in spec_lib.CENTRED}
SPECS |= {f"preset {n}": p.spec for n, p in presets.PRESETS.items()
          if not {"baseline", "value"} & Objective(p.spec).inputs_needed}


def constants_of(name):
  spec, given = SPECS[name], {}
  if name.startswith("preset "):
    given = dict(presets.PRESETS[name.removeprefix("preset ")].constants)
  elif spec.regularizer != "none":
    given["kl_coef"] = 0.1
  for piece in [spec.surrogate, *(c.name for c in spec.corrections)]:
    given |= GIVEN.get(piece, {})  # wide enough for so few tokens
  takes = constants_lib.taken(spec)
  defaults = {k: VALUES.get(k, VALUES.get(k.split("_")[-1]))
              for k, c in takes.items() if c.default is None}
  return constants_lib.resolve(spec, defaults, given)


def make_batch():
  r = np.random.default_rng(0)
  mask = np.arange(T)[None] < np.array([5, 3, 1, 4, 2, 0, 5, 3])[:, None]
  logp = lambda: jnp.asarray(-r.exponential(1.0, (B, T)), jnp.float32)
  return logp(), Batch(
      tokens=jnp.zeros((B, T), jnp.int32), valid=jnp.asarray(mask),
      mask=jnp.asarray(mask),
      reward=jnp.asarray([1, 0, 0, 1, 0, 0, 1, 0], jnp.float32),
      group=jnp.arange(B, dtype=jnp.int32) // 4, logp_behaviour=logp(),
      logp_prox=logp(), logp_ref=logp(),
      version=jnp.where(mask, 3, -1).astype(jnp.int32),
      version_now=jnp.full(B, 5, jnp.int32))


# A head at every token, whose share of the token's own probability is this under
# either policy; the last slot is never in use, the second only on odd versions.
HEAD, HEAD_BEHAVIOUR = (np.log([[np.float32(x)]])
                        for x in ([.5, .2, .1], [.4, .3, .2]))


def outputs_of(logp, entropy):
  return PolicyOutputs(logp, entropy, logp_ids=logp[..., None] + HEAD)


def with_head(batch):
  """The batch with the head's log-probs; those above 0 would be none."""
  logp = jnp.minimum(batch.logp_behaviour[..., None] + HEAD_BEHAVIOUR, 0)
  in_use = jnp.arange(3)[None, None] < 1 + (batch.version % 2)[..., None]
  return batch.replace(
      head_ids=jnp.where(in_use, jnp.arange(3)[None, None], -1),
      head_logp_behaviour=jnp.where(in_use, logp, jnp.nan))


def run(name, logp, batch):
  objective, constants = Objective(SPECS[name]), constants_of(name)
  key = jax.random.key(0)
  prepared = objective.prepare(with_head(batch), constants, key)
  entropy = jnp.ones_like(logp)
  (loss, metrics), grad = jax.value_and_grad(lambda x: objective.loss(
      outputs_of(x, entropy), prepared, constants, key), has_aux=True)(logp)
  return loss, grad, metrics


@pytest.mark.parametrize("name", SPECS)
def test_finite_whatever_stands_under_the_mask_or_in_the_ratio(name):
  """Junk is bit for bit without influence; ratios of e^+-1000 stay finite."""
  logp, batch = make_batch()
  loss, grad, metrics = run(name, logp, batch)
  assert np.isfinite(loss) and np.isfinite(grad).all()
  assert loss != 0 and (np.asarray(grad)[~np.asarray(batch.mask)] == 0).all()
  junk = jnp.where(jnp.arange(T) % 2 == 0, jnp.nan, -jnp.inf)[None]
  dirty = lambda x: jnp.where(batch.mask, x, junk)
  loss_2, grad_2, metrics_2 = run(name, dirty(logp), batch.replace(
      logp_behaviour=dirty(batch.logp_behaviour),
      logp_prox=dirty(batch.logp_prox), logp_ref=dirty(batch.logp_ref)))
  np.testing.assert_array_equal(loss, loss_2)
  np.testing.assert_array_equal(grad, grad_2)
  jax.tree.map(np.testing.assert_array_equal, metrics, metrics_2)
  sign = jnp.where(jnp.arange(T) % 2 == 0, 1000.0, -1000.0)[None]
  loss, grad, _ = run(name, logp, batch.replace(
      logp_behaviour=logp + sign, logp_prox=logp - sign, logp_ref=logp + sign))
  assert np.isfinite(loss) and np.isfinite(grad).all()


@pytest.mark.parametrize("name", [
    n for n, s in SPECS.items() if not any(
        row.is_coupled for row in spec_lib.rows(s).values())])
def test_rows_add_up(name):
  """A prepared batch may be split anywhere: losses and gradients only add."""
  logp, batch = make_batch()
  objective, constants = Objective(SPECS[name]), constants_of(name)
  prepared = objective.prepare(with_head(batch), constants)
  f = jax.value_and_grad(lambda l, b: objective.loss(
      outputs_of(l, jnp.ones_like(l)), b, constants), has_aux=True)
  (loss, metrics), grad = f(logp, prepared)
  (loss_a, m_a), grad_a = f(*jax.tree.map(lambda x: x[:3], (logp, prepared)))
  (loss_b, m_b), grad_b = f(*jax.tree.map(lambda x: x[3:], (logp, prepared)))
  np.testing.assert_allclose(loss, loss_a + loss_b, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(grad, jnp.concatenate([grad_a, grad_b]), rtol=1e-5,
                             atol=1e-7)
  merged = diagnostics.finish({k: m_a[k] + m_b[k] for k in metrics})
  for key, value in diagnostics.finish(metrics).items():
    np.testing.assert_allclose(merged[key], value, rtol=1e-4, atol=1e-6,
                               err_msg=key)


def test_coupled_rows_say_so():
  """A row that does not add up must be marked: splitting changes its loss."""
  coupled = {n for t in (ops.SURROGATES, ops.CORRECTIONS) for n, row in t.items()
             if row.is_coupled}
  assert coupled == {"bapo", "clip_cov", "kl_cov", "m2po", "self_normalise"}


def test_a_correction_may_stand_twice_under_a_label():
  spec = Spec("pg", corrections=(
      Correction("ratio_mask"), Correction("ratio_mask@2", level="sequence_mean")))
  takes = constants_lib.taken(spec)
  assert {"ratio_mask_low", "ratio_mask@2_low"} <= set(takes)
  spec_lib.check(spec)


@pytest.mark.parametrize("text,correction", [
    ("opsm:current/proximal", Correction("opsm", "current", den="proximal")),
    ("k_rejection:proximal:token:estimator=k1:statistic=sum",
     Correction("k_rejection", options=(("estimator", "k1"),
                                        ("statistic", "sum"))))])
def test_ratios_and_options_as_text(text, correction):
  assert spec_lib.parse_corrections(text) == (correction,)
  spec_lib.check(Spec("pg", corrections=(correction,)))
  assert spec_lib.parse_corrections(str(correction)) == (correction,)


@pytest.mark.parametrize("spec,word", [
    (Spec("dppo_tv", options=(("form", "x"),)), "score"),
    (Spec("ppo_clip", options=(("form", "ratio"),)), "form"),
    (Spec("pg", corrections=(Correction("k_rejection", options=(
        ("estimator", "k4"),)),)), "k3"),
    (Spec("pg", corrections=(Correction("m2po", level="sequence_sum"),)),
     "takes no level"),
    (Spec("pg", corrections=(Correction("opsm", den="proximal"),)), "always 1"),
    (Spec("pg", proximal="ewm"), "ewma")])
def test_impossible_choices_are_refused(spec, word):
  with pytest.raises(ValueError, match=word):
    spec_lib.check(spec)
