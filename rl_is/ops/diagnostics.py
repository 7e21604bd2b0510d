"""What the ratios look like: additive metrics, and their finish. Floor 1.

Inside jit everything is a `Mean` (totals and counts, possibly vectors) or a
`Max`, so that microbatches, devices and hosts only add. `finish` turns the sums
into numbers on the host: names that end in `moments` become a mean and an ESS,
names that end in `_hist` become quantiles.

Raw and effective weights are kept apart: statistics of a truncated weight hide
the tail that one wants to see.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, Max, Mean, Weights

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
  log_weight = masked.fill(masked.wide(log_weight), mask)
  w = masked.fill(jnp.exp(masked.clamp(log_weight, -_CLAMP, _CLAMP)), mask)
  return Mean(jnp.stack([jnp.sum(w), jnp.sum(jnp.square(w))]),
              jnp.sum(mask, dtype=w.dtype))


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
    (of the products over a row), `is/frac_above_2`, `is/frac_below_half`,
    `is/log_ratio_hist`. Detached.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: an empty mask gives counts of 0 (absent after `finish`).
  """
  checks.like("mismatch", dict(logp=logp), logp_behaviour=logp_behaviour)
  mask = checks.as_mask("mismatch", mask, jnp.shape(logp))
  logp = lax.stop_gradient(masked.fill(masked.wide(logp), mask))
  behaviour = lax.stop_gradient(masked.fill(masked.wide(logp_behaviour), mask))
  l = logp - behaviour
  clamped = masked.clamp(l, -_CLAMP, _CLAMP)
  # A log-prob above 0 is rounding, or no log-prob: its exp may not overflow.
  prob = lambda x: jnp.exp(jnp.minimum(x, 0))
  prob_diff = jnp.abs(prob(logp) - prob(behaviour))
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
      "is/log_ratio_hist": histogram(l, mask),
  }


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


def histogram(x: Array, mask: Array) -> Mean:
  """Counts of x in the fixed bins of the log ratio; adds, unlike quantiles."""
  bins = jnp.searchsorted(jnp.asarray(_EDGES, x.dtype), x.reshape(-1))
  hits = jax.ops.segment_sum(mask.reshape(-1).astype(x.dtype), bins,
                             len(_EDGES) + 1)
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


def finish(metrics: dict[str, Mean | Max]) -> dict[str, float]:
  """Additive metrics -> plain numbers, on the host; NaN means absent."""
  out = {}
  for name, metric in metrics.items():
    if name.endswith("moments"):  # is/moments -> is/ess, is/weight_mean
      stem = name.removesuffix("moments")
      out[f"{stem}weight_mean"] = float(metric.value()[0])
      out[f"{stem}ess"] = float(ess(metric))
    elif name.endswith("_hist"):
      stem = name.removesuffix("_hist")
      out.update({f"{stem}_{q}": v for q, v in quantiles(metric).items()})
    else:
      out[name] = float(metric.value())
  return out
