"""k-hat and smoothed weights of the host."""

import numpy as np
import pytest
from scipy import stats

from rl_is import psis
from rl_is.core.types import Each


@pytest.mark.parametrize("k", [0.2, 0.5, 1.0])
def test_khat_finds_the_shape_of_a_pareto_tail(k):
  # The quantiles themselves, so that no draw decides: x = ((1 - u)^-k - 1) / k.
  u = (np.arange(20_000) + 0.5) / 20_000
  _, khat = psis.smooth(np.log(stats.genpareto.ppf(u, k) + 1e-3))
  assert khat == pytest.approx(k, abs=0.05)


def test_smoothing_keeps_order_and_bulk_and_sums_to_one():
  x = np.random.default_rng(0).standard_t(2, size=400)
  smoothed, khat = psis.smooth(x)
  order = np.argsort(x)
  assert np.all(np.diff(smoothed[order]) >= -1e-12)
  assert np.exp(smoothed).sum() == pytest.approx(1.0)
  # 3 sqrt(400) = 60 of the largest are replaced; the others keep their ratios.
  bulk = order[:-60]
  np.testing.assert_allclose(np.diff(smoothed[bulk]), np.diff(x[bulk]),
                             atol=1e-10)
  assert not np.allclose(np.diff(smoothed[order[-60:]]), np.diff(x[order[-60:]]))
  assert khat > 0.7  # e^t has no mean at all


@pytest.mark.parametrize("x", [np.zeros(0), np.zeros(24), np.arange(24.0),
                               np.zeros(200)])
def test_without_a_tail_weights_are_normalised_and_khat_is_absent(x):
  smoothed, khat = psis.smooth(x)
  assert np.isnan(khat)
  np.testing.assert_allclose(
      np.exp(smoothed), np.exp(x) / np.exp(x).sum() if len(x) else x)


@pytest.mark.parametrize("off", [1, 3, 10, 18])
def test_where_the_tail_is_tied_to_the_rest_there_is_no_khat(off):
  """Of 100 sequences most are on-policy: fewer than 16 of the 20 largest differ."""
  x = np.zeros(100)
  x[:off] = np.random.default_rng(0).normal(3, 1, off)
  smoothed, khat = psis.smooth(x)
  # The quartile of 20 is the fifth smallest: tied with the rest below 16.
  assert np.isnan(khat) == (off < 16)
  assert np.isfinite(smoothed).all()
  assert np.exp(smoothed).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("nats", [20, 700, 740, 1e4])
def test_one_weight_that_is_all_of_them_has_a_khat_beyond_use(nats):
  x = np.random.default_rng(0).normal(size=100)
  x[3] = nats
  smoothed, khat = psis.smooth(x)
  assert khat > 1 and np.isinf(khat) == (nats > 700)
  assert np.exp(smoothed).sum() == pytest.approx(1.0)


def test_bad_input_is_named():
  with pytest.raises(ValueError, match="not finite at 3"):
    psis.smooth([0.0, 1.0, 2.0, np.inf])
  with pytest.raises(ValueError, match=r"shape \(n,\), got \(2, 2\)"):
    psis.smooth(np.zeros((2, 2)))


def test_report_joins_minibatches_and_leaves_out_empty_rows():
  x = np.random.default_rng(1).normal(size=80).astype(np.float32)
  keep = np.arange(80) % 4 != 0
  parts = Each(x[:40], keep[:40]) + Each(x[40:], keep[40:])
  got = psis.report({"is/sequence_log_weights": parts})
  assert got == {"is/sequence_khat": psis.smooth(x[keep])[1]}
  assert psis.report({}) == {}
