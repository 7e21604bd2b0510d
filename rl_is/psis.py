"""Pareto-smoothed importance sampling, on the host (extra `stats`). Floor 4.

k-hat, the fitted shape of the weights' upper tail, says what an ESS cannot: how
far the largest weights seen are from the largest there are. Below 0.5 the
variance is finite, up to 0.7 estimates are usable, above it they are not.

**Source**: Vehtari, Simpson, Gelman, Yao and Gabry, "Pareto Smoothed Importance
  Sampling", 2024, https://arxiv.org/abs/1507.02646; computed by arviz-stats.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

# The fit needs five of the largest weights, which are a fifth of them at most.
SMALLEST = 25


def check() -> None:
  """Raises ImportError, naming the extra, where arviz-stats is missing."""
  _array_stats()


def _array_stats():
  try:
    from arviz_stats.base import array_stats  # an extra: who asks for it pays
  except ImportError as error:
    raise ImportError("k-hat needs arviz-stats: pip install 'rl_is[stats]', or "
                      "set config.train.psis=false") from error
  return array_stats


def smooth(log_weight: Any) -> tuple[np.ndarray, float]:
  """Log weights whose upper tail is replaced by the fitted one's quantiles.

  Args:
    log_weight: [n] float, nats, finite, any constant added.

  Returns:
    (log weights [n] float64 that sum to 1 as weights, k-hat). Where no tail
    can be fitted the weights are only normalised, and k-hat is NaN (absent):
    fewer than 25, or too many of the largest are equal, as when most sequences
    are on-policy. Infinity: the largest is so far above that, beside it, the
    others are 0 in float64.

  Raises:
    ValueError: not one axis, or a value that is not finite.
  """
  x = np.asarray(log_weight, np.float64)
  if x.ndim != 1:
    raise ValueError(f"smooth: log_weight: expected shape (n,), got {x.shape}")
  if not np.isfinite(x).all():
    raise ValueError("smooth: log_weight: not finite at "
                     f"{int(np.argmin(np.isfinite(x)))}")
  khat = _known_khat(x)
  if khat is not None:
    return x - np.logaddexp.reduce(x) if len(x) else x, khat
  # It takes log likelihoods, whose leave-one-out log weights are their negative.
  smoothed, khat = _array_stats().psislw(-x)
  return np.asarray(smoothed), float(khat)


def _known_khat(x: np.ndarray) -> float | None:
  """k-hat where there is no fit; None: there is one.

  The fit divides by the lower quartile of what the tail's weights exceed the
  largest weight below it by, and wants a spread.
  """
  if len(x) < SMALLEST:
    return float("nan")
  size = int(len(x) / 5 if len(x) <= 225 else 3 * np.sqrt(len(x)))
  below, *tail = np.sort(x)[-size - 1:]
  quartile = tail[int(size / 4 + 0.5) - 1]
  if min(quartile - below, tail[-1] - tail[0]) <= 1e-12:
    return float("nan")
  excess = np.exp(quartile - tail[-1]) - np.exp(below - tail[-1])
  return None if excess > np.finfo(float).tiny else float("inf")


def report(metrics: Mapping[str, Any]) -> dict[str, float]:
  """`is/sequence_khat` from the additive metrics of a step; NaN where absent."""
  each = metrics.get("is/sequence_log_weights")
  if each is None:
    return {}
  values = np.asarray(each.values)[np.asarray(each.keep)]
  return {"is/sequence_khat": smooth(values)[1]}
