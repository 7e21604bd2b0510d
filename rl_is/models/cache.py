"""The key-value cache of a decode. Floor 2."""

import jax.numpy as jnp

from rl_is.core.types import Array, pytree
from rl_is.models.config import TransformerConfig


@pytree
class Cache:
  """Keys and values, each [layers, B, S, kv_heads, head_dim]."""

  k: Array
  v: Array


def empty(config: TransformerConfig, rows: int, length: int) -> Cache:
  shape = (config.layers, rows, length, config.kv_heads, config.head_dim)
  return Cache(*(jnp.zeros(shape, jnp.dtype(config.dtype)) for _ in range(2)))
