"""Surrogates whose trust region is not a fixed band of the ratio. Floor 1.

Everything is `[B, T]`; symbols and rules as in `surrogates`: l is the log ratio
to the anchor at `level`, r = exp(l) with l clamped to +-max_log_ratio, A is
detached, sg() stops the gradient.

DPPO tests how far a token's *probability* moved (`dppo_tv`, `dppo_kl`); BAPO
chooses the band from the batch (`bapo_bounds`, `bapo`); clip-cov and kl-cov
pick tokens by their covariance. These three read the whole minibatch: split
rows give other numbers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, TokenLoss, pytree
from rl_is.ops import ratios, surrogates as base

FORMS = ("score", "ratio")
SIDES = ("advantage", "both")


def _dppo(fn, logp, logp_anchor, adv, mask, above, below, cap, form, level,
          max_log_ratio, penalty=None):
  """-A r (or its score form) where the probability has not moved too far.

  `above`, `below` -> True where it moved too far up, or down; both detached.
  """
  log_ratio, adv, mask = base._inputs(fn, logp, logp_anchor, adv, mask, level)
  keep, acts = ~(above | below), adv != 0
  l = masked.fill(log_ratio, base._live(adv, mask, log_ratio) & keep)
  r, _, over = base._bounded(l, 0, cap, max_log_ratio)
  if form == "score":
    score = masked.wide(logp)
    score = masked.fill(score, base._live(adv, mask, score) & keep)
    r = lax.stop_gradient(r) * score
  loss = masked.fill(-adv * r, keep)
  if penalty is not None:
    loss += penalty
  return base._loss(loss, mask, log_ratio, clip_low=below & acts,
                    clip_high=above & acts, clip_cap=over & acts & keep)


def _detached(fn, logp, logp_anchor, adv, mask, form):
  """(log p, log p_anchor, A, mask): checked, filled, for a test only."""
  checks.choice(f"{fn}: form", form, FORMS)
  checks.like(fn, dict(logp=logp), logp_anchor=logp_anchor, adv=adv)
  mask = checks.as_mask(fn, mask, jnp.shape(logp))
  return (*(lax.stop_gradient(masked.fill(masked.wide(x), mask))
            for x in (logp, logp_anchor, adv)), mask)


@checks.ranged()
def dppo_tv(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
            delta_low: Array | float, delta_high: Array | float,
            cap: Array | float = jnp.inf, kl_tau: Array | float = 0.0,
            form: str = "score", sides: str = "advantage", level: str = "token",
            max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Policy gradient of the tokens whose probability has not moved too far.

    L_t = -A_t sg(min(r_t, cap)) logp_t M_t   (form "score")
          -A_t min(r_t, cap) M_t              (form "ratio")
    M_t = 1 unless A_t > 0 and p_t - p_anchor,t > delta_high, or A_t <= 0 and
    p_anchor,t - p_t > delta_low; sides "both": unless either, whatever A_t

  The total variation of the binary "this token or another" is |p - p_anchor|.

  **Source**: "Rethinking the Trust Region in LLM Reinforcement Learning"
    (DPPO), 2026, https://arxiv.org/abs/2602.04879 (delta 0.15; equation numbers
    unverified).
  **Departs**: form "score" is verl's (cap 3), "ratio" SkyRL's and prime-rl's
    (no cap; where there is one the gradient stops at it); sides "both" is
    prime-rl's ipo, kl_tau l_t^2 its pull on every token. It has no clamp: pass
    inf.

  Args:
    logp, logp_anchor: [B, T] float, nats; the paper's anchor is the behaviour.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    delta_low, delta_high: probabilities in (0, 1]; 1 or more never bind.
    cap: an absolute bound on r, > 0.
    kl_tau: >= 0; the same as 2 kl_tau of `k2` to the anchor, per token.
    form: "score" or "ratio". sides: "advantage" or "both".
    level: of r (see `ratios`); the test is always of the token's probability.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `clip_low`, `clip_high` (bool:
    dropped for p too low, too high, where A != 0), `clip_cap`, `log_ratio`.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level or form.

  Limits: a static gap between sampler and trainer eats up delta. kl_tau acts
    where A = 0 too.
  """
  checks.choice("dppo_tv: sides", sides, SIDES)
  p, q, a, m = _detached("dppo_tv", logp, logp_anchor, adv, mask, form)
  moved = jnp.exp(p) - jnp.exp(q)
  above, below = m & (moved > delta_high), m & (moved < -delta_low)
  if sides == "advantage":
    above, below = above & (a > 0), below & ~(a > 0)
  l = ratios.log_ratio(logp, logp_anchor, mask)
  l = masked.clamp(masked.fill(l, jnp.asarray(kl_tau) != 0),
                   -max_log_ratio, max_log_ratio)
  return _dppo("dppo_tv", logp, logp_anchor, adv, mask, above, below, cap, form,
               level, max_log_ratio, penalty=kl_tau * jnp.square(l))


