"""Surrogates with a soft gate, a detached weight or a penalty. Floor 1.

Everything is `[B, T]`; symbols and rules as in `surrogates`: l is the log ratio
to the anchor at `level`, r = exp(l) with l clamped to +-max_log_ratio, A is
detached, sg() stops the gradient. Here nothing is cut off by a hard bound on r
alone; what keeps the policy close is a gate (sapo, vespo), a mean of bounded
terms (gmpo), a weight (topr, aspo) or a squared log ratio (dro, opmd). The last
two penalise a token whatever its advantage, so also where A = 0.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, TokenLoss
from rl_is.ops import ratios, surrogates as base


def _score(logp, adv, mask):
  """A logp, safe where A = 0."""
  logp = masked.wide(logp)
  return adv * masked.fill(logp, base._live(adv, mask, logp))


@checks.ranged()
def sapo(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
         tau_pos: Array | float, tau_neg: Array | float, level: str = "token",
         max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Soft gate in place of the clip, per token.

    L_t = -A_t (4 / tau) sigmoid(tau (r_t - 1)),  tau = tau_pos for A_t > 0,
    else tau_neg

  The gradient's weight is 4 h (1 - h) r, h the sigmoid: 1 at r = 1.

  **Source**: Qwen, "Soft Adaptive Policy Optimization", 2025,
    https://arxiv.org/abs/2511.20347 (tau 1.0 and 1.05; numbers unverified).
  **Departs**: the log ratio is clamped first, as in verl and SkyRL (TRL and
    AReaL have no clamp: pass inf).

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    tau_pos, tau_neg: temperatures, > 0; larger is a narrower gate.
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `log_ratio` (raw), detached.
    Nothing is clipped, so there are no clip flags.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: saturated on either side: a token far off has next to no gradient. Of
    max_log_ratio = inf, a log ratio beyond 88 has a NaN gradient in float32.
  """
  log_ratio, adv, mask = base._inputs(
      "sapo", logp, logp_anchor, adv, mask, level)
  l = masked.fill(log_ratio, base._live(adv, mask, log_ratio))
  tau = jnp.where(adv > 0, tau_pos, tau_neg)
  r = ratios.ratio(l, max_log_ratio)
  gate = 4 / tau * jax.nn.sigmoid(tau * (r - 1))
  return base._loss(-adv * gate, mask, log_ratio)


@checks.ranged()
def gmpo(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
         log_low: Array | float, log_high: Array | float, level: str = "token",
         max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Geometric mean over the row of ratios that are clipped first.

    L_t = -A_t R,  R = exp((1/|y|) sum_t d_t)
    d_t = min(l_t, log_high) for A_t > 0, max(l_t, -log_low) for A_t < 0, 0 for
    A_t = 0

  **Source**: Zhao et al., "Geometric-Mean Policy Optimization", 2025,
    https://arxiv.org/abs/2507.20673, eq. 4 (number unverified; range +-0.4).
  **Departs**: verl's `geo_mean` with its -mean_t(A_t) R written as a token's
    loss: any aggregation that weighs a row's tokens alike returns it. The row's
    mean is clamped to +-max_log_ratio (verl: pass inf).

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    log_low, log_high: nats, > 0: distances from 0, not from a ratio of 1.
    level: what is clipped before the mean; "token" is the paper's.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `clip_low`, `clip_high` (bool,
    where d_t is at its bound) and `log_ratio` (raw, per token), detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: a clipped token still moves with the row's other tokens in value, not
    in gradient. Verl's eps names (clip_ratio_low) are log_low here.
  """
  log_ratio, adv, mask = base._inputs(
      "gmpo", logp, logp_anchor, adv, mask, level)
  l = masked.fill(log_ratio, base._live(adv, mask, log_ratio))
  low = jnp.where(adv < 0, -log_low, -jnp.inf)
  high = jnp.where(adv > 0, log_high, jnp.inf)
  bounded = masked.clamp(l, low, high)
  row = ratios.ratio(masked.row_mean(bounded, mask), max_log_ratio)
  return base._loss(-adv * row, mask, log_ratio, clip_low=l < low,
                    clip_high=l > high)


@checks.ranged()
def topr(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
         cap: Array | float = 1.0, level: str = "sequence_sum",
         max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Policy gradient that tapers what is bad and already unlikely, per token.

    L_t = -A_t logp_t                  for A_t >= 0
          -sg(min(S, cap)) A_t logp_t  for A_t < 0,  S = exp(l)

  **Source**: Le Roux et al., "Tapered Off-Policy REINFORCE", 2025,
    https://arxiv.org/abs/2503.14286, eq. 7 (number unverified).
  **Departs**: a sign of A stands for the paper's sign of R (use a baseline with
    care: it moves samples from one side to the other). ROLL tapers at "token".

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats: what the samples were drawn from.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    cap: > 0, absolute; 1 is the paper's.
    level: see `ratios`; "sequence_sum" is the paper's.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `clip_high` (bool, where the
    cap binds, A < 0) and `log_ratio` (raw, at the level), detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: positives pull at full weight for ever. logp = -inf with A != 0 gives
    inf.
  """
  log_ratio, adv, mask = base._inputs(
      "topr", logp, logp_anchor, adv, mask, level)
  # A positive one takes no ratio, but a NaN there is still to be seen.
  taper = (adv < 0) | jnp.isnan(log_ratio)
  l = masked.fill(lax.stop_gradient(log_ratio), mask & taper)
  weight, _, over = base._bounded(l, 0, cap, max_log_ratio)
  weight = jnp.where(taper, weight, 1)
  return base._loss(-weight * _score(logp, adv, mask), mask, log_ratio,
                    clip_high=over & taper)


