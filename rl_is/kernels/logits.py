"""THE logit transform: what sampling and scoring both see. Floor 1.

Order: soft cap, padded vocabulary masked, temperature, then the kept set of
top-k / top-p. A sampler that filters records its kept ids, and the learner
normalises over the very same ids; without that every ratio would be multiplied
by the kept mass.
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core.types import Array

# Not -inf: (-inf) - (-inf) is NaN, and a finite floor has a zero gradient too.
FLOOR = -1e30


def head_dot(x: Array, y: Array, dims, head_precision: str) -> Array:
  """`lax.dot_general` without batch axes, its result float32 or wider.

  head_precision "highest": float32 operands, all passes (on TPU a float32 dot
  would otherwise run in bf16); two bf16 operands stay, their products are exact.
  "bf16": bf16 operands, float32 accumulation.
  """
  if head_precision not in ("highest", "bf16"):
    raise ValueError("head_logits: head_precision: expected 'highest' or 'bf16'"
                     f", got {head_precision!r}")
  wide = jnp.promote_types(jnp.promote_types(x.dtype, y.dtype), jnp.float32)
  operand = wide
  if head_precision == "bf16" or x.dtype == y.dtype == jnp.bfloat16:
    operand, wide = jnp.bfloat16, jnp.float32
  return lax.dot_general(
      x.astype(operand), y.astype(operand), (dims, ((), ())),
      precision=lax.Precision.HIGHEST if head_precision == "highest" else None,
      preferred_element_type=wide)


def head_logits(hidden_D: Array, unembed_DV: Array,
                head_precision: str = "highest") -> Array:
  """hidden @ unembed in float32 or wider, `[..., D] x [D, V] -> [..., V]`."""
  return head_dot(hidden_D, unembed_DV, ((hidden_D.ndim - 1,), (0,)),
                  head_precision)


def temper(logits: Array, temperature: Array | float,
           logit_softcap: float | None) -> Array:
  """The part of the transform that looks at one logit at a time."""
  if logit_softcap is not None:
    logits = logit_softcap * jnp.tanh(logits / logit_softcap)
  return logits / temperature


def temper_slope(logits: Array, temperature: Array | float,
                 logit_softcap: float | None) -> Array | float:
  """The derivative of `temper` at the same logits."""
  if logit_softcap is None:
    return 1 / temperature
  return (1 - jnp.tanh(logits / logit_softcap) ** 2) / temperature


def check_vocab(vocab_size: int, width: int) -> None:
  if not 0 < vocab_size <= width:
    raise ValueError(f"transform: vocab_size: expected 1 to {width} (the width "
                     f"of the logits), got {vocab_size}")


def transform(logits_V: Array, *, temperature: Array | float,
              vocab_size: int, logit_softcap: float | None = None) -> Array:
  """Logits of the distribution that is sampled from and scored, `[..., V]`."""
  check_vocab(vocab_size, logits_V.shape[-1])
  logits_V = temper(logits_V, temperature, logit_softcap)
  if vocab_size < logits_V.shape[-1]:
    real = jnp.arange(logits_V.shape[-1]) < vocab_size
    logits_V = jnp.where(real, logits_V, FLOOR)
  return logits_V


def kept_set(logits_V: Array, *, top_k: int, top_p: Array | float = 1.0):
  """The ids that top-k, then top-p, leave: `[..., V] -> ([..., K], [..., K])`.

  Returns the kept logits (FLOOR where dropped) and their ids (-1 where dropped),
  most likely first. top-p keeps the smallest set whose mass, of the top-k's, is
  at least top_p; the most likely token always stays. Logits of the padded
  vocabulary are never kept.
  """
  values_K, ids_K = lax.top_k(logits_V, top_k)
  # Mass before each token, in descending order: the first has 0.
  shifted_K, log_total = _shifted(values_K)
  p_K = jnp.exp(shifted_K - log_total)
  before_K = jnp.cumsum(p_K, axis=-1) - p_K
  # In float32 the mass may round up to 1 early; top_p = 1 drops nothing.
  first_K = jnp.arange(top_k) == 0
  first_K = first_K.reshape((1,) * (values_K.ndim - 1) + (-1,))
  # So written a NaN stays: dropped, all would look like a uniform distribution.
  keep_K = ((before_K < top_p) | (top_p >= 1) | first_K) & ~(values_K <= FLOOR)
  return (jnp.where(keep_K, values_K, FLOOR),
          jnp.where(keep_K, ids_K, -1).astype(jnp.int32))


def _shifted(x: Array) -> tuple[Array, Array]:
  """x minus its largest entry, and the logsumexp of that, over the last axis."""
  x = x - lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
  return x, jnp.log(jnp.sum(jnp.exp(x), axis=-1, keepdims=True))


def log_normalise(logits: Array) -> Array:
  """log-softmax over the last axis, at most 0."""
  # In this order: a sum with a large maximum would round the small logarithm.
  shifted, log_total = _shifted(logits)
  return jnp.minimum(shifted - log_total, 0.0)


def entropy(logp: Array) -> Array:
  """Of a distribution given by its log-probs over the last axis."""
  # p log p -> 0 for what is excluded: exp underflows and FLOOR is finite.
  return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def with_target(ids_BTK: Array, targets_BT: Array) -> Array:
  """The kept ids and, in one more slot, the target; none is there twice."""
  target_id = targets_BT[..., None]
  kept = (ids_BTK == target_id).any(axis=-1, keepdims=True)
  return jnp.concatenate([ids_BTK, jnp.where(kept, -1, target_id)], axis=-1)


def of_target(logp_BTS: Array, ids_BTK: Array, targets_BT: Array) -> Array:
  """The target's entry of what is over the slots of `with_target`."""
  hit = ids_BTK == targets_BT[..., None]
  slot = jnp.where(hit.any(axis=-1), jnp.argmax(hit, axis=-1),
                   ids_BTK.shape[-1])
  return jnp.take_along_axis(logp_BTS, slot[..., None], axis=-1)[..., 0]
