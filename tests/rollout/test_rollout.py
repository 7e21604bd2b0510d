"""Publisher, queue, batching, generator."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.core.types import Batch
from rl_is.infra import mesh as mesh_lib, rng
from rl_is.models.config import TransformerConfig
from rl_is.models import scoring
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.rollout import batching, generator
from rl_is.rollout.buffer import LagQueue
from rl_is.rollout.mismatch import Disturbance, Spikes
from rl_is.rollout.publisher import Publisher, Weights
from rl_is.rollout.verify import Verifier
from rl_is.tasks import Problem, make_task

TASK = make_task("addition", digits=1)


def test_published_weights_survive_donation():
  """Case E11's kind: the learner's next step deletes its own buffers."""
  params = {"w": jnp.arange(4.0)}
  publisher = Publisher()
  publisher.publish(0, params)
  jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
  assert params["w"].is_deleted()
  version, held, learner = publisher.latest()
  assert version == 0
  np.testing.assert_array_equal(held["w"], np.arange(4.0))


def test_versions_only_grow():
  publisher = Publisher()
  with pytest.raises(RuntimeError, match="no weights"):
    publisher.latest()
  publisher.publish(3, {})
  for version in (3, 2):
    with pytest.raises(ValueError, match="version"):
      publisher.publish(version, {})


def stamped(version):
  return Batch(tokens=None, valid=None, mask=np.ones((1, 1), bool), reward=None,
               group=None, version=np.full((1, 1), version, np.int32))


@pytest.mark.parametrize("lag,U", [(0, 1), (1, 1), (3, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("total", [1, 3, 9])
def test_every_batch_has_exactly_its_lag(lag, U, total):
  """Each number once and in order, sampled from version max(0, n U - lag)."""
  queue, sampled = LagQueue(lag, U), []
  for n in range(total):
    for m in queue.due(n, total):
      sampled.append(m)
      queue.push(m, stamped(n * U))
    batch = queue.pop(n)
    assert batch.version[0, 0] == max(0, n * U - lag)
    assert len(queue.waiting()) <= lag // U
  assert sampled == list(range(total))  # none drawn to be thrown away


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_restored_queue_goes_on(stop):
  """Cases E01, E05: stop after any step; the same batches follow."""
  lag, total = 3, 6
  queue = LagQueue(lag, 1)
  for n in range(stop):
    for m in queue.due(n, total):
      queue.push(m, stamped(n))
    queue.pop(n)
  again = LagQueue(lag, 1, queue.waiting(), first=stop)
  for n in range(stop, total):
    assert list(queue.due(n, total)) == list(again.due(n, total))
    for m in again.due(n, total):
      queue.push(m, stamped(n))
      again.push(m, stamped(n))
    assert queue.pop(n).version == again.pop(n).version


def test_a_batch_of_the_wrong_age_is_refused():
  queue = LagQueue(2, 1)
  for m in range(3):
    queue.push(m, stamped(0))
  queue.pop(0)
  queue.push(3, stamped(0))  # must be of version 1
  for n in (1, 2):
    queue.pop(n)
  with pytest.raises(RuntimeError, match="version"):
    queue.pop(3)


@pytest.mark.parametrize("lag,U,word", [(3, 2, "2 or 4"), (1, 2, "0 or 2"),
                                        (-1, 1, ">= 0")])
def test_lag_must_be_a_multiple_of_the_updates(lag, U, word):
  with pytest.raises(ValueError, match=word):
    LagQueue(lag, U)


def test_the_stream_visits_every_problem_once_an_epoch():
  """Cases E02, E04: an order that follows from (seed, cursor)."""
  for count in (1, 7):
    for epoch in range(3):
      seen = [batching.problem_index(0, epoch * count + i, count)
              for i in range(count)]
      assert sorted(seen) == list(range(count))
  order = lambda seed: [batching.problem_index(seed, c, 50) for c in range(100)]
  assert order(0) == order(0) != order(1)
  assert order(0)[:50] != order(0)[50:]


def test_prompts_are_padded_on_the_left():
  tokenizer = TASK.tokenizer
  problems = [Problem("1+2=", "3"), Problem("1", "1")]
  prompts = batching.encode_prompts(tokenizer, problems, [5, 9], 2, 6)
  bos, one, plus, two, eq = 1, 4, 13, 5, 14
  np.testing.assert_array_equal(prompts.tokens, [
      [0, bos, one, plus, two, eq]] * 2 + [[0, 0, 0, 0, bos, one]] * 2)
  np.testing.assert_array_equal(prompts.valid.sum(axis=1), [5, 5, 2, 2])
  np.testing.assert_array_equal(prompts.cursor, [5, 5, 9, 9])
  np.testing.assert_array_equal(prompts.sample, [0, 1, 0, 1])
  with pytest.raises(ValueError, match="at most 3"):
    batching.encode_prompts(tokenizer, problems, [0, 1], 1, 3)


def test_demonstrations_end_with_eos_and_mask_the_answer():
  batch = batching.demonstrations(
      TASK.tokenizer, [Problem("1+2=", "3"), Problem("9+9=", "81")], 5, 3)
  np.testing.assert_array_equal(batch.tokens[:, 5:], [[6, 2, 0], [11, 4, 2]])
  np.testing.assert_array_equal(batch.mask[:, 5:], [[1, 1, 0], [1, 1, 1]])
  assert not batch.mask[:, :5].any() and (batch.reward == 1).all()
  with pytest.raises(ValueError, match="at most 2"):
    batching.demonstrations(TASK.tokenizer, [Problem("9+9=", "81")], 5, 2)


def test_describe_counts_what_is_there():
  """Rewards [1, 0 | NaN, 1]; lags 2 and 3 on tokens; one EOS of four."""
  batch = Batch(
      tokens=None, valid=None,
      mask=np.array([[1, 1], [1, 0], [0, 0], [1, 1]], bool),
      reward=np.array([1, 0, np.nan, 1], np.float32),
      group=np.array([0, 0, 1, 1]),
      version=np.array([[8, 8], [8, -1], [-1, -1], [7, 7]]),
      stop_token=np.array([2, -1, -1, -1]))
  out = batching.describe(batch, 10)
  assert out["reward/mean"] == pytest.approx(2 / 3)
  assert out["reward/groups_with_signal"] == 0.5
  assert out["reward/unscorable"] == 1
  assert out["rollout/staleness_mean"] == pytest.approx((3 * 2 + 2 * 3) / 5)
  assert out["rollout/staleness_max"] == 3
  assert out["rollout/tokens"] == 5 and out["rollout/length_mean"] == 5 / 4
  assert out["rollout/length_scored_mean"] == pytest.approx(5 / 3)
  assert out["rollout/length_unscorable_mean"] == 0
  assert out["rollout/stopped_frac"] == 0.25


def tiny_model(task=TASK):
  return Model(TransformerConfig(
      vocab_size=task.tokenizer.vocab_size, embed=8, layers=1, heads=2,
      kv_heads=2, head_dim=4, mlp=8))


def make_generator(task=TASK, **changes):
  """f(cursors, scale=1) -> the batch of a tiny model times `scale`.

  latest: params -> the (version, params) to go on with.
  """
  model = tiny_model(task)
  params = model.init(jax.random.key(0))
  kwargs = dict(
      key=rng.key(0, "sample"), seed=0, group_size=4, model=model,
      sampling=Sampling(1.0, max_new_tokens=3, eos_ids=(2,)),
      mesh=mesh_lib.make(dict(data=-1, fsdp=1, tensor=1), jax.devices()[:1]))
  made = generator.Generator(Verifier(task), **(kwargs | changes))
  weights = lambda version, params: Weights(version, params, params)
  return lambda cursors, scale=1, latest=None: made.groups(
      cursors, weights(0, jax.tree.map(lambda x: x * scale, params)),
      latest and (lambda: weights(*latest(params))))


def test_generator_fills_every_field():
  batch = make_generator()([6, 7])
  assert batch.tokens.shape == (8, 5 + 3)
  np.testing.assert_array_equal(batch.group, [0, 0, 0, 0, 1, 1, 1, 1])
  assert (batch.version[batch.mask] == 0).all()
  assert batch.logp_behaviour.dtype == np.float32
  # Rewards are the verifier's, of the text under the mask.
  for row in range(8):
    index = batching.problem_index(0, 6 + row // 4, len(TASK.train))
    text = TASK.tokenizer.decode(batch.tokens[row][batch.mask[row]])
    assert batch.reward[row] == float(text == TASK.train[index].answer)


def test_generator_is_a_function_of_the_cursors():
  a, b = make_generator(), make_generator()
  a([0, 1])  # what came before does not matter
  jax.tree.map(np.testing.assert_array_equal, a([2, 3]), b([2, 3]))
  assert not np.array_equal(a([2, 3]).tokens, a([4, 5]).tokens)
  # And of each one alone: not of its neighbours or its row.
  alone = batching.groups(a([5, 3]), 4)[1]
  jax.tree.map(np.testing.assert_array_equal, alone,
               batching.groups(b([2, 3]), 4)[1])


def test_a_failing_verifier_stops_the_run_and_says_where():
  import dataclasses
  def broken(problem, text):
    raise KeyError("gold")
  bad = dataclasses.replace(TASK, verify=broken)
  with pytest.raises(RuntimeError, match="addition.*gold"):
    make_generator(bad)([0, 1])


@pytest.mark.parametrize("how", [
    {}, dict(top_k=3), dict(top_k=3, top_p=0.5, record_top_k=2),
    dict(record_top_k=2, disturb=Disturbance(top_p=0.5)),
    dict(disturb=Disturbance(spikes=Spikes(0.5, 2.0, 0.1)))])
def test_nan_logits_stop_the_run_and_say_where(how):
  """Case A15: the sampler's NaN is never replaced, whatever filters it."""
  generate = make_generator(sampling=Sampling(
      1.0, max_new_tokens=3, eos_ids=(2,), **how))
  with pytest.raises(FloatingPointError, match="prompt 4, sample 0, token 5"):
    generate([4, 5], scale=jnp.nan)


