"""ops/regularizers.py: k1, k2, k3."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import draws, losses
from rl_is.ops import regularizers

NAMES = ("k1", "k2", "k3")


@functools.partial(jax.jit, static_argnames="name")
def _jitted(name, logp, ref, mask, out, **constants):
  def total(x):
    value = getattr(regularizers, name)(x, ref, mask, **constants)
    return jnp.sum(out * value), value
  return jax.grad(total, has_aux=True)(logp)[::-1]


def _run(*args, **kwargs):
  """(value, gradient of sum(out * value) in `logp`)."""
  return jax.device_get(_jitted(*args, **kwargs))


_ONES = np.ones((draws.B, draws.T), np.float32)


def test_literal():
  # x = logp - ref = [0.5, -1, 0 | 2, -0.5, -]
  logp = draws.pad([[-1, -3, -1], [-1, -2, -9]])
  ref = draws.pad([[-1.5, -2, -1], [-3, -1.5, 0]])
  on = [[1, 1, 1], [1, 1, 0]]
  e = np.exp
  want = {
      "k1": ([[.5, -1, 0], [2, -.5, 0]], on),
      # x^2 / 2; gradient x.
      "k2": ([[.125, .5, 0], [2, .125, 0]], [[.5, -1, 0], [2, -.5, 0]]),
      # e^-x - 1 + x; gradient 1 - e^-x.
      "k3": ([[e(-.5) - .5, e(1) - 2, 0], [e(-2) + 1, e(.5) - 1.5, 0]],
             [[1 - e(-.5), 1 - e(1), 0], [1 - e(-2), 1 - e(.5), 0]])}
  for name, pair in want.items():
    got = _run(name, logp, ref, draws.pad(np.bool_(on)), _ONES)
    for x, y in zip(got, pair):
      np.testing.assert_allclose(x, draws.pad(y), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("x64", [False, True])
def test_twin(name, x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  mask = draws.mask()
  logp, ref, out = draws.tokens(1, dtype=dtype)
  with jax.enable_x64(x64):
    value, grad = _run(name, logp, ref, mask, out)
    assert value.dtype == dtype
  want, slope = getattr(losses, name)(logp, ref, mask)
  np.testing.assert_allclose(value, want, rtol=tol, atol=tol)
  np.testing.assert_allclose(grad, out * slope, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", NAMES)
def test_equal_policies_have_no_kl(name):
  logp, _, _ = draws.tokens(2)
  value, grad = _run(name, logp, logp, draws.mask(), _ONES)
  np.testing.assert_array_equal(value, 0)
  np.testing.assert_array_equal(grad, draws.mask() if name == "k1" else 0)


def test_signs_and_expectation():
  p, q = np.float64([.5, .3, .2]), np.float64([.2, .2, .6])
  logp, ref = (draws.put(np.log(x), np.float64) for x in (p, q))
  with jax.enable_x64(True):
    k = {name: draws.take(_run(name, logp, ref, draws.put(p) > 0, _ONES)[0], 3)
         for name in NAMES}
  kl = np.sum(p * np.log(p / q))
  assert (k["k1"] < 0).any() and (k["k2"] >= 0).all() and (k["k3"] >= 0).all()
  for name in ("k1", "k3"):  # unbiased under p
    np.testing.assert_allclose(np.sum(p * k[name]), kl, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_detached(name):
  logp, ref, _ = draws.tokens(3)
  grad = jax.jit(jax.grad(lambda r: getattr(regularizers, name)(
      logp, r, draws.mask()).sum()))(ref)
  np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(draws.B)),
       junk=st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_junk_and_order_of_rows(name, seed, order, junk):
  mask = draws.mask()
  logp, ref, _ = draws.tokens(seed)
  want = _run(name, draws.fill(logp, mask, 0), draws.fill(ref, mask, 0), mask,
              _ONES)
  got = _run(name, draws.fill(logp, mask, junk)[order],
             draws.fill(ref, mask, junk)[order], mask[order], _ONES)
  for x, y in zip(got, want):
    np.testing.assert_array_equal(x, y[np.array(order)])
    np.testing.assert_array_equal(x[~mask[order]], 0)


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_masks_and_jit(name):
  logp, ref, _ = draws.tokens(4)
  mask, fn = draws.mask(), getattr(regularizers, name)
  want = fn(logp, ref, mask)
  for kind in (np.int32, np.float32):
    np.testing.assert_array_equal(fn(logp, ref, mask.astype(kind)), want)
  np.testing.assert_allclose(
      _run(name, logp, ref, mask, _ONES)[0], want, rtol=1e-5, atol=1e-7)
  half = fn(jnp.bfloat16(logp), jnp.bfloat16(ref), mask)
  assert half.dtype == jnp.float32
  empty = _run(name, logp, ref, np.zeros_like(mask), _ONES)
  np.testing.assert_array_equal(empty, 0)


def test_the_clamp_may_be_an_axis():
  logp, ref, _ = draws.tokens(5, scale=3.)
  limits = np.float32([.5, 1, 2])
  many = jax.jit(jax.vmap(lambda c: regularizers.k3(
      logp, ref, draws.mask(), max_log_ratio=c)))(limits)
  for got, c in zip(np.asarray(many), limits):
    want, _ = losses.k3(logp, ref, draws.mask(), max_log_ratio=float(c))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_argument(name):
  x = np.zeros((2, 3), np.float32)
  fn = getattr(regularizers, name)
  for bad in (x[:1], x.astype(np.int32)):
    with pytest.raises(ValueError, match=f"{name}: logp_ref: "):
      fn(x, bad, x)
  with pytest.raises(ValueError, match=f"{name}: logp: .*floating"):
    fn(x.astype(np.int32), x, x)
  with pytest.raises(ValueError, match=f"{name}: logp: .*rank 2"):
    fn(x[0], x[0], x[0])
  with pytest.raises(ValueError, match=f"{name}: mask: "):
    fn(x, x, x[:1])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_case_A03_k3_is_clamped_before_the_exp(dtype):
  d = np.float32([-100, -20, -1, 0, 1, 20, 80, 88, 89, 100, 1000, -1000, 10])
  logp, ref = (jnp.asarray(draws.put(x), dtype) for x in (-d, []))
  mask = draws.put(np.ones(d.size), bool)
  value, grad = _run("k3", logp, ref, mask, _ONES)
  value, grad = (draws.take(x, d.size).astype(np.float32)
                 for x in (value, grad))
  assert np.isfinite(value).all() and np.isfinite(grad).all()
  inside = np.abs(d) <= 10
  exact = np.float64(d[inside])
  np.testing.assert_allclose(value[inside], np.expm1(exact) - exact, rtol=1e-5)
  tol = 1e-5 if dtype == np.float32 else 1e-2  # a bf16 input's own gradient
  np.testing.assert_allclose(grad[inside], -np.expm1(exact), rtol=tol)
  # Stated choice: beyond the bound the bound's value, and no gradient; at it,
  # the whole gradient.
  beyond = np.abs(d) > 20
  bound = np.clip(np.float64(d[beyond]), -20, 20)
  np.testing.assert_allclose(value[beyond], np.expm1(bound) - bound, rtol=1e-5)
  np.testing.assert_array_equal(grad[beyond], 0)
  at = np.abs(d) == 20
  np.testing.assert_allclose(grad[at], -np.expm1(np.float64(d[at])), rtol=tol)
