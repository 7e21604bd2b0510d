"""How queries attend: by XLA, or by the splash kernel for TPU. Floor 2.

Shape suffixes: B batch, T query positions, S key positions, H query heads, K kv
heads, h head_dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib
from jax.sharding import PartitionSpec as P

from rl_is.core.types import Array

_LANES = 128  # what the kernel's blocks are multiples of
_BLOCKS = (512, 256, 128)  # of queries and of keys; the first that divides T


def xla(q_BTHh: Array, k_BSKh: Array, v_BSKh: Array, mask_BTS: Array) -> Array:
  """Grouped-query attention; a row that may see nothing is finite, unused."""
  return jax.nn.dot_product_attention(q_BTHh, k_BSKh, v_BSKh,
                                      mask=mask_BTS[:, None])


def splash(q_BTHh: Array, k_BTKh: Array, v_BTKh: Array, valid_BT: Array,
           window: int, is_global: Array) -> Array:
  """Causal attention of whole sequences; no [T, T] array exists.

  `valid` has no holes: padding is left or right of the real tokens. On the mesh
  that is set each device has its own rows and heads. On a CPU it is interpreted.
  """
  def local(q, k, v, valid, is_global):
    run = lambda window, interpret: functools.partial(
        _rows, window=window, interpret=interpret)
    def on(interpret):
      everything = run(0, interpret)
      if not window:
        return lambda *args: everything(*args[:-1])
      return lambda *args: lax.cond(
          args[-1], everything, run(window, interpret), *args[:-1])
    return lax.platform_dependent(q, k, v, valid, is_global, tpu=on(False),
                                  cpu=on(True))

  if not jax.sharding.get_abstract_mesh().empty:
    rows = ("data", "fsdp")
    local = jax.shard_map(
        local, in_specs=(P(rows, None, "tensor"),) * 3 + (P(rows), P()),
        out_specs=P(rows, None, "tensor"), check_vma=False)
  return local(q_BTHh, k_BTKh, v_BTKh, valid_BT, is_global)


def _rows(q_BTHh, k_BTKh, v_BTKh, valid_BT, *, window, interpret):
  length, size = q_BTHh.shape[1], q_BTHh.shape[-1]
  padding = -length % _LANES
  # [B, T, heads, h] -> [B, heads, T, h]; the kernel does not scale.
  turn = lambda x: jnp.pad(jnp.swapaxes(x, 1, 2),
                           ((0, 0), (0, 0), (0, padding), (0, 0)))
  segments = jnp.pad(valid_BT.astype(jnp.int32), ((0, 0), (0, padding)))
  kernel = _kernel(q_BTHh.shape[2], length + padding, window, interpret)
  y = jax.vmap(lambda q, k, v, s: kernel(
      q, k, v, splash_lib.SegmentIds(s, s)))(
          turn(q_BTHh * size**-0.5), turn(k_BTKh), turn(v_BTKh), segments)
  return jnp.swapaxes(y, 1, 2)[:, :length]


def _kernel(heads: int, length: int, window: int, interpret: bool):
  shape = (length, length)
  mask = (splash_lib.LocalMask(shape, (window - 1, 0), 0) if window else
          splash_lib.CausalMask(shape))
  block = next(b for b in _BLOCKS if length % b == 0)
  blocks = splash_lib.BlockSizes(**{
      f"block_{name}": block for name in (
          "q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq",
          "kv_dq")})
  return splash_lib.make_splash_mha(
      splash_lib.MultiHeadMask([mask] * heads), block_sizes=blocks,
      head_shards=1, q_seq_shards=1, interpret=interpret)
