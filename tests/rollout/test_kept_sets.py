"""Kept sets and heads of top-k / top-p under swaps and mismatch dials."""

import jax
import numpy as np
import pytest
from rollout.test_mismatch import (MODEL, PATTERN, V, draw, learner_logits,
                                   log_softmax, params)  # noqa: F401  (a fixture)
from test_train import tiny

from rl_is import train
from rl_is.core.types import Prompts
from rl_is.infra import metrics
from rl_is.models import scoring
from rl_is.models.sampler import Sampling
from rl_is.rollout import asynchronous, batching, generator, mismatch, verify
from rl_is.rollout.mismatch import Disturbance, Spikes
from rl_is.rollout.publisher import Weights
from rl_is.rollout.verify import Scores

ROWS, NEW, TOP_K, TOP_P, HEAD = 64, 6, 6, 0.7, 3
RARE, NATS = 0.08, 4.0
SCORES = Scores(np.zeros(ROWS, np.float32), np.zeros(ROWS, bool))
# name -> (the sampler's weights, its temperature, what it does to logits)
DIALS = {
    "none": (("none", None), 1.0, {}),
    "bf16": (("bf16", None), 1.0, {}),
    "int3": (("int", 3), 1.0, {}),
    "mantissa2": (("mantissa", 2), 1.0, {}),
    "temperature": (("none", None), 1.4, {}),
    "pattern": (("none", None), 1.0, dict(pattern=PATTERN)),
    "spikes": (("none", None), 1.0, dict(spikes=Spikes(0.4, NATS, RARE))),
    "all": (("int", 4), 0.8, dict(pattern=PATTERN,
                                  spikes=Spikes(0.4, NATS, RARE))),
}


def swapping(versions, dial, cache="keep"):
  """(rollout, the sampler's weights): two tokens under each of `versions`."""
  kind, temperature, disturb = DIALS[dial]
  made = {v: mismatch.weights(learner, *kind)
          for v, learner in versions.items()}
  first, *rest = [Weights(v, made[v], versions[v]) for v in versions]
  rows = np.arange(ROWS, dtype=np.int32)
  prompts = Prompts(3 + rows[:, None] % 3 + np.arange(3, dtype=np.int32)[None],
                    np.ones((ROWS, 3), bool), rows, 0 * rows)
  rollout = generator._swapping(
      first.params, prompts, jax.random.key(1), first.version,
      generator.Swaps(2, cache), iter(rest).__next__, model=MODEL,
      sampling=Sampling(
          temperature, top_p=TOP_P, max_new_tokens=NEW, top_k=TOP_K,
          record_top_k=HEAD, disturb=Disturbance(**disturb) if disturb else None))
  return jax.device_get(rollout), made


def score(learner, rollout):
  return np.asarray(scoring.score(
      learner, batching.assemble(rollout, SCORES, 4), model=MODEL,
      temperature=1.0).logp)


def disturbed(logits, dial):
  """The distributions that the sampler may have drawn from, as logits."""
  _, temperature, disturb = DIALS[dial]
  x = logits / temperature + (PATTERN[:V] if "pattern" in disturb else 0)
  if "spikes" not in disturb:
    return [x]
  return [x, x + NATS * (log_softmax(x) < np.log(RARE))]


def kept_of(x):
  """float64: (ids, log-probs) [..., K] of top-k, then top-p; -1 and -inf."""
  ids = np.argsort(-x, axis=-1)[..., :TOP_K]
  logp = log_softmax(np.take_along_axis(x, ids, axis=-1))
  keep = np.cumsum(np.exp(logp), axis=-1) - np.exp(logp) < TOP_P
  logp = log_softmax(np.where(keep, logp, -np.inf))
  return np.where(keep, ids, -1), logp


def check_recorded(rollout):
  """What holds whatever the weights: the token, its set, and the set's head."""
  m = rollout.mask
  kept, head, logq = (x[m] for x in (
      rollout.kept_ids, rollout.head_ids, rollout.head_logp_behaviour))
  token, logp = rollout.tokens[m][:, None], rollout.logp_behaviour[m][:, None]
  assert (kept == token).any(axis=1).all()
  size = head.shape[1]
  np.testing.assert_array_equal(head, kept[:, :size])
  used, own = head >= 0, head == token
  assert used[:, 0].all() and (logq[~used] == 0).all()
  np.testing.assert_array_equal(logq[own], logp[own.any(axis=1), 0])
  mass = np.where(used, np.exp(logq), 0).sum(axis=1)
  whole = (kept >= 0).sum(axis=1) <= size  # the head is the set
  np.testing.assert_allclose(mass[whole], 1, atol=1e-5)
  assert (mass[~whole] < 1).all()
  assert (rollout.kept_ids[~m] == -1).all()
  return kept, own, whole


