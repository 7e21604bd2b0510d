"""Estimators of KL(policy || reference) per token, from samples. Floor 1.

With d = ref - logp of the sampled token, tokens drawn from the policy:
k1 = -d is unbiased and noisy, k2 = d^2 / 2 is biased with low variance, k3 =
e^d - 1 - d is unbiased and never negative. All are differentiable in `logp`;
which of their *gradients* is the KL's is another question (k2's is, on-policy).
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array


def _difference(fn, logp, logp_ref, mask):
  checks.like(fn, dict(logp=logp), logp_ref=logp_ref)
  mask = checks.as_mask(fn, mask, jnp.shape(logp))
  ref = lax.stop_gradient(masked.fill(masked.wide(logp_ref), mask))
  return ref - masked.fill(masked.wide(logp), mask)


def k1(logp: Array, logp_ref: Array, mask: Array) -> Array:
  """The log ratio itself: unbiased, may be negative.

    k1_t = logp_t - ref_t

  **Source**: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.
  **Departs**: no clamp (NeMo-RL, AReaL and OpenRLHF clamp at 10). As a loss its
    gradient has expectation zero on-policy: use it for reporting.

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: linear, so finite for finite inputs.
  """
  return -_difference("k1", logp, logp_ref, mask)


def k2(logp: Array, logp_ref: Array, mask: Array) -> Array:
  """Half the squared log ratio: biased, its on-policy gradient is the KL's.

    k2_t = (logp_t - ref_t)^2 / 2

  **Source**: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.
  **Departs**: no clamp.

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: finite up to |d| of 1e19 in float32.
  """
  return 0.5 * jnp.square(_difference("k2", logp, logp_ref, mask))


def k3(logp: Array, logp_ref: Array, mask: Array, *,
       max_log_ratio: Array | float = 20.0) -> Array:
  """Unbiased and never negative.

    k3_t = e^d - 1 - d,  d = ref_t - logp_t

  **Source**: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html; used by GRPO,
    https://arxiv.org/abs/2402.03300, eq. 4.
  **Departs**: d is clamped to +-max_log_ratio *before* the exp: beyond it the
    value is that of the bound and the gradient zero (verl, NeMo-RL and SkyRL
    clamp the output at 10 too; TRL and Tunix do not clamp).

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    max_log_ratio: nats, > 0.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: off-policy it estimates neither KL(policy || ref) nor its gradient.
  """
  d = masked.clamp(_difference("k3", logp, logp_ref, mask),
                   -max_log_ratio, max_log_ratio)
  return jnp.expm1(d) - d