@checks.ranged()
def vespo(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
          k_pos: Array | float, lambda_pos: Array | float,
          k_neg: Array | float, lambda_neg: Array | float,
          level: str = "sequence_sum",
          max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Policy gradient under a gamma-shaped gate of the sequence's ratio.

    L_t = -sg(phi(W)) A_t logp_t,  phi(W) = W^k exp(lambda (1 - W)),  W = exp(l)

  k, lambda are the `pos` ones for A_t >= 0. phi(1) = 1; the peak is at
  W = k / lambda.

  **Source**: "VESPO", 2026, https://arxiv.org/abs/2602.10693 (numbers
    unverified; (2, 3) and (3, 2) from TRL and the authors' configuration).
  **Departs**: l is clamped to +-max_log_ratio at its level; TRL clamps each
    token before the sum and W at 1e-8, and makes a NaN 0. TRL's sampler weight
    w goes into W: pass logp_anchor - log w as the anchor (detached, so nothing
    else changes).

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    k_pos, lambda_pos: > 0, for A >= 0.
    k_neg, lambda_neg: > 0, for A < 0.
    level: see `ratios`; "sequence_sum" is the paper's.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `log_ratio` (raw, at the
    level), detached. Nothing is clipped, so there are no clip flags.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: phi < 2e-7 from W = 6 on for A > 0: long rows that drift are silent.
  """
  log_ratio, adv, mask = base._inputs(
      "vespo", logp, logp_anchor, adv, mask, level)
  l = lax.stop_gradient(
      masked.fill(log_ratio, base._live(adv, mask, log_ratio)))
  l = masked.clamp(l, -max_log_ratio, max_log_ratio)
  k = jnp.where(adv < 0, k_neg, k_pos)
  scale = jnp.where(adv < 0, lambda_neg, lambda_pos)
  gate = jnp.exp(k * l + scale * (1 - jnp.exp(l)))
  return base._loss(-gate * _score(logp, adv, mask), mask, log_ratio)


@checks.ranged()
def aspo(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
         eps_low: Array | float, eps_high: Array | float,
         clip_c: Array | float = 3.0, cap: Array | float = 3.0,
         level: str = "token",
         max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Dual clip whose positive tokens weigh by the reciprocal ratio.

    L_t = -A_t min(1/r_t, cap), gradient weight min(1/r_t, cap) on A_t > 0;
          past r_t > 1 + eps_high the weight is 1/(1 + eps_high), no gradient
          dual_clip_t for A_t <= 0

  **Source**: Wang et al., "ASPO", 2025, https://arxiv.org/abs/2510.06062
    (authors and numbers unverified).
  **Departs**: one range of eps for all tokens; Archer 2.0 takes a wider one for
    tokens of low (as coded) entropy.

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    eps_low, eps_high: distances from 1, > 0.
    clip_c: an absolute bound on r for A < 0, > 1; no gradient beyond it.
    cap: an absolute bound on 1/r for A > 0, > 0; the gradient stays ("soft").
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss as `dual_clip`, and aux `clip_cap` (bool, where `cap` binds).

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: the value falls as r grows for A > 0; only the gradient has a meaning.
  """
  log_ratio, adv, mask = base._inputs(
      "aspo", logp, logp_anchor, adv, mask, level)
  l = masked.fill(log_ratio, base._live(adv, mask, log_ratio))
  flip = adv > 0
  low = jnp.where(adv < 0, 1 - eps_low, 0)
  high = jnp.where(flip, 1 + eps_high, clip_c)
  r, under, over = base._bounded(l, low, high, max_log_ratio)
  # 1/r from the log: no division can overflow; r/sg(r) as 1 + l - sg(l).
  # r is bounded above already, so its own gradient is not in the way.
  inverse = ratios.ratio(lax.stop_gradient(-l), max_log_ratio)
  capped = inverse > cap
  weight = jnp.where(over, 1 / (1 + eps_high), jnp.where(capped, cap, inverse))
  inside = masked.fill(l, flip & ~over)
  flipped = weight * (1 + inside - lax.stop_gradient(inside))
  return base._loss(-adv * jnp.where(flip, flipped, r), mask, log_ratio,
                    clip_low=under, clip_high=over & flip,
                    clip_dual=over & (adv < 0), clip_cap=capped & flip & ~over)


