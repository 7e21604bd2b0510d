"""Sampling: what was drawn, what was recorded, and where it stopped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.core.types import Batch, Prompts
from rl_is.models import sampler, scoring
from rl_is.models.config import TransformerConfig
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model

# 13 real tokens in a table of 16: three rows of padding.
MODEL = Model(TransformerConfig(
    vocab_size=13, vocab_multiple=8, embed=16, layers=2, heads=4, kv_heads=2,
    head_dim=8, mlp=32))
B, P, N = 64, 5, 4
EOS = (2, 7)


@pytest.fixture(scope="module")
def params():
  # Larger than at init, so that distributions are far from uniform.
  return jax.tree.map(lambda x: x * 3, MODEL.init(jax.random.key(0)))


@pytest.fixture(scope="module")
def prompts():
  """Left-padded prompts of 1 to 5 tokens."""
  length = np.arange(B) % P + 1
  valid = np.arange(P)[None] >= (P - length)[:, None]
  tokens = np.random.default_rng(0).integers(3, 13, (B, P))
  return Prompts(jnp.asarray(np.where(valid, tokens, 0), jnp.int32),
                 jnp.asarray(valid), jnp.arange(B, dtype=jnp.int32) // 4,
                 jnp.arange(B, dtype=jnp.int32) % 4)


draw = jax.jit(functools.partial(sampler.sample, model=MODEL))
score = jax.jit(functools.partial(
    scoring.score, model=MODEL, return_entropy=True),
                static_argnames="return_head")


def sampling(**changes):
  return dataclasses.replace(Sampling(
      temperature=1.0, max_new_tokens=N, eos_ids=EOS), **changes)


def as_batch(rollout):
  return Batch(tokens=rollout.tokens, valid=rollout.valid, mask=rollout.mask,
               reward=None, group=None, kept_ids=rollout.kept_ids,
               head_ids=rollout.head_ids)


@pytest.mark.parametrize("top_k,top_p", [(0, 1.0), (4, 1.0), (6, 0.8)])
@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.5])
def test_rescored_equals_recorded(params, prompts, temperature, top_k, top_p):
  """The cached decode and the full forward pass, through one transform."""
  rollout = draw(params, prompts, jax.random.key(1), 3, sampling=sampling(
      temperature=temperature, top_k=top_k, top_p=top_p))
  logp = score(params, as_batch(rollout), temperature=temperature).logp
  mask = np.asarray(rollout.mask)
  np.testing.assert_allclose(np.asarray(logp)[mask],
                             np.asarray(rollout.logp_behaviour)[mask], atol=1e-5)
  # So unchanged weights give ratio 1; and something was really sampled.
  assert mask.sum() > B


def test_full_support_rescoring_of_filtered_samples_is_wrong(params, prompts):
  """What C04 is about: without the kept set each ratio is the kept mass."""
  rollout = draw(params, prompts, jax.random.key(1), 3,
                 sampling=sampling(top_k=4))
  blind = dataclasses.replace(as_batch(rollout), kept_ids=None)
  gap = np.asarray(score(params, blind, temperature=1.0).logp
                   - rollout.logp_behaviour)[np.asarray(rollout.mask)]
  assert gap.max() <= 1e-5 and gap.mean() < -0.1


@pytest.mark.parametrize("top_k", [0, 3])
def test_sampled_token_is_in_its_kept_set(params, prompts, top_k):
  rollout = draw(params, prompts, jax.random.key(2), 0,
                 sampling=sampling(top_k=top_k, top_p=0.7 if top_k else 1.0))
  mask = np.asarray(rollout.mask)
  if not top_k:
    assert rollout.kept_ids is None
    return
  kept = np.asarray(rollout.kept_ids)
  assert (kept == np.asarray(rollout.tokens)[..., None]).any(-1)[mask].all()
  assert (kept[~mask] == -1).all()


HEADS = [(0, 1.0, 3), (0, 1.0, 99), (4, 1.0, 2), (6, 0.8, 4), (6, 0.8, 99)]


@pytest.mark.parametrize("top_k,top_p,record", HEADS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_recorded_head_is_what_is_rescored(params, prompts, temperature,
                                               top_k, top_p, record):
  """Ids and log-probs of the distribution that was drawn from, at each token."""
  s = sampling(temperature=temperature, top_k=top_k, top_p=top_p)
  plain = draw(params, prompts, jax.random.key(1), 3, sampling=s)
  assert plain.head_ids is None and plain.head_logp_behaviour is None
  rollout = draw(params, prompts, jax.random.key(1), 3,
                 sampling=dataclasses.replace(s, record_top_k=record))
  for name in ("tokens", "logp_behaviour", "kept_ids"):  # not another draw
    np.testing.assert_array_equal(getattr(rollout, name), getattr(plain, name))
  ids, logq = map(np.asarray, (rollout.head_ids, rollout.head_logp_behaviour))
  mask = np.asarray(rollout.mask)
  assert ids.shape == (B, P + N, min(record, top_k or 13)) == logq.shape
  assert ids.dtype == np.int32 and logq.dtype == np.float32
  used = ids >= 0
  assert (used[mask].sum(axis=-1) >= 1).all() and not used[~mask].any()
  assert used[mask].all() == (top_p == 1) and (logq[~used] == 0).all()
  assert (ids < 13).all()
  out = score(params, as_batch(rollout), temperature=temperature,
              return_head=True)
  got = np.asarray(out.logp_ids)
  np.testing.assert_allclose(got[used], logq[used], rtol=1e-5, atol=1e-5)
  # The sampled token's own, where it is in the head; most likely first.
  own = used & (ids == np.asarray(rollout.tokens)[..., None])
  np.testing.assert_array_equal(
      logq[own], np.asarray(rollout.logp_behaviour)[own.any(axis=-1)])
  assert own.any(axis=-1)[mask].all() if record == 99 else own.any()
  assert (np.diff(np.where(used, logq, -1e9)[mask], axis=-1) <= 0).all()
  mass = np.where(used, np.exp(logq), 0).sum(axis=-1)[mask]
  if record == 99:
    np.testing.assert_allclose(mass, 1, atol=1e-5)
  assert (mass <= 1 + 1e-5).all()


def test_the_head_of_an_answer_in_pieces_is_of_each_pieces_weights(
    params, prompts):
  """Weights swapped after two tokens: the rest is as the new ones say."""
  s, key = sampling(record_top_k=3, eos_ids=()), jax.random.key(1)
  other = jax.tree.map(lambda x: -x, params)
  decode = jax.jit(functools.partial(sampler.decode, model=MODEL))
  begun = jax.jit(functools.partial(sampler.begin, model=MODEL))(
      params, prompts, key, sampling=s)
  half = decode(params, begun, 3, 2, sampling=s)
  again = jax.jit(functools.partial(sampler.read_again, model=MODEL))(
      other, half)
  swapped = sampler.finish(decode(other, again, 4, 2, sampling=s))
  whole = draw(params, prompts, key, 3, sampling=s)
  for weights, version in ((params, 3), (other, 4)):
    at = np.asarray(swapped.version) == version
    assert at.sum() == 2 * B
    out = score(weights, as_batch(swapped), temperature=1.0, return_head=True)
    np.testing.assert_allclose(np.asarray(out.logp_ids)[at], np.asarray(
        swapped.head_logp_behaviour)[at], rtol=1e-5, atol=1e-5)
    if version == 3:
      np.testing.assert_array_equal(np.asarray(whole.head_ids)[at],
                                    np.asarray(swapped.head_ids)[at])


@pytest.mark.parametrize("top_k", [0, 6])
def test_the_heads_log_probs_have_the_tokens_gradient(params, prompts, top_k):
  """Where a slot holds the token itself, d logp_ids is d logp."""
  rollout = draw(params, prompts, jax.random.key(1), 3, sampling=sampling(
      top_k=top_k, record_top_k=4))
  own = rollout.head_ids == rollout.tokens[..., None]
  def total(p, of_head):
    out = score(p, as_batch(rollout), temperature=0.7, return_head=True)
    return jnp.sum(jnp.where(own, out.logp_ids, 0)) if of_head else jnp.sum(
        jnp.where(own.any(axis=-1), out.logp, 0))
  a, b = (jax.grad(total)(params, of_head) for of_head in (True, False))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=1e-4, atol=1e-4), a, b)
  assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(a)) > 1


def test_no_head_no_score_of_it(params, prompts):
  rollout = draw(params, prompts, jax.random.key(1), 3, sampling=sampling())
  assert score(params, as_batch(rollout), temperature=1.0).logp_ids is None
  with pytest.raises(ValueError, match="no head_ids"):
    score(params, as_batch(rollout), temperature=1.0, return_head=True)


def test_stops_at_any_eos_or_at_the_limit(params, prompts):
  rollout = draw(params, prompts, jax.random.key(3), 9, sampling=sampling())
  tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.mask)
  reasons = set()
  for row in range(B):
    answer = tokens[row, P:]
    eos = [i for i, t in enumerate(answer[:mask[row].sum()]) if t in EOS]
    stop = int(rollout.stop_token[row])
    reasons.add(stop)
    if stop == -1:  # the length limit: N tokens, none an EOS
      assert not eos and mask[row].sum() == N
    else:  # the EOS is the last token counted
      assert eos == [mask[row].sum() - 1] and answer[eos[0]] == stop
    length = mask[row].sum()
    # One run of the mask, from the first new column; nothing after it.
    assert mask[row, P:P + length].all() and mask[row].sum() == length
    assert not rollout.valid[row, P + length:].any()
    assert (tokens[row, P + length:] == 0).all()
  assert reasons == {-1, *EOS}  # each happened
  version = np.asarray(rollout.version)
  assert (version[mask] == 9).all() and (version[~mask] == -1).all()
  logp = np.asarray(rollout.logp_behaviour)
  assert logp.dtype == np.float32 and (logp[~mask] == 0).all()
  assert (logp[mask] <= 0).all()


def test_padded_vocabulary_is_never_sampled(params, prompts):
  """Even where the padding's logits are by far the largest (case C10)."""
  loud = dict(params, head=params["head"].at[:, 13:].set(50.0))
  for k in (0, 5):
    for seed in range(10):
      rollout = draw(loud, prompts, jax.random.key(seed), 0,
                     sampling=sampling(top_k=k))
      assert int(rollout.tokens.max()) < 13
      assert np.isfinite(rollout.logp_behaviour).all()


