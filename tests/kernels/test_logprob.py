"""kernels/logprob.py: the log-prob of given tokens from hidden states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import losses
from rl_is.kernels import logits, logprob

B, T, D, V, K = 2, 3, 4, 7, 3  # V: 6 real entries and one of padding
REAL = 6

_jitted = jax.jit(logprob.token_logprob, static_argnames=(
    "support", "vocab_size", "return_entropy", "head_precision", "impl"))


def _batch(seed=0, dtype=np.float32):
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(B, T, D)).astype(dtype)
  unembed = rng.normal(size=(D, V)).astype(dtype)
  targets = rng.integers(0, REAL, (B, T)).astype(np.int32)
  ids = np.stack([rng.permutation(REAL)[:K] for _ in range(B * T)])
  ids = ids.reshape(B, T, K).astype(np.int32)
  ids[0, 0, 1] = ids[1, 1, 0] = -1
  return hidden, unembed, targets, ids


def _score(z, targets, **kwargs):
  """Scores given logits: the unembedding is the identity."""
  z = np.float32(z)
  kwargs = dict(temperature=1., vocab_size=z.shape[-1]) | kwargs
  return jax.device_get(_jitted(z, np.eye(z.shape[-1], dtype=np.float32),
                                np.asarray(targets, np.int32), **kwargs))


_VARIANTS = {
    "tempered": dict(temperature=.6),
    "capped": dict(temperature=1.5, logit_softcap=2.),
    "kept": dict(temperature=.6, support="ids"),
}


def _twin(hidden, unembed, targets, ids, temperature, logit_softcap=None,
          support="all"):
  """(logp, entropy, logp_ids, d sum(logp) / d logits, the same of entropy)."""
  z = np.float64(hidden) @ np.float64(unembed)
  logp, entropy = np.zeros((B, T)), np.zeros((B, T))
  logp_ids = np.full((B, T, K), logits.FLOOR)
  d_logp, d_entropy = np.zeros_like(z), np.zeros_like(z)
  for at in np.ndindex(B, T):
    logp[at], entropy[at], every = losses.score(
        z[at], targets[at], temperature=temperature, vocab_size=REAL,
        kept=ids[at] if support == "ids" else None, softcap=logit_softcap)
    for k, v in enumerate(ids[at]):
      if v >= 0:
        logp_ids[at][k] = every[v]
    for v, l in every.items():
      p = np.exp(l)
      slope = 1 / temperature
      if logit_softcap is not None:
        slope *= 1 - np.tanh(z[at][v] / logit_softcap) ** 2
      d_logp[at][v] = ((v == targets[at]) - p) * slope
      d_entropy[at][v] = -p * (l + entropy[at]) * slope
  return logp, entropy, logp_ids, d_logp, d_entropy


def test_literal():
  # Row 0, of three logits: log(e^1 / (e^1 + 1 + 1)), log(1 / 3), and
  # log(e^2 / (e^2 + 1 + e)); row 1: the other tokens of the same.
  z = [[[1, 0, 0], [0, 0, 0], [2, 0, 1]]] * 2
  got = _score(z, [[0, 1, 0], [2, 2, 1]])
  e = np.e
  a, b, c = e + 2, 3, e ** 2 + 1 + e
  np.testing.assert_allclose(
      got.logp, -np.log([[a / e, b, c / e ** 2], [a, b, c]]), rtol=1e-6)
  assert got.entropy is None and got.logp_ids is None
  got = _score(z, [[0, 1, 0], [2, 2, 1]], return_entropy=True)
  # log a - e / a; log 3; log c - (2 e^2 + e) / c.
  want = [np.log(a) - e / a, np.log(3), np.log(c) - (2 * e ** 2 + e) / c]
  np.testing.assert_allclose(got.entropy, [want] * 2, rtol=1e-6)


@pytest.mark.parametrize("variant,x64", [
    *((variant, False) for variant in _VARIANTS),
    ("capped", True), ("kept", True)])
def test_twin(variant, x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  kwargs = _VARIANTS[variant]
  hidden, unembed, targets, ids = _batch(1, dtype)
  def total(hidden, unembed):
    got = logprob.token_logprob(hidden, unembed, targets, ids=ids,
                                vocab_size=REAL, return_entropy=True, **kwargs)
    return jnp.sum(got.logp) + 2 * jnp.sum(got.entropy), got
  with jax.enable_x64(x64):
    grads, got = jax.jit(jax.grad(
        total, argnums=(0, 1), has_aux=True))(hidden, unembed)
    assert {x.dtype for x in got} == {np.dtype(dtype)}
  *want, d_logp, d_entropy = _twin(hidden, unembed, targets, ids, **kwargs)
  for x, y in zip(got, want):
    np.testing.assert_allclose(x, y, rtol=tol, atol=tol)
  d_z = d_logp + 2 * d_entropy
  np.testing.assert_allclose(
      grads[0], d_z @ np.float64(unembed).T, rtol=tol, atol=10 * tol)
  np.testing.assert_allclose(
      grads[1], np.einsum("btd,btv->dv", np.float64(hidden), d_z), rtol=tol,
      atol=10 * tol)
  np.testing.assert_array_equal(grads[1][:, REAL:], 0)


def _run(hidden, unembed, targets, ids, **kwargs):
  kwargs = dict(temperature=1., vocab_size=REAL, return_entropy=True) | kwargs
  return jax.device_get(_jitted(hidden, unembed, targets, ids=ids, **kwargs))


def test_jit_and_an_axis_of_temperatures():
  hidden, unembed, targets, ids = _batch(2)
  fn = functools.partial(
      logprob.token_logprob, hidden, unembed, targets, ids=ids,
      vocab_size=REAL)
  eager = fn(temperature=.7)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, _run(hidden, unembed, targets, ids, temperature=.7,
                           return_entropy=False), eager)
  many = jax.jit(jax.vmap(lambda t: fn(temperature=t)))(jnp.float32([.7, 2]))
  jax.tree.map(lambda x, y: close(np.asarray(x)[0], y), many, eager)


def test_the_padded_vocabulary_is_not_seen():
  hidden, unembed, targets, ids = _batch(3)
  want = _run(hidden, unembed, targets, ids)
  for junk in (0., 50., 1e30, np.inf, np.nan):
    dirty = unembed.copy()
    dirty[:, REAL:] = junk
    jax.tree.map(np.testing.assert_array_equal,
                 _run(hidden, dirty, targets, ids), want)


def test_the_kept_set_is_a_set():
  hidden, unembed, targets, ids = _batch(4)
  want = _run(hidden, unembed, targets, ids, support="ids")
  order = _run(hidden, unembed, targets, ids[..., ::-1], support="ids")
  np.testing.assert_array_equal(order.logp, want.logp)
  np.testing.assert_array_equal(order.logp_ids[..., ::-1], want.logp_ids)
  # The target is in it, whether or not it is listed.
  others = np.where(ids == targets[..., None], -1, ids)
  listed = np.concatenate([others, targets[..., None]], axis=-1)
  for same in (others, listed):
    got = _run(hidden, unembed, targets, same, support="ids")
    for x, y in zip(got[:2], want[:2]):
      np.testing.assert_allclose(x, y, rtol=1e-6)
  np.testing.assert_array_equal(got.logp_ids[..., K], got.logp)
  # All of the vocabulary is no restriction; the target alone is certain.
  everything = np.broadcast_to(np.arange(REAL, dtype=np.int32), (B, T, REAL))
  full = _run(hidden, unembed, targets, everything, support="ids")
  np.testing.assert_allclose(
      full.logp, _run(hidden, unembed, targets, ids).logp, rtol=1e-6)
  none = _run(hidden, unembed, targets, np.full_like(ids, -1), support="ids")
  np.testing.assert_array_equal(none.logp, 0)
  np.testing.assert_array_equal(none.entropy, 0)
  np.testing.assert_array_equal(none.logp_ids, np.float32(logits.FLOOR))


def test_probabilities_sum_to_one_and_shifts_do_not_matter():
  hidden, unembed, targets, _ = _batch(5)
  ids = np.broadcast_to(np.arange(REAL, dtype=np.int32), (B, T, REAL))
  got = _run(hidden, unembed, targets, ids)
  np.testing.assert_allclose(np.exp(got.logp_ids).sum(axis=-1), 1, rtol=1e-5)
  np.testing.assert_allclose(
      got.entropy, -(np.exp(got.logp_ids) * got.logp_ids).sum(axis=-1),
      rtol=1e-5)
  shifted = _run(hidden, unembed + hidden[0, 0][:, None], targets, ids)
  np.testing.assert_allclose(shifted.logp[0, 0], got.logp[0, 0], rtol=1e-4)


def test_extreme_logits_are_finite():
  def total(z, scale):
    got = _score_inside(scale * z)
    return jnp.sum(got.logp) + jnp.sum(got.entropy), got
  def _score_inside(z):
    return logprob.token_logprob(
        z, jnp.eye(3), jnp.zeros((1, 2), jnp.int32), temperature=1.,
        vocab_size=3, return_entropy=True)
  fn = jax.jit(jax.grad(total, has_aux=True))
  z = np.float32([[[1, 0, -1], [-1, 0, 1]]])
  for scale in (30., 1000., 1e20):
    grad, got = fn(z, scale)
    for x in (grad, got.logp, got.entropy):
      assert np.isfinite(x).all(), scale
    np.testing.assert_allclose(got.logp, [[0, -2 * scale]], rtol=1e-5,
                               atol=1e-6)


@pytest.mark.parametrize("change,message", [
    (dict(hidden=np.zeros((B, D), "f")), r"hidden: expected \[B, T, D\]"),
    (dict(hidden=np.zeros((B, T, V), "f")), "unembed: .*logits or hidden"),
    (dict(unembed=np.zeros((V, D), "f")), "unembed: expected"),
    (dict(targets=np.zeros((B, T + 1), "i")), "targets: expected"),
    (dict(targets=np.zeros((B, T), "f")), "targets: expected an integer"),
    (dict(ids=np.zeros((B, T), "i")), "ids: expected"),
    (dict(ids=np.zeros((B, T + 1, K), "i")), "ids: expected"),
    (dict(ids=None), "ids: support='ids' needs them"),
    (dict(support="id"), "support: unknown name 'id'; did you mean ids"),
    (dict(impl="referenc"), "impl: .*did you mean reference"),
    (dict(head_precision="low"), "head_precision"),
    (dict(vocab_size=V + 1), "vocab_size")])
def test_errors_name_the_argument(change, message):
  hidden, unembed, targets, ids = _batch()
  good = dict(hidden=hidden, unembed=unembed, targets=targets, ids=ids,
              support="ids", temperature=1., vocab_size=REAL)
  with pytest.raises(ValueError, match=message):
    logprob.token_logprob(**good | change)


# Published cases.


def test_case_C01_position_t_of_hidden_scores_target_t():
  # The caller shifts: hidden of tokens 0..2 scores tokens 1..3. Those three
  # have log-probs -1, -2, -3; the mask [0, 0, 1, 0] over tokens selects -2.
  tokens = np.array([[10, 11, 12, 13]])
  p = np.exp([-1., -2, -3])
  z = np.log(np.tile((1 - p[:, None]) / 13, 14))[None]  # 14 entries
  z[0, range(3), tokens[0, 1:]] = np.log(p)
  logp = _score(z, tokens[:, 1:]).logp
  np.testing.assert_allclose(logp, [[-1, -2, -3]], rtol=1e-5)
  mask = np.array([[0, 0, 1, 0]], bool)
  np.testing.assert_allclose(logp[mask[:, 1:]], -2, rtol=1e-5)
  uniform = _score(np.zeros((1, 3, 14)), tokens[:, 1:], return_entropy=True)
  np.testing.assert_allclose(uniform.logp, -np.log(14), rtol=1e-6)
  np.testing.assert_allclose(uniform.entropy, np.log(14), rtol=1e-6)
  copy = np.where(np.arange(14) == tokens[:, 1:, None], 40., 0.)
  np.testing.assert_allclose(_score(copy, tokens[:, 1:]).logp, 0, atol=1e-6)


@pytest.mark.parametrize("temperature", [.3, .5, .6, 1., 1.5])
def test_case_C03_sampler_and_learner_share_the_temperature(temperature):
  z = np.float32([[[2, 0]]])
  got = _score(z, [[0]], temperature=temperature).logp
  sampler = np.asarray(logits.log_normalise(
      logits.transform(z, temperature=temperature, vocab_size=2)))[..., 0]
  np.testing.assert_allclose(got, sampler, atol=1e-6)
  if temperature == .5:  # not -0.126928, and not that over 0.5
    np.testing.assert_allclose(got, -.018150, atol=1e-6)


def test_case_C04_the_kept_set_is_replayed():
  # p = [.5, .3, .15, .05], top_p .8 keeps {0, 1}: log(.5 / .8), not log .5.
  z = np.log(np.float32([[[.5, .3, .15, .05]]]))
  kept, ids = jax.device_get(
      jax.jit(lambda x: logits.kept_set(x, top_k=4, top_p=.8))(z))
  np.testing.assert_array_equal(ids, [[[0, 1, -1, -1]]])
  sampler = np.asarray(logits.log_normalise(kept))[..., 0]
  np.testing.assert_allclose(sampler, -.470004, atol=1e-6)
  learner = _score(z, [[0]], ids=ids, support="ids").logp
  np.testing.assert_allclose(np.exp(learner - sampler), 1, rtol=1e-6)
  full = _score(z, [[0]], ids=ids)  # the ids alone restrict nothing
  np.testing.assert_allclose(full.logp, -.693147, atol=1e-6)
  np.testing.assert_allclose(
      full.logp_ids, np.where(ids < 0, logits.FLOOR, z), rtol=1e-6)


def test_case_C08_bfloat16_operands_are_scored_in_float32():
  rng = np.random.default_rng(0)
  hidden = jnp.bfloat16(rng.normal(size=(1, 4, 8)))
  unembed = jnp.bfloat16(2 * rng.normal(size=(8, 8000)))
  targets = rng.integers(0, 8000, (1, 4)).astype(np.int32)
  z = np.float64(hidden) @ np.float64(unembed)
  want = np.take_along_axis(z, targets[..., None], -1)[..., 0] - np.log(
      np.exp(z).sum(axis=-1))
  for precision in ("highest", "bf16"):
    got = _jitted(hidden, unembed, targets, temperature=1., vocab_size=8000,
                  head_precision=precision).logp
    assert got.dtype == jnp.float32 and (got <= 0).all()
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_case_C10_padded_ids_have_no_probability():
  # log(e^3 / (e^1 + e^2 + e^3)) = -0.407606; with the padding, -6.695.
  z = np.float32([[[1, 2, 3, 9, 9]]])
  got = _score(z, [[2]], vocab_size=3, ids=np.arange(5)[None, None])
  np.testing.assert_allclose(got.logp, -.407606, atol=1e-6)
  np.testing.assert_allclose(np.exp(got.logp_ids[..., :3]).sum(), 1, rtol=1e-6)
  assert (got.logp_ids[..., 3:] <= -1e29).all()


def test_case_J04_the_entropy_is_never_negative():
  z = np.float32([[[0, 0, 0], [50, 0, 0], [1e4, 0, -1e4]]])
  got = _score(z, [[0, 0, 0]], return_entropy=True).entropy
  assert (got >= 0).all()
  np.testing.assert_allclose(got, [[np.log(3), 0, 0]], atol=1e-6)
