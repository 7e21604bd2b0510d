"""Corrections: detached weights and masks for data of another policy. Floor 1.

A correction multiplies a surrogate's token loss by a weight and may drop
tokens. Its ratio is w = num / behaviour, where the numerator is `proximal`
(then surrogate and weight telescope: current/proximal x proximal/behaviour) or
`current`. Tests and caps are applied to the *log* ratio, before any exp, so
that a ratio of e^1000 is dropped or capped and never meets a 0 * inf. Weights
are detached inside the function that makes them. Everything is `[B, T]`.
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, Weights
from rl_is.ops import ratios, rejection

BINDS = ("always", "sum", "max")


def _log_ratio(fn, logp_num, logp_behaviour, mask, level):
  checks.like(fn, dict(logp_num=logp_num), logp_behaviour=logp_behaviour)
  mask = checks.as_mask(fn, mask, jnp.shape(logp_num))
  log_ratio = ratios.log_ratio(
      lax.stop_gradient(logp_num), logp_behaviour, mask, level=level)
  return log_ratio, mask


@checks.ranged()
def tis(logp_num: Array, logp_behaviour: Array, mask: Array, *,
        cap: Array | float, floor: Array | float = 0.0, level: str = "token",
        binds: str = "always", max_log_ratio: Array | float = 20.0) -> Weights:
  """Truncated importance weight.

    w = sg(min(max(num / behaviour, floor), cap))

  **Source**: Ionides, "Truncated Importance Sampling", 2008,
    https://doi.org/10.1198/106186008X320456; for LLM training Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025,
    https://fengyao.notion.site/off-policy-rl (cap 2 and 8).
  **Departs**: the cap is a constant, not Ionides' sqrt(n). The whole weight is
    made in log space; NeMo-RL turns an overflow into 0, we into `cap`. The
    floor (NeMo-RL, slime, OpenRLHF, TRL, AReaL) is off by default.

  Args:
    logp_num: [B, T] float, nats; detached.
    logp_behaviour: [B, T] float, nats, as recorded by the sampler; detached.
    mask: [B, T] bool or 0/1.
    cap: > 0, absolute; inf is plain importance sampling.
    floor: >= 0 and <= cap, absolute: smaller weights are raised to it; 0: off.
    level: see `ratios`.
    binds: "always", or (AReaL) only in rows whose product ("sum", of log ratios)
      or largest ratio ("max") is itself outside of floor and cap.
    max_log_ratio: nats, > 0.

  Returns:
    Weights: weight [B, T] float32 or wider, detached, 0 off the mask; keep = the
    mask; log_ratio raw.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: biased by the mass above the cap; does not pull back a policy that
    drifts away, as no gradient is ever stopped.
  """
  checks.choice("tis: binds", binds, BINDS)
  log_ratio, mask = _log_ratio("tis", logp_num, logp_behaviour, mask, level)
  clamped = masked.clamp(log_ratio, -max_log_ratio, max_log_ratio)
  low, high = jnp.log(floor), jnp.log(cap)
  capped = jnp.minimum(jnp.maximum(clamped, low), high)
  if binds != "always":
    token, _ = _log_ratio("tis", logp_num, logp_behaviour, mask, "token")
    row = rejection.STATISTICS[binds](token, mask)
    capped = jnp.where((row < low) | (row > high), capped, clamped)
  return Weights(masked.fill(jnp.exp(capped), mask), mask, log_ratio)


@checks.ranged()
def mis(logp_num: Array, logp_behaviour: Array, mask: Array, *,
        cap: Array | float, level: str = "token",
        max_log_ratio: Array | float = 20.0) -> Weights:
  """Masked importance weight: above the cap a token is dropped.

    w = sg(num / behaviour) 1[num / behaviour <= cap]

  **Source**: Liu, Li et al., "When Speed Kills Stability", 2025,
    https://richardli.xyz/rl-collapse (address unverified; part 3).
  **Departs**: dropped tokens stay in the denominator unless the objective's
    denominator is "kept".

  Args:
    logp_num: [B, T] float, nats; detached.
    logp_behaviour: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    cap: > 0, absolute, inclusive.
    level: see `ratios`.
    max_log_ratio: nats, > 0.

  Returns:
    Weights: weight [B, T], 0 where dropped; keep [B, T]; log_ratio raw. Detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: if all is dropped the update has no signal, and is counted as such.
  """
  log_ratio, mask = _log_ratio("mis", logp_num, logp_behaviour, mask, level)
  keep = mask & ~(log_ratio > jnp.log(cap))  # so written, a NaN is seen
  weight = ratios.ratio(masked.fill(log_ratio, keep), max_log_ratio)
  return Weights(masked.fill(weight, keep), keep, log_ratio)


@checks.ranged()
def icepop(logp_num: Array, logp_behaviour: Array, mask: Array, *,
           low: Array | float, high: Array | float, level: str = "token",
           outside: str = "drop",
           max_log_ratio: Array | float = 20.0) -> Weights:
  """Importance weight inside a band, dropped outside it on either side.

    w = sg(k) 1[low <= k <= high],  k = num / behaviour

  **Source**: Ling Team, "Every Step Evolves" (Ring-1T), 2025,
    https://arxiv.org/abs/2510.18855 (0.5 and 5; eq. number unverified).
  **Departs**: inclusive bounds, as five of six peers (SkyRL's are strict). No
    renormalisation for dropped tokens unless the denominator is "kept";
    `outside` "zero" (verl) weighs them 0 and still counts them as kept.

  Args:
    logp_num: [B, T] float, nats; detached.
    logp_behaviour: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    low, high: > 0, absolute, inclusive.
    level: see `ratios`.
    outside: "drop" or "zero".
    max_log_ratio: nats, > 0.

  Returns:
    Weights: weight [B, T], 0 where dropped; keep [B, T]; log_ratio raw. Detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: a fixed gap larger than the band silences a token for ever, while the
    dropped fraction may look healthy.
  """
  checks.choice("icepop: outside", outside, ("drop", "zero"))
  log_ratio, mask = _log_ratio("icepop", logp_num, logp_behaviour, mask, level)
  # So written, a NaN is kept and seen, not dropped in silence.
  keep = mask & ~((log_ratio < jnp.log(low)) | (log_ratio > jnp.log(high)))
  weight = ratios.ratio(masked.fill(log_ratio, keep), max_log_ratio)
  return Weights(masked.fill(weight, keep), keep if outside == "drop" else mask,
                 log_ratio)


@checks.ranged()
def trace(logp_num: Array, logp_behaviour: Array, mask: Array, *,
          cap: Array | float = 1.0, max_log_ratio: Array | float = 20.0
          ) -> Weights:
  """V-trace's product of truncated ratios, from each token to the end.

    w_t = sg(prod_{i >= t} min(num_i / behaviour_i, cap))

  With an outcome reward, gamma = lambda = 1 and a constant baseline, V-trace
  weighs (R - b) at token t by this.

  **Source**: Espeholt et al., "IMPALA", 2018, https://arxiv.org/abs/1802.01561,
    eq. 1, and Munos et al., "Retrace", 2016, https://arxiv.org/abs/1606.02647
    (cap 1).
  **Departs**: no value function; with one see `values.vtrace`. `tis` at level
    "suffix" truncates the product, not its factors.

  Args:
    logp_num: [B, T] float, nats; detached.
    logp_behaviour: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    cap: > 0, absolute, on each token's ratio.
    max_log_ratio: nats, > 0; on the product.

  Returns:
    Weights: weight [B, T], 0 off the mask; keep = the mask; log_ratio per token,
    raw. Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: with cap 1 early tokens of a long row get weights near 0: the price of
    a bounded variance is a shorter reach.
  """
  log_ratio, mask = _log_ratio("trace", logp_num, logp_behaviour, mask, "token")
  capped = masked.fill(jnp.minimum(log_ratio, jnp.log(cap)), mask)
  product = jnp.cumsum(capped[:, ::-1], axis=1)[:, ::-1]
  weight = ratios.ratio(product, max_log_ratio)
  return Weights(masked.fill(weight, mask), mask, log_ratio)


@checks.ranged()
def geometric_mean(weights: Weights, mask: Array, *,
                   log_eps: Array | float = 1e-10) -> Weights:
  """A row's weights replaced by their geometric mean.

    exp((1/|y|) sum_t log(w_t + log_eps)), on every token of the row

  **Source**: verl's `geo_mean` loss under `rollout_is`, 2026,
    https://github.com/volcengine/verl.
  **Departs**: nothing; a weight of 0 counts as log_eps.

  Args:
    weights: a correction's result, [B, T].
    mask: [B, T] bool or 0/1.
    log_eps: >= 0, added before the log; 0: one weight of 0 makes the row's 0.

  Returns:
    Weights: one number a row, repeated over the mask; keep and log_ratio as
    given. Detached.

  Raises:
    ValueError: on another shape.

  Limits: it is biased low: the mean of the logs is below the log of the mean.
  """
  mask = checks.as_mask("geometric_mean", mask, jnp.shape(weights.weight))
  w = lax.stop_gradient(masked.wide(weights.weight))
  mean = masked.row_mean(jnp.log(masked.fill(w + log_eps, mask, 1)), mask)
  row = jnp.broadcast_to(jnp.exp(mean), w.shape)
  return Weights(masked.fill(row, mask), weights.keep, weights.log_ratio)
