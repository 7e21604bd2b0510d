"""ops/diagnostics.py: divergences, bands, tails and parts; all additive."""

import functools

import jax
import numpy as np
import pytest

from reference import draws, losses
from rl_is.core.types import Max, Mean
from rl_is.ops import corrections, diagnostics

_divergence = jax.jit(diagnostics.divergence)


@functools.partial(jax.jit, static_argnames="bins")
def _parts(adv, version, now, logp, behaviour, mask, hit, bins=3):
  parts = diagnostics.by_sign(adv) | diagnostics.by_lag(version, now, bins=bins)
  return diagnostics.breakdown(parts, logp, behaviour, mask, hit)


def _finish(metrics):
  return diagnostics.finish(jax.device_get(metrics))


def test_literal():
  # Rows p = [1/2, 1/4], q = [1/4, 1/4] and p = [1/2], q = [1].
  p, q = [[.5, .25], [.5, 1]], [[.25, .25], [1, 1]]
  mask = draws.pad(np.bool_([[1, 1], [1, 0]]))
  got = _finish(_divergence(draws.pad(np.log(p)), draws.pad(np.log(q)), mask))
  k3 = lambda d: np.exp(d) - 1 - d
  m = np.array([3 / 8, 1 / 4, 3 / 4])  # the mixture
  p, q = np.array([.5, .25, .5]), np.array([.25, .25, 1])
  w, rows = np.array([2, 1, .5]), np.array([2, .5])
  band = lambda w: w.mean() + 1.96 * np.array(
      [-1, 1]) * np.std(w, ddof=1) / np.sqrt(len(w))
  want = {
      "is/js": np.mean((k3(np.log(p / m)) + k3(np.log(q / m))) / 2),
      "is/chi2": (4 + 1 + .25) / 3 - 1, "is/sequence_chi2": (4 + .25) / 2 - 1,
      "is/prob_pearson": np.corrcoef(p, q)[0, 1],
      "is/weight_mean_low": band(w)[0], "is/weight_mean_high": band(w)[1],
      "is/sequence_weight_mean_low": band(rows)[0],
      "is/sequence_weight_mean_high": band(rows)[1],
      # Perplexities: 8^(1/2) and 2; 4 and 1; ratio policy / behaviour.
      "is/ppl": (8**.5 + 2) / 2, "is/ppl_behaviour": 2.5,
      "is/ppl_ratio": (8**.5 / 4 + 2) / 2,
      "is/log_ppl_diff": (np.log(8**.5 / 4) + np.log(2)) / 2,
      "is/log_ppl_diff_abs": (np.log(4 / 8**.5) + np.log(2)) / 2,
      "is/log_ppl_diff_max": np.log(2),
      # l = log 2, 0, -log 2 = -+0.693: the upper edges of bins 0.02 wide.
      "is/log_ratio_p01": -.68, "is/log_ratio_p50": 0, "is/log_ratio_p99": .7,
      "is/log_ratio_p999": .7}
  assert got.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-12,
                               err_msg=name)


def test_same_policies_and_nothing():
  logp, behaviour, _ = draws.tokens(1)
  mask = draws.mask()
  got = _finish(_divergence(logp, logp, mask))
  for name in ("is/js", "is/chi2", "is/sequence_chi2", "is/log_ppl_diff_max"):
    np.testing.assert_allclose(got[name], 0, atol=1e-6, err_msg=name)
  for name in ("is/prob_pearson", "is/ppl_ratio", "is/weight_mean_low",
               "is/weight_mean_high"):
    np.testing.assert_allclose(got[name], 1, rtol=1e-5, err_msg=name)
  got = _finish(_divergence(logp, behaviour, np.zeros_like(mask)))
  assert all(np.isnan(v) for v in got.values())
  # One token: no band, no correlation.
  got = _finish(_divergence(logp, behaviour, draws.put(np.ones(1), bool)))
  for name in ("is/prob_pearson", "is/weight_mean_low"):
    assert np.isnan(got[name])


