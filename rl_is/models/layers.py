"""The layers of the transformer, as Flax NNX modules. Floor 2.

Shape suffixes: B batch, T tokens, D embed, H query heads, K kv heads, h
head_dim, F mlp, k experts of a token.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from rl_is.models import experts
from rl_is.models.config import TransformerConfig


def _init(rngs: nnx.Rngs, shape, fan_in: int, dtype) -> nnx.Param:
  """Normal with variance 1 / fan_in."""
  return nnx.Param(
      jax.random.normal(rngs.params(), shape, jnp.dtype(dtype)) * fan_in**-0.5)


def rms_norm(x, scale, eps: float):
  """x / rms(x) * scale; statistics in float32."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
  return (wide * rms * scale).astype(x.dtype)


class RMSNorm(nnx.Module):

  def __init__(self, size: int, config: TransformerConfig):
    self.scale = nnx.Param(jnp.ones((size,), jnp.dtype(config.param_dtype)))
    self.eps = config.norm_eps

  def __call__(self, x):
    return rms_norm(x, self.scale[...], self.eps)


def rotary(x_BTHh, positions_BT, theta):
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

  def __call__(self, x_BTD, positions_BT, theta, attend):
    """attend: (q, k, v) -> y; it knows what each token sees, and the cache."""
    dtype = x_BTD.dtype
    q, k, v = (jnp.einsum("BTD,DHh->BTHh", x_BTD, w[...].astype(dtype))
               for w in (self.q, self.k, self.v))
    if self.q_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    y, more = attend(rotary(q, positions_BT, theta),
                     rotary(k, positions_BT, theta), v)
    return jnp.einsum("BTHh,HhD->BTD", y, self.o[...].astype(dtype)), more


class MLP(nnx.Module):
  """down(act(gate x) * up x)."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    c = config
    self.gate = _init(rngs, (c.embed, c.mlp), c.embed, c.param_dtype)
    self.up = _init(rngs, (c.embed, c.mlp), c.embed, c.param_dtype)
    self.down = _init(rngs, (c.mlp, c.embed), c.mlp, c.param_dtype)
    self.act = activation(c)

  def __call__(self, x):
    gate, up, down = (w[...].astype(x.dtype)
                      for w in (self.gate, self.up, self.down))
    return (self.act(x @ gate) * (x @ up)) @ down


class Experts(nnx.Module):
  """Each token's MLP is a weighted sum of a few of many; see `models.experts`."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    c, E = config, config.experts
    self.router = _init(rngs, (c.embed, E), c.embed, c.param_dtype)
    self.gate = _init(rngs, (E, c.embed, c.mlp), c.embed, c.param_dtype)
    self.up = _init(rngs, (E, c.embed, c.mlp), c.embed, c.param_dtype)
    self.down = _init(rngs, (E, c.mlp, c.embed), c.mlp, c.param_dtype)
    self.act = activation(c)
    self.count, self.precision = c.experts_per_token, c.head_precision

  def __call__(self, x_BTD, routes_BTk):
    """(y, the experts that each token went through [B, T, k])."""
    routes, share = experts.route(x_BTD, self.router[...], self.count,
                                  routes_BTk, self.precision)
    gate, up, down = (w[...].astype(x_BTD.dtype)
                      for w in (self.gate, self.up, self.down))
    return experts.mix(x_BTD, routes, share, gate, up, down, self.act), routes


def activation(config: TransformerConfig):
  return dict(silu=jax.nn.silu, gelu=functools.partial(
      jax.nn.gelu, approximate=True))[config.activation]


class Block(nnx.Module):
  """Pre-norm attention and MLP (or experts), each added to the stream."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    norm = lambda: RMSNorm(config.embed, config)
    self.attention_norm = norm()
    self.attention = Attention(config, rngs)
    self.mlp_norm = norm()
    if config.experts:
      self.experts = Experts(config, rngs)
    else:
      self.mlp = MLP(config, rngs)
    self.has_experts = config.experts > 0
    self.attention_post_norm = norm() if config.post_norms else None
    self.mlp_post_norm = norm() if config.post_norms else None

  def __call__(self, x, positions, theta, attend, routes):
    """(x, what `attend` returns besides, the experts taken or None)."""
    y, more = self.attention(self.attention_norm(x), positions, theta, attend)
    x = x + _after(self.attention_post_norm, y)
    y = self.mlp_norm(x)
    y, routes = self.experts(y, routes) if self.has_experts else (
        self.mlp(y), None)
    return x + _after(self.mlp_post_norm, y), more, routes


def _after(norm: RMSNorm | None, x):
  return x if norm is None else norm(x)
