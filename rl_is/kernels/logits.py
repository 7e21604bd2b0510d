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


def head_logits(hidden_D: Array, unembed_DV: Array,
                head_precision: str = "highest") -> Array:
  """hidden @ unembed in float32 (or wider), `[..., D] x [D, V] -> [..., V]`.

  head_precision "highest": float32 operands, all passes (on TPU a float32 dot
  would otherwise run in bf16). "bf16": bf16 operands, float32 accumulation.
  """
  if head_precision == "bf16":
    hidden_D, unembed_DV = (x.astype(jnp.bfloat16)
                            for x in (hidden_D, unembed_DV))
    return jnp.matmul(hidden_D, unembed_DV, preferred_element_type=jnp.float32)
  if head_precision != "highest":
    raise ValueError("head_logits: head_precision: expected 'highest' or 'bf16'"
                     f", got {head_precision!r}")
  wide = jnp.promote_types(jnp.promote_types(
      hidden_D.dtype, unembed_DV.dtype), jnp.float32)
  return jnp.matmul(hidden_D.astype(wide), unembed_DV.astype(wide),
                    precision=lax.Precision.HIGHEST)


def transform(logits_V: Array, *, temperature: Array | float,
              vocab_size: int, logit_softcap: float | None = None) -> Array:
  """Logits of the distribution that is sampled from and scored, `[..., V]`."""
  if not 0 < vocab_size <= logits_V.shape[-1]:
    raise ValueError(f"transform: vocab_size: expected 1 to {logits_V.shape[-1]}"
                     f" (the width of the logits), got {vocab_size}")
  if logit_softcap is not None:
    logits_V = logit_softcap * jnp.tanh(logits_V / logit_softcap)
  logits_V = logits_V / temperature
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
  p_K = jnp.exp(values_K - _logsumexp(values_K))
  before_K = jnp.cumsum(p_K, axis=-1) - p_K
  # In float32 the mass may round up to 1 early; top_p = 1 drops nothing.
  first_K = jnp.arange(top_k) == 0
  first_K = first_K.reshape((1,) * (values_K.ndim - 1) + (-1,))
  # So written a NaN stays: dropped, all would look like a uniform distribution.
  keep_K = ((before_K < top_p) | (top_p >= 1) | first_K) & ~(values_K <= FLOOR)
  return (jnp.where(keep_K, values_K, FLOOR),
          jnp.where(keep_K, ids_K, -1).astype(jnp.int32))


def _logsumexp(x: Array) -> Array:
  top = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
  return top + jnp.log(jnp.sum(jnp.exp(x - top), axis=-1, keepdims=True))


def log_normalise(logits: Array) -> Array:
  """log-softmax over the last axis, at most 0."""
  return jnp.minimum(logits - _logsumexp(logits), 0.0)
