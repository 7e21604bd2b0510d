"""The composed objective: hand-worked, in minibatches, and without signal.

What every piece and preset must have is in test_every_piece.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is import ops
from rl_is.core.types import Batch, PolicyOutputs
from rl_is.objective import constants as constants_lib, presets
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec
from rl_is.ops import diagnostics

B, T = 8, 5


def make_batch(seed=0):
  """Two groups of four; rows of different length, one of them empty."""
  r = np.random.default_rng(seed)
  mask = np.arange(T)[None] < np.array([5, 3, 1, 4, 2, 0, 5, 3])[:, None]
  logp = lambda: jnp.asarray(-r.exponential(1.0, (B, T)), jnp.float32)
  return logp(), Batch(
      tokens=jnp.zeros((B, T), jnp.int32), valid=jnp.asarray(mask),
      mask=jnp.asarray(mask), reward=jnp.asarray(r.integers(0, 2, B), jnp.float32),
      group=jnp.arange(B, dtype=jnp.int32) // 4, logp_behaviour=logp(),
      logp_prox=logp(), logp_ref=logp())


def constants_of(spec, **given):
  preset_like = dict(eps_low=0.2, eps_high=0.3, cap=2.0, length=5.0,
                     kl_coef=0.1)
  takes = constants_lib.taken(spec)
  return constants_lib.resolve(
      spec, {k: v for k, v in preset_like.items() if k in takes}, given)


def loss_and_grad(objective, logp, batch, constants):
  """Loss, gradient and finished metrics over all minibatches of a batch."""
  minibatches = objective.minibatches(objective.prepare(batch, constants))
  rows = B // len(minibatches)

  def f(logp, minibatch):
    # Junk where the log-prob is: a model's entropy there means nothing either.
    entropy = jax.lax.stop_gradient(jnp.abs(logp))
    return objective.loss(PolicyOutputs(logp, entropy), minibatch, constants)

  out = []
  for u, minibatch in enumerate(minibatches):
    (loss, metrics), grad = jax.value_and_grad(f, has_aux=True)(
        logp[u * rows:(u + 1) * rows], minibatch)
    out.append((loss, grad, metrics))
  return out


def test_hand_worked_token_mean():
  """pg, rewards 1 and 0 in a group of two, two tokens and one.

  dr_grpo: A = 1 - 1/2 = 1/2 and -1/2; three tokens in all.
  loss = -(1/2 (-1 - 2) - 1/2 (-3)) / 3 = (1.5 - 1.5) / 3 = 0
  gradient = -A / 3 = -1/6, -1/6, +1/6
  """
  objective = Objective(Spec("pg", advantage="dr_grpo"))
  logp = jnp.array([[-1.0, -2.0], [-3.0, -9.0]])
  batch = Batch(tokens=jnp.zeros((2, 2), int), valid=None,
                mask=jnp.array([[True, True], [True, False]]),
                reward=jnp.array([1.0, 0.0]), group=jnp.zeros(2, int))
  constants = constants_of(objective.spec)
  prepared = objective.prepare(batch.replace(valid=batch.mask), constants)
  loss, grad = jax.value_and_grad(lambda l: objective.loss(
      PolicyOutputs(l), prepared, constants)[0])(logp)
  np.testing.assert_allclose(loss, 0, atol=1e-7)
  np.testing.assert_allclose(grad, [[-1 / 6, -1 / 6], [1 / 6, 0]], rtol=1e-6)


def test_case_A08_the_weight_is_proximal_over_behaviour():
  """cur -1.0, prox -1.2, beh -1.5, A = 1, eps .3, cap 2: w = e^.3 = 1.349859,
  r = e^.2 = 1.221403, loss = -w r = -1.648721 = gradient."""
  objective = Objective(Spec("ppo_clip", "proximal", advantage="reward",
                             corrections=(Correction("tis"),)))
  one = lambda x: jnp.full((1, 1), x)
  batch = Batch(one(0), one(True), one(True), jnp.ones(1), jnp.zeros(1, int),
                logp_behaviour=one(-1.5), logp_prox=one(-1.2))
  constants = constants_of(objective.spec, eps_low=0.3, eps_high=0.3, cap=2.0)

  def f(logp, prox, beh):
    prepared = objective.prepare(
        batch.replace(logp_prox=prox, logp_behaviour=beh), constants)
    return objective.loss(PolicyOutputs(logp), prepared, constants)[0]

  loss, grads = jax.value_and_grad(f, (0, 1, 2))(one(-1.0), one(-1.2), one(-1.5))
  np.testing.assert_allclose(loss, -1.648721, rtol=1e-6)
  np.testing.assert_allclose(grads[0], -1.648721, rtol=1e-6)
  assert grads[1] == 0 and grads[2] == 0


@pytest.mark.parametrize("correction", ["tis", "mis", "icepop"])
@pytest.mark.parametrize("num", ["proximal", "current"])
def test_on_policy_a_correction_changes_nothing(correction, num):
  logp, batch = make_batch()
  batch = batch.replace(logp_behaviour=logp, logp_prox=logp)
  plain = Objective(Spec("pg"))
  corrected = Objective(Spec("pg", corrections=(Correction(correction, num),)))
  (loss, grad, _), = loss_and_grad(plain, logp, batch, constants_of(plain.spec))
  (loss_2, grad_2, _), = loss_and_grad(corrected, logp, batch,
                                       constants_of(corrected.spec))
  np.testing.assert_allclose(loss, loss_2, rtol=1e-6)
  np.testing.assert_allclose(grad, grad_2, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ops.AGGREGATIONS)
def test_each_minibatch_has_its_own_denominator(aggregation):
  """U = 2 gives, on each half, what that half alone as a batch would give."""
  spec = Spec("pg", aggregation=aggregation, advantage="rloo")
  logp, batch = make_batch()
  whole = loss_and_grad(Objective(spec, updates_per_batch=2), logp, batch,
                        constants_of(spec))
  for u, (loss, grad, _) in enumerate(whole):
    half = slice(u * 4, u * 4 + 4)
    alone = jax.tree.map(lambda x: x[half], batch)
    alone = alone.replace(group=alone.group - alone.group.min())
    prepared = Objective(spec).prepare(alone, constants_of(spec))
    loss_1, grad_1 = jax.value_and_grad(lambda l: Objective(spec).loss(
        PolicyOutputs(l), prepared, constants_of(spec))[0])(logp[half])
    np.testing.assert_allclose(loss, loss_1, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, grad_1, rtol=1e-6)


def test_denominator_kept_renormalises():
  """Case B07's kind: weights 1, dropped, 1 of three tokens: x 3/2."""
  logp = jnp.full((1, 3), -1.0)
  beh = jnp.array([[-1.0, -9.0, -1.0]])  # the middle ratio is e^8
  batch = Batch(jnp.zeros((1, 3), int), jnp.ones((1, 3), bool),
                jnp.ones((1, 3), bool), jnp.ones(1), jnp.zeros(1, int),
                logp_behaviour=beh, logp_prox=logp)
  grads = {}
  for denominator in ("all", "kept"):
    objective = Objective(Spec(
        "pg", advantage="reward", denominator=denominator,
        corrections=(Correction("icepop"),)))
    constants = constants_of(objective.spec)
    prepared = objective.prepare(batch, constants)
    grads[denominator] = jax.grad(lambda l: objective.loss(
        PolicyOutputs(l), prepared, constants)[0])(logp)
  np.testing.assert_allclose(grads["all"], [[-1 / 3, 0, -1 / 3]], rtol=1e-6)
  np.testing.assert_allclose(grads["kept"], [[-1 / 2, 0, -1 / 2]], rtol=1e-6)


