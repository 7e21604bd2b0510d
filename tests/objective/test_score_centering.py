"""Score centring in a whole objective: by enumeration of a one-step policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import rejection as twins
from rl_is import ops
from rl_is.core.types import Batch, PolicyOutputs
from rl_is.models import scoring
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model
from rl_is.objective import constants as constants_lib
from rl_is.objective import spec as spec_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec

V = 6
R = np.random.default_rng(5)
Z = R.normal(size=V).astype(np.float32)
P, Q = (np.exp(x) / np.exp(x).sum() for x in (Z, R.normal(size=V)))
BASE = Spec("pg", centering="score", advantage="given")
# The weight's name, and its bounds as the twins and as the constants call them.
WEIGHTS = [("none", {}, {}),
           ("tis", dict(low=.5, high=1.3), dict(floor=.5, cap=1.3)),
           ("tis", {}, dict(cap=np.inf)),
           ("icepop", dict(low=.7, high=1.4), dict(low=.7, high=1.4))]


def spec_of(weight, **changes):
  own = () if weight == "none" else (Correction(weight, "current"),)
  return dataclasses.replace(BASE, corrections=own, **changes)


def every_action(adv=1., q=Q, head=np.arange(V), copies=1):
  """A row for each action, after a prompt of one token; more than once."""
  tile = lambda x: np.tile(x, (copies, 1))
  two = lambda x: np.concatenate([np.zeros_like(x), x], axis=1)
  action, logq = tile(np.arange(V)[:, None]), np.log(q).astype(np.float32)
  rows, ones = copies * V, np.ones((copies * V, 1), np.float32)
  at_head = lambda x: np.broadcast_to(x[head], (rows, 2, len(head)))
  return Batch(
      tokens=two(action), valid=np.ones((rows, 2), bool), mask=two(ones) > 0,
      reward=ones[:, 0], group=np.arange(rows), logp_behaviour=two(logq[action]),
      adv=two(adv * ones), version=two(ones.astype(int)),
      version_now=np.ones(rows, int), head_ids=at_head(np.arange(V)),
      head_logp_behaviour=at_head(logq))


def gradients(spec, batch, given):
  """d loss / d logits of each row, in units of one token; and the metrics."""
  objective = Objective(spec)
  constants = constants_lib.resolve(spec, {}, given)
  prepared = objective.prepare(batch, constants)

  def of_row(row):
    def loss(z):
      logp = jax.nn.log_softmax(z)
      return objective.loss(PolicyOutputs(
          logp[row.tokens], logp_ids=logp[row.head_ids]), row, constants)
    return jax.grad(loss, has_aux=True)(jnp.asarray(Z))

  rows = jax.tree.map(lambda x: jnp.asarray(x)[:, None], prepared)
  grads, metrics = jax.jit(jax.vmap(of_row))(rows)
  return len(batch.tokens) * np.asarray(grads, np.float64), metrics


@pytest.mark.parametrize("weight,bounds,given", WEIGHTS)
def test_the_expected_update_of_a_constant_advantage_is_zero(
    weight, bounds, given):
  """E_q[-A (w s - E_q[w s])] = 0, for each of the weights; not so without."""
  spec = spec_of(weight)
  grads, _ = gradients(spec, every_action(1.7), given)
  np.testing.assert_allclose(Q @ grads, 0, atol=1e-6)
  assert np.abs(grads).max() > .1
  drift = Q @ gradients(dataclasses.replace(spec, centering="none"),
                        every_action(1.7), given)[0]
  np.testing.assert_allclose(
      drift, -1.7 * twins.expected_score(P, Q, weight, **bounds), atol=1e-6)
  if (weight, bounds) != ("tis", {}):
    assert np.abs(drift).max() > 1e-2
  if weight == "icepop":  # some action is dropped, and its term is not
    dropped = (P / Q < bounds["low"]) | (P / Q > bounds["high"])
    assert dropped.any() and (np.abs(grads[dropped]).max(axis=1) > 0).all()


@pytest.mark.parametrize("weight,bounds,given", WEIGHTS)
def test_so_it_is_with_a_head_where_the_tail_is_in_proportion(
    weight, bounds, given):
  head, rest = np.array([4, 0, 2]), np.array([1, 3, 5])
  q = Q.copy()
  q[rest] = P[rest] * q[rest].sum() / P[rest].sum()
  grads, metrics = gradients(spec_of(weight), every_action(-.6, q, head), given)
  np.testing.assert_allclose(q @ grads, 0, atol=1e-6)
  for name, policy in (("head_mass", P), ("head_mass_behaviour", q)):
    mass = metrics[f"centering/{name}"]
    np.testing.assert_allclose(mass.total / mass.count, policy[head].sum(),
                               rtol=1e-5)


@pytest.mark.parametrize("weight,bounds,given", WEIGHTS)
def test_the_expected_update_is_a_covariance(weight, bounds, given):
  """-Cov_q(A, w s) for any A, in float64 by hand: Marek and Ryabinin's claim.

  With the exact weight it is the policy gradient itself, -E_p[A s].
  """
  adv = R.normal(size=(V, 1)).astype(np.float32)
  grads, _ = gradients(spec_of(weight), every_action(adv), given)
  score = np.eye(V) - P
  w = np.array([twins.weight(weight, x, **bounds) for x in P / Q])
  centred = w[:, None] * score - Q @ (w[:, None] * score)
  np.testing.assert_allclose(Q @ grads, -(Q * adv[:, 0]) @ centred, atol=1e-6)
  if (weight, bounds) == ("tis", {}):
    np.testing.assert_allclose(Q @ grads, -(P * adv[:, 0]) @ score, atol=1e-6)


@pytest.mark.parametrize("head", [[0, 1, 2, 3, 4, 5], [3, 1]])
def test_exact_weights_need_no_centring(head):
  """Token for token the loss of plain importance sampling, whatever the head."""
  batch = every_action(R.normal(size=(V, 1)), head=np.array(head))
  spec, given = spec_of("tis"), dict(cap=np.inf)
  plain, _ = gradients(dataclasses.replace(spec, centering="none"), batch, given)
  centred, _ = gradients(spec, batch, given)
  np.testing.assert_allclose(centred, plain, atol=1e-6)
  off, _ = gradients(spec, batch, dict(cap=1.1))  # one that binds does need it
  assert np.abs(off - gradients(dataclasses.replace(
      spec, centering="none"), batch, dict(cap=1.1))[0]).max() > 1e-2


def test_a_mask_drops_a_token_with_its_term():
  """Half of the rows are too old; the others stay centred, counted or not."""
  batch = every_action(copies=2)
  old = np.repeat([False, True], V)
  batch = batch.replace(version_now=np.where(old, 9, 1))
  for denominator, units in (("all", 1), ("kept", 2)):
    spec = dataclasses.replace(BASE, denominator=denominator, corrections=(
        Correction("version_mask"),))
    grads, _ = gradients(spec, batch, dict(max_lag=3.))
    np.testing.assert_array_equal(grads[old], 0)
    np.testing.assert_allclose(Q @ grads[~old], 0, atol=1e-6)
    alone, _ = gradients(BASE, every_action(), {})
    np.testing.assert_allclose(grads[~old], units * alone, atol=1e-6)
    # Before and after a weight: it is the mask's drop that takes the term away.
    for chain in ((0, 1), (1, 0)) if denominator == "all" else ():
      both = Correction("icepop", "current"), Correction("version_mask")
      grads, _ = gradients(
          dataclasses.replace(BASE, corrections=tuple(both[i] for i in chain)),
          batch, dict(max_lag=3., low=.7, high=1.4))
      np.testing.assert_array_equal(grads[old], 0)
      np.testing.assert_allclose(Q @ grads[~old], 0, atol=1e-6)


@pytest.mark.parametrize("weight", ["none", "tis", "icepop"])
def test_a_mask_of_the_current_ratio_drops_the_term_too(weight):
  """It is known only now, so the token's share of the mean is not 0."""
  given = dict(ratio_mask_low=.9, ratio_mask_high=1.6, icepop_low=.7,
               icepop_high=1.4, low=.9, high=1.6, cap=1.3)
  mask = Correction("ratio_mask", "current")
  own = spec_of(weight).corrections
  for chain in {(*own, mask), (mask, *own)}:
    spec = dataclasses.replace(BASE, corrections=chain)
    takes = constants_lib.taken(spec)
    grads, _ = gradients(spec, every_action(), {
        k: x for k, x in given.items() if k in takes})
    alone, _ = gradients(spec_of(weight), every_action(), {
        "none": {}, "tis": dict(cap=1.3), "icepop": dict(low=.7, high=1.4)}[weight])
    kept = (.9 <= P / Q) & (P / Q <= 1.6)
    assert 0 < kept.sum() < V
    np.testing.assert_array_equal(grads[~kept], 0)
    np.testing.assert_allclose(grads[kept], alone[kept], atol=1e-6)


