"""The key-value cache of a decode. Floor 2."""

import jax.numpy as jnp

from rl_is.core.types import Array, pytree
from rl_is.models.config import TransformerConfig


@pytree
class Cache:
  """Keys and values of every layer, each [B, S, kv_heads, head_dim]."""

  layers: tuple[tuple[Array, Array], ...]


def empty(config: TransformerConfig, rows: int, length: int) -> Cache:
  shape = (rows, length, config.kv_heads, config.head_dim)
  zeros = jnp.zeros(shape, jnp.dtype(config.dtype))
  return Cache(tuple((zeros, zeros) for _ in range(config.layers)))
