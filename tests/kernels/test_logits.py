"""kernels/logits.py: the one transform that sampling and scoring share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.kernels import logits

P = np.float32([.5, .3, .15, .05])


def test_head_logits_literal():
  # [1, 2] @ [[1, 0, 3], [0, 1, -1]] = [1, 2, 1]; [0, -1] -> [0, -1, 1].
  hidden = np.float32([[1, 2], [0, -1]])
  unembed = np.float32([[1, 0, 3], [0, 1, -1]])
  for precision in ("highest", "bf16"):  # all of them bf16 numbers
    got = logits.head_logits(hidden, unembed, precision)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [[1, 2, 1], [0, -1, 1]])
  with pytest.raises(ValueError, match="head_precision.*'high'"):
    logits.head_logits(hidden, unembed, "high")


def test_head_precision():
  rng = np.random.default_rng(0)
  hidden, unembed = rng.normal(size=(3, 64)), rng.normal(size=(64, 5))
  exact = hidden @ unembed
  narrow = np.float32(hidden), np.float32(unembed)
  highest = logits.head_logits(*narrow)
  np.testing.assert_allclose(highest, exact, rtol=1e-5, atol=1e-5)
  rounded = [x.astype(jnp.bfloat16) for x in narrow]
  bf16 = logits.head_logits(*narrow, "bf16")
  assert bf16.dtype == jnp.float32
  # bf16 operands, but the sum is not rounded to bf16.
  np.testing.assert_allclose(
      bf16, np.float64(rounded[0]) @ np.float64(rounded[1]), rtol=1e-5,
      atol=1e-5)
  mixed = logits.head_logits(narrow[0], rounded[1])
  assert mixed.dtype == jnp.float32
  np.testing.assert_allclose(
      mixed, np.float64(narrow[0]) @ np.float64(rounded[1]), rtol=1e-5,
      atol=1e-5)
  with jax.enable_x64(True):
    wide = logits.head_logits(hidden, unembed)
    assert wide.dtype == np.float64
  np.testing.assert_allclose(wide, exact, rtol=1e-12, atol=1e-12)


def test_transform_literal():
  z = np.float32([[1, 2, 3, 9], [0, -4, 2, np.nan]])
  plain = logits.transform(z, temperature=1., vocab_size=3)
  floor = logits.FLOOR
  np.testing.assert_array_equal(
      plain, np.float32([[1, 2, 3, floor], [0, -4, 2, floor]]))
  # The soft cap comes before the temperature: 5 tanh(z / 5) / 0.5.
  got = logits.transform(z, temperature=.5, vocab_size=3, logit_softcap=5.)
  np.testing.assert_allclose(
      got[:, :3], 10 * np.tanh(z[:, :3] / 5), rtol=1e-6)
  assert np.isfinite(got).all()
  np.testing.assert_array_equal(
      logits.transform(z[:, :3], temperature=1., vocab_size=3), z[:, :3])


@pytest.mark.parametrize("vocab_size", [0, -1, 5])
def test_transform_refuses_a_vocabulary_of_another_size(vocab_size):
  with pytest.raises(ValueError, match="vocab_size: expected 1 to 4"):
    logits.transform(np.zeros((2, 4), "f"), temperature=1.,
                     vocab_size=vocab_size)


def test_temperature_may_be_an_axis():
  z = np.float32([[1, 2, 3, 9]])
  t = np.float32([.3, 1, 1.5])
  many = jax.vmap(
      lambda x: logits.transform(z, temperature=x, vocab_size=3))(t)
  for got, x in zip(many, t):
    np.testing.assert_allclose(
        got, logits.transform(z, temperature=x, vocab_size=3), rtol=1e-6)


_kept_set = jax.jit(logits.kept_set, static_argnames="top_k")


def _kept(values, top_k, top_p=1.):
  """The kept ids, and that the kept logits are those of the ids."""
  kept, ids = jax.device_get(
      _kept_set(np.float32(values), top_k=top_k, top_p=top_p))
  assert kept.shape == ids.shape and ids.dtype == jnp.int32
  values = np.asarray(values, np.float32)
  for x, i in zip(kept.reshape(-1), ids.reshape(-1)):
    assert x == (values.reshape(-1)[i] if i >= 0 else logits.FLOOR)
  return list(ids)


def test_kept_set_literal():
  z = np.log(P[[2, 0, 3, 1]])  # ids by probability: 1, 3, 0, 2
  assert _kept(z, 4) == [1, 3, 0, 2]
  assert _kept(z, 2) == [1, 3]
  # Mass before each: 0, .5, .8, .95.
  assert _kept(z, 4, .9) == [1, 3, 0, -1]
  assert _kept(z, 4, .6) == [1, 3, -1, -1]
  assert _kept(z, 4, .4) == [1, -1, -1, -1]
  assert _kept(z, 4, 1e-6) == [1, -1, -1, -1]  # the first always stays
  # Of the top 2's own mass: .5 / .8 = .625.
  assert _kept(z, 2, .6) == [1, -1]
  assert _kept(z, 2, .7) == [1, 3]


def test_kept_set_without_top_p_drops_nothing():
  # The first token's mass is 1 in float32; the others are still there.
  assert _kept([30, 0, -5, -20], 4) == [0, 1, 2, 3]
  assert _kept([0] * 4, 3) == [0, 1, 2]  # ties: the lowest ids


def test_kept_set_never_keeps_the_padded_vocabulary():
  z = logits.transform(np.float32([1, 2, 3, 9, 9]), temperature=1.,
                       vocab_size=3)
  assert _kept(z, 5) == [2, 1, 0, -1, -1]
  assert _kept(z, 5, .95) == [2, 1, 0, -1, -1]


def test_kept_set_keeps_a_nan():
  """One NaN makes the whole row NaN: never a uniform row of unused slots."""
  for bad in (np.nan, np.inf):
    z = np.float32([[1, bad, 2, 0], [1, 3, 2, 0]])
    kept, ids = _kept_set(z, top_k=2, top_p=.9)
    logp = logits.log_normalise(kept)
    assert np.isnan(logp[0, 0]) and np.isfinite(logp[1]).all()
    np.testing.assert_array_equal(ids, [[1, -1], [1, 2]])


def test_kept_set_on_more_axes():
  z = np.log(np.stack([P, P[::-1]]))[None]
  _, ids = _kept_set(z, top_k=3, top_p=.7)
  np.testing.assert_array_equal(ids, [[[0, 1, -1], [3, 2, -1]]])
  many = jax.jit(jax.vmap(lambda p: logits.kept_set(
      z, top_k=3, top_p=p)[1]))(jnp.float32([.4, .7]))
  np.testing.assert_array_equal(many[1], ids)
  np.testing.assert_array_equal(many[0], [[[0, -1, -1], [3, -1, -1]]])


def test_log_normalise():
  fn = jax.jit(logits.log_normalise)
  z = np.log(P)
  np.testing.assert_allclose(fn(z + 7), z, rtol=1e-5)
  for big in (1e4, 1e30):
    got = fn(np.float32([big, 0, 0, -big]))
    assert np.isfinite(got).all() and got[0] == 0
  # Never above 0, however it rounds.
  rng = np.random.default_rng(0)
  many = np.asarray(fn(np.float32(30 * rng.normal(size=(500, 4)) + 1000)))
  assert (many <= 0).all()
  np.testing.assert_allclose(np.exp(many).sum(axis=-1), 1, rtol=1e-4)
  with_floor = np.float32([*z, logits.FLOOR])
  np.testing.assert_allclose(fn(with_floor)[:4], z, rtol=1e-5)
  jac = np.asarray(jax.jit(jax.jacrev(logits.log_normalise))(with_floor))
  np.testing.assert_allclose(
      jac[:4, :4], np.eye(4) - P, rtol=1e-4, atol=1e-6)
  np.testing.assert_array_equal(jac[:4, 4], 0)
