"""The transformer as pure functions of a nested dict of arrays. Floor 2."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from rl_is.core.types import Array, Params
from rl_is.models import layers
from rl_is.models.cache import Cache
from rl_is.models.config import TransformerConfig


class _Transformer(nnx.Module):

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.param_dtype)
    table = (config.padded_vocab, config.embed)
    self.embed = nnx.Param(jax.random.normal(rngs.params(), table, dtype) * 0.02)
    self.blocks = nnx.List(
        [layers.Block(config, rngs) for _ in range(config.layers)])
    self.final_norm = layers.RMSNorm(config.embed, config)
    if not config.tie_embeddings:
      self.head = nnx.Param(
          jax.random.normal(rngs.params(), table[::-1], dtype) * 0.02)

  def __call__(self, tokens_BT, positions_BT, attend_BTS, cache, start, dtype):
    x = self.embed[...][tokens_BT].astype(dtype)
    new = []
    for i, block in enumerate(self.blocks):
      x, layer_cache = block(x, positions_BT, attend_BTS,
                             cache.layers[i] if cache else None, start)
      new.append(layer_cache)
    return self.final_norm(x), Cache(tuple(new)) if cache else None


@dataclasses.dataclass(frozen=True)
class Model:
  """A transformer's pure functions; hashable, so it may be a static argument."""

  config: TransformerConfig

  def init(self, key: Array) -> Params:
    """Random parameters, a nested dict of arrays."""
    return nnx.to_pure_dict(
        nnx.split(_Transformer(self.config, nnx.Rngs(params=key)))[1])

  def hidden(self, params: Params, tokens: Array, valid: Array) -> Array:
    """Final hidden states of whole sequences, [B, T] -> [B, T, D].

    Padding (`valid` False), left or right, is not attended to and takes no
    position; what comes out there is finite and means nothing.
    """
    length = tokens.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    attend = causal[None] & valid[:, None, :]
    return self._apply(params, tokens, positions(valid), attend, None, 0)[0]

  def extend(self, params: Params, tokens: Array, valid: Array, cache: Cache,
             start: Array | int) -> tuple[Array, Cache]:
    """Hidden states of the tokens at columns start.., given the cache before.

    tokens: [B, t]; valid: [B, S], S = the cache's length, True for every real
    token up to and with these.
    """
    columns = start + jnp.arange(tokens.shape[1])
    seen = jnp.arange(valid.shape[1])[None, :] <= columns[:, None]
    attend = seen[None] & valid[:, None, :]
    here = jax.lax.dynamic_slice_in_dim(
        positions(valid), start, tokens.shape[1], axis=1)
    return self._apply(params, tokens, here, attend, cache, start)

  def unembed(self, params: Params) -> Array:
    """[D, V] with V padded; separate, so that the log-prob kernel fuses it."""
    return params["embed"].T if self.config.tie_embeddings else params["head"]

  def _apply(self, params, tokens, positions_, attend, cache, start):
    module = nnx.merge(_graph(self.config), params)
    return module(tokens, positions_, attend, cache, start,
                  jnp.dtype(self.config.dtype))


def positions(valid: Array) -> Array:
  """Position of each token among the real ones of its row; padding gets 0."""
  return jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)


@functools.lru_cache(maxsize=None)
def _graph(config: TransformerConfig):
  """The static half of the module: made once per config, without arrays."""
  return nnx.split(nnx.eval_shape(
      lambda: _Transformer(config, nnx.Rngs(params=0))))[0]