def test_the_term_has_the_weight_of_its_token():
  """Rows of one and of three tokens, each row's mean counting once: the term of
  a token is divided by its own row's length and by the number of rows."""
  spec = dataclasses.replace(BASE, aggregation="sequence_mean_token_mean")
  objective, constants = Objective(spec), constants_lib.resolve(spec, {}, {})
  mask = np.bool_([[0, 1, 0, 0], [0, 1, 1, 1]])
  logp, logq = (np.float32(-1 - R.random((2, 4, 3))) for _ in range(2))
  batch = objective.prepare(Batch(
      tokens=np.zeros((2, 4), int), valid=np.ones((2, 4), bool), mask=mask,
      reward=np.zeros(2), group=np.arange(2), adv=np.ones((2, 4), np.float32),
      head_ids=np.broadcast_to(np.arange(3), (2, 4, 3)),
      head_logp_behaviour=logq), constants)
  grad = jax.grad(lambda x: objective.loss(PolicyOutputs(
      jnp.zeros((2, 4)), logp_ids=x), batch, constants)[0])(logp)
  p, q = np.exp(logp.astype(np.float64)), np.exp(logq.astype(np.float64))
  a = (1 - q.sum(-1, keepdims=True)) / (1 - p.sum(-1, keepdims=True))
  share = np.array([[[1 / 2]], [[1 / 6]]])
  np.testing.assert_allclose(
      grad, np.where(mask[..., None], share * (q - a * p), 0), atol=1e-6)


