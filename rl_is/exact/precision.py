"""64-bit floats for this package alone, whatever the session has. Floor 3."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def in_float64(fn: Callable) -> Callable:
  """Runs it with 64-bit types; float32 arrays that come in are widened."""
  @functools.wraps(fn)
  def wide(*args, **kwargs):
    with jax.enable_x64(True):
      return fn(*(_widen(x) for x in args),
                **{k: _widen(x) for k, x in kwargs.items()})
  return wide


def _widen(tree: Any) -> Any:
  def leaf(x):
    is_float = isinstance(x, float) or (
        hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating))
    return jnp.asarray(x, jnp.float64) if is_float else x
  return jax.tree.map(leaf, tree)
