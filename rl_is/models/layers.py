"""The layers of the transformer, as Flax NNX modules. Floor 2.

Shape suffixes: B batch, T query positions, S key positions, D embed, H query
heads, K kv heads, h head_dim, F mlp.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from rl_is.models.config import TransformerConfig


def _init(rngs: nnx.Rngs, shape, fan_in: int, dtype) -> nnx.Param:
  """Normal with variance 1 / fan_in."""
  return nnx.Param(
      jax.random.normal(rngs.params(), shape, jnp.dtype(dtype)) * fan_in**-0.5)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale; statistics in float32."""

  def __init__(self, size: int, config: TransformerConfig):
    self.scale = nnx.Param(jnp.ones((size,), jnp.dtype(config.param_dtype)))
    self.eps = config.norm_eps

  def __call__(self, x):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
    scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * rms * scale).astype(x.dtype)


def rotary(x_BTHh, positions_BT, theta: float):
  """Rotates the two halves of each head by the token's position."""
  half = x_BTHh.shape[-1] // 2
  freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions_BT[..., None].astype(jnp.float32) * freq[None, None]
  cos, sin = (f(angle)[:, :, None, :] for f in (jnp.cos, jnp.sin))
  a, b = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate(
      [a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHh.dtype)


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions, and a cache if given one."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    c = config
    self.q = _init(rngs, (c.embed, c.heads, c.head_dim), c.embed, c.param_dtype)
    self.k = _init(rngs, (c.embed, c.kv_heads, c.head_dim), c.embed,
                   c.param_dtype)
    self.v = _init(rngs, (c.embed, c.kv_heads, c.head_dim), c.embed,
                   c.param_dtype)
    self.o = _init(rngs, (c.heads, c.head_dim, c.embed),
                   c.heads * c.head_dim, c.param_dtype)
    self.q_norm = RMSNorm(c.head_dim, c) if c.qk_norm else None
    self.k_norm = RMSNorm(c.head_dim, c) if c.qk_norm else None
    self.theta = c.rope_theta

  def __call__(self, x_BTD, positions_BT, attend_BTS, layer_cache, start):
    dtype = x_BTD.dtype
    q, k, v = (jnp.einsum("BTD,DHh->BTHh", x_BTD, w[...].astype(dtype))
               for w in (self.q, self.k, self.v))
    if self.q_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    q = rotary(q, positions_BT, self.theta)
    k = rotary(k, positions_BT, self.theta)
    if layer_cache is not None:
      k, v = (jax.lax.dynamic_update_slice(old, new, (0, start, 0, 0))
              for old, new in zip(layer_cache, (k, v)))
      layer_cache = (k, v)
    # Rows that may attend to nothing (padding) get finite, unused values.
    y = jax.nn.dot_product_attention(q, k, v, mask=attend_BTS[:, None])
    return jnp.einsum("BTHh,HhD->BTD", y, self.o[...].astype(dtype)), layer_cache


class MLP(nnx.Module):
  """down(silu(gate x) * up x)."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    c = config
    self.gate = _init(rngs, (c.embed, c.mlp), c.embed, c.param_dtype)
    self.up = _init(rngs, (c.embed, c.mlp), c.embed, c.param_dtype)
    self.down = _init(rngs, (c.mlp, c.embed), c.mlp, c.param_dtype)

  def __call__(self, x):
    gate, up, down = (w[...].astype(x.dtype)
                      for w in (self.gate, self.up, self.down))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


class Block(nnx.Module):
  """Pre-norm attention and MLP, each added to the stream."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config.embed, config)
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config.embed, config)
    self.mlp = MLP(config, rngs)

  def __call__(self, x, positions, attend, layer_cache, start):
    y, layer_cache = self.attention(
        self.attention_norm(x), positions, attend, layer_cache, start)
    x = x + y
    return x + self.mlp(self.mlp_norm(x)), layer_cache