def test_it_is_centred_in_the_parameters_of_a_model():
  """Through scoring: another model sampled, at another temperature than 1."""
  model = Model(TransformerConfig(
      vocab_size=V, vocab_multiple=8, embed=8, layers=1, heads=2, kv_heads=2,
      head_dim=4, mlp=8))
  params, old = (model.init(jax.random.key(i)) for i in (0, 1))
  spec, given = spec_of("tis"), dict(cap=1.05)
  batch = every_action()
  score = lambda p, b: scoring.score(
      p, b, model=model, temperature=.7, return_head=True)
  recorded = score(old, batch)
  batch = batch.replace(logp_behaviour=recorded.logp,
                        head_logp_behaviour=recorded.logp_ids)
  q = np.exp(np.asarray(recorded.logp_ids)[0, 1])
  np.testing.assert_allclose(q.sum(), 1, rtol=1e-6)

  def norm(spec):
    objective, constants = Objective(spec), constants_lib.resolve(spec, {}, given)
    # Linear in A, so A = q makes the sum over rows the expectation.
    prepared = objective.prepare(batch.replace(
        adv=np.stack([0 * q, q], axis=1)), constants)
    grads = jax.jit(jax.grad(lambda p: objective.loss(
        score(p, prepared), prepared, constants)[0]))(params)
    return np.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)))

  assert norm(spec) < 1e-6
  assert norm(dataclasses.replace(spec, centering="none")) > 1e-4


