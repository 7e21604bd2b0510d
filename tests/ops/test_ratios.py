"""ops/ratios.py: log ratios at each level, and the clamped exp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import draws, losses
from rl_is.ops import ratios

LEVELS = sorted(ratios.LEVELS)


@functools.partial(jax.jit, static_argnames="level")
def _jitted(logp, anchor, mask, out, level):
  def total(x):
    value = ratios.log_ratio(x, anchor, mask, level=level)
    return jnp.sum(out * value), value
  return jax.grad(total, has_aux=True)(logp)[::-1]


def _run(*args):
  """(value, gradient of sum(out * value) in `logp`)."""
  return jax.device_get(_jitted(*args))


_ONES = np.ones((draws.B, draws.T), np.float32)


def test_literal():
  # Row 0: 0.1, -0.2, 0.3; mean 0.2 / 3. Row 1: (0.4 + 0.2) / 2 = 0.3.
  logp = draws.pad([[-1.0, -1.2, -0.7], [-0.5, -0.3, -9.0]])
  anchor = draws.pad([[-1.1, -1.0, -1.0], [-0.9, -0.5, -2.0]])
  mask = draws.pad(np.bool_([[1, 1, 1], [1, 1, 0]]))
  want = dict(token=[[.1, -.2, .3], [.4, .2, 0]])
  want["sequence_mean"] = [[.2 / 3] * 3, [.3, .3, 0]]
  want["sequence_mean_token"] = want["sequence_mean"]
  for level, value in want.items():
    got, grad = _run(logp, anchor, mask, _ONES, level)
    np.testing.assert_allclose(got, draws.pad(value), atol=1e-6)
    # Each of n copies of the mean has 1/n of each token: 1 in all.
    np.testing.assert_allclose(grad, mask, rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("x64", [False, True])
def test_twin(level, x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  mask = draws.mask()
  logp, anchor, out = draws.tokens(1, dtype=dtype)
  with jax.enable_x64(x64):
    got, grad = _run(logp, anchor, mask, out, level)
    assert got.dtype == dtype
  np.testing.assert_allclose(
      got, losses.log_ratio(logp, anchor, mask, level), rtol=tol, atol=tol)
  np.testing.assert_allclose(
      grad, losses.to_logp(out, mask, level), rtol=tol, atol=tol)


@pytest.mark.parametrize("level", LEVELS)
def test_the_anchor_is_detached(level):
  logp, anchor, _ = draws.tokens(2)
  grad = jax.jit(jax.grad(lambda a: ratios.log_ratio(
      logp, a, draws.mask(), level=level).sum()))(anchor)
  np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("junk", draws.JUNK)
def test_junk_off_the_mask(level, junk):
  mask = draws.mask()
  logp, anchor, _ = draws.tokens(3)
  clean = [draws.fill(x, mask, 0) for x in (logp, anchor)]
  dirty = [draws.fill(x, mask, junk) for x in (logp, anchor)]
  for got, want in zip(_run(*dirty, mask, _ONES, level),
                       _run(*clean, mask, _ONES, level)):
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got[~mask], 0)


@pytest.mark.parametrize("level", LEVELS)
def test_kinds_of_mask_and_jit(level):
  logp, anchor, _ = draws.tokens(4)
  mask = draws.mask()
  want = ratios.log_ratio(logp, anchor, mask, level=level)
  for kind in (np.int32, np.float32):
    np.testing.assert_array_equal(
        ratios.log_ratio(logp, anchor, mask.astype(kind), level=level), want)
  jitted, _ = _run(logp, anchor, mask, _ONES, level)
  np.testing.assert_allclose(jitted, want, rtol=1e-6, atol=1e-6)


def test_token_variant_has_the_value_of_the_mean_bit_for_bit():
  logp, anchor, out = draws.tokens(5)
  (mean, _), (token, grad) = (
      _run(logp, anchor, draws.mask(), out, level)
      for level in ("sequence_mean", "sequence_mean_token"))
  np.testing.assert_array_equal(grad, out * draws.mask())
  np.testing.assert_array_equal(mean, token)


@pytest.mark.parametrize("level", LEVELS)
def test_one_token_a_row_is_the_same_at_every_level(level):
  logp, anchor, _ = draws.tokens(6)
  mask = draws.put(np.ones(draws.B), bool)
  value, grad = _run(logp, anchor, mask, _ONES, level)
  np.testing.assert_array_equal(value[:, 0], (logp - anchor)[:, 0])
  np.testing.assert_array_equal(grad, mask)


@pytest.mark.parametrize("level", LEVELS)
def test_all_masked_and_no_rows(level):
  logp, anchor, _ = draws.tokens(7)
  mask = np.zeros((draws.B, draws.T), bool)
  for x in _run(logp, anchor, mask, _ONES, level):
    np.testing.assert_array_equal(x, 0)
  none = np.zeros((0, draws.T), np.float32)
  assert ratios.log_ratio(none, none, none, level=level).shape == none.shape


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_input_on_the_mask_stays_visible(bad):
  logp, anchor, _ = draws.tokens(8)
  logp[0, 0] = bad
  for level in LEVELS:
    got, _ = _run(logp, anchor, draws.mask(), _ONES, level)
    assert not np.isfinite(got[0, 0])
    assert np.isfinite(got[1:]).all()
    assert np.isfinite(got[0, 1]) == (level in ("token", "suffix"))


def test_bfloat16_is_subtracted_in_float32():
  # -10 and -10.0625 are bf16 numbers; nothing is lost in float32.
  logp = jnp.full((1, 2), -10, jnp.bfloat16)
  anchor = jnp.full((1, 2), -10.0625, jnp.bfloat16)
  got = ratios.log_ratio(logp, anchor, np.ones((1, 2)))
  assert got.dtype == jnp.float32
  np.testing.assert_array_equal(got, 0.0625)


def test_ratio_clamps_and_passes_the_gradient_at_the_bound():
  x = jnp.float32([-1000, -30, -20, 0, 20, 30, 1000])
  value = ratios.ratio(x, 20.0)
  want = np.exp([-20., -20, -20, 0, 20, 20, 20])
  np.testing.assert_allclose(value, want, rtol=1e-5)
  slope = jax.jit(jax.grad(lambda y: ratios.ratio(y, 20.0).sum()))(x)
  np.testing.assert_allclose(slope, want * [0, 0, 1, 1, 1, 0, 0], rtol=1e-5)
  np.testing.assert_array_equal(ratios.ratio(jnp.float32(30), jnp.inf),
                                jnp.exp(jnp.float32(30)))


def test_errors_name_the_argument():
  x = np.zeros((2, 3), np.float32)
  with pytest.raises(ValueError, match="logp_anchor.*shape"):
    ratios.log_ratio(x, x[:, :2], x)
  with pytest.raises(ValueError, match="logp: .*rank 2"):
    ratios.log_ratio(x[0], x[0], x[0])
  with pytest.raises(ValueError, match="mask.*shape"):
    ratios.log_ratio(x, x, x[:1])
  with pytest.raises(ValueError, match="logp: .*floating"):
    ratios.log_ratio(x.astype(np.int32), x, x)
  with pytest.raises(ValueError, match="logp_anchor: .*floating"):
    ratios.log_ratio(x, x.astype(np.int32), x)
  with pytest.raises(ValueError, match="level.*sequence_mean"):
    ratios.log_ratio(x, x, x, level="sequence_men")


def test_case_A13_the_mean_is_over_the_mask():
  # (0.3 + 0.3) / 2, and never (0.3 + 0.3 + 0) / 3 or with the 50.
  mask = draws.mask()
  logp = np.full(mask.shape, .3, np.float32)
  for junk in (50., 0., np.nan, np.inf):
    dirty = draws.fill(logp, mask, junk)
    for level in ("sequence_mean", "sequence_mean_token"):
      l, _ = _run(dirty, 0 * logp, mask, _ONES, level)
      np.testing.assert_allclose(np.exp(l)[mask], 1.349859, rtol=1e-6)
  unpadded = ratios.log_ratio(np.float32([[.3, .3]]), np.zeros((1, 2), "f"),
                              np.ones((1, 2)), level="sequence_mean")
  np.testing.assert_allclose(unpadded, .3, rtol=1e-6)


def test_case_A07_exp_of_the_mean_not_mean_of_exps():
  # The level here is the mean: exp((0.1 - 0.2 + 0.3) / 3); the product over the
  # row, e^0.2, is in diagnostics (`is/sequence_moments`).
  logp = np.zeros((draws.B, draws.T), np.float32)
  logp[0, :3] = .1, -.2, .3
  mask = logp != 0
  l, _ = _run(logp, 0 * logp, mask, _ONES, "sequence_mean")
  np.testing.assert_allclose(np.exp(l)[0, :3], np.exp(.2 / 3), rtol=1e-6)
