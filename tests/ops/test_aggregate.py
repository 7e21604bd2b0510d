"""ops/aggregate.py: weights, counts, and what adds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import draws, losses
from rl_is.core.types import Mean
from rl_is.ops import aggregate

CONSTANTS = {
    "token_mean": {},
    "sequence_mean_token_mean": {},
    "constant_length": dict(length=7.),
}
NAMES = sorted(CONSTANTS)


@functools.partial(jax.jit, static_argnames="name")
def _jitted(name, constants, loss, mask):
  def total(x):
    mean = getattr(aggregate, name)(x, mask, **constants)
    return mean.value(), mean
  return jax.grad(total, has_aux=True)(loss)[::-1]


def _run(name, loss, mask, **constants):
  """(Mean, gradient of its value in `loss`)."""
  return jax.device_get(
      _jitted(name, {**CONSTANTS[name], **constants}, loss, mask))


def _value(name, *args, **constants):
  return _run(name, *args, **constants)[0].value()


def _twin(name, loss, mask, **constants):
  return getattr(losses, name)(loss, mask, **{**CONSTANTS[name], **constants})


def test_literal():
  # Row 0: 1 + 2 + 3 = 6 of 3 tokens; row 1: 8 of 1 token.
  loss = draws.pad([[1, 2, 3], [8, 5, 5]])
  mask = draws.pad(np.bool_([[1, 1, 1], [1, 0, 0]]))
  third = 1 / 3
  for name, total, count, grad in (
      ("token_mean", 14, 4, [[.25] * 3, [.25, 0, 0]]),
      ("sequence_mean_token_mean", 2 + 8, 2,
       [[third / 2] * 3, [.5, 0, 0]]),
      ("constant_length", (6 + 8) / 7, 2, [[1 / 14] * 3, [1 / 14, 0, 0]])):
    mean, slope = _run(name, loss, mask)
    np.testing.assert_allclose((mean.total, mean.count), (total, count),
                               rtol=1e-6)
    np.testing.assert_allclose(slope, draws.pad(grad), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("x64", [False, True])
def test_twin(name, x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  loss, mask = draws.tokens(1, dtype=dtype)[0], draws.mask()
  with jax.enable_x64(x64):
    mean, grad = _run(name, loss, mask)
    assert mean.total.dtype == dtype
  total, count = _twin(name, loss, mask)
  np.testing.assert_allclose(mean.total, total, rtol=tol)
  assert mean.count == count
  # Linear: the gradient at a token is what one unit of loss there adds.
  unit = np.zeros_like(loss)
  unit[0, 1] = 1
  np.testing.assert_allclose(
      grad[0, 1], _twin(name, unit, mask)[0] / count, rtol=tol)
  np.testing.assert_allclose(np.sum(grad * loss), total / count, rtol=10 * tol)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [*draws.JUNK, draws.JUNK])
def test_junk_off_the_mask(name, junk):
  mask = draws.mask()
  loss = draws.tokens(2)[0]
  got, grad = _run(name, draws.fill(loss, mask, junk), mask)
  want, slope = _run(name, draws.fill(loss, mask, 0), mask)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  np.testing.assert_array_equal(grad, slope)
  np.testing.assert_array_equal(grad[~mask], 0)


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_masks_and_jit(name):
  loss, mask = draws.tokens(3)[0], draws.mask()
  fn = functools.partial(getattr(aggregate, name), **CONSTANTS[name])
  eager = fn(loss, mask)
  for kind in (np.int32, np.float32):
    jax.tree.map(np.testing.assert_array_equal, fn(loss, mask.astype(kind)),
                 eager)
  jitted, _ = _run(name, loss, mask)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6),
               jitted, eager)
  half = fn(jnp.bfloat16(loss), mask)
  assert half.total.dtype == half.count.dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(draws.B)),
       junk=st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_splits_order_and_padding(name, seed, order, junk):
  loss, mask = draws.tokens(seed)[0], draws.mask()
  want, _ = _run(name, loss, mask)
  halves = [_run(name, loss[order[i:i + 2]], mask[order[i:i + 2]])[0]
            for i in (0, 2)]
  wide = np.pad(mask, ((0, 0), (0, 2)))
  padded, _ = _run(
      name, draws.fill(np.pad(loss, ((0, 0), (0, 2))), wide, junk), wide)
  for got in (halves[0] + halves[1], padded):
    np.testing.assert_allclose(got.total, want.total, rtol=1e-5, atol=1e-6)
    assert got.count == want.count


def test_the_length_may_be_an_axis():
  loss, mask = draws.tokens(4)[0], draws.mask()
  lengths = np.float32([1, 5, 10])
  many = jax.jit(jax.vmap(lambda c: aggregate.constant_length(
      loss, mask, length=c).total))(lengths)
  np.testing.assert_allclose(
      many, [_twin("constant_length", loss, mask, length=c)[0]
             for c in lengths], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_counted_keeps_what_was_dropped_in_the_denominator(name):
  # Row 0 loses one of three tokens, row 1 its only two, row 2 has none.
  counted = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]], bool)
  mask = np.array([[1, 0, 1], [0, 0, 0], [0, 0, 0]], bool)
  parts = functools.partial(
      getattr(aggregate, f"{name}_parts"), **CONSTANTS[name])
  kept, every = parts(mask), parts(mask, counted)
  part = {"token_mean": (1, 1), "sequence_mean_token_mean": (1 / 2, 1 / 3),
          "constant_length": (1 / 7, 1 / 7)}[name]
  for got, weight in zip((kept, every), part):
    np.testing.assert_allclose(got.weight, weight * mask, rtol=1e-6)
  tokens = name == "token_mean"
  np.testing.assert_array_equal(kept.count, [2, 0, 0] if tokens else [1, 0, 0])
  np.testing.assert_array_equal(every.count, [3, 2, 0] if tokens else [1, 1, 0])


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_argument(name):
  loss, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
  fn = functools.partial(getattr(aggregate, name), **CONSTANTS[name])
  parts = functools.partial(
      getattr(aggregate, f"{name}_parts"), **CONSTANTS[name])
  with pytest.raises(ValueError, match="mask: expected shape"):
    fn(loss, mask[:1])
  with pytest.raises(ValueError, match=f"{name}: mask: .*rank 2"):
    fn(loss[0], mask[0])
  with pytest.raises(ValueError, match=f"{name}: mask: .*shape"):
    parts(mask, mask[:1])


# Published cases.


def test_case_B01_a_token_mean_is_no_mean_of_means():
  # 100 tokens of 2.0 and 900 of 0.5: 650 / 1000 = 0.65, not 1.25.
  batches = [(np.full((1, 900), x, np.float32), np.arange(900)[None] < n)
             for n, x in ((100, 2.), (900, .5))]
  (first, one), (second, two) = (_run("token_mean", *b) for b in batches)
  mean = first + second
  np.testing.assert_allclose(mean.value(), .65, rtol=1e-6)
  # Over the common count every token's gradient is 1 / 1000, wherever it was.
  for part, grad, (_, mask) in ((first, one, batches[0]),
                                (second, two, batches[1])):
    np.testing.assert_allclose(
        grad * part.count / mean.count, 1e-3 * mask, rtol=1e-5)


def test_case_B03_the_modes_differ_as_reported():
  loss = np.float32([[2, 2, 2, 2, 2, 6, 5, 3, 2, 4],
                     [10, 3, 4, 5, 2, 3, 4, 1, 1, 3]])
  mask = np.arange(10) < np.array([[5], [1]])
  # (5 x 2 + 10) / 6; (2 + 10) / 2; (10 + 10) / 10 / 2. The fourth, a mean of
  # sums = 10, is constant_length with length 1.
  np.testing.assert_allclose(
      _value("token_mean", loss, mask), 20 / 6, rtol=1e-6)
  np.testing.assert_allclose(_value("sequence_mean_token_mean", loss, mask), 6)
  for length, want in ((10., 1), (1., 10)):
    np.testing.assert_allclose(
        _value("constant_length", loss, mask, length=length), want, rtol=1e-6)


def test_case_B04_constant_length_knows_no_split_and_no_width():
  for width in (10, 12):
    loss = np.zeros((4, width), np.float32)
    loss[:, 0] = 2, 4, 6, 8
    mask = np.arange(width) < 3 + np.zeros((4, 1))
    for size in (1, 4) if width == 12 else (1, 2, 4):
      parts = [_run("constant_length", loss[i:i + size], mask[i:i + size],
                    length=10.)[0] for i in range(0, 4, size)]
      mean = functools.reduce(Mean.__add__, parts)
      np.testing.assert_allclose(mean.value(), .5, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_case_B06_nothing_left(name):
  loss, mask = draws.tokens(5)[0], np.zeros((draws.B, draws.T), bool)
  mean, _ = _run(name, loss, mask)
  assert mean.total == mean.count == 0 and np.isnan(mean.value())  # absent
  full = np.ones_like(mask)
  whole, _ = _run(name, loss, full)
  both = mean + whole  # one device's rows all masked: as if it were not there
  jax.tree.map(np.testing.assert_array_equal, both, whole)
  grad = jax.jit(jax.grad(lambda x: getattr(aggregate, name)(
      x, mask, **CONSTANTS[name]).total))(loss)
  np.testing.assert_array_equal(grad, 0)
  full[1] = False  # one row masked: as if it were not there
  part, _ = _run(name, loss, full)
  np.testing.assert_allclose(
      part.value(), np.divide(*_twin(name, loss[[0, 2, 3]], full[[0, 2, 3]])),
      rtol=1e-5)


def test_case_B07_an_empty_row_is_no_sequence():
  loss = np.float32([[2, 2], [7, 7]])
  mask = np.array([[1, 1], [0, 0]], bool)
  mean, _ = _run("sequence_mean_token_mean", loss, mask)
  assert (mean.value(), mean.count) == (2, 1)
  assert _run("constant_length", loss, mask)[0].count == 1


@pytest.mark.parametrize("name", NAMES)
def test_case_B09_masked_junk_is_silent_and_unmasked_junk_is_not(name):
  loss = draws.put([1, np.nan, -np.inf])
  mask = draws.put([1, 0, 0], bool)
  mean, grad = _run(name, loss, mask, **{k: 1. for k in CONSTANTS[name]})
  assert mean.value() == 1
  np.testing.assert_array_equal(grad, draws.put([1, 0, 0]))
  assert np.isnan(_value(name, loss, draws.put([1, 1, 0], bool)))
  assert np.isneginf(_value(name, loss, draws.put([1, 0, 1], bool)))