def test_draws_do_not_depend_on_the_slot(params, prompts):
  """Reversed rows, and a half of them alone, give the same answers."""
  s = sampling()
  whole = draw(params, prompts, jax.random.key(4), 0, sampling=s)
  flipped = draw(params, jax.tree.map(lambda x: x[::-1], prompts),
                 jax.random.key(4), 0, sampling=s)
  half = draw(params, jax.tree.map(lambda x: x[:B // 2], prompts),
              jax.random.key(4), 0, sampling=s)
  np.testing.assert_array_equal(whole.tokens, flipped.tokens[::-1])
  np.testing.assert_array_equal(whole.tokens[:B // 2], half.tokens)


def test_every_row_has_its_own_key(prompts):
  """Case D14: no two (prompt, sample) share noise; another seed, all new."""
  keys = {tuple(k) for seed in (0, 1) for k in np.asarray(jax.random.key_data(
      sampler.row_keys(jax.random.key(seed), prompts)))}
  assert len(keys) == 2 * B


def test_frequencies_match_the_distribution(params):
  """2000 draws of one token: within 4 standard errors of softmax."""
  n = 2000
  one = Prompts(jnp.full((n, 1), 5, jnp.int32), jnp.ones((n, 1), bool),
                jnp.arange(n, dtype=jnp.int32), jnp.zeros(n, jnp.int32))
  rollout = draw(params, one, jax.random.key(6), 0,
                 sampling=sampling(max_new_tokens=1))
  hidden = MODEL.hidden(params, one.tokens[:1], one.valid[:1])[0, 0]
  p = np.asarray(jax.nn.softmax((hidden @ MODEL.unembed(params))[:13]))
  count = np.bincount(np.asarray(rollout.tokens)[:, 1], minlength=13)
  error = np.sqrt(p * (1 - p) * n) + 1e-9
  assert (np.abs(count - n * p) < 4 * error + 1).all()


def test_greedy_takes_the_most_likely(params, prompts):
  rollout = draw(params, prompts, jax.random.key(7), 0,
                 sampling=sampling(greedy=True))
  hidden = MODEL.hidden(params, rollout.tokens, rollout.valid)
  logits = (hidden @ MODEL.unembed(params))[..., :13]
  best = np.asarray(jnp.argmax(logits, -1))[:, P - 1:-1]
  mask = np.asarray(rollout.mask)[:, P:]
  np.testing.assert_array_equal(np.asarray(rollout.tokens)[:, P:][mask],
                                best[mask])


@pytest.mark.parametrize("changes,word", [
    (dict(temperature=0.0), "temperature"),
    (dict(temperature=-1.0), "temperature"),
    (dict(temperature=float("nan")), "temperature"),
    (dict(top_p=0.9), "top_k"),
    (dict(top_p=0.0, top_k=3), "top_p"),
    (dict(top_p=1.5, top_k=3), "top_p"),
    (dict(top_k=-1), "top_k"),
    (dict(record_top_k=-1), "record_top_k"),
    (dict(max_new_tokens=0), "max_new_tokens"),
])
def test_refuses_what_it_cannot_account_for(changes, word):
  with pytest.raises(ValueError, match=word):
    sampler.check(sampling(**changes))