def test_removed_tokens_are_in_no_sequence_ratio_and_no_regularizer():
  """As if the rejected token were not in the batch at all."""
  logp = jnp.array([[-1.0, -2.0, -1.5], [-0.5, -1.0, -1.0]])
  prox, ref = logp - 0.1, logp + jnp.array([[0.3, -0.2, 0.1]])
  beh = prox.at[0, 1].add(-9.0)  # a ratio of e^9
  spec = Spec("ppo_clip", "proximal", "sequence_mean", advantage="given",
              aggregation="sequence_mean_token_mean", regularizer="k3")
  chain = (Correction("ratio_mask"),)
  numbers = dict(eps_low=.2, eps_high=.2, kl_coef=.1)

  def run(spec, mask, **more):
    batch = Batch(jnp.zeros((2, 3), int), mask, mask, jnp.ones(2),
                  jnp.zeros(2, int), logp_behaviour=beh, logp_prox=prox,
                  logp_ref=ref, adv=jnp.array([[1., 2, -1], [1, -1, 3]]))
    constants = constants_lib.resolve(spec, {}, numbers | more)
    prepared = Objective(spec).prepare(batch, constants)
    return jax.value_and_grad(lambda l: Objective(spec).loss(
        PolicyOutputs(l), prepared, constants)[0])(logp)

  whole = jnp.ones((2, 3), bool)
  want = run(spec, whole.at[0, 1].set(False))
  got = run(dataclasses.replace(spec, corrections=chain,
                                denominator="removed"), whole, low=.5, high=2.)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
  np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
  kept = run(dataclasses.replace(spec, corrections=chain, denominator="kept"),
             whole, low=.5, high=2.)
  assert abs(kept[0] - want[0]) > 1e-4
  with pytest.raises(ValueError, match="removed"):
    Objective(dataclasses.replace(
        spec, corrections=(Correction("ratio_mask", "current"),),
        denominator="removed"))