def test_extreme_and_junk():
  l = draws.put([-1000, -30, 30, 1000])
  got = _finish(_divergence(np.minimum(l, 0), -np.maximum(l, 0),
                            draws.put(np.ones(4), bool)))
  for quantile in ("p99", "p999"):  # beyond the last edge
    assert got.pop(f"is/log_ratio_{quantile}") == np.inf
  assert np.isfinite(list(got.values())).all()
  mask = draws.mask()
  logp, behaviour, adv = draws.tokens(2)
  hit = adv > .5
  version = np.full(mask.shape, 2, np.int32)
  want = jax.device_get((_divergence(logp, behaviour, mask), _parts(
      adv, version, 3, logp, behaviour, mask, hit)))
  junk = [draws.fill(x, mask, draws.JUNK) for x in (logp, behaviour)]
  version = np.where(mask, version, -1)
  got = jax.device_get((_divergence(*junk, mask.astype(np.int32)), _parts(
      adv, version, 3, *junk, mask, hit)))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  logp[0, 0] = np.nan  # an unmasked NaN is seen, in its part alone
  got = _finish(_parts(np.abs(adv) + 1, version, 3, logp, behaviour, mask, hit))
  assert np.isnan(got["is/positive_kl_k1"]) and np.isnan(got["is/lag1_ess"])
  assert np.isnan(_finish(_divergence(logp, behaviour, mask))["is/js"])


def test_parts_literal():
  # Tokens: A = [1, -1, 1, 0], lag = [0, 1, 7, 0], l = log [2, 1/2, 4, 1].
  mask = draws.put(np.ones(4), bool)
  l = draws.put(np.log([2, .5, 4, 1]))
  got = _finish(_parts(
      draws.put([1, -1, 1, 0]), 9 - draws.put([0, 1, 7, 0], np.int32), 9,
      l, np.zeros_like(l), mask, draws.put([0, 1, 1, 0], bool)))
  ln2 = np.log(2)
  want = {
      "is/positive_kl_k1": -1.5 * ln2, "is/negative_kl_k1": ln2,
      "is/positive_weight_mean": 3, "is/positive_ess": 36 / (2 * 20),
      "is/negative_ess": 1, "is/positive_token_frac": .5,
      "is/negative_token_frac": .25, "clip/positive_frac": .5,
      "clip/negative_frac": 1,
      "is/lag0_kl_k1": -ln2 / 2, "is/lag0_weight_mean": 1.5,
      "is/lag0_ess": 9 / (2 * 5), "is/lag0_token_frac": .5, "clip/lag0_frac": 0,
      "is/lag1_kl_k1": ln2, "is/lag1_weight_mean": .5, "clip/lag1_frac": 1,
      "is/lag2_kl_k1": -2 * ln2, "is/lag2_weight_mean": 4,  # two or more
      "is/lag2_token_frac": .25, "clip/lag2_frac": 1}
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
  empty = _finish(_parts(-np.ones_like(l), np.zeros(l.shape, np.int32), 0, l, l,
                         mask, mask))
  for name in ("is/positive_kl_k1", "is/lag2_ess", "clip/lag1_frac"):
    assert np.isnan(empty[name]), name  # absent, never 0


def test_tail_effective_and_clipped():
  w = np.array([.5, 1, 4, 8])
  mask = draws.put(np.ones(4), bool)
  l = draws.put(np.log(w))
  tail = lambda cap: float(diagnostics.tail_mass(l, mask, cap=cap).value())
  np.testing.assert_allclose(tail(2.), (2 + 6) / 4, rtol=1e-5)
  assert tail(np.inf) == 0
  tis = corrections.tis(l, np.zeros_like(l), mask, cap=2.)
  got = _finish(diagnostics.effective("tis", tis, mask))
  np.testing.assert_allclose(got["tis/raw_ess"], losses.ess(w), rtol=1e-5)
  capped = np.minimum(w, 2)
  # verl's: 1 / mean((w / mean w)^2), of the truncated weights.
  np.testing.assert_allclose(got["tis/effective_ess"],
                             1 / np.mean((capped / capped.mean())**2), rtol=1e-5)
  np.testing.assert_allclose(got["tis/effective_weight_mean"], capped.mean(),
                             rtol=1e-6)
  drop = corrections.mis(l, np.zeros_like(l), mask, cap=2.)
  np.testing.assert_allclose(  # weights [.5, 1, 0, 0]
      _finish(diagnostics.effective("mis", drop, mask))["mis/effective_ess"],
      1.5**2 / (4 * 1.25), rtol=1e-5)
  logp = draws.put(np.log([.1, .2, .3, .4]))
  got = _finish(diagnostics.clipped(logp, draws.put([1, 0, 1, 0], bool), mask))
  np.testing.assert_allclose(got["clip/prob_mean"], .2, rtol=1e-5)
  np.testing.assert_allclose(got["clip/logp_mean"], np.log(.03) / 2, rtol=1e-5)
  none = _finish(diagnostics.clipped(logp, np.zeros_like(mask), mask))
  assert all(np.isnan(v) for v in none.values())


