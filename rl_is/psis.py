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
    (log weights [n] float64 that sum to 1 as weights, k-hat). With fewer than
    25, or where the largest are all equal, there is no tail to fit: the weights
    are only normalised, and k-hat is NaN (absent).

  Raises:
    ValueError: not one axis, or a value that is not finite.
  """
  x = np.asarray(log_weight, np.float64)
  if x.ndim != 1:
    raise ValueError(f"smooth: log_weight: expected shape (n,), got {x.shape}")
  if not np.isfinite(x).all():
    raise ValueError("smooth: log_weight: not finite at "
                     f"{int(np.argmin(np.isfinite(x)))}")
  if len(x) < SMALLEST or _is_flat(x):
    return x - np.logaddexp.reduce(x) if len(x) else x, float("nan")
  # It takes log likelihoods, whose leave-one-out log weights are their negative.
  smoothed, khat = _array_stats().psislw(-x)
  return np.asarray(smoothed), float(khat)


def _is_flat(x: np.ndarray) -> bool:
  """No spread among the largest: arviz-stats refuses to fit such a tail."""
  tail = int(np.ceil(min(len(x) / 5, 3 * np.sqrt(len(x)))))
  top = np.sort(x)[-tail:]
  return bool(np.isclose(top[0], top[-1], rtol=0, atol=1e-12))


def report(metrics: Mapping[str, Any]) -> dict[str, float]:
  """`is/sequence_khat` from the additive metrics of a step; NaN where absent."""
  each = metrics.get("is/sequence_log_weights")
  if each is None:
    return {}
  values = np.asarray(each.values)[np.asarray(each.keep)]
  return {"is/sequence_khat": smooth(values)[1]}