def _binary_kl(q, p):
  """KL of "this token or another": anchor q, current p, log-probs. [B, T]."""
  # float32 cannot tell 1 - 1e-8 from 1: no token is infinitely far for that.
  q_other, p_other = (jnp.maximum(-jnp.expm1(x), 1e-8) for x in (q, p))
  share = jnp.exp(q)
  return (jnp.where(share > 0, share * (q - p), 0)
          + q_other * jnp.log(q_other / p_other))


@checks.ranged()
def dppo_kl(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
            delta_low: Array | float, delta_high: Array | float,
            cap: Array | float = jnp.inf, form: str = "score",
            level: str = "token",
            max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """As `dppo_tv`, with the binary KL divergence as the distance.

    M_t = 1 unless KL_t > delta_high with p_t > p_anchor,t and A_t > 0, or
    KL_t > delta_low with p_t < p_anchor,t and A_t <= 0
    KL_t = q log(q/p) + (1 - q) log((1 - q)/(1 - p)),  q = p_anchor,t, p = p_t

  **Source**: as `dppo_tv` (delta 0.05).
  **Departs**: 1 - p is made by expm1 and kept at 1e-8 or more (verl adds 1e-8).

  Args:
    logp, logp_anchor: [B, T] float, nats; the paper's anchor is the behaviour.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    delta_low, delta_high: nats, > 0.
    cap: an absolute bound on r, > 0.
    form: "score" or "ratio", as in `dppo_tv`.
    level: of r (see `ratios`); the test is always of the token's probability.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss as `dppo_tv`.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level or form.

  Limits: near p = 1 a bf16 log-prob decides the test by rounding alone.
  """
  p, q, a, m = _detached("dppo_kl", logp, logp_anchor, adv, mask, form)
  kl = _binary_kl(q, p)
  above = m & (kl > delta_high) & (p > q) & (a > 0)
  below = m & (kl > delta_low) & (p < q) & ~(a > 0)
  return _dppo("dppo_kl", logp, logp_anchor, adv, mask, above, below, cap, form,
               level, max_log_ratio)


@pytree
class BapoBounds:
  """Bounds on the ratio itself, and the share that they leave to A > 0."""

  low: Array  # scalar
  high: Array  # scalar
  share: Array  # scalar in [0, 1]; of the batch that chose them


@checks.ranged()
def bapo_bounds(state: BapoBounds | None, logp: Array, logp_anchor: Array,
                adv: Array, mask: Array, *, low: Array | float = 0.6,
                low_max: Array | float = 0.8, low_step: Array | float = 0.05,
                high: Array | float = 1.2, high_max: Array | float = 2.0,
                high_step: Array | float = 0.05, target: Array | float = 0.5,
                level: str = "token",
                max_log_ratio: Array | float = 20.0) -> BapoBounds:
  """Clip bounds under which positive tokens have their share of the batch.

    raise low by low_step to low_max, then high by high_step to high_max, until
    share >= target, share = P / (P + N),
    P = sum_{A > 0} min(r, high) A,  N = sum_{A < 0} max(r, low) |A|

  **Source**: Xi et al., "BAPO", 2025, https://arxiv.org/abs/2510.18927,
    algorithm 1 (authors and number unverified; there target 0.4, low 0.6 to
    0.9 by 0.02, high 1.2 to 3 by 0.05, and high first); the order and the
    defaults are the authors' released code's, where target is P / N >= 1.
  **Departs**: nothing in value. As there, a clipped negative still counts with
    `low`, so raising low silences it and yet lowers the share.

  Args:
    state: where to start, e.g. the last batch's bounds; None: `low`, `high`.
    logp, logp_anchor: [B, T] float, nats; detached.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    low, low_max, low_step, high, high_max, high_step: on r, absolute, > 0.
    target: share of the positive tokens, in (0, 1).
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    BapoBounds: scalars, detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: without positive tokens both bounds end at their maxima; an empty one
    has share 0 and does so too. A step of 0, or too small for the float type,
    leaves its bound where it is; there are as many passes as steps.
  """
  l, adv, mask = base._inputs("bapo", logp, logp_anchor, adv, mask, level)
  r = ratios.ratio(lax.stop_gradient(l), max_log_ratio)
  r, size = masked.fill(r, mask & (adv != 0)), jnp.abs(adv)
  scalar = lambda x: jnp.asarray(x, r.dtype)

  def share(low, high):
    up = masked.total(jnp.minimum(r, high) * size, adv > 0)
    down = masked.total(jnp.maximum(r, low) * size, adv < 0)
    both = up + down
    return up / jnp.where(both == 0, 1, both)

  def next_(low, high):
    """The next bounds; the same ones where there is none."""
    raised = jnp.where(low < low_max, jnp.minimum(low + low_step, low_max), low)
    widened = jnp.where(high < high_max,
                        jnp.minimum(high + high_step, high_max), high)
    return scalar(raised), scalar(jnp.where(raised > low, high, widened))

  def short(bounds):
    low, high, got = bounds
    raised, widened = next_(low, high)
    return ((raised > low) | (widened > high)) & (got < target)

  def widen(bounds):
    low, high, _ = bounds
    low, high = next_(low, high)
    return low, high, share(low, high)

  low, high = (low, high) if state is None else (state.low, state.high)
  low, high = lax.stop_gradient((scalar(low), scalar(high)))
  return BapoBounds(*lax.stop_gradient(
      lax.while_loop(short, widen, (low, high, share(low, high)))))


@checks.ranged()
def bapo(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
         low: Array | float = 0.6, low_max: Array | float = 0.8,
         low_step: Array | float = 0.05, high: Array | float = 1.2,
         high_max: Array | float = 2.0, high_step: Array | float = 0.05,
         target: Array | float = 0.5, level: str = "token",
         max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """`ppo_clip` under the bounds that this batch asks for (`bapo_bounds`).

    L_t = -min(r_t A_t, clip(r_t, c_low, c_high) A_t)

  **Source**: as `bapo_bounds`.
  **Departs**: starts from (low, high) on each batch, as the source; to carry
    the bounds over, call `bapo_bounds` and then `ppo_clip`. The authors' code
    has a dual clip of 3 as well.

  Args:
    logp, logp_anchor, adv, mask: [B, T], as `ppo_clip`; a whole minibatch.
    low, low_max, low_step, high, high_max, high_step, target: as `bapo_bounds`.
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss as `ppo_clip`; aux has `bound_low`, `bound_high` too: the bounds,
    repeated over [B, T].

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: reads the whole minibatch: refuse it with more than one microbatch.
  """
  bounds = bapo_bounds(
      None, logp, logp_anchor, adv, mask, low=low, low_max=low_max,
      low_step=low_step, high=high, high_max=high_max, high_step=high_step,
      target=target, level=level, max_log_ratio=max_log_ratio)
  token = base.ppo_clip(
      logp, logp_anchor, adv, mask, eps_low=1 - bounds.low,
      eps_high=bounds.high - 1, level=level, max_log_ratio=max_log_ratio)
  repeated = {f"bound_{side}": jnp.broadcast_to(getattr(bounds, side),
                                                jnp.shape(logp))
              for side in ("low", "high")}
  return TokenLoss(token.loss, token.aux | repeated)


def _covariance(logp, adv, mask):
  """(A - mean A)(logp - mean logp) over the batch's tokens, detached."""
  logp = lax.stop_gradient(masked.fill(masked.wide(logp), mask))
  n = jnp.maximum(jnp.sum(mask), 1).astype(logp.dtype)
  mean = lambda x: masked.total(x, mask) / n
  return (adv - mean(adv)) * (logp - mean(logp))


def _first(score, count):
  """The `count` positions with the lowest score; ties by position. [B, T]."""
  order = jnp.argsort(score.reshape(-1))
  rank = jnp.zeros(order.shape, order.dtype).at[order].set(
      jnp.arange(order.size, dtype=order.dtype))
  return (rank < count).reshape(score.shape)


def _count(fraction, mask, dtype):
  """max(floor(fraction N), 1), and 0 for a fraction of 0."""
  n = jnp.floor(fraction * jnp.sum(mask).astype(dtype))
  return jnp.where(jnp.asarray(fraction) > 0, jnp.maximum(n, 1), 0)


@checks.ranged()
def clip_cov(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
             key: Array, eps_low: Array | float, eps_high: Array | float,
             cov_ratio: Array | float, cov_low: Array | float,
             cov_high: Array | float, level: str = "token",
             max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """`ppo_clip` that silences some tokens of high covariance, at random.

    L_t = 0 for max(floor(cov_ratio N), 1) tokens drawn from those with cov_low
    < cov_t < cov_high that the clip leaves alone; else ppo_clip_t
    cov_t = (A_t - mean A)(logp_t - mean logp), means over the N tokens

  **Source**: Cui et al., "The Entropy Mechanism of Reinforcement Learning for
    Reasoning Language Models", 2025, https://arxiv.org/abs/2505.22617, eq. 11
    and 12 (numbers unverified; ratio 2e-4, bounds 1 and 5).
  **Departs**: the draw takes a key; a cov_ratio of 0 silences nothing (verl:
    one token). verl has no clamp here: pass inf.

  Args:
    logp, logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    key: a PRNG key; used up.
    eps_low, eps_high: distances from 1, > 0.
    cov_ratio: share of the batch's tokens to silence, in [0, 1].
    cov_low, cov_high: reward times nats, exclusive.
    level: of r, see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss as `ppo_clip`; aux has `clip_cov` (bool, the silenced tokens) too.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: reads the whole minibatch: refuse it with more than one microbatch.
  """
  token = base.ppo_clip(logp, logp_anchor, adv, mask, eps_low=eps_low,
                        eps_high=eps_high, level=level,
                        max_log_ratio=max_log_ratio)
  _, adv, mask = base._inputs("clip_cov", logp, logp_anchor, adv, mask, level)
  cov = _covariance(logp, adv, mask)
  # So written, a NaN is no candidate: it is not silenced.
  candidate = (mask & (cov > cov_low) & (cov < cov_high)
               & ~(token.aux["clip_low"] | token.aux["clip_high"]))
  draw = masked.fill(jax.random.uniform(key, cov.shape), candidate, jnp.inf)
  hit = candidate & _first(draw, _count(cov_ratio, mask, cov.dtype))
  return TokenLoss(masked.fill(token.loss, ~hit),
                   dict(token.aux, clip_cov=hit & (adv != 0)))


@checks.ranged()
def kl_cov(logp: Array, logp_anchor: Array, adv: Array, mask: Array, *,
           cov_ratio: Array | float, kl_coef: Array | float,
           level: str = "token",
           max_log_ratio: Array | float = 20.0) -> TokenLoss:
  """Unclipped ratio with a pull to the anchor on the tokens that covary most.

    L_t = -A_t r_t + kl_coef |l_t| 1[t among the max(floor(cov_ratio N), 1)
    tokens with the largest cov_t],  cov_t as in `clip_cov`

  **Source**: Cui et al., 2025, https://arxiv.org/abs/2505.22617, eq. 13 and 14
    (numbers unverified; ratio 2e-4 to 2e-3, coefficient 1).
  **Departs**: verl has no clamp here: pass inf. Ties go to the earlier token.
    There is nothing random in it, hence no key.

  Args:
    logp, logp_anchor: [B, T] float, nats.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    cov_ratio: share of the batch's tokens that are pulled, in [0, 1].
    kl_coef: weight of the pull, >= 0.
    level: of r and l, see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider; aux `clip_cov` (bool, the pulled
    tokens) and `log_ratio` (raw), detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: reads the whole minibatch: refuse it with more than one microbatch.
    The pull acts where A = 0 too, and is 0 with no gradient at l = 0.
  """
  log_ratio, adv, mask = base._inputs(
      "kl_cov", logp, logp_anchor, adv, mask, level)
  cov = masked.fill(-_covariance(logp, adv, mask), mask, jnp.inf)
  hit = mask & _first(cov, _count(cov_ratio, mask, cov.dtype))
  r = ratios.ratio(
      masked.fill(log_ratio, base._live(adv, mask, log_ratio)), max_log_ratio)
  l = masked.clamp(masked.fill(log_ratio, hit), -max_log_ratio, max_log_ratio)
  pull = l * lax.stop_gradient(jnp.sign(l))  # jnp.abs has slope 1 at 0
  return base._loss(kl_coef * pull - adv * r, mask, log_ratio, clip_cov=hit)