def test_unscorable_rows_leave_numerator_and_denominator():
  """Case A20: rewards [1, NaN, 0, 0], mean-centred [2/3, -, -1/3, -1/3]."""
  objective = Objective(Spec("pg", advantage="dr_grpo"))
  batch = Batch(jnp.zeros((4, 1), int), jnp.ones((4, 1), bool),
                jnp.ones((4, 1), bool), jnp.array([1, jnp.nan, 0, 0]),
                jnp.zeros(4, int))
  constants = constants_of(objective.spec)
  prepared = objective.prepare(batch, constants)
  grad = jax.grad(lambda l: objective.loss(
      PolicyOutputs(l), prepared, constants)[0])(jnp.full((4, 1), -1.0))
  np.testing.assert_allclose(  # three tokens count: -A / 3
      grad[:, 0], [-2 / 9, 0, 1 / 9, 1 / 9], rtol=1e-6)


@pytest.mark.parametrize("spec,field", [
    (Spec("ppo_clip", "behaviour"), "logp_behaviour"),
    (Spec("ppo_clip", "proximal"), "logp_prox"),
    (Spec("pg", corrections=(Correction("tis", "current"),)), "logp_behaviour"),
    (Spec("pg", regularizer="k3"), "logp_ref")])
def test_a_missing_recording_is_named(spec, field):
  _, batch = make_batch()
  with pytest.raises(ValueError, match=field):
    Objective(spec).prepare(batch.replace(**{field: None}), constants_of(spec))


@pytest.mark.parametrize("spec,changes,constants,message", [
    (Spec("pg", advantage="given"), dict(adv=jnp.ones((B, 1))), {},
     r"adv: expected shape \(8, 5\), got \(8, 1\)"),
    (Spec("ppo_clip", "proximal", proximal="log_linear"),
     dict(version=jnp.zeros((B, T), jnp.int32), version_now=jnp.int32(3)), {},
     r"version_now: expected shape \(8,\), got \(\)"),
    (Spec("ppo_clip"), {}, None, "constants: eps_low is missing"),
    (Spec("pg"), dict(mask=jnp.ones((B, T + 1))), {}, "mask: expected shape"),
])
def test_what_does_not_fit_is_named(spec, changes, constants, message):
  _, batch = make_batch()
  constants = {} if constants is None else constants_of(spec, **constants)
  with pytest.raises(ValueError, match=message):
    Objective(spec).prepare(batch.replace(**changes), constants)


