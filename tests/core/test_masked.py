"""core/masked.py: selections before arithmetic, and the clamp's gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import draws
from rl_is.core import masked

X = np.float32([[1, 2, 6], [4, 5, 6]])
MASK = np.array([[1, 1, 0], [0, 0, 0]], bool)


@pytest.mark.parametrize("given_,want", [
    (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.float32),
    (np.float32, np.float32), (np.int32, np.float32), (bool, np.float32)])
def test_wide(given_, want):
  assert masked.wide(jnp.ones(2, given_)).dtype == want


def test_wide_keeps_float64():
  with jax.enable_x64(True):
    assert masked.wide(np.ones(2)).dtype == np.float64
    assert masked.wide(np.ones(2, np.float32)).dtype == np.float32


def test_literal():
  np.testing.assert_array_equal(masked.fill(X, MASK), [[1, 2, 0], [0, 0, 0]])
  np.testing.assert_array_equal(
      masked.fill(X, MASK, -1.), [[1, 2, -1], [-1, -1, -1]])
  assert masked.fill(jnp.bfloat16(X), MASK, .5).dtype == jnp.bfloat16
  assert masked.total(X, MASK) == 3
  np.testing.assert_array_equal(masked.total(X, MASK, axis=1), [3, 0])
  mean = masked.mean(X, MASK)
  assert (mean.total, mean.count, mean.value()) == (3, 2, 1.5)
  np.testing.assert_array_equal(masked.row_mean(X, MASK), [[1.5], [0]])


def test_mean_of_flags():
  mean = masked.mean(X > 1, MASK)
  assert (mean.total, mean.count) == (1, 2)
  assert mean.total.dtype == mean.count.dtype == jnp.float32


def test_nothing_selected():
  none = np.zeros_like(MASK)
  assert masked.total(X, none) == 0
  assert np.isnan(masked.mean(X, none).value())
  np.testing.assert_array_equal(masked.row_mean(X, none), 0)


@jax.jit
def _reductions(x, mask):
  def total(x):
    mean = masked.mean(x, mask)
    return mean.total + jnp.sum(jnp.exp(masked.fill(x, mask))), (
        mean, masked.row_mean(x, mask), masked.total(x, mask))
  return jax.value_and_grad(total, has_aux=True)(x)


@settings(max_examples=20, deadline=None)
@given(junk=st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_junk_changes_no_bit_of_value_or_gradient(junk):
  mask = draws.mask()
  x, _, _ = draws.tokens(0)
  got = _reductions(draws.fill(x, mask, junk), mask)
  want = _reductions(draws.fill(x, mask, 0), mask)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_kinds_of_mask():
  x, mask = draws.tokens(1)[0], draws.mask()
  want = _reductions(x, mask)
  for kind in (np.int32, np.float32):
    jax.tree.map(np.testing.assert_array_equal,
                 _reductions(x, mask.astype(kind)), want)


def test_clamp():
  x = jnp.float32([-3, -2, 0, 2, 3, np.nan])
  fn = jax.vmap(jax.value_and_grad(lambda y: masked.clamp(y, -2., 2.)))
  value, slope = fn(x)
  np.testing.assert_array_equal(value, [-2, -2, 0, 2, 2, np.nan])
  # Whole at a bound (`jnp.clip` passes half), none beyond it.
  np.testing.assert_array_equal(slope[:5], [0, 1, 1, 1, 0])
  np.testing.assert_array_equal(masked.clamp(x), x)
  np.testing.assert_array_equal(
      masked.clamp(x, low=-2.), [-2, -2, 0, 2, 3, np.nan])
  np.testing.assert_array_equal(
      masked.clamp(x, high=2.), [-3, -2, 0, 2, 2, np.nan])
  assert masked.clamp(jnp.bfloat16(1), -2., 2.).dtype == jnp.bfloat16


def test_first_bad():
  mask = draws.mask()
  x, y, _ = draws.tokens(2)
  assert masked.first_bad(mask, x, y) == -1
  dirty = draws.fill(x, mask, np.nan)
  assert masked.first_bad(mask, dirty, y) == -1  # off the mask
  for bad in (np.nan, np.inf, -np.inf):
    worse = y.copy()
    worse[1, 1] = worse[2, 0] = bad
    got = jax.jit(masked.first_bad)(mask, dirty, worse)
    assert got == 1 * draws.T + 1 and got.dtype == jnp.int32