@checks.ranged()
def dro(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
        beta: Array | float, level: str = "token",
        max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Policy gradient without a ratio, and a quadratic pull to the anchor.

    L_t = -(A_t logp_t - (beta / 2) l_t^2)

  **Source**: Richemond et al., "Offline Regularised Reinforcement Learning for
    LLM Alignment" (DRO), 2024, https://arxiv.org/abs/2405.19107, section 3
    (number unverified).
  **Departs**: verl's form: A for the paper's R - V. Beyond +-max_log_ratio the
    penalty is constant (verl has no clamp: pass inf).

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    beta: units of reward per nat, >= 0.
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `log_ratio` (raw), detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: the penalty acts where A = 0 too. logp = -inf with A != 0 gives inf.
  """
  log_ratio, adv, mask = base._inputs(
      "dro", logp, logp_anchor, adv, mask, level)
  l = masked.clamp(log_ratio, -max_log_ratio, max_log_ratio)
  return base._loss(0.5 * beta * jnp.square(l) - _score(logp, adv, mask), mask,
                    log_ratio)


@checks.ranged()
def opmd(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
         tau: Array | float, level: str = "sequence_sum",
         max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Online policy mirror descent as in Kimi k1.5: no ratio, squared residual.

    sum_t L_t = -A sum_t logp_t + (tau / 2) (sum_t log(p_t / p_anchor,t))^2

  The square is shared evenly over the row's tokens, so L_t = -A_t logp_t +
  (tau / 2) l^2 / |y|: aggregate by a *sum* over tokens.

  **Source**: Kimi Team, "Kimi k1.5", 2025, https://arxiv.org/abs/2501.12599,
    eq. 3 (number unverified); A = R - mean R stands for R - tau log Z.
  **Departs**: l is clamped to +-max_log_ratio at its level: past it the penalty
    is constant. Pass inf for the paper.

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    tau: units of reward per nat, >= 0.
    level: see `ratios`; "sequence_sum" is the paper's.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `log_ratio` (raw, at the
    level), detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: as `dro`; a long row's sum passes 20 nats easily: mind the clamp.
  """
  log_ratio, adv, mask = base._inputs(
      "opmd", logp, logp_anchor, adv, mask, level)
  l = masked.clamp(log_ratio, -max_log_ratio, max_log_ratio)
  length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1).astype(l.dtype)
  return base._loss(
      0.5 * tau * jnp.square(l) / length - _score(logp, adv, mask), mask,
      log_ratio)