def test_a_piece_that_draws_needs_a_key():
  objective = Objective(Spec("clip_cov"))
  logp, batch = make_batch()
  values = constants_lib.resolve(objective.spec, presets.PRESETS[
      "clip_cov"].constants, {})
  batch = objective.prepare(batch, values)
  with pytest.raises(ValueError, match="objective: key"):
    objective.loss(PolicyOutputs(logp, None), batch, values)


def test_no_updates_a_batch_are_refused():
  with pytest.raises(ValueError, match="updates_per_batch: .*at least 1, got 0"):
    Objective(Spec(), updates_per_batch=0)


def test_a_mask_of_numbers_is_a_mask():
  logp, batch = make_batch()
  objective = Objective(Spec("ppo_clip"))
  values = constants_of(objective.spec)
  want, = loss_and_grad(objective, logp, batch, values)
  for dtype in (jnp.float32, jnp.int32):
    got, = loss_and_grad(
        objective, logp, batch.replace(mask=batch.mask.astype(dtype)), values)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_float64_stays_float64():
  objective = Objective(Spec("ppo_clip", aggregation="sequence_mean_token_mean"))
  with jax.enable_x64(True):
    wide = lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x
    _, batch = jax.tree.map(wide, make_batch())
    prepared = objective.prepare(batch, constants_of(objective.spec))
  assert {x.dtype for x in jax.tree.leaves((
      prepared.weight, prepared.token_weight, prepared.adv))} == {
          np.dtype("float64")}


def test_a_users_own_correction():
  """Half the weight, whatever the ratio: half the gradient."""
  from rl_is.core.types import Weights

  def half(num, behaviour, mask, *, level="token"):
    return Weights(jnp.where(mask, 0.5, 0.0), mask, num - behaviour)

  row = ops.Row(half, "here", has_factor=True)
  plain = Objective(Spec("pg"))
  mine = Objective(Spec("pg", corrections=(Correction("half", "current"),)),
                   extra=(("half", row),))
  logp, batch = make_batch()
  (_, grad, _), = loss_and_grad(plain, logp, batch, constants_of(plain.spec))
  values = constants_lib.resolve(mine.spec, {}, {}, dict(half=row))
  (_, grad_2, metrics), = loss_and_grad(mine, logp, batch, values)
  np.testing.assert_allclose(grad_2, grad / 2, rtol=1e-6)
  assert "half/weight_mean" in metrics


def test_loss_metrics_count_only_where_the_clip_binds():
  """Case J01: ratios .7 .7 1.3 1.3, A + - + -, eps .2 -> F T T F."""
  objective = Objective(Spec("ppo_clip", "behaviour", advantage="reward"))
  logp = jnp.log(jnp.array([[0.7], [0.7], [1.3], [1.3]]))
  ones = jnp.ones((4, 1), bool)
  batch = Batch(jnp.zeros((4, 1), int), ones, ones,
                jnp.array([1.0, -1, 1, -1]), jnp.zeros(4, int),
                logp_behaviour=jnp.zeros((4, 1)))
  constants = constants_of(objective.spec, eps_low=0.2, eps_high=0.2)
  prepared = objective.prepare(batch, constants)
  metrics = diagnostics.finish(objective.loss(
      PolicyOutputs(logp), prepared, constants)[1])
  assert metrics["clip/frac"] == 0.5
  assert metrics["clip/frac_low"] == metrics["clip/frac_high"] == 0.25
