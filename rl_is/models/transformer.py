"""The transformer as pure functions of a nested dict of arrays. Floor 2."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from rl_is.core.types import Array, Params
from rl_is.models import attention, layers
from rl_is.models.cache import Cache
from rl_is.models.config import TransformerConfig

# Where each parameter's axes lie; the blocks' first axis is the layer. Rows are
# split over data and fsdp, the widths of heads, experts and vocabulary over
# tensor, and fsdp takes D, gathered where it is used.
RULES = (
    (r"embed", P("tensor", "fsdp")),
    (r"head", P("fsdp", "tensor")),
    (r"attention/[qkv]", P(None, "fsdp", "tensor", None)),
    (r"attention/o", P(None, "tensor", None, "fsdp")),
    (r"mlp/(gate|up)", P(None, "fsdp", "tensor")),
    (r"mlp/down", P(None, "tensor", "fsdp")),
    (r"experts/router", P(None, "fsdp", None)),
    (r"experts/(gate|up)", P(None, None, "fsdp", "tensor")),
    (r"experts/down", P(None, None, "tensor", "fsdp")),
    (r"norm/scale", P()),
)


@dataclasses.dataclass(frozen=True)
class Model:
  """A transformer's pure functions; hashable, so it may be a static argument."""

  config: TransformerConfig
  rules = RULES  # for `infra.sharding`

  def init(self, key: Array) -> Params:
    """Random parameters, a nested dict of arrays; those of a layer stacked."""
    c = self.config
    dtype = jnp.dtype(c.param_dtype)
    embed, blocks, head = jax.random.split(key, 3)
    table = lambda key, *shape: 0.02 * jax.random.normal(key, shape, dtype)
    params = dict(
        embed=table(embed, c.padded_vocab, c.embed),
        blocks=jax.vmap(lambda key: nnx.to_pure_dict(nnx.split(
            layers.Block(c, nnx.Rngs(params=key)))[1]))(
                jax.random.split(blocks, c.layers)),
        final_norm=dict(scale=jnp.ones((c.embed,), dtype)))
    if not c.tie_embeddings:
      params["head"] = table(head, c.embed, c.padded_vocab)
    return params

  def hidden(self, params: Params, tokens: Array, valid: Array,
             routes: Array | None = None) -> Array:
    """Final hidden states of whole sequences, [B, T] -> [B, T, D].

    Padding (`valid` False), left or right, is not attended to and takes no
    position; what comes out there is finite and means nothing. routes: [B, T,
    layers, k] experts to go through, -1 for those that the router chooses.
    """
    where = positions(valid)
    if self.config.attention == "splash":
      def look(layer, cache, q, k, v):
        return attention.splash(q, k, v, valid, self.config.window,
                                layer["is_global"]), cache
    else:
      length = tokens.shape[1]
      causal = jnp.tril(jnp.ones((length, length), bool))
      mask = self._mask(causal[None] & valid[:, None, :], where, where)

      def look(layer, cache, q, k, v):
        return attention.xla(q, k, v, mask(layer)), cache

    return self._apply(params, tokens, where, look, None, routes)[0]

  def extend(self, params: Params, tokens: Array, valid: Array, cache: Cache,
             start: Array | int) -> tuple[Array, Cache]:
    """Hidden states of the tokens at columns start.., given the cache before.

    tokens: [B, t]; valid: [B, S], S = the cache's length, True for every real
    token up to and with these.
    """
    columns = start + jnp.arange(tokens.shape[1])
    seen = jnp.arange(valid.shape[1])[None, :] <= columns[:, None]
    everywhere = positions(valid)
    here = lax.dynamic_slice_in_dim(everywhere, start, tokens.shape[1], axis=1)
    mask = self._mask(seen[None] & valid[:, None, :], here, everywhere)

    def look(layer, cache, q, k, v):
      put = lambda old, new: lax.dynamic_update_slice(
          old, new[None], (layer["number"], 0, start, 0, 0))
      cache = dataclasses.replace(
          cache, k=put(cache.k, k), v=put(cache.v, v))
      k, v = (lax.dynamic_index_in_dim(x, layer["number"], keepdims=False)
              for x in (cache.k, cache.v))
      return attention.xla(q, k, v, mask(layer)), cache

    x, cache, routes = self._apply(params, tokens, here, look, cache)
    if cache.routes is not None:
      cache = dataclasses.replace(cache, routes=lax.dynamic_update_slice(
          cache.routes, routes.astype(cache.routes.dtype), (0, 0, start, 0)))
    return x, cache

  def unembed(self, params: Params) -> Array:
    """[D, V] with V padded; separate, so that the log-prob kernel fuses it."""
    return params["embed"].T if self.config.tie_embeddings else params["head"]

  def _mask(self, seen_BTS, query_BT, key_BS):
    """layer -> what its queries see; a local one no further than its window."""
    c = self.config
    if not c.window:
      return lambda layer: seen_BTS
    near = query_BT[:, :, None] - key_BS[:, None, :] < c.window
    return lambda layer: seen_BTS & (near | layer["is_global"])

  def _apply(self, params, tokens, positions_, look, cache, routes=None):
    """look(layer, cache, q, k, v) -> (y, cache) is how one layer attends.

    Returns (x, cache, the experts taken [layers, B, T, k] or None).
    """
    c = self.config
    # Whole in D first: rows of a table split in D would have to be moved twice.
    table = _constrain(params["embed"], P("tensor", None))
    x = constrain_rows(table[tokens].astype(jnp.dtype(c.dtype)))
    if c.embed_scale:
      x = x * jnp.asarray(c.embed**0.5, x.dtype)
    is_global = [c.is_global(i) for i in range(c.layers)]
    of_layer = dict(
        number=jnp.arange(c.layers), is_global=jnp.asarray(is_global),
        theta=jnp.where(jnp.asarray(is_global), jnp.float32(c.rope_theta),
                        jnp.float32(c.local_rope_theta)))
    if routes is not None:
      of_layer["routes"] = jnp.moveaxis(routes, 2, 0).astype(jnp.int32)

    def body(carry, xs):
      (x, cache), (weights, layer) = carry, xs
      x, cache, taken = nnx.merge(_block(c), weights)(
          x, positions_, layer["theta"], functools.partial(look, layer, cache),
          layer.get("routes"))
      return (constrain_rows(x), cache), taken

    (x, cache), taken = lax.scan(
        _remat(body, c), (x, cache), (params["blocks"], of_layer),
        unroll=1 if c.scan_layers else c.layers)
    x = layers.rms_norm(x, params["final_norm"]["scale"], c.norm_eps)
    return x, cache, taken


def positions(valid: Array) -> Array:
  """Position of each token among the real ones of its row; padding gets 0."""
  return jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)


def constrain_rows(x: Array) -> Array:
  """Rows over data and fsdp."""
  return _constrain(x, P(("data", "fsdp"), *(None,) * (x.ndim - 1)))


def _constrain(x: Array, spec: P) -> Array:
  """So placed on the mesh that is set; without one, as it is."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return lax.with_sharding_constraint(x, spec)


def _remat(body, config: TransformerConfig):
  if config.remat == "none":
    return body
  policy = (jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            if config.remat == "dots" else None)
  # Inside a loop nothing could be shared across the barrier that this puts.
  return jax.checkpoint(body, policy=policy, prevent_cse=not config.scan_layers)


@functools.lru_cache(maxsize=None)
def _block(config: TransformerConfig):
  """The static half of a layer: made once per config, without arrays."""
  return nnx.split(nnx.eval_shape(
      lambda: layers.Block(config, nnx.Rngs(params=0))))[0]
