"""Published faults of losses, masks and denominators, through an Objective.

A case's name stands beside its arithmetic; the same kinds on the bare functions
are in ops/ as `test_case_...`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import addition
from rl_is import build, ops, overrides
from rl_is.core.types import Batch, PolicyOutputs, Prompts
from rl_is.infra import workdir
from rl_is.models import sampler
from rl_is.models.config import TransformerConfig
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.objective import constants as constants_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec
from rl_is.ops import diagnostics
from rl_is.rollout import batching

# The surrogate is -A logp: with A = -1 the "log-prob" is the loss itself.
PLAIN = Spec("pg", advantage="given")
BAND = dict(low=0.5, high=5.0)


def batch_of(mask, adv=-1.0, **fields):
  mask = jnp.asarray(mask, bool)
  rows = mask.shape[0]
  given = dict(reward=jnp.zeros(rows), group=jnp.zeros(rows, int))
  if adv is not None:
    given["adv"] = jnp.full(mask.shape, adv)
  return Batch(jnp.zeros(mask.shape, int), mask, mask, **(given | fields))


def run(spec, logp, batch, U=1, micro=None, jit=False, **constants):
  """[(loss, gradient, finished metrics)] of each minibatch.

  `micro`: rows of a microbatch; losses and gradients are only added up.
  """
  objective = Objective(spec, updates_per_batch=U)
  values = constants_lib.resolve(spec, {}, constants)
  prepare = functools.partial(objective.prepare, constants=values)
  f = jax.value_and_grad(lambda x, b: objective.loss(
      PolicyOutputs(x), b, values), has_aux=True)
  if jit:
    prepare, f = jax.jit(prepare), jax.jit(f)
  logp, out = jnp.asarray(logp, jnp.float32), []
  first = 0
  for minibatch in objective.minibatches(prepare(batch)):
    rows = minibatch.mask.shape[0]
    parts = []
    for i in range(0, rows, micro or rows):
      cut = slice(i, i + (micro or rows))
      parts.append(f(logp[first:first + rows][cut],
                     jax.tree.map(lambda x: x[cut], minibatch)))
    total = functools.reduce(
        lambda x, y: {k: x[k] + y[k] for k in x}, [p[0][1] for p in parts])
    out.append((sum(p[0][0] for p in parts),
                np.concatenate([p[1] for p in parts]),
                diagnostics.finish(total)))
    first += rows
  return out


@pytest.mark.parametrize("name", ["icepop", "mis", "ratio_mask"])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("gap", [80.0, 100.0, 1000.0])
def test_A01_a_rejected_token_is_out_whatever_its_ratio(name, jit, gap):
  """prox - beh = [gap, 0], A = r = 1: loss -(0 + 1) / 2, gradient [0, -.5]."""
  spec = Spec("ppo_clip", "proximal", advantage="given",
              corrections=(Correction(name),))
  numbers = dict(cap=5.0) if name == "mis" else BAND
  prox = jnp.zeros((1, 2))
  batch = batch_of([[1, 1]], 1.0, logp_prox=prox,
                   logp_behaviour=jnp.array([[-gap, 0.0]]))
  (loss, grad, got), = run(spec, prox, batch, jit=jit, eps_low=0.2,
                           eps_high=0.2, **numbers)
  assert loss == -0.5
  np.testing.assert_array_equal(grad, [[0, -0.5]])
  assert got[f"{name}/masked_frac"] == 0.5


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [-100., -1., 0., 1., 20., 80., 89., 100., 1000.])
def test_A03_a_regularizer_is_finite_at_any_distance(name, d):
  """ref - cur = d, coefficient .1; k3 beyond 20 nats: e^20 - 21, flat."""
  spec = dataclasses.replace(PLAIN, regularizer=name)
  batch = batch_of([[1]], 0.0, logp_ref=jnp.array([[d]]))
  (loss, grad, _), = run(spec, [[0.0]], batch, kl_coef=0.1)
  x = np.float64(d)
  limited = np.clip(x, -20, 20)
  want = dict(k1=-x, k2=x * x / 2, k3=np.expm1(limited) - limited)[name]
  slope = dict(k1=1, k2=-x, k3=-np.expm1(x) if abs(x) <= 20 else 0)[name]
  np.testing.assert_allclose(loss, 0.1 * want, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(grad, [[0.1 * slope]], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level,rejected", [
    ("sequence_sum", 1.0), ("sequence_mean", 0.0), ("token", 0.0)])
@pytest.mark.parametrize("rows", [1, 3])
def test_A06_a_product_rejects_what_its_mean_keeps(level, rejected, rows):
  """300 tokens of +0.005: product e^1.5 = 4.48 > 3, mean e^0.005 = 1.005."""
  spec = dataclasses.replace(
      PLAIN, corrections=(Correction("mis", level=level),))
  x = jnp.full((rows, 300), -1.0)
  batch = batch_of(np.ones((rows, 300)), logp_prox=x, logp_behaviour=x - 0.005)
  (loss, grad, got), = run(spec, x, batch, cap=3.0)
  assert got["mis/masked_frac"] == rejected
  np.testing.assert_allclose(got["is/sequence_weight_mean"], np.exp(1.5),
                             rtol=1e-4)
  assert (loss == 0) == (grad == 0).all() == bool(rejected)


def test_A07_a_rows_weight_is_the_exp_of_its_sum():
  """Log ratios .1 -.2 .3: e^.2 = 1.221403; with mask 1 0 1 e^.4 = 1.491825."""
  spec = dataclasses.replace(
      PLAIN, corrections=(Correction("tis", level="sequence_sum"),))
  prox = jnp.array([[.1, -.2, .3], [.1, -.2, .3]])
  batch = batch_of([[1, 1, 1], [1, 0, 1]], logp_prox=prox,
                   logp_behaviour=0 * prox)
  (_, grad, _), = run(spec, 0 * prox, batch, cap=10.0)
  a, b = 1.221403 / 5, 1.491825 / 5  # five tokens
  np.testing.assert_allclose(grad, [[a, a, a], [b, 0, b]], rtol=1e-6)


@pytest.mark.parametrize("beh,loss,grad", [
    (-2.0, -1.2, 0.0), (-1.1, -np.exp(.1), -np.exp(.1)), (-1.0, -1.0, -1.0)])
def test_A09_with_two_policies_the_anchor_is_the_behaviour(beh, loss, grad):
  """cur = -1, A = 1, eps .2: r = e^(-1 - beh), cut at 1.2."""
  spec = Spec("ppo_clip", "behaviour", advantage="given")
  batch = batch_of([[1]], 1.0, logp_behaviour=jnp.array([[beh]]))
  (got, slope, _), = run(spec, [[-1.0]], batch, eps_low=.2, eps_high=.2)
  np.testing.assert_allclose(got, loss, rtol=1e-6)
  np.testing.assert_allclose(slope, [[grad]], rtol=1e-6)


@pytest.mark.parametrize("level,mask,want", [
    ("sequence_mean", [1, 1, 0, 0], [.3, .3, 0, 0]),
    ("segment", [1, 1, 0, 1], [.3, .3, 0, -1.]),  # two runs: told apart
    ("sequence_mean_token", [1, 1, 0, 0], [.3, .3, 0, 0])])
@pytest.mark.parametrize("junk", [0.0, 50.0, np.nan])
def test_A13_a_mean_ratio_is_over_its_own_tokens(level, mask, want, junk):
  """e^.3 = 1.349859 for (.3 + .3) / 2, not / 3; the next run has its own."""
  spec = Spec("ppo_clip", "behaviour", level, advantage="given",
              aggregation="token_sum")
  logp = jnp.array([[.3, .3, junk, -1.]])
  batch = batch_of([mask], -1.0, logp_behaviour=jnp.zeros((1, 4)))
  (loss, grad, _), = run(spec, logp, batch, eps_low=.99, eps_high=9.)
  on = np.array(mask, bool)
  np.testing.assert_allclose(loss, np.exp(np.array(want)[on]).sum(), rtol=1e-6)
  assert (grad[0, ~on] == 0).all()
  assert abs(grad.sum() - loss) < 1e-5  # A = -1: each ratio's own slope


def test_A22_what_is_exported_is_raw_and_what_is_used_is_flagged():
  """25 nats, limited to 20, cap 2: the log says 25, one token of two cut."""
  spec = dataclasses.replace(PLAIN, corrections=(Correction("tis", "current"),))
  batch = batch_of([[1, 1]], logp_behaviour=jnp.array([[-25.0, 0.0]]))
  (_, _, got), = run(spec, [[0.0, 0.0]], batch, cap=2.0)
  assert got["is/log_ratio_max"] == 25
  assert got["tis/weight_mean"] == 1.5 and got["tis/changed_frac"] == 0.5


SPLITS = [name for name in ops.AGGREGATIONS]


@pytest.mark.parametrize("aggregation", SPLITS)
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("width", [10, 12])
def test_B01_B04_neither_split_nor_width_changes_the_loss(aggregation, micro,
                                                         width):
  """Rows of 1, 9, 9, 9 tokens; 2.0 on the short one, 0.5 on the others.

  token mean: (2 + 27 / 2) / 28, not (2 + .5 + .5 + .5) / 4; row means: 3.5 / 4;
  over a constant 10: row sums 2 + 3 x 4.5 = 15.5, / 10 / 4.
  """
  length = np.array([1, 9, 9, 9])
  mask = np.arange(width) < length[:, None]
  logp = np.where(mask, np.array([2., .5, .5, .5])[:, None], np.nan)
  spec = dataclasses.replace(PLAIN, aggregation=aggregation)
  numbers = dict(length=10.0) if aggregation == "constant_length" else {}
  (loss, grad, _), = run(spec, logp, batch_of(mask), micro=micro, **numbers)
  want = dict(token_mean=15.5 / 28, token_sum=15.5,
              sequence_mean_token_mean=3.5 / 4,
              sequence_mean_token_sum=15.5 / 4, constant_length=15.5 / 40,
              prompt_mean=15.5 / 28)[aggregation]
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  # Linear: the gradient times the losses is the loss.
  np.testing.assert_allclose((grad * np.nan_to_num(logp)).sum(), want,
                             rtol=1e-6)


@pytest.mark.parametrize("rows,U,micro", [(4, 2, 1), (8, 4, 2), (2, 1, 1),
                                          (6, 2, 3), (6, 2, 1)])
def test_B02_the_denominator_is_of_the_update_not_of_the_batch(rows, U, micro):
  """Rows of 5 tokens of loss 1: 1.0 an update, whatever the batch holds."""
  out = run(PLAIN, np.ones((rows, 5)), batch_of(np.ones((rows, 5))), U=U,
            micro=micro)
  assert len(out) == U
  for loss, grad, _ in out:
    np.testing.assert_allclose(loss, 1, rtol=1e-6)
    np.testing.assert_allclose(grad.sum(), 1, rtol=1e-6)


@pytest.mark.parametrize("aggregation,want", [
    ("token_mean", 20 / 6), ("sequence_mean_token_mean", 6.0),
    ("sequence_mean_token_sum", 10.0), ("constant_length", 1.0)])
def test_B03_four_names_four_values(aggregation, want):
  """Five tokens of 2, one of 10: 20 / 6, (2 + 10) / 2, 20 / 2, 20 / 10 / 2."""
  mask = np.arange(10) < np.array([[5], [1]])
  logp = [[2, 2, 2, 2, 2, 6, 5, 3, 2, 4], [10, 3, 4, 5, 2, 3, 4, 1, 1, 3]]
  spec = dataclasses.replace(PLAIN, aggregation=aggregation)
  numbers = dict(length=10.0) if aggregation == "constant_length" else {}
  (loss, _, _), = run(spec, logp, batch_of(mask), **numbers)
  np.testing.assert_allclose(loss, want, rtol=1e-6)


@pytest.mark.parametrize("aggregation", SPLITS)
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_B06_B07_rows_without_a_token(aggregation, denominator):
  """Losses 2 2 in row 1, none in row 2: as row 1 alone. Nothing at all: 0."""
  spec = dataclasses.replace(
      PLAIN, aggregation=aggregation, denominator=denominator)
  numbers = dict(length=2.0) if aggregation == "constant_length" else {}
  logp = np.array([[2., 2.], [7., np.inf]])
  (loss, _, got), = run(spec, logp, batch_of([[1, 1], [0, 0]]), **numbers)
  assert loss == (4 if "sum" in aggregation else 2)
  assert got["policy/logp"] == 2
  (loss, grad, got), = run(spec, logp, batch_of([[0, 0], [0, 0]]), **numbers)
  assert loss == 0 and (grad == 0).all() and np.isnan(got["policy/logp"])


@pytest.mark.parametrize("aggregation", SPLITS[:1] + SPLITS[2:4])
@pytest.mark.parametrize("jit", [False, True])
def test_B09_junk_is_silent_off_the_mask_and_loud_on_it(aggregation, jit):
  spec = dataclasses.replace(PLAIN, aggregation=aggregation)
  logp = [[1, np.nan, -np.inf]]
  (loss, grad, _), = run(spec, logp, batch_of([[1, 0, 0]]), jit=jit)
  assert loss == 1
  np.testing.assert_array_equal(grad, [[1, 0, 0]])
  (loss, _, _), = run(spec, logp, batch_of([[1, 1, 0]]), jit=jit)
  assert np.isnan(loss)


def sample(pad, eos):
  """48 answers of up to 4 tokens of 8, all about equally likely."""
  model = Model(TransformerConfig(vocab_size=8, vocab_multiple=8, embed=8,
                                  layers=1, heads=2, kv_heads=2, head_dim=4,
                                  mlp=8))
  rows = jnp.arange(48)
  prompts = Prompts(jnp.ones((48, 1), int), jnp.ones((48, 1), bool), rows, rows)
  return jax.device_get(jax.jit(functools.partial(
      sampler.sample, model=model, sampling=Sampling(
          1.0, max_new_tokens=4, eos_ids=eos, pad_id=pad)))(
              model.init(jax.random.key(0)), prompts, jax.random.key(1), 0))


@pytest.mark.parametrize("pad", [2, 5])
def test_B10_B11_the_mask_is_of_what_was_drawn_not_of_token_values(pad):
  """Pad is EOS: 5 6 2 | 2: 3 drawn. Pad inside an answer: all of it is drawn.

  Any of the EOS ids ends an answer and is in it; none of them: the limit.
  """
  eos = (2, 3, 7)
  want, got = sample(0, eos), sample(pad, eos)
  np.testing.assert_array_equal(got.mask, want.mask)
  np.testing.assert_array_equal(got.tokens[got.mask], want.tokens[want.mask])
  stops, inside = set(), 0
  for tokens, mask, stop in zip(got.tokens[:, 1:], got.mask[:, 1:],
                                got.stop_token):
    n = mask.sum()
    ends = [i for i in range(4) if tokens[i] in eos and mask[i]]
    assert mask[:n].all() and ends == ([n - 1] if stop >= 0 else [])
    assert (tokens[n:] == pad).all() and (stop >= 0 or n == 4)
    stops.add(int(stop))
    inside += int((tokens[:n - 1] == pad).any())
  assert stops == {-1, *eos} and (inside > 0) == (pad not in eos)


@pytest.mark.parametrize("U", [1, 2, 4])
def test_B13_advantages_are_made_before_the_split(U):
  """Two groups of two, rewards 1 0 | 1 1: A = .5 -.5 0 0, also row by row."""
  spec = Spec("pg", advantage="dr_grpo")
  batch = batch_of(np.ones((4, 1)), None, reward=jnp.array([1., 0, 1, 1]),
                   group=jnp.array([0, 0, 1, 1]))
  out = run(spec, np.zeros((4, 1)), batch, U)
  grads = np.concatenate([grad for _, grad, _ in out])
  np.testing.assert_allclose(grads[:, 0] * (4 // U), [-.5, .5, 0, 0], rtol=1e-6)


def test_B14_every_row_is_consumed_once_or_the_batch_is_refused():
  """12 rows in 4 updates: each once, in order. 10 rows in 4: 8 or 12."""
  objective = Objective(PLAIN, updates_per_batch=4)
  whole = batch_of(np.ones((12, 1))).replace(tokens=jnp.arange(12)[:, None])
  parts = objective.minibatches(objective.prepare(whole, dict(entropy_coef=0.0)))
  ids = [int(i) for part in parts for i in part.tokens[:, 0]]
  assert ids == list(range(12))
  with pytest.raises(ValueError, match="10 .*= 4; nearest valid: 8 or 12"):
    objective.prepare(batch_of(np.ones((10, 1))),
                      dict(entropy_coef=0.0))


def test_B17_a_length_is_the_count_of_its_tokens_not_their_span():
  """000 1111 000 11111: 9 tokens. opo's baseline: (9 x 1 + 1 x 0) / 10 = .9."""
  mask = np.zeros((2, 15), bool)
  mask[0, 3:7] = mask[0, 10:15] = mask[1, 0] = True
  described = batching.describe(Batch(
      tokens=None, valid=None, mask=mask[:1], reward=np.ones(1, np.float32),
      group=np.zeros(1, int), version=np.zeros((1, 15), int),
      stop_token=np.full(1, -1)), 0)
  assert described["rollout/length_mean"] == 9
  batch = batch_of(mask, None, reward=jnp.array([1., 0]))
  (_, grad, _), = run(Spec("pg", advantage="opo"), np.zeros((2, 15)), batch)
  np.testing.assert_allclose(grad[0], -.1 / 10 * mask[0], rtol=1e-5)
  np.testing.assert_allclose(grad[1], .9 / 10 * mask[1], rtol=1e-5)


