"""What a tiled log-prob is made of: options, blocks of tokens, shares. Floor 1.

An engine passes over tiles of the logits of one device's share of the
vocabulary; `logprob_streamed` puts the shares together.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from rl_is.core.types import Array

ROWS, VOCAB = ("data", "fsdp"), "tensor"  # mesh axes of rows and vocabulary


class Partials(NamedTuple):
  """Of the logits z that one device holds."""

  top: Array  # [B, T] the largest, FLOOR if there is none
  total: Array  # [B, T] sum of exp(z - top)
  moment: Array  # [B, T] sum of exp(z - top) (z - top); 0 without entropy
  picked: Array  # [B, T, P] z at the picks; 0 for a pick held elsewhere


class Slopes(NamedTuple):
  """What fixes the gradient of a logit, summed over the picks k:

    d loss / d z_v = [v = pick_k] picked_k - p_v (flat + tilt (z_v - top))
  """

  top: Array  # [B, T]
  log_total: Array  # [B, T]; p_v = exp(z_v - top - log_total)
  flat: Array  # [B, T]
  tilt: Array  # [B, T], 0 without entropy
  picked: Array  # [B, T, P]


@dataclasses.dataclass(frozen=True)
class Options:
  """What is static; `partials` and `gradients` are the engine.

  partials(options, hidden, unembed, picks, temperature, limit) -> Partials
  gradients(options, hidden, unembed, picks, temperature, limit, slopes) ->
    d hidden [B, T, D], d unembed [D, V] and, per token, [B, T] the sum of
    d z_v (z_v - top); of the dtypes `wide`, `unembed_grad` and `wide`

  `limit`: real entries among the V columns held here; `picks` outside of
  [0, V) are held elsewhere.
  """

  partials: Callable
  gradients: Callable
  vocab_size: int
  logit_softcap: float | None
  entropy: bool
  head_precision: str
  chunk: int | None
  token_chunk: int | None
  mesh: Mesh | AbstractMesh | None
  wide: jnp.dtype
  unembed_grad: jnp.dtype


def split_tokens(arrays, size: int):
  """[B, T, ...] -> [blocks, B, size, ...]; zeros fill the last block.

  Rows stay whole, so that rows that are split over devices stay where they are.
  """
  def split(x):
    count = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - x.shape[1])) +
                ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(
        x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)
  return jax.tree.map(split, arrays)


def join_tokens(arrays, length: int):
  """What `split_tokens` split."""
  def join(x):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
  return jax.tree.map(join, arrays)


def shards(o: Options, fn: Callable, inputs: str, outputs: str) -> Callable:
  """`fn` on every device's share: "r" of the rows, "v" of the vocabulary.

  The gradients are written out, so no transposition passes through: every sum
  over devices stands in the code.
  """
  if o.mesh is None:
    return fn
  spec = {"r": PartitionSpec(ROWS), "v": PartitionSpec(None, VOCAB),
          ".": PartitionSpec()}
  specs = tuple(spec[x] for x in inputs)
  out = tuple(spec[x] for x in outputs)
  return jax.shard_map(fn, mesh=o.mesh, in_specs=specs,
                       out_specs=out if len(out) > 1 else out[0],
                       check_vma=False)


def first_column(o: Options, unembed: Array) -> Array | int:
  return 0 if o.mesh is None else lax.axis_index(VOCAB) * unembed.shape[1]


def device_sum(o: Options, x: Array, axes) -> Array:
  return x if o.mesh is None else lax.psum(x, axes)