def test_swapping_to_the_same_weights_changes_nothing():
  """Decoded two tokens at a time, the cache kept or read again: bit for bit."""
  whole = make_generator()([6, 7])
  for cache in generator.CACHES:
    swapping = make_generator(swaps=generator.Swaps(2, cache))
    versions = itertools.count(1)  # newer in name alone: the cache is read again
    got = swapping([6, 7], latest=lambda params: (next(versions), params))
    for name in ("tokens", "mask", "reward", "stop_token"):
      np.testing.assert_array_equal(getattr(got, name), getattr(whole, name))
    np.testing.assert_allclose(got.logp_behaviour, whole.logp_behaviour,
                               rtol=0, atol=0 if cache == "keep" else 1e-6)


def test_each_token_keeps_the_version_and_log_prob_of_its_weights():
  """The first two tokens by the old weights, the others by the new ones.

  Under the model that read the prompt again each is scored exactly so.
  """
  old = make_generator()([6, 7])
  got = make_generator(swaps=generator.Swaps(2, "read_again"))(
      [6, 7], latest=lambda params: (5, jax.tree.map(lambda x: 2 * x, params)))
  first, later = slice(5, 7), slice(7, 8)
  for name in ("tokens", "logp_behaviour"):
    np.testing.assert_array_equal(getattr(got, name)[:, first],
                                  getattr(old, name)[:, first])
  assert set(got.version[:, first][got.mask[:, first]]) == {0}
  assert set(got.version[:, later][got.mask[:, later]]) == {5}
  model = tiny_model()
  params = jax.tree.map(lambda x: 2 * x, model.init(jax.random.key(0)))
  scored = scoring.score(params, got, model=model, temperature=1.0).logp
  live = got.mask[:, later]
  np.testing.assert_allclose(scored[:, later][live],
                             got.logp_behaviour[:, later][live], atol=1e-5)
  # With the old keys and values the same draw has another log-prob.
  kept = make_generator(swaps=generator.Swaps(2, "keep"))(
      [6, 7], latest=lambda params: (5, jax.tree.map(lambda x: 2 * x, params)))
  assert np.abs(kept.logp_behaviour - got.logp_behaviour)[:, later].max() > 1e-3
