"""The log-prob over kept ids: K + 1 of the V columns are multiplied. Floor 1."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core.types import Array
from rl_is.kernels import logits as logits_lib
from rl_is.kernels import logprob_parts as parts


def over_ids(o, hidden, unembed, targets_BT, ids_BTK, temperature):
  """(logp, entropy, logp_ids) of the softmax over ids and target."""
  support = logits_lib.with_target(ids_BTK, targets_BT)
  raw = _gathered(o, hidden, unembed, support)
  logits_BTS = logits_lib.temper(raw, temperature, o.logit_softcap)
  real = (support >= 0) & (support < o.vocab_size)
  logp = logits_lib.log_normalise(
      jnp.where(real, logits_BTS, logits_lib.FLOOR))
  entropy = logits_lib.entropy(logp) if o.entropy else None
  return (logits_lib.of_target(logp, ids_BTK, targets_BT), entropy,
          logp[..., :-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(o: parts.Options, hidden, unembed, picks):
  """hidden . unembed[:, pick], [B, T, S]; a pick of -1 gives 0."""
  return _gather_forward(o, hidden, unembed, picks)[0]


def _gather_forward(o, hidden, unembed, picks):
  def local(hidden, unembed, picks):
    def block(xs):
      h_BtD, picks_BtS = xs
      w_DBtS, here = _columns(o, unembed, picks_BtS)
      # One dot a pick: no matrix product, so the precision is that of a sum.
      h_BtD, w_DBtS = _operands(o, h_BtD, w_DBtS)
      raw = jnp.einsum("btd,dbts->bts", h_BtD, w_DBtS,
                       precision=lax.Precision.HIGHEST,
                       preferred_element_type=o.wide)
      return jnp.where(here, raw, 0.0)
    blocks = parts.split_tokens((hidden, picks),
                                _gather_tokens(o, hidden, picks))
    raw = parts.join_tokens(lax.map(block, blocks), hidden.shape[1])
    return parts.device_sum(o, raw, parts.VOCAB)
  raw = parts.shards(o, local, "rvr", "r")(hidden, unembed, picks)
  return raw, (hidden, unembed, picks)


def _gather_backward(o, saved, d_raw):
  hidden, unembed, picks = saved

  def local(hidden, unembed, picks, d_raw):
    def block(d_unembed, xs):
      h_BtD, picks_BtS, d_raw_BtS = xs
      w_DBtS, here = _columns(o, unembed, picks_BtS)
      d_raw_BtS = jnp.where(here, d_raw_BtS, 0.0)
      h_BtD, w_DBtS = _operands(o, h_BtD, w_DBtS)
      d_hidden = jnp.einsum("bts,dbts->btd", d_raw_BtS, w_DBtS,
                            precision=lax.Precision.HIGHEST,
                            preferred_element_type=o.wide)
      add = jnp.moveaxis(h_BtD, -1, 0)[..., None] * d_raw_BtS[None]
      at = _local(o, unembed, picks_BtS)[0]
      return d_unembed.at[:, at].add(add), d_hidden
    blocks = parts.split_tokens((hidden, picks, d_raw),
                                _gather_tokens(o, hidden, picks))
    d_unembed, d_hidden = lax.scan(
        block, jnp.zeros(unembed.shape, o.wide), blocks)
    d_hidden = parts.join_tokens(d_hidden, hidden.shape[1])
    return (parts.device_sum(o, d_hidden, parts.VOCAB).astype(hidden.dtype),
            parts.device_sum(o, d_unembed, parts.ROWS).astype(unembed.dtype))
  d_hidden, d_unembed = parts.shards(o, local, "rvrr", "rv")(
      hidden, unembed, picks, d_raw)
  return d_hidden, d_unembed, None


_gathered.defvjp(_gather_forward, _gather_backward)


def _local(o, unembed, picks):
  """Columns of the picks in this device's share, and whether they are in it."""
  at = picks - parts.first_column(o, unembed)
  here = (picks >= 0) & (at >= 0) & (at < unembed.shape[1])
  return jnp.where(here, at, 0), here


def _columns(o, unembed, picks):
  at, here = _local(o, unembed, picks)
  return jnp.take(unembed, at, axis=1), here


def _operands(o, *arrays):
  dtype = jnp.bfloat16 if o.head_precision == "bf16" else o.wide
  return [x.astype(dtype).astype(o.wide) for x in arrays]


def _gather_tokens(o: parts.Options, hidden: Array, picks: Array) -> int:
  """Positions at a time: the gathered columns stay below 2^24 numbers."""
  each = hidden.shape[0] * hidden.shape[2] * picks.shape[-1]
  return min(o.token_chunk or max(1, 2**24 // each), hidden.shape[1])
