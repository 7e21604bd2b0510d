"""Log-probs of given tokens from hidden states: checks and dispatch. Floor 1."""

from typing import NamedTuple

import jax.numpy as jnp

from rl_is.core import checks
from rl_is.core.types import Array
from rl_is.kernels import logprob_reference

IMPLEMENTATIONS = {"reference": logprob_reference.token_logprob}


class TokenLogprob(NamedTuple):
  logp: Array  # [B, T] float32 or wider, nats, <= 0
  entropy: Array | None  # [B, T] nats
  logp_ids: Array | None  # [B, T, K] nats; -1e30 where ids is -1


def token_logprob(
    hidden: Array, unembed: Array, targets: Array, *,
    ids: Array | None = None, support: str = "all",
    temperature: Array | float, vocab_size: int,
    logit_softcap: float | None = None, return_entropy: bool = False,
    head_precision: str = "highest", impl: str = "reference") -> TokenLogprob:
  """Log-prob of each target under softmax of the transformed logits.

    z = transform(hidden @ unembed); logp = z_target - logsumexp_{v in S} z_v
    S = the vocabulary, or `ids` and the target when support is "ids"

  **Source**: definition; the transform is `kernels.logits`.
  **Departs**: hidden[:, t] scores targets[:, t]: the caller shifts.

  Args:
    hidden: [B, T, D] float.
    unembed: [D, V] float, V >= vocab_size.
    targets: [B, T] int in [0, vocab_size).
    ids: [B, T, K] int, distinct, -1 marks an unused slot: the kept set of the
      sampler, or the ids whose log-probs are wanted.
    support: "all" or "ids" (needs `ids`): what the softmax is over.
    temperature: > 0, may be traced.
    vocab_size: real entries; the rest of V is padding with probability 0.
    logit_softcap: c -> c tanh(z / c), before the temperature.
    return_entropy: also the exact entropy of that softmax.
    head_precision: see `logits.head_logits`.
    impl: a key of `IMPLEMENTATIONS`.

  Returns:
    TokenLogprob, differentiable in hidden and unembed.

  Raises:
    ValueError: on another shape, an unknown support or impl.

  Limits: mass that the learner puts outside `ids` is neither seen nor trained.
  """
  if jnp.ndim(hidden) != 3 or jnp.ndim(unembed) != 2:
    raise ValueError(
        "token_logprob: hidden: expected [B, T, D] with unembed [D, V], got "
        f"{jnp.shape(hidden)} and {jnp.shape(unembed)}")
  if hidden.shape[-1] != unembed.shape[0]:
    raise ValueError(
        f"token_logprob: unembed: expected [D = {hidden.shape[-1]}, V], got "
        f"{unembed.shape} (are these logits or hidden states?)")
  if targets.shape != hidden.shape[:2]:
    raise ValueError(f"token_logprob: targets: expected {hidden.shape[:2]}, got "
                     f"{targets.shape}")
  if not jnp.issubdtype(targets.dtype, jnp.integer):
    raise ValueError("token_logprob: targets: expected an integer dtype, got "
                     f"{targets.dtype}")
  checks.choice("token_logprob: support", support, ("all", "ids"))
  checks.choice("token_logprob: impl", impl, IMPLEMENTATIONS)
  if support == "ids" and ids is None:
    raise ValueError("token_logprob: ids: support='ids' needs them, got None")
  if ids is not None and (ids.ndim != 3 or ids.shape[:2] != targets.shape):
    raise ValueError(f"token_logprob: ids: expected [*{targets.shape}, K], got "
                     f"{ids.shape}")
  return TokenLogprob(*IMPLEMENTATIONS[impl](
      hidden, unembed, targets, ids=ids, support=support,
      temperature=temperature, vocab_size=vocab_size,
      logit_softcap=logit_softcap, return_entropy=return_entropy,
      head_precision=head_precision))
