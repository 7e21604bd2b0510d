"""Masks: corrections that only drop tokens or rows. Floor 1.

A mask tests the data and multiplies nothing: kept tokens have weight 1, so a
chain may hold as many as you like. `log_ratio` is raw, of logp_num to
logp_behaviour, per token unless a level is given; l below. Tests are made on
the log ratio, before any exp. An unmasked NaN is never dropped: what it would
have decided is kept with weight NaN, so that it is seen.

Everything is `[B, T]` and detached. Dropped tokens stay in the denominator
unless the objective's denominator is "kept".
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, Mean, Weights
from rl_is.ops import ratios

STATISTICS = {
    "token": lambda x, mask: x,
    "mean": masked.row_mean,
    "sum": lambda x, mask: jnp.sum(masked.fill(x, mask), axis=1, keepdims=True),
    "max": lambda x, mask: jnp.max(masked.fill(x, mask, -jnp.inf), axis=1,
                                   keepdims=True, initial=-jnp.inf),
}
# x is the log ratio of the first policy to the second.
ESTIMATORS = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * jnp.square(x),
    "k3": lambda x: jnp.expm1(-x) + x,
}
DIRECTIONS = ("behaviour_to_num", "num_to_behaviour")


def _log_ratio(fn, logp_num, logp_behaviour, mask, level="token", **others):
  checks.like(fn, dict(logp_num=logp_num), logp_behaviour=logp_behaviour,
              **others)
  mask = checks.as_mask(fn, mask, jnp.shape(logp_num))
  log_ratio = ratios.log_ratio(
      lax.stop_gradient(logp_num), logp_behaviour, mask, level=level)
  return log_ratio, mask


def _outside(x, low, high):
  return (x < low) | (x > high)  # False for a NaN


def _weights(drop, seen, mask, log_ratio) -> Weights:
  """Weight 1 where not dropped; NaN where `seen`, what decided it, is NaN."""
  keep = mask & ~drop
  weight = jnp.where(jnp.isnan(seen), jnp.nan, jnp.ones_like(log_ratio))
  return Weights(masked.fill(weight, keep), keep, log_ratio)


@checks.ranged()
def ratio_mask(logp_num: Array, logp_behaviour: Array, mask: Array, *,
               low: Array | float, high: Array | float, level: str = "token"
               ) -> Weights:
  """Keeps what has its ratio inside a band, at any level, with weight 1.

    keep = 1[low <= k <= high],  k = num / behaviour at the level

  **Source**: Liu, Li et al., "When Speed Kills Stability", 2025,
    https://richardli.xyz/rl-collapse (address unverified; part 3).
  **Departs**: no weight; `icepop` is this one times the ratio. Inclusive.

  Args:
    logp_num, logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.
    low, high: >= 0, absolute; 0 and inf are off.
    level: see `ratios`; the row's product is "sequence_sum".

  Returns:
    Weights: weight 1 where kept; log_ratio at the level. Detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown level.

  Limits: a row's product leaves any fixed band as the row gets longer.
  """
  l, mask = _log_ratio("ratio_mask", logp_num, logp_behaviour, mask, level)
  return _weights(_outside(l, jnp.log(low), jnp.log(high)), l, mask, l)


@checks.ranged()
def geometric_mask(logp_num: Array, logp_behaviour: Array, mask: Array, *,
                   low: Array | float, high: Array | float) -> Weights:
  """Keeps rows whose geometric mean ratio is inside a band.

    keep = 1[low <= exp((1/|y|) sum_t l_t) <= high], for the whole row

  **Source**: Liu, Li et al., "When Speed Kills Stability", 2025,
    https://richardli.xyz/rl-collapse (address unverified; Geo-RS).
  **Departs**: no weight (NeMo-RL and OpenRLHF `seq-mask-tis`: chain `tis` with
    cap inf; AReaL: with the level sequence_mean). verl bounds behaviour / num.

  Args:
    logp_num, logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.
    low, high: >= 0, absolute; usually within 1 per cent of 1.

  Returns:
    Weights as `ratio_mask` at the level sequence_mean.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: large ratios of opposite sign cancel; see `token_veto`.
  """
  return ratio_mask(logp_num, logp_behaviour, mask, low=low, high=high,
                    level="sequence_mean")


@checks.ranged()
def token_veto(logp_num: Array, logp_behaviour: Array, mask: Array, *,
               low: Array | float, high: Array | float) -> Weights:
  """Drops the whole row if one of its tokens has a ratio outside a band.

    keep = 1[low <= e^{l_t} <= high for every t of the row]

  **Source**: Liu, Li et al., "When Speed Kills Stability", 2025,
    https://richardli.xyz/rl-collapse (address unverified); SkyRL's
    outlier_token_is_threshold.
  **Departs**: nothing; inclusive bounds.

  Args:
    logp_num, logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.
    low, high: >= 0, absolute; 0 and inf are off.

  Returns:
    Weights: weight 1 where kept; log_ratio per token. Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: drops nearly every row once the rows are long enough.
  """
  l, mask = _log_ratio("token_veto", logp_num, logp_behaviour, mask)
  most = STATISTICS["max"](l, mask)  # of a row with a NaN: NaN
  least = -STATISTICS["max"](-l, mask)
  drop = (least < jnp.log(low)) | (most > jnp.log(high))
  return _weights(drop, most, mask, l)


@checks.ranged()
def k_rejection(logp_num: Array, logp_behaviour: Array, mask: Array, *,
                upper: Array | float, lower: Array | float = -jnp.inf,
                estimator: str = "k3", statistic: str = "mean",
                direction: str = "behaviour_to_num", clamped: str = "k3",
                max_log_ratio: Array | float = 20.0) -> Weights:
  """Drops tokens, or rows, whose estimated divergence is out of bounds.

    keep = 1[lower <= statistic_t(k(x_t)) <= upper],  x = log first / second
    k1 = x,  k2 = x^2 / 2,  k3 = e^-x - 1 + x

  **Source**: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html, as verl's `rollout_rs`.
  **Departs**: bounds are on the statistic itself, in nats: verl's "lo_hi" of a
    k1 are log lo and log hi (of behaviour / num). verl's is the direction
    behaviour_to_num (x = -l: k1 = -l, k3 = e^l - 1 - l), AReaL's is
    num_to_behaviour (x = l: k1 = l, k3 = e^-l - 1 + l).

  Args:
    logp_num, logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.
    upper, lower: nats, inclusive; +-inf are off.
    estimator: a key of `ESTIMATORS`.
    statistic: a key of `STATISTICS`; but for "token", over the row.
    direction: one of `DIRECTIONS`.
    clamped: "k3" or "all": which estimators take a clamped x (verl: all).
    max_log_ratio: nats, > 0; of that clamp.

  Returns:
    Weights: weight 1 where kept; log_ratio per token. Detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown choice.

  Limits: k3 and k2 see both tails, k1 lets them cancel in a mean or a sum.
  """
  fn = "k_rejection"
  checks.choice(f"{fn}: estimator", estimator, ESTIMATORS)
  checks.choice(f"{fn}: statistic", statistic, STATISTICS)
  checks.choice(f"{fn}: direction", direction, DIRECTIONS)
  checks.choice(f"{fn}: clamped", clamped, ("k3", "all"))
  l, mask = _log_ratio(fn, logp_num, logp_behaviour, mask)
  x = -l if direction == "behaviour_to_num" else l
  if clamped == "all" or estimator == "k3":
    x = masked.clamp(x, -max_log_ratio, max_log_ratio)
  seen = STATISTICS[statistic](ESTIMATORS[estimator](x), mask)
  return _weights(_outside(seen, lower, upper), seen, mask, l)


@checks.ranged()
def m2po(logp_num: Array, logp_behaviour: Array, mask: Array, *,
         tau: Array | float) -> Weights:
  """Drops the largest squared log ratios until the mean of the rest is small.

    keep the largest set of smallest l^2 whose mean is < tau, over the batch

  **Source**: "Prosperity before Collapse" (M2PO), 2025,
    https://arxiv.org/abs/2510.01161 (tau 0.04; eq. number unverified).
  **Departs**: as AReaL's code it drops whatever the sign of the advantage (the
    paper only what moves the wrong way; unverified). Among equal l^2 the
    earlier one in memory is dropped first; if no set qualifies, all are.

  Args:
    logp_num, logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.
    tau: nats^2, > 0.

  Returns:
    Weights: weight 1 where kept; log_ratio per token. Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: coupled over the batch: call it on all of it, before any split.
  """
  l, mask = _log_ratio("m2po", logp_num, logp_behaviour, mask)
  tested = mask & ~jnp.isnan(l)
  square = masked.fill(jnp.square(l), tested, -1).reshape(-1)
  order = jnp.argsort(-square, stable=True)[::-1]  # the smallest first
  square = square[order]
  real = square >= 0
  count = jnp.cumsum(real)
  mean = jnp.cumsum(masked.fill(square, real)) / jnp.maximum(count, 1)
  most = jnp.max(masked.fill(count, real & (mean < tau)), initial=0)
  drop = jnp.zeros(real.shape, bool).at[order].set(real & (count > most))
  return _weights(drop.reshape(l.shape), l, mask, l)


@checks.ranged()
def opsm(logp_num: Array, logp_behaviour: Array, mask: Array, *, adv: Array,
         delta: Array | float) -> Weights:
  """Off-policy sequence mask: drops bad rows that the policy has left.

    drop = A_t < 0 and (1/|y|) sum_t (behaviour_t - num_t) > delta

  **Source**: DeepSeek-AI, "DeepSeek-V3.2", 2025,
    https://arxiv.org/abs/2512.02556 (unverified; delta is unpublished).
  **Departs**: nothing. With num the current policy it is TRL's (behaviour the
    sampler, or the proximal policy where it was not recorded) and slime's
    (always the proximal policy, as `logp_behaviour` here).

  Args:
    logp_num: [B, T] float, nats: the policy in training.
    logp_behaviour: [B, T] float, nats: the one it is compared with.
    mask: [B, T] bool or 0/1.
    adv: [B, T] float.
    delta: nats a token, strict.

  Returns:
    Weights: weight 1 where kept; log_ratio per token. Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: rows with A >= 0 are never dropped, however far off they are.
  """
  l, mask = _log_ratio("opsm", logp_num, logp_behaviour, mask, adv=adv)
  adv = lax.stop_gradient(masked.fill(masked.wide(adv), mask))
  kl = -masked.row_mean(l, mask)
  return _weights((adv < 0) & (kl > delta), kl, mask, l)


@checks.ranged()
def vaco_tv(logp_num: Array, logp_behaviour: Array, mask: Array, *, adv: Array,
            high: Array | float, low: Array | float = 0.0,
            max_log_ratio: Array | float = 20.0) -> Weights:
  """In rows far from the sampler, drops the tokens that would go further.

    drop = A_t l_t > 0 and not low <= (1/|y|) sum_t |e^{l_t} - 1| <= high

  **Source**: "VACO", 2026, https://arxiv.org/abs/2603.01365 (unread), as
    open-instruct's `rho_mask_tv_divergence`.
  **Departs**: clamp at 20 (open-instruct: 10).

  Args:
    logp_num, logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.
    adv: [B, T] float.
    high, low: absolute, inclusive; inf and 0 are off.
    max_log_ratio: nats, > 0.

  Returns:
    Weights: weight 1 where kept; log_ratio per token. Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: twice the total variation, and one large ratio decides the row.
  """
  l, mask = _log_ratio("vaco_tv", logp_num, logp_behaviour, mask, adv=adv)
  adv = lax.stop_gradient(masked.fill(masked.wide(adv), mask))
  clamped = masked.clamp(l, -max_log_ratio, max_log_ratio)
  tv = masked.row_mean(jnp.abs(jnp.expm1(clamped)), mask)
  away = jnp.sign(l) * adv > 0
  return _weights(away & _outside(tv, low, high), tv, mask, l)


def _lag(fn, version, version_now, mask):
  """(lag, where it is known, mask)."""
  dtype = jnp.result_type(version)
  if jnp.ndim(version) != 2 or not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(f"{fn}: version: expected rank 2 [B, T] of an integer "
                     f"dtype, got {jnp.shape(version)} {dtype}")
  mask = checks.as_mask(fn, mask, jnp.shape(version))
  lag = jnp.asarray(version_now) - version
  return lag, (jnp.asarray(version) >= 0) & (lag >= 0), mask


@checks.ranged()
def version_mask(version: Array, version_now: Array, mask: Array, *,
                 max_lag: Array | float, level: str = "token") -> Weights:
  """Keeps tokens, or rows, that were sampled at most `max_lag` updates ago.

    keep = 1[0 <= version_now - version <= max_lag]

  **Source**: slime's `mask-offpolicy-in-partial-rollout` and TRL's
    `max_staleness`, 2026 (https://github.com/THUDM/slime).
  **Departs**: per token, inclusive; a row is as old as its oldest token.

  Args:
    version: [B, T] int: updates behind the weights that drew the token.
    version_now: int scalar: of the policy that will be updated.
    mask: [B, T] bool or 0/1.
    max_lag: updates, >= 0.
    level: "token" or "sequence".

  Returns:
    Weights: weight 1 where kept; log_ratio 0, as none is tested. Detached.

  Raises:
    ValueError: on another shape, a float version, an unknown level.

  Limits: an unknown (-1) or future version is an error that an array function
    cannot raise: not kept, counted by `unknown_versions`; the host checks that.
  """
  checks.choice("version_mask: level", level, ("token", "sequence"))
  lag, known, mask = _lag("version_mask", version, version_now, mask)
  drop = mask & ~(known & (lag <= max_lag))
  if level == "sequence":
    drop = jnp.any(drop, axis=1, keepdims=True)
  zeros = jnp.zeros(mask.shape, jnp.float32)
  return _weights(drop, zeros, mask, zeros)


def unknown_versions(version: Array, version_now: Array, mask: Array) -> Mean:
  """Tokens of an unknown (-1) or future version, over tokens; both scalar."""
  _, known, mask = _lag("unknown_versions", version, version_now, mask)
  return masked.mean(~known, mask)


def self_normalise(weights: Weights, mask: Array, *, level: str = "token"
                   ) -> Weights:
  """Divides weights by their mean, after whatever truncated them.

    w_t / ((1/N) sum w)  over tokens;  or N rows, each by its mean weight

  **Source**: Hesterberg, "Weighted Average Importance Sampling", 1995,
    https://doi.org/10.1080/00401706.1995.10484303 (unverified); verl's
    `rollout_is_batch_normalize`.
  **Departs**: nothing; dropped tokens count as weight 0.

  Args:
    weights: a correction's result, [B, T].
    mask: [B, T] bool or 0/1.
    level: "token" or "sequence".

  Returns:
    Weights: the mean weight is 1; keep and log_ratio as given.

  Raises:
    ValueError: on another shape or an unknown level.

  Limits: may exceed the cap again; coupled over the batch; all 0 stays 0.
  """
  checks.choice("self_normalise: level", level, ("token", "sequence"))
  mask = checks.as_mask("self_normalise", mask, jnp.shape(weights.weight))
  w = lax.stop_gradient(masked.wide(weights.weight))
  if level == "token":
    mean = masked.mean(w, mask)
  else:
    row = jnp.any(mask, axis=1, keepdims=True)
    mean = masked.mean(masked.row_mean(w, mask), row)
  mean = mean.total / jnp.maximum(mean.count, 1)
  scaled = masked.fill(w / jnp.where(mean == 0, 1, mean), mask)
  return Weights(scaled, weights.keep, weights.log_ratio)
