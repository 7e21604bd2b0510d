"""The definition of `token_logprob`: all logits at once. Floor 1."""

import jax.numpy as jnp

from rl_is.core.types import Array
from rl_is.kernels import logits as logits_lib


def token_logprob(hidden_BTD, unembed_DV, targets_BT, *, ids, support,
                  temperature, vocab_size, logit_softcap, return_entropy,
                  head_precision):
  """See `logprob.token_logprob`; returns (logp, entropy, logp_ids)."""
  logits_BTV = logits_lib.transform(
      logits_lib.head_logits(hidden_BTD, unembed_DV, head_precision),
      temperature=temperature, vocab_size=vocab_size,
      logit_softcap=logit_softcap)
  if support == "ids":
    # The softmax is over the kept ids and the target, in the last slot.
    logp = logits_lib.log_normalise(_at_ids(
        logits_BTV, logits_lib.with_target(ids, targets_BT)))
    logp_target = logits_lib.of_target(logp, ids, targets_BT)
    logp_ids = logp[..., :-1]
  else:
    logp = logits_lib.log_normalise(logits_BTV)
    logp_target = jnp.take_along_axis(
        logp, targets_BT[..., None], axis=-1)[..., 0]
    logp_ids = None if ids is None else _at_ids(logp, ids)
  entropy = logits_lib.entropy(logp) if return_entropy else None
  return logp_target, entropy, logp_ids


def _at_ids(x_BTV: Array, ids_BTK: Array) -> Array:
  at = jnp.take_along_axis(x_BTV, jnp.maximum(ids_BTK, 0), axis=-1)
  return jnp.where(ids_BTK >= 0, at, logits_lib.FLOOR)
