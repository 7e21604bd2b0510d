"""Surrogate losses: one number a token, to be minimised. Floor 1.

Everything is `[B, T]`; no reduction happens here (see `aggregate`) and no
weight for stale or mismatched data (see `corrections`). Symbols:

  l   log ratio of `logp` to the anchor at `level`; r = exp(l), l clamped to
      +-max_log_ratio
  A   advantage, detached; sg() stops the gradient

A token with A = 0 contributes exactly 0, value and gradient, however extreme
its ratio; only a NaN log-prob survives there, so that it is seen. Constants are
keyword-only and may be traced; a plain number must lie in its row's range.
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, TokenLoss
from rl_is.ops import ratios


def _live(adv: Array, mask: Array, x: Array) -> Array:
  """Where a token can contribute: 0 * inf must not become NaN elsewhere."""
  return mask & ((adv != 0) | jnp.isnan(x))


def _inputs(fn, logp, logp_anchor, adv, mask, level):
  """Checked inputs -> (l, A, mask), safe at every masked position."""
  checks.like(fn, dict(logp=logp), logp_anchor=logp_anchor, adv=adv)
  mask = checks.as_mask(fn, mask, jnp.shape(logp))
  adv = lax.stop_gradient(masked.fill(masked.wide(adv), mask))
  log_ratio = ratios.log_ratio(logp, logp_anchor, mask, level=level)
  return log_ratio, adv, mask


def _bounded(log_ratio, low, high, max_log_ratio):
  """(r limited to [low, high], where low binds, where high binds)."""
  l = masked.clamp(log_ratio, -max_log_ratio, max_log_ratio)
  return masked.limited(jnp.exp, low, high, l)


def _loss(loss, mask, log_ratio, **clips) -> TokenLoss:
  """A masked TokenLoss; everything in `aux` is detached."""
  aux = {name: lax.stop_gradient(mask & hit) for name, hit in clips.items()}
  return TokenLoss(masked.fill(loss, mask),
                   dict(aux, log_ratio=lax.stop_gradient(log_ratio)))


def pg(logp: Array, adv: Array, mask: Array) -> TokenLoss:
  """Plain policy gradient (REINFORCE), per token.

    L_t = -A_t logp_t

  **Source**: Williams, "Simple statistical gradient-following algorithms for
    connectionist reinforcement learning", 1992,
    https://doi.org/10.1007/BF00992696, eq. 4.
  **Departs**: no ratio, so nothing corrects stale data; chain `tis` for that.
    Where a peer writes -A exp(logp - sg(logp)) the gradient is the same and the
    value differs.

  Args:
    logp: [B, T] float, nats.
    adv: [B, T] float, in units of reward; detached.
    mask: [B, T] bool or 0/1.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; `aux` is empty.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: an empty mask gives zeros; logp = -inf with A != 0 gives inf.
  """
  checks.like("pg", dict(logp=logp), adv=adv)
  mask = checks.as_mask("pg", mask, jnp.shape(logp))
  adv = lax.stop_gradient(masked.fill(masked.wide(adv), mask))
  logp = masked.wide(logp)
  logp = masked.fill(logp, _live(adv, mask, logp))
  return TokenLoss(masked.fill(-adv * logp, mask), {})


@checks.ranged()
def ppo_clip(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
             eps_low: Array | float, eps_high: Array | float,
             level: str = "token",
             max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """PPO's clipped surrogate with separate bounds, per token.

    L_t = -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
        = -A_t min(r_t, 1 + eps_high)   for A_t > 0
          -A_t max(r_t, 1 - eps_low)    for A_t < 0

  **Source**: Schulman et al., "Proximal Policy Optimization Algorithms", 2017,
    https://arxiv.org/abs/1707.06347, eq. 7; separate bounds: Yu et al., "DAPO",
    2025, https://arxiv.org/abs/2503.14476, eq. 8. With level "sequence_mean"
    it is GSPO (https://arxiv.org/abs/2507.18071, eq. 5).
  **Departs**: the log ratio is clamped to +-max_log_ratio first, as in verl
    (NeMo-RL, TRL and AReaL have no clamp: pass inf). At a bound the gradient
    passes whole.

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats: the policy that the clip keeps close to.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    eps_low, eps_high: distances from 1, > 0. eps_low >= 1 never binds.
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `clip_low`, `clip_high` (bool,
    where the bound binds) and `log_ratio` (raw), detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: for A < 0 the loss grows with r up to e^max_log_ratio (see
    `dual_clip`); an empty mask gives zeros; bf16 log-probs alone move r by a
    per cent, more than GSPO's bounds.
  """
  log_ratio, adv, mask = _inputs("ppo_clip", logp, logp_anchor, adv, mask, level)
  l = masked.fill(log_ratio, _live(adv, mask, log_ratio))
  # The bound that the sign of A makes active; the other is out of reach.
  low = jnp.where(adv < 0, 1 - eps_low, 0)
  high = jnp.where(adv > 0, 1 + eps_high, jnp.inf)
  r, under, over = _bounded(l, low, high, max_log_ratio)
  return _loss(-adv * r, mask, log_ratio, clip_low=under, clip_high=over)


@checks.ranged()
def dual_clip(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
              eps_low: Array | float, eps_high: Array | float,
              clip_c: Array | float, level: str = "token",
              max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """PPO's clipped surrogate with a floor for negative advantages, per token.

    L_t = ppo_clip_t                          for A_t >= 0
          -max(-L^ppo_t, clip_c A_t) = -A_t clip(r_t, 1 - eps_low, clip_c), A_t < 0

  **Source**: Ye et al., "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning", 2020, https://arxiv.org/abs/1912.09729, section
    3.3 (number unverified).
  **Departs**: as `ppo_clip`. TRL's `delta` caps r for both signs instead.

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    eps_low, eps_high: distances from 1, > 0.
    clip_c: an absolute bound on r for A < 0, > 1 (3 in verl, 10 in DPPO).
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss as `ppo_clip`; aux has `clip_dual` too.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: beyond clip_c a negative token has no gradient at all.
  """
  log_ratio, adv, mask = _inputs("dual_clip", logp, logp_anchor, adv, mask, level)
  l = masked.fill(log_ratio, _live(adv, mask, log_ratio))
  low = jnp.where(adv < 0, 1 - eps_low, 0)
  high = jnp.where(adv > 0, 1 + eps_high, clip_c)
  r, under, over = _bounded(l, low, high, max_log_ratio)
  return _loss(-adv * r, mask, log_ratio, clip_low=under,
               clip_high=over & (adv > 0), clip_dual=over & (adv < 0))


@checks.ranged()
def two_sided(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
              eps_low: Array | float, eps_high: Array | float,
              delta: Array | float, level: str = "token",
              max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """PPO's clipped surrogate of a ratio capped for both signs, per token.

    L_t = -min(min(r_t, delta) A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
        = -A_t min(r_t, 1 + eps_high, delta)                    for A_t > 0
          -A_t clip(r_t, 1 - eps_low, max(1 + eps_high, delta)) for A_t < 0

  **Source**: Prime Intellect, "INTELLECT-2", 2025,
    https://arxiv.org/abs/2505.07291, section 3.4 (number unverified; delta 4).
  **Departs**: nothing; TRL's `delta`. With delta >= 1 + eps_high it is
    `dual_clip` with clip_c = delta; below that it also tightens A > 0.

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    eps_low, eps_high: distances from 1, > 0.
    delta: an absolute bound on r, > 0; above 1 + eps_high to be of use.
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss as `dual_clip`: `clip_dual` is the bound on A < 0.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: beyond delta a negative token has no gradient at all.
  """
  log_ratio, adv, mask = _inputs("two_sided", logp, logp_anchor, adv, mask, level)
  l = masked.fill(log_ratio, _live(adv, mask, log_ratio))
  low = jnp.where(adv < 0, 1 - eps_low, 0)
  high = jnp.where(adv > 0, jnp.minimum(1 + eps_high, delta),
                   jnp.maximum(1 + eps_high, delta))
  r, under, over = _bounded(l, low, high, max_log_ratio)
  return _loss(-adv * r, mask, log_ratio, clip_low=under,
               clip_high=over & (adv > 0), clip_dual=over & (adv < 0))


@checks.ranged()
def cispo(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
          cap: Array | float, floor: Array | float = 0.0, level: str = "token",
          max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Policy gradient weighted by a capped, detached ratio, per token.

    L_t = -sg(clip(r_t, floor, cap)) A_t logp_t

  **Source**: MiniMax, "MiniMax-M1", 2025, https://arxiv.org/abs/2506.13585,
    eq. 4 and 5 (numbers unverified; the cap itself is not published).
  **Departs**: `cap` is the bound on r itself, as in TRL; NeMo-RL, verl, SkyRL
    and slime write it as 1 + eps_high (their 5 is our 6). The floor is off by
    default: a positive one lets tokens that the policy has left pull for ever.

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    cap: > 0, absolute.
    floor: >= 0 and < cap, absolute.
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `clip_low`, `clip_high` (bool,
    for both signs of A: the weight is bounded either way) and `log_ratio`.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: every token keeps a gradient: nothing here stops drift, it only
    bounds a token's pull. logp = -inf with A != 0 gives inf.
  """
  log_ratio, adv, mask = _inputs("cispo", logp, logp_anchor, adv, mask, level)
  l = masked.fill(log_ratio, _live(adv, mask, log_ratio))
  weight, under, over = _bounded(l, floor, cap, max_log_ratio)
  logp = masked.wide(logp)
  logp = masked.fill(logp, _live(adv, mask, logp))
  return _loss(-lax.stop_gradient(weight) * adv * logp, mask, log_ratio,
               clip_low=under & (adv != 0), clip_high=over & (adv != 0))
