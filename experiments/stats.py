"""Numbers of a few seeds, with how sure they are. Floor 5.

A curve is rewards by step. One seed has no interval: None, not a width of 0.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats
from rl_is import plots


WINDOW = 20  # steps that an end is the mean of
_RESAMPLES = 2000


class Estimate(NamedTuple):
  value: float
  low: float | None  # of the 95 % interval
  high: float | None
  n: int  # seeds


def mean(values) -> Estimate:
  return _with_interval(values, np.mean)


def iqm(values) -> Estimate:
  """Mean of the middle half: one seed that fails does not decide it.

  **Source**: Agarwal et al., "Deep Reinforcement Learning at the Edge of the
    Statistical Precipice", 2021, https://arxiv.org/abs/2108.13264, section 4.
  """
  return _with_interval(
      values, lambda x, axis=-1: stats.trim_mean(x, 0.25, axis=axis))


def _with_interval(values, statistic) -> Estimate:
  """Percentile bootstrap over the seeds; of a fixed seed itself."""
  x = _finite(values)
  value = float(statistic(x)) if len(x) else math.nan
  if len(x) < 2:
    return Estimate(value, None, None, len(x))
  if np.ptp(x) == 0:  # every resample is the same
    return Estimate(value, value, value, len(x))
  interval = stats.bootstrap(
      (x,), statistic, n_resamples=_RESAMPLES, method="percentile",
      rng=np.random.default_rng(0)).confidence_interval
  return Estimate(value, float(interval.low), float(interval.high), len(x))


def _finite(values) -> np.ndarray:
  x = np.asarray(values, float)
  return x[np.isfinite(x)]


class Paired(NamedTuple):
  difference: Estimate  # a - b over the seeds that both have
  wins: int  # seeds where a > b
  n: int
  p_value: float  # two-sided sign test; ties are left out


def paired(a: dict[int, float], b: dict[int, float]) -> Paired:
  """By seed: a seed's luck is in both, and goes out of the difference."""
  common = sorted(s for s in a.keys() & b.keys()
                  if math.isfinite(a[s]) and math.isfinite(b[s]))
  difference = np.array([a[s] - b[s] for s in common])
  wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
  p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
  return Paired(mean(difference), wins, len(common), p)


def within_seeds(runs: Mapping[tuple, float]) -> dict[tuple, float]:
  """Of (point, seed) -> value: without what a seed adds to every point.

    y' = m_p + (y - m_p - m_s + m) sqrt(J / (J - 1))

  with the means of the point, of the seed and of all, J points. A point's mean
  stays; an interval over its seeds then says what a comparison of points needs,
  where seeds (warm starts) differ by more than points do. Unchanged where not
  every point has the same seeds with finite values, or there is one point.

  **Source**: Cousineau, Tutorials in Quantitative Methods for Psychology 1(1),
    2005, and Morey, 4(2), 2008 (the factor), https://www.tqmp.org.
  """
  points = list(dict.fromkeys(p for p, _ in runs))
  seeds = list(dict.fromkeys(s for _, s in runs))
  y = np.array([[runs.get((p, s), math.nan) for s in seeds] for p in points])
  if len(points) < 2 or not np.isfinite(y).all():
    return dict(runs)
  point = y.mean(axis=1, keepdims=True)
  rest = y - point - y.mean(axis=0, keepdims=True) + y.mean()
  y = point + rest * math.sqrt(len(points) / (len(points) - 1))
  return {(p, s): float(y[i, j]) for i, p in enumerate(points)
          for j, s in enumerate(seeds)}


def probability_of_improvement(a, b) -> float:
  """P(A > B) of a run of each, ties as a half; NaN where one has none.

  **Source**: Agarwal et al., 2021, https://arxiv.org/abs/2108.13264, section 4.
  """
  a, b = _finite(a), _finite(b)
  if not len(a) or not len(b):
    return math.nan
  d = a[:, None] - b[None]
  return float((d > 0).mean() + (d == 0).mean() / 2)


# ---- Of one curve.


def smoothed(curve) -> np.ndarray:
  """Mean of the last WINDOW steps at each step that has as many behind it."""
  return plots.moving_mean(curve, WINDOW)[min(WINDOW, len(curve)) - 1:]


def final(curve) -> float:
  """Mean of the last WINDOW steps."""
  return float(np.nanmean(np.asarray(curve, float)[-WINDOW:]))


def auc(curve) -> float:
  """Mean over all steps."""
  return float(np.nanmean(np.asarray(curve, float)))


def time_to(curve, threshold: float) -> int | None:
  """The first step at which the smoothed curve reaches it; None: never."""
  at = np.flatnonzero(smoothed(curve) >= threshold)
  return int(at[0]) + min(WINDOW, len(curve)) if len(at) else None


def collapse_step(curve) -> int | None:
  """Where the smoothed curve falls below 70 % of its best so far, for good.

  None: it does not. **Departs**: not called so below a best of 0.05, where
  70 % is noise.
  """
  x = smoothed(curve)
  if not len(x):
    return None
  best = np.fmax.accumulate(x)  # a missing step hides no best
  below = (x < 0.7 * best) & (best >= 0.05)
  if not below[-1]:
    return None
  up = np.flatnonzero(~below)
  return int(up[-1] + 1 if len(up) else 0) + min(WINDOW, len(curve))


class Sigmoid(NamedTuple):
  """R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B); sd of each, one sigma."""

  A: float
  B: float
  C_mid: float
  R0: float
  sd: dict[str, float]


def fit_sigmoid(compute, curve, *, begin: float = 0.0) -> Sigmoid:
  """How a run saturates, from the points with compute > `begin`.

  **Source**: Khatri et al., "The Art of Scaling Reinforcement Learning Compute
    for LLMs", 2025, https://arxiv.org/abs/2510.13786, eq. 1 (unverified).

  Raises:
    ValueError: fewer than 5 points, or no fit is found.
  """
  x, y = np.asarray(compute, float), np.asarray(curve, float)
  on = (x > max(begin, 0)) & np.isfinite(y)
  x, y = x[on], y[on]
  if len(x) < 5:
    raise ValueError(f"fit_sigmoid: expected at least 5 points, got {len(x)}")
  try:
    found, covariance = optimize.curve_fit(
        _sigmoid, x, y, p0=(y.max(), 1.0, np.median(x), y.min()),
        bounds=((-1, 0.05, x.min() / 100, -1), (2, 20, x.max() * 100, 1)),
        maxfev=20_000)
  except RuntimeError as error:
    raise ValueError(f"fit_sigmoid: no fit: {error}") from None
  sd = dict(zip(("A", "B", "C_mid", "R0"), np.sqrt(np.diag(covariance))))
  return Sigmoid(*map(float, found), {k: float(v) for k, v in sd.items()})


def _sigmoid(x, A, B, C_mid, R0):
  return R0 + (A - R0) / (1 + (C_mid / x) ** B)
