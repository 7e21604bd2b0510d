"""What the ratios look like: additive metrics, and their finish. Floor 1.

Inside jit everything is a `Mean` (totals and counts, possibly vectors) or a
`Max`, so that microbatches, devices and hosts only add. `finish` turns the sums
into numbers on the host: a name that ends in `moments` becomes a mean and an
ESS, in `excess` chi2 and the ends of a confidence band, in `_hist` quantiles,
in `_pearson` a correlation.

Raw and effective weights are kept apart: statistics of a truncated weight hide
the tail that one wants to see.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, Each, Max, Mean, Weights

_CLAMP = 20.0  # nats; a weight beyond e^20 is reported as e^20
# Bins of the log ratio: 0.02 nats wide around 0, open at both ends.
_EDGES = np.linspace(-5.0, 5.0, 501)
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "p999": 0.999}


def moments(log_weight: Array, mask: Array) -> Mean:
  """Totals of w and w^2 over the unmasked elements; ESS follows from them.

    ESS / n = (sum w)^2 / (n sum w^2)

  **Source**: Kong, "A Note on Importance Sampling using Standardized Weights",
    1992 (the ESS approximation; no stable address).
  **Departs**: of *raw* weights; verl and ms-swift use truncated ones, which
    cannot show a low ESS.

  Args:
    log_weight: any shape, float, nats.
    mask: the same shape, bool.

  Returns:
    Mean with total [2] and a scalar count.

  Limits: log weights are clamped to +-20 before exp; an ESS near 1 says that
    weights are even, not that they are right.
  """
  return _powers(_weight(masked.wide(log_weight), mask), mask)


def _weight(log_weight: Array, mask: Array) -> Array:
  return jnp.exp(masked.clamp(masked.fill(log_weight, mask), -_CLAMP, _CLAMP))


def _powers(x: Array, mask: Array) -> Mean:
  """Totals of x and x^2 over the unmasked elements."""
  x = masked.fill(x, mask)
  return Mean(jnp.stack([jnp.sum(x), jnp.sum(jnp.square(x))]),
              jnp.sum(mask, dtype=x.dtype))


def _pair(fn, logp, logp_behaviour, mask):
  """Both log-probs and the mask: checked, detached, 0 off the mask."""
  checks.like(fn, dict(logp=logp), logp_behaviour=logp_behaviour)
  mask = checks.as_mask(fn, mask, jnp.shape(logp))
  return (*(lax.stop_gradient(masked.fill(masked.wide(x), mask))
            for x in (logp, logp_behaviour)), mask)


def _miss(logp: Array) -> Array:
  """1 - e^logp, exact where tokens are likely, as most are.

  A log-prob above 0 is rounding, or no log-prob: it may not overflow.
  """
  return -jnp.expm1(jnp.minimum(logp, 0))


def ess(moments_: Mean) -> Array:
  """Effective sample size as a share of n, from `moments`; NaN if n = 0."""
  first, second = moments_.total[0], moments_.total[1]
  safe = jnp.where(second > 0, second * moments_.count, 1)
  return jnp.where(second > 0, jnp.square(first) / safe, jnp.nan)


def mismatch(logp: Array, logp_behaviour: Array, mask: Array
             ) -> dict[str, Mean | Max]:
  """How far the policy is from the one that sampled, from raw log ratios.

    l = logp - behaviour; k1 = mean(-l), k3 = mean(e^l - 1 - l): both estimate
    KL(behaviour || policy), as the tokens were drawn from the behaviour policy.

  **Source**: Schulman, 2020, http://joschu.net/blog/kl-approx.html.
  **Departs**: names are by what is measured; verl calls k1 here `rollout_corr/kl`.

  Args:
    logp: [B, T] float, nats.
    logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.

  Returns:
    `is/kl_k1`, `is/kl_k3`, `is/log_ratio_max` (absolute), `is/prob_diff_mean`,
    `is/prob_diff_max`, `is/moments` (of token weights), `is/sequence_moments`
    (of the products over a row), `is/frac_above_2`, `is/frac_below_half`.
    Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: an empty mask gives counts of 0 (absent after `finish`).
  """
  logp, behaviour, mask = _pair("mismatch", logp, logp_behaviour, mask)
  l = logp - behaviour
  clamped = masked.clamp(l, -_CLAMP, _CLAMP)
  prob_diff = jnp.abs(_miss(behaviour) - _miss(logp))
  return {
      "is/kl_k1": masked.mean(-l, mask),
      "is/kl_k3": masked.mean(jnp.expm1(clamped) - clamped, mask),
      "is/log_ratio_max": masked.largest(jnp.abs(l), mask),
      "is/prob_diff_mean": masked.mean(prob_diff, mask),
      "is/prob_diff_max": masked.largest(prob_diff, mask),
      "is/moments": moments(l, mask),
      "is/sequence_moments": moments(jnp.sum(l, axis=1), mask.any(axis=1)),
      "is/frac_above_2": masked.mean(l > jnp.log(2.0), mask),
      "is/frac_below_half": masked.mean(l < -jnp.log(2.0), mask),
  }


def decomposed(logp: Array, logp_version: Array, logp_behaviour: Array,
               mask: Array) -> dict[str, Mean | Max]:
  """`mismatch` in its two parts: another engine, and newer weights.

    logp - behaviour = (version - behaviour) + (logp - version)

  Args:
    logp: [B, T] float, nats, of the policy now.
    logp_version: [B, T] float, nats: the learner's own score at the version
      that sampled; NaN where that is not known.
    logp_behaviour: [B, T] float, nats, as the sampler recorded it.
    mask: [B, T] bool or 0/1.

  Returns:
    The names of `mismatch` under `engine/` (version against behaviour, same
    weights) and `stale/` (logp against version, same engine), and
    `engine/token_frac`, the share of tokens that they are of. Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: k1 adds up to that of `mismatch` on the same tokens; k3, ESS do not.
  """
  checks.like("decomposed", dict(logp=logp), logp_version=logp_version)
  mask = checks.as_mask("decomposed", mask, jnp.shape(logp))
  known = mask & ~jnp.isnan(logp_version)
  under = lambda name, metrics: {
      k.replace("is/", name): v for k, v in metrics.items()}
  return {**under("engine/", mismatch(logp_version, logp_behaviour, known)),
          **under("stale/", mismatch(logp, logp_version, known)),
          "engine/token_frac": masked.mean(known, mask)}


def correction(name: str, weights: Weights, mask: Array) -> dict[str, Mean]:
  """What a correction changed: effective against raw weights.

  Args:
    name: of the correction; it names the metrics.
    weights: its result.
    mask: [B, T] bool: the tokens it was given.

  Returns:
    `<name>/weight_mean` (effective), `<name>/lost_mass` = E[(raw - effective)+],
    `<name>/changed_frac`, `<name>/masked_frac`.
  """
  raw = masked.fill(jnp.exp(masked.clamp(
      weights.log_ratio, -_CLAMP, _CLAMP)), mask)
  lost = raw - weights.weight
  return {
      f"{name}/weight_mean": masked.mean(weights.weight, mask),
      f"{name}/lost_mass": masked.mean(jnp.maximum(lost, 0), mask),
      # Above rounding: exp(min(l, log cap)) and exp(l) may differ in a last bit.
      f"{name}/changed_frac": masked.mean(
          jnp.abs(lost) > 1e-6 * raw, mask),
      f"{name}/masked_frac": masked.mean(~weights.keep, mask),
  }


def divergence(logp: Array, logp_behaviour: Array, mask: Array
               ) -> dict[str, Mean | Max]:
  """More distances between the policy and the one that sampled.

    js = (k3(logp - m) + k3(behaviour - m)) / 2 = log cosh(l / 2),
      k3(d) = e^d - 1 - d,  e^m = (e^logp + e^behaviour) / 2
    chi2 = E[w^2] - 1;  ppl of a row = e^(-mean_t logp)

  **Source**: js: NeMo-RL's `js_divergence_error`; the rest: verl's
    `rollout_corr`, Tunix (Pearson).
  **Departs**: rows without a token do not count (verl: as ppl 1, weight 1). Of
    raw weights. Bands: normal, 1.96 standard errors of the mean weight.

  Args:
    logp, logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.

  Returns:
    `is/js`, `is/prob_pearson`, `is/excess`, `is/sequence_excess` (of products
    over a row: chi2 and bands after `finish`), `is/ppl`, `is/ppl_behaviour`, `is/ppl_ratio` (policy / behaviour),
    `is/log_ppl_diff`, `is/log_ppl_diff_abs`, `is/log_ppl_diff_max`,
    `is/log_ratio_hist`. Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: the correlation loses digits where all probabilities are alike (it is
    of float32 sums, and may pass 1); this js is not bounded by log 2; log
    weights are clamped to +-20, log perplexities to +-40; a band is too narrow
    where the tail is unseen.
  """
  logp, behaviour, mask = _pair("divergence", logp, logp_behaviour, mask)
  rows = mask.any(axis=1)
  l, l_row = logp - behaviour, jnp.sum(logp - behaviour, axis=1)
  size = jnp.abs(l)
  small = jnp.minimum(size, _CLAMP)
  grown = jnp.expm1(small)  # sinh(l / 2)^2 = (e^|l| - 1)^2 / (4 e^|l|)
  js = 0.5 * (jnp.log1p(jnp.square(grown) / (4 * (1 + grown))) + (size - small))
  # Of w - 1, not w: near 1 their squares leave nothing for float32 to lose.
  excess = lambda x, m: _powers(
      jnp.expm1(masked.clamp(masked.fill(x, m), -_CLAMP, _CLAMP)), m)
  x, y = _miss(logp), _miss(behaviour)  # their correlation is the same
  mean, mean_b = (masked.row_mean(p, mask)[:, 0] for p in (logp, behaviour))
  ppl = lambda m: masked.mean(
      jnp.exp(masked.clamp(-m, -2 * _CLAMP, 2 * _CLAMP)), rows)
  gap = mean_b - mean
  return {
      "is/js": masked.mean(js, mask),
      "is/prob_pearson": Mean(
          jnp.stack([masked.total(v, mask)
                     for v in (x, y, x * x, y * y, x * y)]),
          jnp.sum(mask, dtype=x.dtype)),
      "is/excess": excess(l, mask), "is/sequence_excess": excess(l_row, rows),
      "is/ppl": ppl(mean), "is/ppl_behaviour": ppl(mean_b),
      "is/ppl_ratio": masked.mean(_weight(gap, rows), rows),
      "is/log_ppl_diff": masked.mean(gap, rows),
      "is/log_ppl_diff_abs": masked.mean(jnp.abs(gap), rows),
      "is/log_ppl_diff_max": masked.largest(jnp.abs(gap), rows),
      "is/log_ratio_hist": histogram(l, mask),
  }


@checks.ranged(cap=checks.POSITIVE)
def tail_mass(log_weight: Array, mask: Array, *, cap: Array | float) -> Mean:
  """E[(w - cap)+]: what a truncation at `cap` would take away; raw weights."""
  w = _weight(lax.stop_gradient(masked.wide(log_weight)), mask)
  return masked.mean(w - jnp.minimum(w, cap), mask)


def effective(name: str, weights: Weights, mask: Array) -> dict[str, Mean]:
  """Moments of a correction's weights beside those of the raw ones.

  `<name>/raw_moments`, `<name>/effective_moments`: an ESS each after `finish`.
  A dropped token is an effective weight of 0, so it lowers the effective ESS.
  """
  return {f"{name}/raw_moments": moments(weights.log_ratio, mask),
          f"{name}/effective_moments": _powers(weights.weight, mask)}


def sequence_log_weights(logp: Array, logp_behaviour: Array, mask: Array) -> Each:
  """The log of each row's product of weights: for statistics that need them all.

  Not a sum, so whole batches of it are carried: B numbers, for the host.
  """
  logp, behaviour, mask = _pair("sequence_log_weights", logp, logp_behaviour,
                                mask)
  return Each(jnp.sum(logp - behaviour, axis=1), mask.any(axis=1))


def clipped(logp: Array, hit: Array, mask: Array) -> dict[str, Mean]:
  """Which tokens a bound binds on: their mean log-prob and probability.

  `hit`: [B, T] bool, from a TokenLoss (only where the bound changes the loss).
  `clip/logp_mean`, `clip/prob_mean`; nothing clipped is absent, not 0.
  """
  mask = checks.as_mask("clipped", mask, jnp.shape(logp))
  mask &= checks.as_mask("clipped", hit, jnp.shape(logp))
  logp = lax.stop_gradient(masked.fill(masked.wide(logp), mask))
  return {"clip/logp_mean": masked.mean(logp, mask),
          "clip/prob_mean": masked.mean(1 - _miss(logp), mask)}


def by_sign(adv: Array) -> dict[str, Array]:
  """Parts for `breakdown`: where the advantage is positive, and negative."""
  return dict(positive=adv > 0, negative=adv < 0)


def by_lag(version: Array, version_now: Array | int, *, bins: int = 4
           ) -> dict[str, Array]:
  """Parts for `breakdown`: lag 0, 1, ..., and `bins - 1` or more.

  Args:
    version: [B, T] int: updates behind the weights that drew the token.
    version_now: updates behind the weights that are trained.
    bins: how many parts, static.
  """
  lag = jnp.clip(version_now - version, 0, bins - 1)
  return {f"lag{i}": lag == i for i in range(bins)}


def breakdown(parts: dict[str, Array], logp: Array, logp_behaviour: Array,
              mask: Array, hit: Array | None = None) -> dict[str, Mean]:
  """KL, weights and clip fraction apart for each part of the tokens.

  Args:
    parts: name -> [B, T] bool, as `by_sign` and `by_lag` give them.
    logp, logp_behaviour: [B, T] float, nats.
    mask: [B, T] bool or 0/1.
    hit: [B, T] bool or None: where a bound of the surrogate binds.

  Returns:
    `is/<part>_kl_k1`, `is/<part>_moments`, `is/<part>_token_frac` and with
    `hit` `clip/<part>_frac` (of the part's tokens). Detached.

  Raises:
    ValueError: on another shape or an integer dtype.
  """
  logp, behaviour, mask = _pair("breakdown", logp, logp_behaviour, mask)
  if hit is not None:
    hit = checks.as_mask("breakdown", hit, jnp.shape(logp))
  l, out = logp - behaviour, {}
  for name, part in parts.items():
    part = mask & checks.as_mask("breakdown", part, jnp.shape(logp))
    out[f"is/{name}_kl_k1"] = masked.mean(-l, part)
    out[f"is/{name}_moments"] = moments(l, part)
    out[f"is/{name}_token_frac"] = masked.mean(part, mask)
    if hit is not None:
      out[f"clip/{name}_frac"] = masked.mean(hit, part)
  return out


def histogram(x: Array, mask: Array) -> Mean:
  """Counts of x in the fixed bins of the log ratio; adds, unlike quantiles."""
  width = _EDGES[1] - _EDGES[0]
  # Even bins need no search. A bin beyond the last is dropped: not counted.
  inner = jnp.clip(jnp.ceil((x - _EDGES[0]) / width), 0, len(_EDGES))
  bins = jnp.where(mask, inner.astype(jnp.int32), len(_EDGES) + 1)
  hits = jnp.zeros(len(_EDGES) + 1, x.dtype).at[bins.reshape(-1)].add(
      1, mode="drop")
  return Mean(hits, jnp.sum(mask, dtype=x.dtype))


def quantiles(hist: Mean) -> dict[str, float]:
  """Quantiles of the log ratio from `histogram`: a bin's upper edge (host)."""
  total = np.asarray(hist.total, np.float64)
  if not total.sum():
    return {name: float("nan") for name in _QUANTILES}
  upper = np.append(_EDGES, np.inf)
  share = np.cumsum(total) / total.sum()
  return {name: float(upper[np.searchsorted(share, q - 1e-12)])
          for name, q in _QUANTILES.items()}


def band(moments_: Mean) -> tuple[float, float]:
  """Mean weight +- 1.96 standard errors, from moments of w - 1 (host)."""
  (first, second), n = np.asarray(moments_.total, np.float64), moments_.count
  if n < 2:
    return float("nan"), float("nan")
  mean = first / n
  error = 1.96 * np.sqrt(max(second / n - mean**2, 0) / (n - 1))
  return float(1 + mean - error), float(1 + mean + error)


def pearson(sums: Mean) -> float:
  """Correlation from the totals of x, y, x^2, y^2, xy; NaN without spread."""
  n = np.asarray(sums.count, np.float64)
  x, y, xx, yy, xy = np.asarray(sums.total, np.float64) / np.where(n, n, np.nan)
  spread = (xx - x * x) * (yy - y * y)
  return float((xy - x * y) / np.sqrt(spread)) if spread > 0 else float("nan")


def finish(metrics: dict[str, Mean | Max | Each]) -> dict[str, float]:
  """Additive metrics -> plain numbers, on the host; NaN means absent."""
  out = {}
  for name, metric in metrics.items():
    if isinstance(metric, Each):
      continue  # for the caller's own statistics; see psis
    if name.endswith("moments"):  # is/moments -> is/ess, is/weight_mean
      stem = name.removesuffix("moments")
      out[f"{stem}weight_mean"] = float(metric.value()[0])
      out[f"{stem}ess"] = float(ess(metric))
    elif name.endswith("_hist"):
      stem = name.removesuffix("_hist")
      out.update({f"{stem}_{q}": v for q, v in quantiles(metric).items()})
    elif name.endswith("excess"):  # is/excess -> is/chi2, is/weight_mean_low
      stem = name.removesuffix("excess")
      first, second = np.asarray(metric.value(), np.float64)
      out[f"{stem}chi2"] = float(second + 2 * first)  # E[w^2] - 1
      out[f"{stem}weight_mean_low"], out[f"{stem}weight_mean_high"] = band(metric)
    elif name.endswith("_pearson"):
      out[name] = pearson(metric)
    else:
      out[name] = float(metric.value())
  return out
