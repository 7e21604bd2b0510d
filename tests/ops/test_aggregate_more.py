"""ops/aggregate.py: sums, prompts, and whether an empty row counts."""

import functools

import jax
import numpy as np
import pytest

from reference import draws, rejection as twins
from rl_is.ops import aggregate

MASK = draws.mask()
GROUP = np.int32([2, 0, 2, 0])  # the last row is empty
CONSTANTS = {
    "token_sum": {},
    "sequence_mean_token_mean": {},
    "sequence_mean_token_sum": {},
    "constant_length": dict(length=7.),
    "prompt_mean": dict(group=GROUP),
}
ALL = [(name, empty) for name in CONSTANTS for empty in aggregate.EMPTY
       if name != "token_sum" or empty == "exclude"]


def _constants(name, empty):
  return CONSTANTS[name] | ({} if name == "token_sum" else dict(empty=empty))


def _mean(name, empty, loss, mask=MASK, **changes):
  return getattr(aggregate, name)(
      loss, mask, **{**_constants(name, empty), **changes})


def _loss(seed, dtype=np.float32):
  return draws.fill(draws.tokens(seed, dtype=dtype)[0], MASK, 0)


def test_literal():
  # Row sums 6 of 3 tokens, 8 of 1, 0 of 0; rows 0 and 1 share a prompt.
  loss = np.float32([[1, 2, 3], [8, 5, 5], [5, 5, 5]])
  mask = np.bool_([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
  group = np.int32([1, 1, 0])
  for name, changes, total, exclude, count in (
      ("token_sum", {}, 14, 1, 1),
      ("sequence_mean_token_mean", {}, 2 + 8, 2, 3),
      ("sequence_mean_token_sum", {}, 14, 2, 3),
      ("constant_length", dict(length=7.), 2, 2, 3),
      ("prompt_mean", dict(group=group), 14 / 4, 1, 2)):
    for empty, n in zip(aggregate.EMPTY, (exclude, count)):
      mean = _mean(name, empty, loss, mask, **changes)
      np.testing.assert_allclose(
          (mean.total, mean.count), (total, n), rtol=1e-6)


@pytest.mark.parametrize("name,empty", ALL)
def test_twin_gradient_and_junk(name, empty):
  value = lambda x, m=MASK: _mean(name, empty, x, m).value()
  jitted = jax.jit(jax.value_and_grad(value))
  loss = _loss(1)
  twin = functools.partial(twins.aggregate, name, mask=MASK, empty=empty,
                           **CONSTANTS[name])
  total, count = twin(loss)
  got, grad = jitted(loss)
  np.testing.assert_allclose(got, total / count, rtol=1e-5)
  np.testing.assert_allclose(value(loss, MASK.astype(int)), got, rtol=1e-6)
  # Linear: the gradient at a token is what one unit of loss there adds.
  unit = np.zeros_like(loss)
  unit[0, 1] = 1
  np.testing.assert_allclose(grad[0, 1], twin(unit)[0] / count, rtol=1e-5)
  np.testing.assert_allclose(np.sum(grad * loss), got, rtol=1e-5)
  dirty = jitted(draws.fill(loss, MASK, draws.JUNK))
  jax.tree.map(np.testing.assert_array_equal, dirty, (got, grad))
  with jax.enable_x64(True):
    wide = _mean(name, empty, _loss(2, np.float64))
    assert wide.total.dtype == wide.count.dtype == np.float64
  np.testing.assert_allclose((wide.total, wide.count),
                             twin(_loss(2, np.float64)), rtol=1e-12)


@pytest.mark.parametrize("name,empty", ALL)
def test_parts_add_over_rows(name, empty):
  """Weights and counts of a half are those of the whole, row by row."""
  parts = getattr(aggregate, f"{name}_parts")(MASK, **_constants(name, empty))
  loss = _loss(3)
  mean = _mean(name, empty, loss)
  np.testing.assert_allclose(np.sum(parts.weight * loss), mean.total, rtol=1e-6)
  if name == "token_sum":
    np.testing.assert_array_equal(parts.count, 0)  # nothing to divide by
    return
  np.testing.assert_allclose(np.sum(parts.count), mean.count, rtol=1e-6)
  if name != "prompt_mean":
    halves = [_mean(name, empty, loss[i:i + 2], MASK[i:i + 2]) for i in (0, 2)]
    both = halves[0] + halves[1]
    np.testing.assert_allclose(both.value(), mean.value(), rtol=1e-6)


@pytest.mark.parametrize("bad", [-1, 3])
def test_prompt_mean_refuses_a_prompt_that_is_none(bad):
  group = np.array([0, bad, 1])
  x, mask = np.ones((3, 2), np.float32), np.ones((3, 2), bool)
  with pytest.raises(ValueError, match=r"prompt_mean: group: .*\[0, 3\)"):
    aggregate.prompt_mean(x, mask, group=group)
  traced = jax.jit(lambda g: aggregate.prompt_mean(x, mask, group=g).value())
  assert np.isnan(traced(group))


def test_prompt_mean_is_what_it_says():
  loss, ones = _loss(4), np.ones((draws.B, draws.T), np.float32)
  value = lambda x, group, mask=MASK: aggregate.prompt_mean(
      x, mask, group=np.int32(group)).value()
  # A prompt a row: the sequence mean. One prompt: the token mean.
  np.testing.assert_allclose(
      value(loss, [3, 1, 0, 2]),
      aggregate.sequence_mean_token_mean(loss, MASK).value(), rtol=1e-6)
  np.testing.assert_allclose(
      value(loss, [1] * 4), aggregate.token_mean(loss, MASK).value(), rtol=1e-6)
  # Each part of a prompt that is split weighs its share: a constant stays one.
  parts = aggregate.prompt_mean_parts(MASK, group=GROUP)
  for rows in (slice(0, 2), slice(2, 4)):
    total = np.sum(parts.weight[rows] * ones[rows])
    np.testing.assert_allclose(total, np.sum(parts.count[rows]), rtol=1e-6)
  # The order of rows and the names of prompts do not matter.
  order = np.array([2, 3, 0, 1])
  np.testing.assert_allclose(
      value(loss[order], (3 - GROUP)[order], MASK[order]), value(loss, GROUP),
      rtol=1e-6)


@pytest.mark.parametrize("name,empty", [a for a in ALL if a[0] != "token_sum"])
def test_counted_is_the_denominator(name, empty):
  """With tokens dropped, "all" divides by what was there before."""
  kept = MASK & (np.arange(draws.T) < 1)[None]
  parts = functools.partial(getattr(aggregate, f"{name}_parts"),
                            **_constants(name, empty))
  full, dropped = parts(MASK), parts(kept, MASK)
  np.testing.assert_array_equal(dropped.count, full.count)
  np.testing.assert_array_equal(dropped.weight, full.weight * kept)


def test_errors_name_the_argument():
  x = np.zeros((2, 3), np.float32)
  for name, empty in ALL:
    with pytest.raises(ValueError, match="mask: .*shape"):
      _mean(name, empty, x, x[:1])
    if name != "token_sum":
      with pytest.raises(ValueError, match=f"{name}: empty: unknown name 'no'"):
        _mean(name, "no", x, x, **(
            dict(group=np.int32([0, 0])) if name == "prompt_mean" else {}))
  for group, match in ((np.int32([0]), "equal length"),
                       (np.float32([0, 1]), "group: .*integer")):
    with pytest.raises(ValueError, match=f"prompt_mean: .*{match}"):
      aggregate.prompt_mean(x, x, group=group)