def test_case_F09_every_metric_is_a_sum_and_a_count():
  # Parts of unequal size: 10 tokens and 90 give the whole's means, not a mean
  # of means.
  logp, behaviour, adv = draws.tokens(3)
  mask, hit = draws.mask(), adv > 0
  version = np.arange(draws.B * draws.T, dtype=np.int32).reshape(mask.shape) % 4
  run = lambda m: jax.device_get(
      dict(_divergence(logp, behaviour, m),
           **_parts(adv, version, 4, logp, behaviour, m, hit)))
  first = mask & (np.arange(draws.B)[:, None] == 0)
  whole, a, b = run(mask), run(first), run(mask & ~first)
  for name, metric in whole.items():
    assert isinstance(metric, (Mean, Max)), name
    jax.tree.map(lambda x, y: np.testing.assert_allclose(
        x, y, rtol=1e-4, atol=1e-5, err_msg=name), a[name] + b[name], metric)


def test_detached_and_eager():
  logp, behaviour, adv = draws.tokens(4)
  mask = draws.mask()
  eager = diagnostics.divergence(logp, behaviour, mask)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=1e-5, atol=1e-6), eager, _divergence(logp, behaviour, mask))
  total = lambda x: sum(v.sum() for v in jax.tree.leaves(
      diagnostics.divergence(x, behaviour, mask)
      | diagnostics.clipped(x, adv > 0, mask)
      | diagnostics.breakdown(diagnostics.by_sign(adv), x, behaviour, mask)))
  np.testing.assert_array_equal(jax.grad(total)(logp), 0)


def test_errors_name_the_argument():
  x, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
  with pytest.raises(ValueError, match="divergence: logp_behaviour"):
    diagnostics.divergence(x, x[:1], mask)
  with pytest.raises(ValueError, match="breakdown: mask"):
    diagnostics.breakdown(dict(a=mask[:1]), x, x, mask)
  with pytest.raises(ValueError, match="clipped: mask"):
    diagnostics.clipped(x, mask[:1], mask)


def test_mismatch_in_its_two_parts():
  """One token unknown, one masked; of the others, in nats:

  engine: version - behaviour = .1, -.3; stale: logp - version = .2, .4.
  """
  behaviour = np.float32([[-1, -1, -1, -1]])
  version = np.float32([[-.9, -1.3, np.nan, 7]])
  logp = np.float32([[-.7, -.9, -.5, 9]])
  mask = np.array([[1, 1, 1, 0]], bool)
  got = _finish(diagnostics.decomposed(logp, version, behaviour, mask))
  k3 = lambda *l: np.mean([np.expm1(x) - x for x in l])
  want = {"engine/kl_k1": .1, "stale/kl_k1": -.3, "engine/token_frac": 2 / 3,
          "engine/kl_k3": k3(.1, -.3), "stale/kl_k3": k3(.2, .4),
          "engine/log_ratio_max": .3, "stale/log_ratio_max": .4}
  for name, value in want.items():
    assert got[name] == pytest.approx(value, rel=1e-5), name
  # k1 adds up: that of the whole on the same tokens is .1 - .3.
  known = mask & ~np.isnan(version)
  whole = _finish(diagnostics.mismatch(logp, behaviour, known))
  assert whole["is/kl_k1"] == pytest.approx(.1 - .3, rel=1e-5)
