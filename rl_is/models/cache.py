"""The key-value cache of a decode. Floor 2."""

import jax.numpy as jnp

from rl_is.core.types import Array, pytree
from rl_is.models.config import TransformerConfig


@pytree
class Cache:
  """Keys and values, each [layers, B, S, kv_heads, head_dim]."""

  k: Array
  v: Array
  # The experts that each token went through, -1 where none was fed yet.
  routes: Array | None = None  # [layers, B, S, experts_per_token] int16


def empty(config: TransformerConfig, rows: int, length: int,
          record_routes: bool = False) -> Cache:
  c, start = config, (config.layers, rows, length)
  keys, values = (jnp.zeros((*start, c.kv_heads, c.head_dim),
                            jnp.dtype(c.dtype)) for _ in range(2))
  return Cache(keys, values, jnp.full(
      (*start, c.experts_per_token), -1, jnp.int16) if record_routes else None)
