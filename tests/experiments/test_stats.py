"""Statistics of a few seeds: by hand, and at their edges."""

import math

import numpy as np
import pytest

from experiments import stats


def test_one_seed_has_no_interval_and_equal_ones_one_of_width_0():
  assert stats.mean([0.5]) == (0.5, None, None, 1)
  assert stats.mean([]).n == 0 and np.isnan(stats.mean([]).value)
  assert stats.iqm([0.5, 0.5]) == (0.5, 0.5, 0.5, 2)
  assert stats.mean([0.2, np.nan, 0.4]).n == 2


def test_iqm_is_the_mean_of_the_middle_half():
  """Of 0, 1, 2, 9 the middle two: 1.5; of eight, the middle four."""
  assert stats.iqm([9, 0, 2, 1]).value == 1.5
  assert stats.iqm([100, 0, 1, 2, 3, 4, 5, -100]).value == 2.5


def test_the_interval_covers_as_often_as_it_says():
  """Means of 10 normal draws; the percentile bootstrap is a bit narrow."""
  r = np.random.default_rng(0)
  hits = [e.low <= 0 <= e.high for e in (
      stats.mean(r.normal(size=10)) for _ in range(200))]
  assert 0.85 < np.mean(hits) < 0.98


def test_paired_by_seed():
  """Differences over the common seeds 1, 2, 3: 0.1, 0.3, -0.1; 2 of 3 wins."""
  got = stats.paired({0: 9, 1: 0.5, 2: 0.7, 3: 0.1}, {1: 0.4, 2: 0.4, 3: 0.2, 4: 0})
  assert got.difference.value == pytest.approx(0.1)
  assert (got.wins, got.n, got.p_value) == (2, 3, 1.0)
  # All of 5: 2 x 2^-5.
  five = {i: 1.0 for i in range(5)}
  assert stats.paired(five, {i: 0.0 for i in range(5)}).p_value == 0.0625
  assert stats.paired(five, five)[1:] == (0, 5, 1.0)


def test_probability_of_improvement_by_hand():
  """(2, 3) against (1, 3): wins 2>1, 3>1; a tie 3=3; a loss 2<3: 2.5 / 4."""
  assert stats.probability_of_improvement([2, 3], [1, 3]) == 0.625
  assert np.isnan(stats.probability_of_improvement([], [1]))


def test_a_collapse_is_a_fall_that_stays():
  rise, fall = np.linspace(0, 0.8, 100), np.full(60, 0.1)
  step = stats.collapse_step(np.concatenate([rise, fall]))
  # The mean of 20 falls below 0.7 of its best some steps after step 100.
  assert 105 <= step <= 115
  assert stats.collapse_step(np.concatenate([rise, fall, rise])) is None
  assert stats.collapse_step(rise) is None
  assert stats.collapse_step(0.04 * (np.arange(100) < 50)) is None  # noise
  assert stats.collapse_step([0.5]) is stats.collapse_step([]) is None
  # Steps that are missing hide no fall: the mean of 20 is below 0.7 after 20 zeros.
  gap = [1.0] * 30 + [np.nan] * 25 + [0.0] * 60
  assert stats.collapse_step(gap) is not None


def test_ends_areas_and_times():
  curve = np.concatenate([np.zeros(50), np.ones(50)])
  assert stats.final(curve) == 1 and stats.auc(curve) == 0.5
  # The first 20 steps whose mean is 0.5 end with step 60.
  assert stats.time_to(curve, 0.5) == 60 and stats.time_to(curve, 1.1) is None
  assert stats.time_to([0.5, 0.5], 0.5) == 2


def test_the_sigmoid_is_found_again():
  C = np.arange(1, 301)
  y = 0.1 + (0.8 - 0.1) / (1 + (60 / C) ** 2)
  fit = stats.fit_sigmoid(C, y + np.random.default_rng(0).normal(0, 0.01, 300))
  for name, value in dict(A=0.8, B=2.0, C_mid=60.0, R0=0.1).items():
    assert abs(getattr(fit, name) - value) < 4 * fit.sd[name] + 1e-3
    assert 0 < fit.sd[name] < 0.1 * value + 0.05
  with pytest.raises(ValueError, match="at least 5 points, got 2"):
    stats.fit_sigmoid([1, 2], [0, 1])


def test_what_a_seed_adds_is_taken_out():
  """Means of a 3, b 4; of the seeds 2, 5; of all 3.5. Left of (a, 0): 1 - 3 - 2 +
  3.5 = -0.5, of (b, 0): 3 - 4 - 2 + 3.5 = 0.5; times sqrt(2)."""
  runs = {("a", 0): 1.0, ("a", 1): 5.0, ("b", 0): 3.0, ("b", 1): 5.0}
  left = 0.5 * 2**0.5
  assert stats.within_seeds(runs) == pytest.approx({
      ("a", 0): 3 - left, ("a", 1): 3 + left, ("b", 0): 4 + left,
      ("b", 1): 4 - left})
  # What is not the same seeds everywhere, or not finite, stays.
  for other in ({**runs, ("a", 2): 1.0}, {**runs, ("a", 0): math.inf},
                {("a", 0): 1.0, ("a", 1): 5.0}, {}):
    assert stats.within_seeds(other) == other