@pytest.mark.parametrize("field", ["head_ids", "head_logp_behaviour"])
def test_a_batch_without_a_head_is_told_the_key_to_set(field):
  objective = Objective(BASE)
  assert field in objective.inputs_needed and objective.needs_head
  assert not Objective(Spec("pg")).needs_head
  with pytest.raises(ValueError, match=f"needs {field}.*rollout.record_top_k"):
    objective.prepare(every_action().replace(**{field: None}), {})


def test_outputs_without_the_heads_log_probs_are_refused():
  objective = Objective(BASE)
  constants = constants_lib.resolve(BASE, {}, {})
  prepared = objective.prepare(every_action(), constants)
  with pytest.raises(ValueError, match="centering: needs.*logp_ids"):
    objective.loss(PolicyOutputs(prepared.logp_behaviour), prepared, constants)


OWN = {"own": ops.Row(lambda *a, **k: None, "the user", has_factor=True)}


@pytest.mark.parametrize("change,words", [
    (dict(surrogate="ppo_clip"), "'pg', got 'ppo_clip'"),
    (dict(corrections=(Correction("tis"),)), "tis:proximal:token; it takes"),
    (dict(corrections=(Correction("tis", "current", "sequence_sum"),)),
     "tis:current:sequence_sum"),
    (dict(corrections=(Correction("icepop", "current", den="proximal"),),
          allow_double_counting=True), "icepop:current/proximal:token"),
    (dict(corrections=(Correction("tis", "current", options=(
        ("binds", "sum"),)),)), "binds=sum"),
    (dict(corrections=(Correction("mis", "current"),)), "mis:current:token"),
    (dict(corrections=(Correction("own", "current"),)), "own:current:token"),
    (dict(corrections=(Correction("tis", "current"), Correction("icepop",
          "current")), allow_double_counting=True), "tis:current:token, icepop"),
    (dict(corrections=(Correction("tis", "current"), Correction(
        "self_normalise"))), "self_normalise"),
    (dict(corrections=(Correction("icepop", "current"), Correction(
        "ratio_mask", options=(("over", "kept"),)))), "ratio_mask.*over=all"),
    (dict(centering="scores"), "objective.centering: unknown name 'scores'")])
def test_what_has_no_known_expectation_is_refused(change, words):
  with pytest.raises(ValueError, match=words) as error:
    spec_lib.check(dataclasses.replace(BASE, **change), OWN)
  assert "objective.centering" in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("corrections", [
    (Correction("tis@a", "current"), Correction("version_mask")),
    (Correction("m2po"), Correction("icepop", "current", options=(
        ("outside", "zero"),)), Correction("ratio_mask", "current"))])
def test_masks_and_labels_are_accepted(corrections):
  spec_lib.check(dataclasses.replace(BASE, corrections=corrections))


def test_what_a_mask_kept_before_the_split_stays_kept():
  """m2po chose on the whole batch; of one half alone it would keep others."""
  spec = dataclasses.replace(BASE, corrections=(Correction("m2po"),))
  batch = every_action(copies=2)
  off = np.linspace(0, .6, 2 * V)[:, None] * np.float32([[0, 1]])
  batch = batch.replace(logp_prox=batch.logp_behaviour + off)
  grads, _ = gradients(spec, batch, dict(tau=.04))
  kept = np.abs(grads).max(axis=1) > 0
  assert 0 < kept.sum() < 2 * V
  alone, _ = gradients(BASE, batch, {})
  np.testing.assert_allclose(grads[kept], alone[kept], atol=1e-6)
  halves, _ = gradients(spec, jax.tree.map(lambda x: x[V:], batch), dict(tau=.04))
  assert (np.abs(halves).max(axis=1) > 0).sum() != kept[V:].sum()
