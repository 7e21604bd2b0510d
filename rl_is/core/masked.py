"""Masked reductions and clamps whose gradients are safe. Floor 0.

The rule: what stands at a masked position (inf, NaN, 1e30) changes neither
value nor gradient. Multiplying by the mask breaks it (inf * 0 = NaN), so every
function here selects with `where` *before* the arithmetic; that is enough for
the gradient too, because the selected constant has none.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core.types import Array, Max, Mean


def wide(x: Array) -> Array:
  """x in at least float32; float64 stays float64."""
  x = jnp.asarray(x)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def fill(x: Array, mask: Array, value: float = 0.0) -> Array:
  """x where the mask is True, else `value`."""
  return jnp.where(mask, x, jnp.asarray(value, jnp.asarray(x).dtype))


def total(x: Array, mask: Array, axis=None) -> Array:
  """Sum of the unmasked elements."""
  return jnp.sum(fill(x, mask), axis=axis)


def mean(x: Array, mask: Array) -> Mean:
  """Additive mean over all unmasked elements."""
  x = wide(x)
  return Mean(total(x, mask), jnp.sum(mask, dtype=x.dtype))


def largest(x: Array, mask: Array) -> Max:
  """Additive maximum over all unmasked elements."""
  return Max(jnp.max(fill(x, mask, -jnp.inf), initial=-jnp.inf))


def power_of_two(x: Array) -> Array:
  """The one next to the largest |x|: x over it can be squared, without rounding.

  1 where that is 0, denormal or no number. Scalar, detached.
  """
  largest = lax.stop_gradient(jnp.max(jnp.abs(x), initial=0))
  usual = (largest >= jnp.finfo(x.dtype).tiny) & jnp.isfinite(largest)
  _, exponent = jnp.frexp(jnp.where(usual, largest, 1))
  return jnp.ldexp(jnp.ones((), x.dtype), exponent - 1)


def row_mean(x: Array, mask: Array) -> Array:
  """Mean of each row's unmasked elements, [B, 1]; 0 for an empty row."""
  count = jnp.sum(mask, axis=-1, keepdims=True)
  return (jnp.sum(fill(x, mask), axis=-1, keepdims=True)
          / jnp.maximum(count, 1).astype(x.dtype))


def clamp(x: Array, low=None, high=None) -> Array:
  """x limited to [low, high]; at a bound the gradient passes whole.

  `jnp.clip` passes half of it there (a tie of min and max); torch passes all,
  and so do the peers whose numbers we compare with.
  """
  if high is not None:
    x = jnp.where(x > high, high, x)
  if low is not None:
    x = jnp.where(x < low, low, x)
  return x


def limited(fn: Callable[..., Array], low, high, *xs: Array
            ) -> tuple[Array, Array, Array]:
  """(fn(*xs) limited to [low, high], where low binds, where high binds).

  `fn` is elementwise. At a bound its gradient passes whole. Beyond it the
  gradient is 0 even where fn's own is inf: it is never multiplied by 0.
  """
  value = lax.stop_gradient(fn(*xs))
  under, over = value < low, value > high
  inside = _passing(fn, ~(under | over), *xs)
  return jnp.where(over, high, jnp.where(under, low, inside)), under, over


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _passing(fn, passes, *xs):
  """fn(*xs), whose gradient passes where `passes` is True."""
  return fn(*xs)


@_passing.defjvp
def _passing_jvp(fn, primals, tangents):
  (passes, *xs), (_, *d_xs) = primals, tangents
  slope = lambda i: jax.jvp(
      lambda x: fn(*xs[:i], x, *xs[i + 1:]), (xs[i],), (jnp.ones_like(xs[i]),))[1]
  return fn(*xs), sum(fill(slope(i), passes) * d for i, d in enumerate(d_xs))


def first_bad(mask: Array, *arrays: Array) -> Array:
  """Flat index of the first unmasked non-finite element, else -1. int32."""
  bad = jnp.zeros(mask.shape, bool)
  for x in arrays:
    bad |= mask & ~jnp.isfinite(lax.stop_gradient(x))
  bad = bad.reshape(-1)
  return jnp.where(bad.any(), jnp.argmax(bad), -1).astype(jnp.int32)
