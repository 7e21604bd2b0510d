"""Log ratios of two policies, at each level. Floor 1.

Everything is `[B, T]` float32 (or wider), nats; a row is one sequence. What a
ratio is *over* is its level:

  token                 l_t = logp_t - anchor_t
  sequence_mean         mean of l_t over the row's mask, on every token (GSPO)
  sequence_mean_token   the same value, but its gradient is the token's own
                        (GSPO-token)

The anchor is always detached: the gradient flows through `logp` alone.
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array


def _token(diff: Array, mask: Array) -> Array:
  return diff


def _sequence_mean(diff: Array, mask: Array) -> Array:
  return masked.fill(
      jnp.broadcast_to(masked.row_mean(diff, mask), diff.shape), mask)


def _sequence_mean_token(diff: Array, mask: Array) -> Array:
  mean = lax.stop_gradient(_sequence_mean(diff, mask))
  return diff - lax.stop_gradient(diff) + mean


LEVELS = {
    "token": _token,
    "sequence_mean": _sequence_mean,
    "sequence_mean_token": _sequence_mean_token,
}


def log_ratio(logp: Array, logp_anchor: Array, mask: Array, *,
              level: str = "token") -> Array:
  """Log ratio of `logp` to the anchor at a level, per token.

    token: l_t = logp_t - sg(anchor_t)
    sequence_mean: (1/|y|) sum_t l_t, repeated over the row
    sequence_mean_token: l_t - sg(l_t) + sg((1/|y|) sum_t l_t)

  **Source**: Zheng et al., "Group Sequence Policy Optimization", 2025,
    https://arxiv.org/abs/2507.18071, eq. 7 (sequence) and 14 (token variant).
  **Departs**: no clamp here; verl and SkyRL clamp the GSPO log ratio at 10.

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    level: a key of `LEVELS`.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask. Differentiable in `logp`.

  Raises:
    ValueError: on another shape, an integer log-prob, an unknown level.

  Limits: a row without tokens gives 0. A non-finite unmasked input stays
    non-finite, here and in the row's mean. bf16 inputs are subtracted in
    float32: they have already lost about 1e-2 nats each.
  """
  checks.like("log_ratio", dict(logp=logp), logp_anchor=logp_anchor)
  mask = checks.as_mask("log_ratio", mask, jnp.shape(logp))
  checks.choice("log_ratio: level", level, LEVELS)
  logp = masked.fill(masked.wide(logp), mask)
  anchor = masked.fill(masked.wide(logp_anchor), mask)
  return LEVELS[level](logp - lax.stop_gradient(anchor), mask)


def ratio(log_ratio_: Array, max_log_ratio: Array | float) -> Array:
  """exp of the log ratio clamped to +-max_log_ratio.

  Beyond the clamp the value stays and the gradient is zero.
  """
  return jnp.exp(masked.clamp(log_ratio_, -max_log_ratio, max_log_ratio))
