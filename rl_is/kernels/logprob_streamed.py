"""What `chunked` and `pallas` share: the softmax and its gradients. Floor 1.

Both pass over the logits in tiles and keep, per token, what fixes the softmax:
the largest logit, the sum of the exponentials above it, and their mean logit.
The backward pass makes the tiles again. Each device sees its share of the
vocabulary; here the shares are put together.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core import checks
from rl_is.core.types import Array
from rl_is.kernels import logits as logits_lib
from rl_is.kernels import logprob_kept
from rl_is.kernels import logprob_parts as parts


def token_logprob(engine: tuple[Callable, Callable], hidden_BTD, unembed_DV,
                  targets_BT, *, ids, support, temperature, vocab_size,
                  logit_softcap, return_entropy, head_precision, chunk=None,
                  token_chunk=None, mesh=None):
  """See `logprob.token_logprob`; returns (logp, entropy, logp_ids)."""
  wide = jnp.promote_types(
      jnp.promote_types(hidden_BTD.dtype, unembed_DV.dtype), jnp.float32)
  if head_precision == "bf16":
    wide = jnp.dtype(jnp.float32)
  if mesh is not None and mesh.size == 1:
    mesh = None
  split_rows = mesh is not None and any(mesh.shape[a] > 1 for a in parts.ROWS)
  options = parts.Options(
      *engine, vocab_size, logit_softcap, return_entropy, head_precision, chunk,
      token_chunk, mesh, wide, wide if split_rows else unembed_DV.dtype)
  _check(options, hidden_BTD, unembed_DV)
  temperature = jnp.asarray(temperature, wide)
  if support == "ids":
    return logprob_kept.over_ids(options, hidden_BTD, unembed_DV,
                                 targets_BT, ids, temperature)
  picks = targets_BT[..., None]
  if ids is not None:
    picks = jnp.concatenate([picks, ids.astype(picks.dtype)], axis=-1)
  logp, entropy = _log_softmax(options, hidden_BTD, unembed_DV, picks,
                               temperature)
  # Unused slots and padding are constants; outside of the table is a mistake,
  # and so is -1 for a target.
  logp = jnp.where((picks >= 0) & (picks < vocab_size), logp, logits_lib.FLOOR)
  logp = jnp.where(picks < unembed_DV.shape[1], logp, jnp.nan)
  return (jnp.where(targets_BT >= 0, logp[..., 0], jnp.nan), entropy,
          None if ids is None else logp[..., 1:])


def _check(o: parts.Options, hidden_BTD: Array, unembed_DV: Array) -> None:
  logits_lib.check_vocab(o.vocab_size, unembed_DV.shape[1])
  if o.mesh is not None:
    checks.divisible("token_logprob: rows", hidden_BTD.shape[0],
                     "mesh data x fsdp", o.mesh.shape["data"] *
                     o.mesh.shape["fsdp"])
    checks.divisible("token_logprob: padded vocabulary", unembed_DV.shape[1],
                     "mesh tensor", o.mesh.shape[parts.VOCAB])


# ---- the softmax over the vocabulary


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_softmax(o: parts.Options, hidden, unembed, picks, temperature):
  """log p at the picks [B, T, P], and the entropy [B, T] or None."""
  return _forward(o, hidden, unembed, picks, temperature)[0]


def _forward(o, hidden, unembed, picks, temperature):
  def local(hidden, unembed, picks, temperature):
    first = parts.first_column(o, unembed)
    return _combine(o, o.partials(o, hidden, unembed, picks - first, temperature,
                                  o.vocab_size - first))
  top, total, moment, picked = parts.shards(o, local, "rvr.", "r")(
      hidden, unembed, picks, temperature)
  log_total, mean = jnp.log(total), moment / total
  # In this order: top + log_total would round the small logarithm.
  logp = jnp.minimum(picked - top[..., None] - log_total[..., None], 0.0)
  # Both terms are at least 0: total >= 1, and every z is at most top.
  entropy = log_total - mean if o.entropy else None
  return (logp, entropy), (hidden, unembed, picks, temperature, top, log_total,
                           mean)


def _backward(o, saved, cotangents):
  hidden, unembed, picks, temperature, top, log_total, mean = saved
  d_logp, d_entropy = cotangents
  # A token that nothing asks about takes no part, whatever is in it.
  live = (d_logp != 0).any(axis=-1)
  if o.entropy:
    live |= d_entropy != 0
  top, log_total, mean = (jnp.where(live, x, 0) for x in (top, log_total, mean))
  live_hidden = jnp.where(live[..., None], hidden, 0)
  flat = d_logp.sum(axis=-1)
  tilt = jnp.zeros_like(flat)
  if o.entropy:  # d H / d z_v = -p_v (z_v - top - mean)
    flat, tilt = flat - d_entropy * mean, d_entropy

  def local(hidden, unembed, picks, temperature, slopes):
    first = parts.first_column(o, unembed)
    d_hidden, d_unembed, d_z_z = o.gradients(
        o, hidden, unembed, picks - first, temperature, o.vocab_size - first,
        slopes)
    return (parts.device_sum(o, d_hidden, parts.VOCAB).astype(hidden.dtype),
            parts.device_sum(o, d_unembed, parts.ROWS).astype(unembed.dtype),
            parts.device_sum(o, d_z_z, parts.VOCAB))
  d_hidden, d_unembed, d_z_z = parts.shards(o, local, "rvr.r", "rvr")(
      live_hidden, unembed, picks, temperature,
      parts.Slopes(top, log_total, flat, tilt, d_logp))
  # z = u / temperature; a token's slopes add up to 0, so z - top will do for z.
  return d_hidden, d_unembed, None, -jnp.sum(d_z_z) / temperature


_log_softmax.defvjp(_forward, _backward)


def _combine(o: parts.Options, x: parts.Partials) -> parts.Partials:
  if o.mesh is None:
    return x
  top = lax.pmax(x.top, parts.VOCAB)
  below = x.top - top
  scale = jnp.exp(below)
  return parts.Partials(top, lax.psum(x.total * scale, parts.VOCAB),
                  lax.psum((x.moment + x.total * below) * scale, parts.VOCAB),
                  lax.psum(x.picked, parts.VOCAB))
