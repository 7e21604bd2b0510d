"""`token_logprob` in plain jax, some columns and tokens at a time. Floor 1.

The outer loop is over the vocabulary: a slice of the unembedding is read once,
and its gradient is complete, and rounded once, before the next. Of the logits no
more than [tokens at a time, columns at a time] exists.
"""

import functools

import jax.numpy as jnp
from jax import lax

from rl_is.core.types import Array
from rl_is.kernels import logits as logits_lib
from rl_is.kernels import logprob_parts as parts
from rl_is.kernels import logprob_streamed

COLUMNS = 2048  # at a time, unless `chunk` says otherwise
TILE = 2**24  # logits at a time, unless `token_chunk` says otherwise


def _sizes(o: parts.Options, hidden_BTD: Array, unembed_DV: Array):
  """(columns, positions) at a time."""
  columns = min(o.chunk or COLUMNS, unembed_DV.shape[1])
  rows, length = hidden_BTD.shape[:2]
  tokens = o.token_chunk or max(1, TILE // (columns * rows))
  return columns, min(tokens, length)


def _columns(unembed_DV: Array, j: Array, size: int):
  """(first column, the columns [D, v], which of them are new [v]) of slice j.

  The last slice begins early enough to be whole; what it repeats is not new.
  """
  first = jnp.minimum(j * size, unembed_DV.shape[1] - size)
  w_Dv = lax.dynamic_slice_in_dim(unembed_DV, first, size, axis=1)
  column = first + jnp.arange(size)
  return first, w_Dv, (column >= j * size)


def _logits(o, h_BtD, w_Dv, temperature, real_v):
  """(logits before the transform, after it with FLOOR where not real)."""
  raw = logits_lib.head_logits(h_BtD, w_Dv, o.head_precision)
  z = logits_lib.temper(raw, temperature, o.logit_softcap)
  return raw, jnp.where(real_v, z, logits_lib.FLOOR)


def partials(o, hidden, unembed, picks, temperature, limit):
  """See `parts.Options`."""
  columns, tokens = _sizes(o, hidden, unembed)
  h_nBtD, picks_nBtP = parts.split_tokens((hidden, picks), tokens)
  zero = jnp.zeros(picks_nBtP.shape, o.wide)
  start = parts.Partials(zero[..., 0] + logits_lib.FLOOR, zero[..., 0],
                            zero[..., 0], zero)

  def over_columns(state, j):
    first, w_Dv, new_v = _columns(unembed, j, columns)
    real_v = new_v & (first + jnp.arange(columns) < limit)

    def block(xs):
      h_BtD, picks_BtP, before = xs
      z = _logits(o, h_BtD, w_Dv, temperature, real_v)[1]
      top = jnp.maximum(before.top, z.max(axis=-1))
      above = z - top[..., None]
      p = jnp.exp(above)
      down = before.top - top
      scale = jnp.exp(down)
      total = before.total * scale + p.sum(axis=-1)
      moment = before.moment
      if o.entropy:
        # Where nothing was seen before, total and scale make this 0.
        moment = ((moment + before.total * down) * scale
                  + (p * above).sum(axis=-1))
      at = picks_BtP - first
      hit = (at >= 0) & (at < columns) & (picks_BtP >= j * columns)
      value = jnp.take_along_axis(z, jnp.where(hit, at, 0), axis=-1)
      return parts.Partials(top, total, moment,
                               jnp.where(hit, value, before.picked))
    return lax.map(block, (h_nBtD, picks_nBtP, state)), None

  steps = -(-unembed.shape[1] // columns)
  state = lax.scan(over_columns, start, jnp.arange(steps))[0]
  return parts.join_tokens(state, hidden.shape[1])


def gradients(o, hidden, unembed, picks, temperature, limit, slopes):
  """See `parts.Options`."""
  columns, tokens = _sizes(o, hidden, unembed)
  h_nBtD, picks_nBtP, slopes_n = parts.split_tokens(
      (hidden, picks, slopes), tokens)

  def over_columns(carry, j):
    d_h_nBtD, d_z_z_nBt, d_unembed = carry
    first, w_Dv, new_v = _columns(unembed, j, columns)
    real_v = new_v & (first + jnp.arange(columns) < limit)
    # Out of the way of 0 * inf: what a padded column holds is not said.
    w_Dv = jnp.where(real_v, w_Dv, 0)

    def block(d_w_Dv, xs):
      h_BtD, picks_BtP, s, d_h_BtD, d_z_z_Bt = xs
      raw, z = _logits(o, h_BtD, w_Dv, temperature, real_v)
      above = z - s.top[..., None]
      p = jnp.exp(above - s.log_total[..., None])
      weight = s.flat[..., None]
      if o.entropy:
        weight = weight + s.tilt[..., None] * above
      d_z = _add_picks(-p * weight, picks_BtP - first, s.picked, real_v)
      d_z_z_Bt = d_z_z_Bt + (d_z * above).sum(axis=-1)
      d_raw = d_z * logits_lib.temper_slope(raw, temperature, o.logit_softcap)
      dot = functools.partial(logits_lib.head_dot,
                              head_precision=o.head_precision)
      d_w_Dv = d_w_Dv + dot(h_BtD, d_raw, ((0, 1), (0, 1)))
      return d_w_Dv, (d_h_BtD + dot(d_raw, w_Dv, ((2,), (1,))), d_z_z_Bt)

    d_w_Dv, (d_h_nBtD, d_z_z_nBt) = lax.scan(
        block, jnp.zeros(w_Dv.shape, o.wide),
        (h_nBtD, picks_nBtP, slopes_n, d_h_nBtD, d_z_z_nBt))
    # The columns that are not new are 0 in d_w_Dv: added, they stay.
    old = lax.dynamic_slice_in_dim(d_unembed, first, columns, axis=1)
    d_unembed = lax.dynamic_update_slice_in_dim(
        d_unembed, old + d_w_Dv.astype(d_unembed.dtype), first, axis=1)
    return (d_h_nBtD, d_z_z_nBt, d_unembed), None

  steps = -(-unembed.shape[1] // columns)
  start = (jnp.zeros(h_nBtD.shape, o.wide),
           jnp.zeros(h_nBtD.shape[:-1], o.wide),
           jnp.zeros(unembed.shape, o.unembed_grad))
  d_h, d_z_z, d_unembed = lax.scan(over_columns, start, jnp.arange(steps))[0]
  d_h, d_z_z = parts.join_tokens((d_h, d_z_z), hidden.shape[1])
  return d_h, d_unembed, d_z_z


def _add_picks(d_z, at_BtP, d_picked_BtP, real_v):
  """d_z plus d_picked at the picks, where those columns are real."""
  size = d_z.shape[-1]
  here = (at_BtP >= 0) & (at_BtP < size)
  here &= jnp.take(real_v, jnp.where(here, at_BtP, 0))
  # The target, always there, without a scatter.
  at = jnp.where(here, at_BtP, -1)
  d_z = d_z + jnp.where(at[..., :1] == jnp.arange(size)[None, None],
                        d_picked_BtP[..., :1], 0)
  if at_BtP.shape[-1] == 1:
    return d_z
  b, t, _ = jnp.indices((*at_BtP.shape[:2], 1), sparse=True)
  ids = jnp.where(here, at_BtP, size)[..., 1:]
  return d_z.at[b, t, ids].add(d_picked_BtP[..., 1:], mode="drop")


token_logprob = functools.partial(
    logprob_streamed.token_logprob, (partials, gradients))
