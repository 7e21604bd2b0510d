"""core/checks.py: what passes, and what the one line says."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.core import checks

X = np.zeros((2, 3), np.float32)


def test_like_passes():
  checks.like("f", dict(x=X), y=jnp.zeros((2, 3), jnp.bfloat16))
  checks.like("f", dict(x=np.zeros((0, 3), np.float32)))
  jax.eval_shape(lambda x: checks.like("f", dict(x=x), y=x), X)  # traced


@pytest.mark.parametrize("x,others,message", [
    (X[0], {}, r"f: x: expected rank 2 \[B, T\], got shape \(3,\)"),
    (X[None], {}, r"f: x: expected rank 2 .*\(1, 2, 3\)"),
    (X, dict(y=X, z=X[:1]),
     r"f: z: expected shape \(2, 3\) like x, got \(1, 3\)"),
    (X, dict(y=X.T), r"f: y: expected shape \(2, 3\) like x, got \(3, 2\)"),
    (X.astype(np.int32), dict(y=X), "f: x: expected a floating dtype, .*int32"),
    (X, dict(y=X > 0), "f: y: expected a floating dtype, got bool")])
def test_like_raises(x, others, message):
  with pytest.raises(ValueError, match=message):
    checks.like("f", dict(x=x), **others)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8, np.float32])
def test_as_mask(dtype):
  mask = checks.as_mask("f", np.array([[1, 0, 1]], dtype), (1, 3))
  assert mask.dtype == bool
  np.testing.assert_array_equal(mask, [[True, False, True]])
  with pytest.raises(ValueError, match=r"f: mask: expected shape \(2, 3\), "):
    checks.as_mask("f", np.ones((1, 3), dtype), (2, 3))


def test_vector():
  checks.vector("f", x=X[0], y=X[1])
  for y in (X[0, :2], X):
    with pytest.raises(ValueError, match="f: y: expected rank 1"):
      checks.vector("f", x=X[0], y=y)
  with pytest.raises(ValueError, match="f: x: expected rank 1"):
    checks.vector("f", x=X, y=X)


def test_unknown_names_come_with_the_nearest():
  checks.choice("thing", "tis", ("tis", "mis"))
  with pytest.raises(ValueError, match="^thing: unknown name 'tiss'; did you "
                     "mean tis"):
    checks.choice("thing", "tiss", ("icepop", "tis", "mis"))
  with pytest.raises(ValueError, match="one of: icepop, tis$"):
    checks.choice("thing", "qqq", ("tis", "icepop"))
  with pytest.raises(ValueError, match="thing: unknown name None"):
    checks.choice("thing", None, ("tis",))
  assert "\n" not in checks.unknown("thing", "x", "abc")


@pytest.mark.parametrize("value", [
    1, 1.5, -2, np.float32(.5), np.int64(3), fractions.Fraction(1, 2),
    float("inf")])
def test_number(value):
  got = checks.number("n", value)
  assert type(got) is float and got == value


@pytest.mark.parametrize("value", [
    True, np.bool_(True), "1e-5", None, [1], float("nan"), np.float32("nan")])
def test_no_number(value):
  with pytest.raises(ValueError, match="n: expected a number, got"):
    checks.number("n", value)


@pytest.mark.parametrize("value,closed,ok", [
    (0, False, False), (0, True, True), (1e-9, False, True), (2, False, True),
    (2.1, True, False), (-1, True, False)])
def test_in_range(value, closed, ok):
  if ok:
    assert checks.in_range("n", value, 0, 2, closed) == value
  else:
    bracket = r"\[" if closed else r"\("
    with pytest.raises(
        ValueError, match=rf"n: expected a value in {bracket}0, 2\], got"):
      checks.in_range("n", value, 0, 2, closed)


def test_in_range_up_to_infinity():
  inf = float("inf")
  assert checks.in_range("n", inf, 0, inf) == inf
  for bad in (True, "3", float("nan")):
    with pytest.raises(ValueError, match="n: expected a number"):
      checks.in_range("n", bad, 0, inf)


def test_divisible():
  checks.divisible("rows", 8, "devices", 4)
  with pytest.raises(ValueError, match="rows = 10 is not divisible by devices "
                     "= 4; nearest valid: 8 or 12"):
    checks.divisible("rows", 10, "devices", 4)
  with pytest.raises(ValueError, match="nearest valid: 4$"):
    checks.divisible("rows", 3, "devices", 4)
  with pytest.raises(ValueError, match="by devices = 0"):
    checks.divisible("rows", 3, "devices", 0)
