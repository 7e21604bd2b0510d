"""ops/diagnostics.py: additive metrics, raw against effective weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import draws, losses
from rl_is.core.types import Max, Mean
from rl_is.ops import corrections, diagnostics

_mismatch = jax.jit(diagnostics.mismatch)


def _finished(*args):
  return diagnostics.finish(jax.device_get(_mismatch(*args)))


def _add(x, y):
  return {name: x[name] + y[name] for name in x}


def test_literal():
  # l = [0.1, -1, 0 | 1, 0, -]; probabilities p = e^logp, q = e^behaviour.
  logp = draws.pad([[-1, -2, -1], [-1, -1, -7]])
  behaviour = draws.pad([[-1.1, -1, -1], [-2, -1, -1]])
  mask = draws.pad(np.bool_([[1, 1, 1], [1, 1, 0]]))
  got = _finished(logp, behaviour, mask)
  e = np.exp
  w = e([.1, -1, 0, 1, 0])
  want = {
      "is/kl_k1": -.1 / 5,  # mean of -l
      "is/kl_k3": (e(.1) - 1.1 + e(-1.) + e(1.) - 2) / 5,  # mean of e^l - 1 - l
      "is/log_ratio_max": 1,
      "is/prob_diff_mean": (e(-1.) - e(-1.1) + 2 * (e(-1.) - e(-2.))) / 5,
      "is/prob_diff_max": e(-1.) - e(-2.),
      "is/weight_mean": w.mean(),
      "is/ess": losses.ess(w),
      "is/sequence_weight_mean": (e(-.9) + e(1.)) / 2,  # products over the rows
      "is/sequence_ess": losses.ess([e(-.9), e(1.)]),
      "is/frac_above_2": .2,  # e^1
      "is/frac_below_half": .2}  # e^-1
  assert got.keys() == want.keys()
  for name, value in want.items():
    tol = .0201 if "ratio_p" in name else 1e-5 * abs(value) + 1e-7
    assert abs(got[name] - value) <= tol, (name, got[name], value)


@pytest.mark.parametrize("x64", [False, True])
def test_twin(x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  logp, behaviour, _ = draws.tokens(1, dtype=dtype)
  mask = draws.mask()
  with jax.enable_x64(x64):
    metrics = jax.device_get(_mismatch(logp, behaviour, mask))
    got = diagnostics.finish(metrics)
  l = losses.log_ratio(logp, behaviour, mask)
  rows = [np.sum(l[i][m]) for i, m in enumerate(mask) if m.any()]
  k3, _ = losses.k3(behaviour, logp, mask)  # d = logp - behaviour
  for name, want in {
      "is/kl_k1": -l[mask].mean(), "is/kl_k3": k3[mask].mean(),
      "is/log_ratio_max": abs(l).max(),
      "is/weight_mean": np.exp(l[mask]).mean(),
      "is/ess": losses.ess(np.exp(l[mask])),
      "is/sequence_ess": losses.ess(np.exp(rows))}.items():
    np.testing.assert_allclose(got[name], want, rtol=tol, err_msg=name)
  assert metrics["is/kl_k1"].total.dtype == dtype
  assert metrics["is/sequence_moments"].count == 3


def test_ess():
  ones = diagnostics.moments(np.zeros((2, 3), np.float32), np.ones((2, 3)))
  np.testing.assert_allclose(diagnostics.ess(ones), 1)
  # Equal weights of any size, one weight of many, nothing at all.
  same = diagnostics.moments(np.full((2, 3), 4, np.float32), np.ones((2, 3)))
  np.testing.assert_allclose(diagnostics.ess(same), 1, rtol=1e-6)
  alone = diagnostics.moments(
      np.float32([[20, -20, -20], [-20, -20, -20]]), np.ones((2, 3)))
  np.testing.assert_allclose(diagnostics.ess(alone), 1 / 6, rtol=1e-5)
  none = diagnostics.moments(np.zeros((2, 3), np.float32), np.zeros((2, 3)))
  assert np.isnan(diagnostics.ess(none))


def test_equal_policies():
  logp, _, _ = draws.tokens(2)
  got = _finished(logp, logp, draws.mask())
  for name in ("is/ess", "is/sequence_ess", "is/weight_mean",
               "is/sequence_weight_mean"):
    assert got.pop(name) == 1, name
  assert set(got.values()) == {0}  # the quantiles' bin ends at 0 too


def test_nothing_is_absent_not_zero():
  logp, behaviour, _ = draws.tokens(3)
  got = _finished(logp, behaviour, np.zeros((draws.B, draws.T), bool))
  for name, value in got.items():
    assert np.isnan(value), name


def test_quantiles_are_upper_edges_of_bins():
  # Sorted: -1, 0, 0, 0.1, 1, and one beyond the last edge; junk off the mask.
  x = draws.put([.1, -1, 0, 1, 0, 30, np.nan])
  mask = draws.put(np.ones(6), bool)
  got = diagnostics.quantiles(diagnostics.histogram(x, mask))
  assert got == pytest.approx(
      dict(p01=-1, p50=0, p99=np.inf, p999=np.inf), abs=1e-12)
  assert diagnostics.histogram(x, mask).total.sum() == 6


def test_a_bin_holds_what_a_search_of_the_edges_finds():
  x = np.random.default_rng(0).normal(0, 3, (8, 50)).astype(np.float32)
  want = np.bincount(np.searchsorted(np.linspace(-5, 5, 501), x.reshape(-1)),
                     minlength=502)
  got = diagnostics.histogram(x, np.ones(x.shape, bool)).total
  np.testing.assert_array_equal(got, want)


def test_extreme_ratios_are_finite():
  l = draws.put([-1000, -30, 30, 1000])
  got = _finished(np.minimum(l, 0), -np.maximum(l, 0),
                  draws.put(np.ones(4), bool))
  assert np.isfinite(list(got.values())).all()
  assert got["is/log_ratio_max"] == 1000


@pytest.mark.parametrize("junk", [*draws.JUNK, draws.JUNK])
def test_junk_off_the_mask(junk):
  mask = draws.mask()
  args = draws.tokens(4)[:2]
  for fn in (_mismatch, _corrected):
    got = fn(*(draws.fill(x, mask, junk) for x in args), mask)
    want = fn(*(draws.fill(x, mask, 0) for x in args), mask)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@jax.jit
def _corrected(num, behaviour, mask):
  weights = corrections.icepop(num, behaviour, mask, low=.7, high=1.5)
  return diagnostics.correction("icepop", weights, mask)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(draws.B)),
       junk=st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_splits_order_and_padding(seed, order, junk):
  mask = draws.mask()
  args = draws.tokens(seed)[:2]
  want = _mismatch(*args, mask)
  halves = [_mismatch(*(x[order[i:i + 2]] for x in (*args, mask)))
            for i in (0, 2)]
  wide = np.pad(mask, ((0, 0), (0, 2)))
  padded = _mismatch(*(draws.fill(
      np.pad(x, ((0, 0), (0, 2))), wide, junk) for x in args), wide)
  for got in (_add(*halves), padded):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5,
                                   atol=1e-6), got, want)


def test_masks_dtypes_and_jit():
  logp, behaviour, _ = draws.tokens(5)
  mask = draws.mask()
  eager = diagnostics.mismatch(logp, behaviour, mask)
  for kind in (np.int32, np.float32):
    jax.tree.map(np.testing.assert_array_equal, eager,
                 diagnostics.mismatch(logp, behaviour, mask.astype(kind)))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6,
                                 atol=1e-7),
               _mismatch(logp, behaviour, mask), eager)
  half = diagnostics.mismatch(jnp.bfloat16(logp), jnp.bfloat16(behaviour), mask)
  assert {x.dtype for x in jax.tree.leaves(half)} == {np.dtype(np.float32)}


def test_no_gradient():
  logp, behaviour, _ = draws.tokens(6)
  def total(x):
    metrics = diagnostics.mismatch(x, behaviour, draws.mask())
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(metrics))
  np.testing.assert_array_equal(jax.jit(jax.grad(total))(logp), 0)


def test_errors_name_the_argument():
  x = np.zeros((2, 3), np.float32)
  with pytest.raises(ValueError, match="mismatch: logp_behaviour: .*shape"):
    diagnostics.mismatch(x, x[:1], x)
  with pytest.raises(ValueError, match="mismatch: logp: .*floating"):
    diagnostics.mismatch(x.astype(np.int32), x, x)
  with pytest.raises(ValueError, match="mismatch: mask: "):
    diagnostics.mismatch(x, x, x[:1])


def test_correction_literal():
  # w = [4, 2, 1, 0.25], cap 2: cut by 2 in one of four. IcePop [0.5, 2]
  # loses 4 and 0.25.
  num, mask = draws.put(np.log([4, 2, 1, .25])), draws.put(np.ones(4), bool)
  num = np.nextafter(num, np.float32(0))  # 2 is inside
  for name, weights, want in (
      ("tis", corrections.tis(num, 0 * num, mask, cap=2.),
       (5.25 / 4, .5, .25, 0)),
      ("icepop", corrections.icepop(num, 0 * num, mask, low=.5, high=2.),
       (.75, 4.25 / 4, .5, .5))):
    got = diagnostics.finish(diagnostics.correction(name, weights, mask))
    names = ("weight_mean", "lost_mass", "changed_frac", "masked_frac")
    assert set(got) == {f"{name}/{metric}" for metric in names}
    for metric, value in zip(names, want):
      np.testing.assert_allclose(
          got[f"{name}/{metric}"], value, rtol=1e-5, err_msg=metric)


def test_histogram_quantiles():
  x = np.float32(np.random.default_rng(0).normal(size=(4, 500)))
  hist = diagnostics.histogram(x, np.ones_like(x, bool))
  assert hist.total.sum() == hist.count == x.size
  got = diagnostics.quantiles(hist)
  for name, q in dict(p01=.01, p50=.5, p99=.99, p999=.999).items():
    want = np.quantile(x, q, method="inverted_cdf")
    assert want - 1e-6 <= got[name] <= want + .0201


def test_finish_names():
  got = diagnostics.finish({
      "a/x": Mean(jnp.float32(6), jnp.float32(3)), "a/max": Max(jnp.float32(7)),
      "b_moments": Mean(jnp.float32([4, 8]), jnp.float32(4)),
      "c/moments": Mean(jnp.float32([4, 4]), jnp.float32(4))})
  assert got == {"a/x": 2, "a/max": 7, "b_weight_mean": 1, "b_ess": .5,
                 "c/weight_mean": 1, "c/ess": 1}
  assert all(type(value) is float for value in got.values())


def test_case_A07_the_sequence_weight_is_the_exp_of_the_sum():
  # 0.1 - 0.2 + 0.3: e^0.2 = 1.221403, not 3.273760; with mask [1 0 1], e^0.4.
  logp = np.zeros((draws.B, draws.T), np.float32)
  logp[0, :3] = .1, -.2, .3
  for mask, want in (([1, 1, 1], 1.221403), ([1, 0, 1], 1.491825)):
    on = np.zeros((draws.B, draws.T), bool)
    on[0, :3] = mask
    got = _finished(logp, 0 * logp, on)
    np.testing.assert_allclose(got["is/sequence_weight_mean"], want, rtol=1e-6)


def test_case_J02_an_absent_metric_leaves_the_others_alone():
  absent = Mean(np.float32(0), np.float32(0))
  one, two = (Mean(np.float32(x), np.float32(1)) for x in (.5, .7))
  mean = one + absent + two
  np.testing.assert_allclose((mean.value(), mean.count), (.6, 2), rtol=1e-6)
  assert np.isnan(diagnostics.finish(dict(x=absent + absent))["x"])