def test_B20_another_aggregation_is_another_run(tmp_path):
  """The config says it, the objective has it, the directory is held to it."""
  configs = []
  for name in ("token_mean", "sequence_mean_token_mean"):
    config = addition.get_config("lag=0,tiny")
    overrides.apply(config, "objective.aggregation", name)
    parts = build.build(config, devices=jax.devices()[:1])
    assert parts.objective.spec.aggregation == name
    configs.append(config.to_dict())
  workdir.claim(str(tmp_path), configs[0])
  with pytest.raises(ValueError, match="objective.aggregation: 'token_mean' "
                     "there, 'sequence_mean_token_mean' now"):
    workdir.claim(str(tmp_path), configs[1])


@pytest.mark.parametrize("aggregation,want", [
    ("token_mean", 2.0), ("sequence_mean_token_mean", 2.0),
    ("sequence_mean_token_sum", 4.0), ("prompt_mean", 2.0)])
@pytest.mark.parametrize("junk", [3.0, np.nan])
def test_B22_a_row_that_fills_the_batch_up_counts_nowhere(aggregation, want,
                                                          junk):
  """Three rows of two tokens of 1, 2, 3 and one off the mask: 2, not 9 / 4."""
  spec = dataclasses.replace(PLAIN, aggregation=aggregation)
  rows = np.array([1., 2., 3., junk])[:, None] * np.ones((1, 2))
  mask = np.array([1, 1, 1, 0])[:, None] * np.ones((1, 2))
  batch = batch_of(mask, logp_behaviour=jnp.asarray(rows - .1, jnp.float32))
  (loss, grad, got), = run(spec, rows, batch)
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  assert (grad[3] == 0).all() and (grad[:3] > 0).all()
  np.testing.assert_allclose(got["policy/logp"], 2, rtol=1e-6)
  np.testing.assert_allclose(got["is/log_ratio_max"], .1, rtol=1e-5)


@pytest.mark.parametrize("filler", [0.5, 1.0])
def test_B22_nor_in_a_baseline_when_it_is_unscorable(filler):
  """Rewards 1 0 0 and a filler without tokens: as a NaN it is in no mean."""
  spec = Spec("pg", advantage="dr_grpo")
  mask = np.array([[1], [1], [1], [0]])
  grads = []
  for reward in (np.nan, filler):
    batch = batch_of(mask, None, reward=jnp.array([1., 0, 0, reward]))
    (_, grad, _), = run(spec, np.zeros((4, 1)), batch)
    grads.append(grad[:, 0])
  np.testing.assert_allclose(grads[0] * 3, [-2 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)
  assert np.abs(grads[0] - grads[1]).max() > .01  # a reward would be in it
