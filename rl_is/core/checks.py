"""Checks that stand in the first lines of a public function. Floor 0.

Each error is one line that names the argument, what was expected, what came.
"""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rl_is.core.types import Array

# Ranges (low, high, whether low itself is allowed), as `in_range` takes them.
POSITIVE, NOT_NEGATIVE = (0.0, math.inf, False), (0.0, math.inf, True)
UNIT = (0.0, 1.0, True)
# Pairs of constants that are two edges of one band.
BANDS = (("low", "high"), ("floor", "cap"), ("lower", "upper"),
         ("cov_low", "cov_high"))


def like(fn: str, first: dict[str, Array], **others: Array) -> None:
  """All arrays are [B, T] with the shape of the one in `first`; floats."""
  (name, x), = first.items()
  if jnp.ndim(x) != 2:
    raise ValueError(
        f"{fn}: {name}: expected rank 2 [B, T], got shape {jnp.shape(x)}")
  for other, y in others.items():
    if jnp.shape(y) != jnp.shape(x):
      raise ValueError(f"{fn}: {other}: expected shape {jnp.shape(x)} like "
                       f"{name}, got {jnp.shape(y)}")
  for other, y in {name: x, **others}.items():
    if not jnp.issubdtype(jnp.result_type(y), jnp.floating):
      raise ValueError(f"{fn}: {other}: expected a floating dtype, got "
                       f"{jnp.result_type(y)}")


def as_mask(fn: str, mask: Array, shape: tuple[int, ...]) -> Array:
  """The mask as bool; integer and 0/1 float masks mean the same thing."""
  if jnp.shape(mask) != shape:
    raise ValueError(
        f"{fn}: mask: expected shape {shape}, got {jnp.shape(mask)}")
  mask = jnp.asarray(mask)
  return mask if mask.dtype == bool else mask != 0  # a != would be one more pass


def vector(fn: str, **arrays: Array) -> None:
  """All arrays are [B], equally long."""
  shapes = {name: jnp.shape(x) for name, x in arrays.items()}
  first = next(iter(shapes.values()))
  for name, shape in shapes.items():
    if len(shape) != 1 or shape != first:
      raise ValueError(f"{fn}: {name}: expected rank 1 [B] of equal length, "
                       f"got {shapes}")


def group_ids(fn: str, group: Array, rows: int) -> None:
  """Each row's group is an integer, and in [0, rows) unless it is traced."""
  dtype = jnp.result_type(group)
  if not jnp.issubdtype(dtype, jnp.integer) or jnp.iinfo(dtype).max < rows:
    raise ValueError(f"{fn}: group: expected an integer dtype that holds {rows}"
                     f" (the rows), got {dtype}")
  if not isinstance(group, jax.core.Tracer):
    ids = np.asarray(group)
    if ids.size and not (0 <= ids.min() and ids.max() < rows):
      raise ValueError(f"{fn}: group: expected values in [0, {rows}), got "
                       f"{ids.min()} to {ids.max()}")


def choice(what: str, name, allowed) -> None:
  """`name` is one of `allowed`, else an error with the nearest of them."""
  if not any(name == known for known in allowed):  # it may be unhashable
    raise ValueError(unknown(what, name, allowed))


def unknown(what: str, name, allowed) -> str:
  """One line: the unknown name and what it may have meant."""
  allowed = [str(a) for a in allowed]
  near = difflib.get_close_matches(str(name), allowed, n=3, cutoff=0.4)
  hint = f"did you mean {' or '.join(near)}?" if near else (
      f"one of: {', '.join(sorted(allowed))}")
  return f"{what}: unknown name {name!r}; {hint}"


def number(name: str, value) -> float:
  """A real number: not a bool, not NaN, not text that only looks like one."""
  if isinstance(value, (bool, np.bool_)) or not isinstance(
      value, (numbers.Real, np.number)):
    raise ValueError(f"{name}: expected a number, got {value!r}")
  if math.isnan(value):
    raise ValueError(f"{name}: expected a number, got NaN")
  return float(value)


def in_range(name: str, value, low: float, high: float,
             closed: bool = False) -> float:
  """A number in (low, high], or in [low, high] when `closed`."""
  value = number(name, value)
  ok = (low <= value if closed else low < value) and value <= high
  if not ok:
    bracket = "[" if closed else "("
    raise ValueError(
        f"{name}: expected a value in {bracket}{low:g}, {high:g}], got {value:g}")
  return value


def divisible(what: str, number_: int, by_what: str, by: int,
              zero: bool = False) -> None:
  """number_ % by == 0, else both numbers and the nearest valid ones."""
  if by < 1 or number_ % by:
    below = number_ // by * by if by >= 1 else 0
    near = [str(n) for n in (below, below + by) if n > 0 or zero]
    raise ValueError(f"{what} = {number_} is not divisible by {by_what} = {by}; "
                     f"nearest valid: {' or '.join(near)}")


def ranged(**ranges: tuple[float, float, bool]) -> Callable:
  """Decorates a function: its numbers are held to their ranges at each call.

  A wrong constant of a loss is no crash but silent nonsense: NaN, or a mask
  that drops everything. The ranges of a piece stand in its row, and `ops` adds
  them to `fn.ranges` when the tables are built; a function without a row gives
  its own. What is traced, or on a device, is let through: only its value could
  tell, and that would cost a transfer.
  """
  def decorate(fn):
    parameters = inspect.signature(fn).parameters
    defaults = {p.name: p.default for p in parameters.values()
                if p.default is not p.empty}

    @functools.wraps(fn)
    def held(*args, **kwargs):
      given = {**defaults, **dict(zip(parameters, args)), **kwargs}
      _hold(fn.__name__.removesuffix("_parts"), given, held.ranges)
      return fn(*args, **kwargs)

    held.ranges = dict(ranges)
    return held
  return decorate


def _hold(fn: str, given: dict, ranges: dict) -> None:
  """Each concrete number in its range, and the edges of a band in order."""
  seen = {name: np.asarray(given[name])[()] for name in ranges
          if name in given and not isinstance(given[name], jax.Array)
          and not np.ndim(given[name])}
  for name, value in seen.items():
    in_range(f"{fn}: {name}", value, *ranges[name])
  for low, high in BANDS:
    if low in seen and high in seen and seen[low] > seen[high]:
      raise ValueError(f"{fn}: {low}: expected at most {high} = "
                       f"{seen[high]:g}, got {seen[low]:g}")