@pytest.mark.parametrize("dial", DIALS)
@pytest.mark.parametrize("cache", generator.CACHES)
def test_the_set_is_of_what_the_sampler_drew_from(params, dial, cache):
  """Of the weights of each token's version, through the dial; all replayed.

  With the old keys and values kept no one model made the later tokens: there
  only what is recorded can be held to itself.
  """
  versions = {3: params, 4: jax.tree.map(lambda x: -0.8 * x, params),
              7: jax.tree.map(lambda x: 1.2 * x, params)}
  rollout, made = swapping(versions, dial, cache)
  assert set(rollout.version[rollout.mask]) == {3, 4, 7}
  kept, own, whole = check_recorded(rollout)
  assert 1 < (kept >= 0).sum(axis=1).mean() < TOP_K  # both filters act
  assert 0 < own.any(axis=1).mean() < 1 and 0 < whole.mean() < 1
  for version, learner in versions.items():
    if cache == "keep" and version > 3:
      continue
    at = rollout.mask & (rollout.version == version)
    assert at.sum() == 2 * ROWS
    ids, token = rollout.kept_ids[at], rollout.tokens[at][:, None]
    of_token = lambda logp: logp[ids == token]
    choices = [kept_of(x[at]) for x in disturbed(
        learner_logits(made[version], rollout), dial)]
    same = np.stack([(x == ids).all(axis=1) for x, _ in choices])
    near = np.stack([np.abs(of_token(logp) - rollout.logp_behaviour[at]) < 2e-5
                     for _, logp in choices])
    assert (same & near).any(axis=0).all()
    if len(choices) == 2:  # spikes do change the set
      assert (~same).sum(axis=1).min() > 5
    # The learner over the very same ids, without the dial.
    logits = np.take_along_axis(
        learner_logits(learner, rollout)[at], np.maximum(ids, 0), axis=1)
    want = of_token(log_softmax(np.where(ids >= 0, logits, -np.inf)))
    np.testing.assert_allclose(score(learner, rollout)[at], want, atol=2e-5)


@pytest.mark.parametrize("cache", generator.CACHES)
def test_unchanged_weights_give_ratio_one(params, cache):
  """Newer in name alone, no dial: the log ratio is 0 to 1e-5."""
  rollout, _ = swapping({3: params, 4: params, 9: params}, "none", cache)
  assert set(rollout.version[rollout.mask]) == {3, 4, 9}
  m = rollout.mask
  log_ratio = (score(params, rollout) - rollout.logp_behaviour)[m]
  assert np.abs(log_ratio).max() <= 1e-5
  check_recorded(rollout)


def test_a_one_sided_top_p_leaves_its_own_head(params):
  """What the nucleus dropped cannot be drawn: no slot of the head holds it."""
  rollout = draw(params, record_top_k=V, disturb=Disturbance(top_p=0.6))
  assert rollout.kept_ids is None
  m = rollout.mask
  ids, logq = rollout.head_ids[m], rollout.head_logp_behaviour[m]
  used = ids >= 0
  np.testing.assert_allclose(np.where(used, np.exp(logq), 0).sum(axis=1), 1,
                             atol=1e-5)
  assert (logq > -20).all() and (logq[~used] == 0).all()
  p = np.exp(log_softmax(learner_logits(params, rollout)[m]))
  ordered = -np.sort(-p, axis=1)
  size = (np.cumsum(ordered, axis=1) - ordered < 0.6).sum(axis=1)
  np.testing.assert_array_equal(used.sum(axis=1), size)
  assert (ids == rollout.tokens[m][:, None]).any(axis=1).all()


ASYNC = dict(rollout__mode="async", rollout__max_lag=3, rollout__swap_tokens=1,
             rollout__rows_per_call=8, evaluate__prompts=0, train__steps=8,
             rollout__top_k=6, rollout__top_p=0.9, rollout__record_top_k=3,
             objective__preset="tis_score_centering")


@pytest.mark.parametrize("dial,rate", [
    ({}, 0.0), ({}, 0.02),
    (dict(mismatch__weights="int", mismatch__bits=3, mismatch__logit_sd=0.5,
          mismatch__temperature=0.9, mismatch__spike_rate=0.2,
          mismatch__spike_nats=3.0, mismatch__spike_below=0.1), 0.0)],
    ids=["still", "learning", "dials"])
def test_an_asynchronous_run_replays_them(warm, tmp_path, one_device,
                                          monkeypatch, dial, rate):
  """With swaps and a centred objective; still and without a dial, ratio 1."""
  seen, real = [], asynchronous.Asynchronous.batch

  def batch(self, n):
    seen.append(real(self, n))
    return seen[-1]

  monkeypatch.setattr(asynchronous.Asynchronous, "batch", batch)
  # By chance: the tiny model is hardly ever right.
  monkeypatch.setattr(verify, "reward",
                      lambda task, problem, text: float(len(text) % 2))
  train.run(tiny(warm, optimizer__learning_rate=rate, **ASYNC, **dial),
            str(tmp_path), devices=one_device)
  for one in seen:
    check_recorded(one)
  worst = max(row["is/log_ratio_max"] for row in metrics.read(str(tmp_path)))
  assert worst <= 1e-5 if not dial and not rate else worst > 1e-3
