"""Estimators of KL(policy || reference) per token, from samples. Floor 1.

With d = ref - logp of the sampled token, tokens drawn from the policy:
k1 = -d is unbiased and noisy, k2 = d^2 / 2 is biased with low variance, k3 =
e^d - 1 - d is unbiased and never negative. All are differentiable in `logp`;
which of their *gradients* is the KL's is another question (k2's is, on-policy).

d is clamped to +-max_log_ratio before anything else, and an estimate to
+-max_kl after it (inf: off); beyond either the gradient is zero, at a bound it
passes whole.
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array
from rl_is.ops import ratios


def _difference(fn, logp, logp_ref, mask, max_log_ratio=jnp.inf):
  checks.like(fn, dict(logp=logp), logp_ref=logp_ref)
  mask = checks.as_mask(fn, mask, jnp.shape(logp))
  ref = lax.stop_gradient(masked.fill(masked.wide(logp_ref), mask))
  d = ref - masked.fill(masked.wide(logp), mask)
  return masked.clamp(d, -max_log_ratio, max_log_ratio)


def _limited(kl, max_kl, *xs):
  """kl(*xs) limited to +-max_kl."""
  return masked.limited(kl, -max_kl, max_kl, *xs)[0]


def _k3(d):
  return jnp.expm1(d) - d


@checks.ranged()
def k1(logp: Array, logp_ref: Array, mask: Array, *,
       max_log_ratio: Array | float = jnp.inf,
       max_kl: Array | float = jnp.inf) -> Array:
  """The log ratio itself: unbiased, may be negative.

    k1_t = logp_t - ref_t

  **Source**: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.
  **Departs**: no clamp by default (NeMo-RL, AReaL and OpenRLHF: max_kl 10). Its
    gradient has expectation zero on-policy: for reporting, or `with_score`.

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    max_log_ratio, max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: linear, so finite for finite inputs.
  """
  d = _difference("k1", logp, logp_ref, mask, max_log_ratio)
  return _limited(jnp.negative, max_kl, d)


@checks.ranged()
def k2(logp: Array, logp_ref: Array, mask: Array, *,
       max_log_ratio: Array | float = jnp.inf,
       max_kl: Array | float = jnp.inf) -> Array:
  """Half the squared log ratio: biased, its on-policy gradient is the KL's.

    k2_t = (logp_t - ref_t)^2 / 2

  **Source**: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.
  **Departs**: no clamp by default (NeMo-RL, AReaL and OpenRLHF: max_kl 10).

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    max_log_ratio, max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: finite up to |d| of 1e19 in float32.
  """
  d = _difference("k2", logp, logp_ref, mask, max_log_ratio)
  return _limited(lambda d: 0.5 * jnp.square(d), max_kl, d)


@checks.ranged()
def k3(logp: Array, logp_ref: Array, mask: Array, *,
       max_log_ratio: Array | float = 20.0,
       max_kl: Array | float = jnp.inf) -> Array:
  """Unbiased and never negative.

    k3_t = e^d - 1 - d,  d = ref_t - logp_t

  **Source**: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html; used by GRPO,
    https://arxiv.org/abs/2402.03300, eq. 4.
  **Departs**: d is clamped to +-max_log_ratio *before* the exp: beyond it the
    value is that of the bound and the gradient zero (verl, NeMo-RL and SkyRL
    have max_kl 10 too; AReaL, OpenRLHF, ROLL that alone; TRL and Tunix none).

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    max_log_ratio, max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: off-policy it estimates neither KL(policy || ref) nor its gradient.
  """
  d = _difference("k3", logp, logp_ref, mask, max_log_ratio)
  return _limited(_k3, max_kl, d)


@checks.ranged()
def abs_kl(logp: Array, logp_ref: Array, mask: Array, *,
           max_log_ratio: Array | float = jnp.inf,
           max_kl: Array | float = jnp.inf) -> Array:
  """The absolute log ratio: no KL estimate, but a distance with bounded pull.

    |logp_t - ref_t|

  **Source**: verl's `kl_penalty=abs`, 2024, https://github.com/volcengine/verl.
  **Departs**: nothing.

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    max_log_ratio, max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; the gradient is 0 at 0.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: biased upwards; at least |KL| in expectation on-policy.
  """
  d = _difference("abs_kl", logp, logp_ref, mask, max_log_ratio)
  return _limited(lambda d: d * lax.stop_gradient(jnp.sign(d)), max_kl, d)


def _straight_through(fn, value, logp, logp_ref, mask):
  """`value`, with the gradient of an unclamped k2: logp - ref."""
  slope = lax.stop_gradient(-_difference(fn, logp, logp_ref, mask))
  mask = checks.as_mask(fn, mask, jnp.shape(logp))
  logp = masked.fill(masked.wide(logp), mask)
  return lax.stop_gradient(value) + slope * (logp - lax.stop_gradient(logp))


@checks.ranged()
def k1_straight(logp: Array, logp_ref: Array, mask: Array, *,
                max_log_ratio: Array | float = jnp.inf,
                max_kl: Array | float = jnp.inf) -> Array:
  """Straight-through: the value of k1 with the gradient of k2.

    sg(k1_t) + k2_t - sg(k2_t)

  **Source**: verl's `k1+`, 2025, https://github.com/volcengine/verl.
  **Departs**: nothing; clamps act on the value alone.

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    max_log_ratio, max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: unbiased in value and, on-policy, in gradient.
  """
  value = k1(logp, logp_ref, mask, max_log_ratio=max_log_ratio, max_kl=max_kl)
  return _straight_through("k1_straight", value, logp, logp_ref, mask)


@checks.ranged()
def k3_straight(logp: Array, logp_ref: Array, mask: Array, *,
                max_log_ratio: Array | float = 20.0,
                max_kl: Array | float = jnp.inf) -> Array:
  """Straight-through: the value of k3 with the gradient of k2.

    sg(k3_t) + k2_t - sg(k2_t)

  **Source**: verl's `k3+`, 2025, https://github.com/volcengine/verl.
  **Departs**: nothing; clamps act on the value alone.

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    max_log_ratio, max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: unbiased in value and, on-policy, in gradient.
  """
  value = k3(logp, logp_ref, mask, max_log_ratio=max_log_ratio, max_kl=max_kl)
  return _straight_through("k3_straight", value, logp, logp_ref, mask)


@checks.ranged(max_log_ratio=checks.POSITIVE, max_kl=checks.POSITIVE)
def k3_unbiased(logp: Array, logp_ref: Array, mask: Array, *,
                logp_anchor: Array, level: str = "token",
                max_log_ratio: Array | float = 20.0,
                max_kl: Array | float = jnp.inf) -> Array:
  """k3 times the ratio to the policy that drew the tokens, with its gradient.

    r_t (e^d - 1 - d),  d = ref_t - logp_t,  r = exp(l), l at the level

  **Source**: DeepSeek-AI, "DeepSeek-V3.2", 2025,
    https://arxiv.org/abs/2512.02556 (eq. number unverified).
  **Departs**: both log ratios are clamped to +-max_log_ratio; max_kl bounds the
    product (slime: 10; TRL: none).

  Args:
    logp: [B, T] float, nats.
    logp_ref: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    logp_anchor: [B, T] float, nats; detached: the sampler's or proximal.
    level: see `ratios`.
    max_log_ratio, max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: unbiased off-policy in value and gradient while no clamp binds; its
    variance is the ratio's.
  """
  d = _difference("k3_unbiased", logp, logp_ref, mask, max_log_ratio)
  l = _anchored("k3_unbiased", logp, logp_anchor, mask, level)
  l = masked.clamp(l, -max_log_ratio, max_log_ratio)
  return _limited(lambda d, l: jnp.exp(l) * _k3(d), max_kl, d, l)


def _anchored(fn, logp, logp_anchor, mask, level):
  checks.like(fn, dict(logp=logp), logp_anchor=logp_anchor)
  return ratios.log_ratio(logp, logp_anchor, mask, level=level)


@checks.ranged(max_log_ratio=checks.POSITIVE, max_kl=checks.POSITIVE)
def importance_weighted(kl: Array, logp: Array, logp_anchor: Array,
                        mask: Array, *, level: str = "token",
                        max_log_ratio: Array | float = 20.0,
                        max_kl: Array | float = jnp.inf) -> Array:
  """Any per-token estimate times the ratio to the anchor, with its gradient.

    r_t kl_t

  **Source**: NeMo-RL's `use_on_policy_kl_approximation`, 2025,
    https://github.com/NVIDIA-NeMo/RL (anchor: the sampler).
  **Departs**: the log ratio is clamped; NeMo-RL turns an overflow into 0. As
    there, max_kl bounds the product: give an estimate without one.

  Args:
    kl: [B, T] float, nats; differentiable.
    logp, logp_anchor: [B, T] float, nats; the anchor is detached.
    mask: [B, T] bool or 0/1.
    level: see `ratios`.
    max_log_ratio, max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: d(r kl) = r (kl dlogp + dkl): `with_score` is the case r = 1.
  """
  checks.like("importance_weighted", dict(kl=kl), logp=logp)
  mask = checks.as_mask("importance_weighted", mask, jnp.shape(kl))
  l = _anchored("importance_weighted", logp, logp_anchor, mask, level)
  l = masked.clamp(l, -max_log_ratio, max_log_ratio)
  kl = masked.fill(masked.wide(kl), mask)
  return _limited(lambda kl, l: jnp.exp(l) * kl, max_kl, kl, l)


@checks.ranged(max_kl=checks.POSITIVE)
def with_score(kl: Array, logp: Array, mask: Array, *,
               max_kl: Array | float = jnp.inf) -> Array:
  """The same value; the gradient gets the score function's part, kl dlogp.

    kl_t exp(logp_t - sg(logp_t))

  **Source**: NeMo-RL's KL term, 2025, https://github.com/NVIDIA-NeMo/RL.
  **Departs**: nothing; written without the exp. As there, max_kl bounds the
    product and beyond it no part is left: give an estimate without one.

  Args:
    kl: [B, T] float, nats; differentiable.
    logp: [B, T] float, nats.
    mask: [B, T] bool or 0/1.
    max_kl: nats, > 0; inf is off.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: with it the on-policy gradient of k1 and of k3 is that of the token's
    own KL, given its prefix; the effect on later tokens is left out.
  """
  checks.like("with_score", dict(kl=kl), logp=logp)
  mask = checks.as_mask("with_score", mask, jnp.shape(kl))
  kl = masked.fill(masked.wide(kl), mask)
  logp = masked.fill(masked.wide(logp), mask)
  scored = lambda kl, logp: kl + lax.stop_gradient(kl) * (
      logp - lax.stop_gradient(logp))
  return _limited(scored, max_kl, kl, logp)


def entropy_sampled(logp: Array, mask: Array) -> Array:
  """Entropy from the sampled token alone, where the exact one is not at hand.

    -logp_t

  **Source**: Shannon, "A Mathematical Theory of Communication", 1948,
    https://doi.org/10.1002/j.1538-7305.1948.tb01338.x; E[-log p] by one sample.
  **Departs**: nothing.

  Args:
    logp: [B, T] float, nats.
    mask: [B, T] bool or 0/1.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask; differentiable in `logp`.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: unbiased on-policy in value only. Its gradient has expectation zero:
    as a bonus use the exact entropy, or this one inside `with_score`.
  """
  checks.like("entropy_sampled", dict(logp=logp))
  mask = checks.as_mask("entropy_sampled", mask, jnp.shape(logp))
  return -masked.fill(masked.wide(logp), mask)
