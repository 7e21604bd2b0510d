"""ops/rejection.py: masks that multiply nothing, and self-normalisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import draws, losses, rejection as twins
from rl_is.core.types import Weights
from rl_is.ops import corrections, rejection

MASK = draws.mask()
# Name -> constants that keep some and drop some of a draw with scale 0.5.
CASES = {
    "ratio_mask": dict(low=.7, high=1.5),
    "geometric_mask": dict(low=.9, high=1.2),
    "token_veto": dict(low=.5, high=2.2),
    "m2po": dict(tau=.1),
    "opsm": dict(delta=.05),
    "vaco_tv": dict(high=.35),
}
ROWWISE = ("geometric_mask", "token_veto")
K = [(e, s, d) for e in rejection.ESTIMATORS for s in rejection.STATISTICS
     for d in rejection.DIRECTIONS]


def _args(seed, mask=MASK, dtype=np.float32, scale=.5):
  num, behaviour, adv = draws.tokens(seed, scale, dtype)
  return [draws.fill(x, mask, 0) for x in (num, behaviour, adv)]


def _op(name, num, behaviour, adv, mask, **constants):
  constants = {**CASES.get(name, {}), **constants}
  if name in ("opsm", "vaco_tv"):
    constants["adv"] = adv
  return getattr(rejection, name)(num, behaviour, mask, **constants)


def _twin(name, num, behaviour, adv, mask, **constants):
  constants = {**CASES.get(name, {}), **constants}
  if name in ("opsm", "vaco_tv"):
    constants["adv"] = adv
  return getattr(twins, name)(num, behaviour, mask, **constants)


def _row(l):
  """(num, behaviour, mask) of one row with those log ratios."""
  l = np.float32([l])
  return draws.pad(l), draws.pad(0 * l), draws.pad(np.ones(l.shape, bool))


# w = [2, 0.5, 1 | 1.2, 3, -]; the last position is masked.
_NUM, _BEH, _M, _ADV = map(draws.pad, (
    np.log([[.8, .2, .5], [.6, .9, .1]]), np.log([[.4, .4, .5], [.5, .3, .9]]),
    np.bool_([[1, 1, 1], [1, 1, 0]]), np.float32([[-1, -1, 1], [-1, 1, 9]])))


@pytest.mark.parametrize("name,constants,keep", [
    # 2, 0.5 and 3 are outside [0.7, 1.5].
    ("ratio_mask", {}, [[0, 0, 1], [1, 0, 0]]),
    # Geometric means: (2 x 0.5 x 1)^(1/3) = 1 and sqrt(3.6) = 1.897.
    ("geometric_mask", {}, [[1, 1, 1], [0, 0, 0]]),
    # One token of row 1 is 3.
    ("token_veto", dict(low=.4), [[1, 1, 1], [0, 0, 0]]),
    # l^2 = .480, .480, 0 | .033, 1.207; without the 1.207 the mean is .248;
    # then the first .480 goes: (.480 + 0 + .033) / 3 = .171 < .2.
    ("m2po", dict(tau=.2), [[0, 1, 1], [1, 0, 0]]),
    # Mean of -l: 0 and -0.640; 0 is not > 0, then it is > -0.1.
    ("opsm", dict(delta=0.), [[1, 1, 1], [1, 1, 0]]),
    ("opsm", dict(delta=-.1), [[0, 0, 1], [1, 1, 0]]),
    # Mean |w - 1|: (1 + .5 + 0) / 3 = .5 and (.2 + 2) / 2 = 1.1 > 0.6. There
    # A l > 0 only at the token with w = 3 and A = 1.
    ("vaco_tv", dict(high=.6), [[1, 1, 1], [1, 0, 0]]),
    # From below: row 0 is dropped where A l > 0, at w = 0.5 with A = -1.
    ("vaco_tv", dict(low=.6, high=np.inf), [[1, 0, 1], [1, 1, 0]]),
])
def test_literal(name, constants, keep):
  got = _op(name, _NUM, _BEH, _ADV, _M, **constants)
  np.testing.assert_array_equal(got.keep, draws.pad(keep))
  np.testing.assert_array_equal(got.weight, draws.pad(keep))
  if name == "geometric_mask":
    np.testing.assert_allclose(got.log_ratio[1, 0], np.log(3.6) / 2, rtol=1e-6)
  else:
    np.testing.assert_allclose(
        got.log_ratio, draws.pad(np.log([[2, .5, 1], [1.2, 3, 1]])), rtol=1e-5,
        atol=1e-6)


def test_literal_k_rejection():
  # l = log 2, -log 2, so k1 = -l: -.693, .693; mean 0, sum 0, max .693.
  # k3 = e^l - 1 - l: 2 - 1 - .693 = .307, .5 - 1 + .693 = .193; mean .25.
  num, behaviour, mask = _row(np.log([2, .5]))
  for estimator, statistic, upper, keep in [
      ("k1", "token", .5, [[1, 0]]), ("k1", "mean", .1, [[1, 1]]),
      ("k1", "max", .5, [[0, 0]]), ("k2", "sum", .47, [[0, 0]]),
      ("k2", "sum", .49, [[1, 1]]), ("k3", "token", .2, [[0, 1]]),
      ("k3", "mean", .24, [[0, 0]]), ("k3", "mean", .26, [[1, 1]])]:
    got = rejection.k_rejection(num, behaviour, mask, upper=upper,
                                estimator=estimator, statistic=statistic)
    np.testing.assert_array_equal(got.keep[:1, :2], keep,
                                  f"{estimator} {statistic}")
  # The other direction mirrors k1 and k3.
  for estimator, keep in (("k1", [[0, 1]]), ("k3", [[1, 0]])):
    got = rejection.k_rejection(
        num, behaviour, mask, upper=.2, estimator=estimator, statistic="token",
        direction="num_to_behaviour")
    np.testing.assert_array_equal(got.keep[:1, :2], keep)


@pytest.mark.parametrize("name,x64", [
    *((name, False) for name in CASES), ("geometric_mask", True)])
def test_twin(name, x64):
  dtype = np.float64 if x64 else np.float32
  keeps = []
  with jax.enable_x64(x64):
    for seed in range(4):
      args = (*_args(seed, dtype=dtype), MASK)
      got, keep = _op(name, *args), _twin(name, *args)
      np.testing.assert_array_equal(got.keep, keep)
      np.testing.assert_array_equal(got.weight, keep)
      assert got.weight.dtype == got.log_ratio.dtype == dtype
      level = "sequence_mean" if name == "geometric_mask" else "token"
      np.testing.assert_allclose(
          got.log_ratio, losses.log_ratio(*args[:2], MASK, level),
          rtol=1e-5, atol=1e-5)
      keeps.append(keep[MASK])
  assert 0 < np.mean(keeps) < 1  # the constants decide something


@pytest.mark.parametrize("estimator,statistic,direction", K)
def test_twin_k_rejection(estimator, statistic, direction):
  kinds = dict(estimator=estimator, statistic=statistic, direction=direction)
  for seed in range(2):
    num, behaviour, _ = _args(seed)
    for bounds in (dict(upper=.1), dict(upper=.2, lower=.01)):
      got = rejection.k_rejection(num, behaviour, MASK, **bounds, **kinds)
      want = twins.k_rejection(num, behaviour, MASK, **bounds, **kinds)
      np.testing.assert_array_equal(got.keep, want)


# Identities.


def test_the_names_for_the_same_thing_agree():
  num, behaviour, _ = _args(5)
  args = num, behaviour, MASK
  keep = lambda w: np.asarray(w.keep)
  # A mask is IcePop without its weight.
  mask = rejection.ratio_mask(*args, low=.7, high=1.5)
  icepop = corrections.icepop(*args, low=.7, high=1.5)
  np.testing.assert_array_equal(keep(mask), keep(icepop))
  np.testing.assert_array_equal(mask.log_ratio, icepop.log_ratio)
  # A geometric mean is the mean k1, in log bounds; a veto is two maxima.
  log = dict(upper=np.log(1.2), lower=np.log(.9), estimator="k1",
             direction="num_to_behaviour")
  np.testing.assert_array_equal(
      keep(rejection.geometric_mask(*args, low=.9, high=1.2)),
      keep(rejection.k_rejection(*args, **log, statistic="mean")))
  up = rejection.k_rejection(*args, upper=np.log(1.5), estimator="k1",
                             direction="num_to_behaviour", statistic="max")
  down = rejection.k_rejection(*args, upper=-np.log(.5), estimator="k1",
                               direction="behaviour_to_num", statistic="max")
  np.testing.assert_array_equal(
      keep(rejection.token_veto(*args, low=.5, high=1.5)),
      keep(up) & keep(down))


def test_bounds_are_inclusive_and_may_be_off():
  edge = np.float32(np.log(np.float32(1.5)))
  for l, kept in ((edge, True), (np.nextafter(edge, np.float32(9)), False)):
    args = num, behaviour, mask = _row([l])
    for got in (rejection.ratio_mask(*args, low=0., high=1.5),
                rejection.token_veto(*args, low=0., high=1.5)):
      assert got.keep[0, 0] == kept
  for l in (-1000., 1000.):
    num = _row([l])[0]
    for name in ("ratio_mask", "geometric_mask", "token_veto"):
      got = _op(name, num, behaviour, num, mask, low=0., high=np.inf)
      assert got.keep[0, 0]


@pytest.mark.parametrize("name", CASES)
def test_equal_policies_are_kept(name):
  num, _, adv = _args(6)
  got = _op(name, num, num, adv, MASK)
  np.testing.assert_array_equal(got.keep, MASK)
  np.testing.assert_array_equal(got.weight, MASK)
  np.testing.assert_array_equal(got.log_ratio, 0)


def test_m2po_ties_and_an_impossible_threshold():
  # Mean of four equal l^2 = 1 and a 0 is .8; without the first .75; then .67.
  num, behaviour, mask = _row([1, -1, 1, -1, 0])
  got = rejection.m2po(num, behaviour, mask, tau=.7)
  np.testing.assert_array_equal(got.keep[:1], [[0, 0, 1, 1, 1]])
  got = rejection.m2po(num, behaviour + np.float32(.5), mask, tau=.2)
  np.testing.assert_array_equal(got.keep, False)


# Versions.


def test_version_mask():
  version = np.int32([[7, 5, 4, -1], [7, 8, 3, 7], [7, 6, 7, 0]])
  mask = np.bool_([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
  # At version 7: lags 0 2 3 - | 0 -1 4 0 | 0 1 0 -; version 8 is of the future.
  got = rejection.version_mask(version, 7, mask, max_lag=2)
  np.testing.assert_array_equal(
      got.keep, [[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 0]])
  rows = rejection.version_mask(version, 7, mask, max_lag=2, level="sequence")
  np.testing.assert_array_equal(
      rows.keep, [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
  np.testing.assert_array_equal(rows.weight, rows.keep)
  np.testing.assert_array_equal(got.log_ratio, 0)
  bad = rejection.unknown_versions(version, 7, mask)
  assert (bad.total, bad.count) == (1, 10)
  bad = rejection.unknown_versions(version, 7, np.ones_like(mask))
  assert (bad.total, bad.count) == (2, 12)
  for level in ("token", "sequence"):
    for seed in range(3):
      v = np.random.default_rng(seed).integers(-1, 9, mask.shape)
      for now in (7, 8):
        np.testing.assert_array_equal(
            rejection.version_mask(v, now, mask, max_lag=3, level=level).keep,
            twins.version_mask(v, now, mask, max_lag=3, level=level))
  for wrong, match in ((dict(version=version[0]), "version: .*rank 2"),
                       (dict(version=version * 1.), "version: .*integer"),
                       (dict(mask=mask[:2]), "mask: .*shape"),
                       (dict(level="row"), "level: unknown name")):
    kwargs = {**dict(version=version, version_now=7, mask=mask, max_lag=2),
              **wrong}
    with pytest.raises(ValueError, match=f"version_mask: .*{match}|{match}"):
      rejection.version_mask(**kwargs)


# Self-normalisation.


def test_self_normalise():
  w = draws.pad([[2, 0, 1], [4, 9, 9]])
  mask = draws.pad(np.bool_([[1, 1, 1], [1, 0, 0]]))
  given = Weights(w, w > 0, np.log(w + 1))
  # Tokens: (2 + 0 + 1 + 4) / 4 = 1.75. Rows: (1 + 4) / 2 = 2.5.
  for level, mean in (("token", 1.75), ("sequence", 2.5)):
    got = rejection.self_normalise(given, mask, level=level)
    np.testing.assert_allclose(got.weight, w * mask / mean, rtol=1e-6)
    assert got.keep is given.keep and got.log_ratio is given.log_ratio
    num, behaviour, _ = _args(7)
    tis = corrections.tis(num, behaviour, MASK, cap=1.5)
    got = rejection.self_normalise(tis, MASK, level=level)
    want = twins.self_normalise(np.asarray(tis.weight), MASK, level=level)
    np.testing.assert_allclose(got.weight, want, rtol=1e-5)
  zero = rejection.self_normalise(Weights(0 * w, w > 0, w), mask)
  np.testing.assert_array_equal(zero.weight, 0)
  nan = rejection.self_normalise(
      Weights(np.where(w == 4, np.nan, w), w > 0, w), mask)
  assert np.isnan(nan.weight[mask]).all()
  junk = rejection.self_normalise(
      Weights(draws.fill(w, mask, draws.JUNK), w > 0, w), mask)
  np.testing.assert_array_equal(
      junk.weight, rejection.self_normalise(given, mask).weight)
  with pytest.raises(ValueError, match="self_normalise: mask"):
    rejection.self_normalise(given, mask[:1])
  with pytest.raises(ValueError, match="level: unknown name 'row'"):
    rejection.self_normalise(given, mask, level="row")


# Masks, extremes, transformations.


def _all(num, behaviour, adv, mask):
  out = {name: _op(name, num, behaviour, adv, mask) for name in CASES}
  for e, s, d in K:
    out[e, s, d] = rejection.k_rejection(
        num, behaviour, mask, upper=.1, estimator=e, statistic=s, direction=d)
  return list(out.values())


_jitted = jax.jit(_all)


@pytest.mark.parametrize("junk", [*draws.JUNK, draws.JUNK])
def test_junk_off_the_mask_jit_and_kinds_of_mask(junk):
  args = _args(8)
  dirty = [draws.fill(x, MASK, junk) for x in args]
  want = _jitted(*args, MASK)
  jax.tree.map(np.testing.assert_array_equal, _jitted(*dirty, MASK), want)
  for x in jax.tree.leaves(want):
    np.testing.assert_array_equal(x[~MASK], 0)
  if junk is draws.JUNK:
    eager = _all(*dirty, MASK.astype(np.float32))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
                 eager, want)
    jax.tree.map(np.testing.assert_array_equal,
                 _all(*dirty, MASK.astype(np.int32)), eager)


def test_extreme_ratios_and_an_empty_mask():
  l = np.zeros((draws.B, draws.T), np.float32)
  l[:, 0] = -1000, -30, 30, 1000
  full = np.ones_like(l, bool)
  for got in _jitted(l, 0 * l, -np.sign(l), full):
    np.testing.assert_array_equal(got.weight, got.keep)  # finite
  for got in _jitted(l, 0 * l, l, ~full):
    for x in jax.tree.leaves(got):
      np.testing.assert_array_equal(x, 0)
  # All but the sign-blind means of opsm see the outliers.
  for name in ("ratio_mask", "token_veto", "m2po"):
    assert not _op(name, l, 0 * l, l, full).keep[:, 0].any()
  assert not _op("vaco_tv", l, 0 * l, l, full).keep[2:, 0].any()


def test_an_unmasked_nan_is_seen():
  """Kept, with weight NaN: never dropped in silence."""
  num, behaviour, adv = _args(9)
  num[0, 1] = np.nan
  num[0, 0] = 50.  # an outlier beside it drops nothing on its behalf
  for got in _jitted(num, behaviour, adv, MASK):
    assert got.keep[0, 1] and np.isnan(got.weight[0, 1])
    assert np.isfinite(got.weight[1:]).all()


def test_everything_is_detached_and_constants_are_an_axis():
  num, behaviour, adv = _args(10)
  def total(x, y, a):
    some = [_op(name, x, y, a, MASK) for name in ("ratio_mask", "vaco_tv")]
    some.append(rejection.self_normalise(corrections.tis(x, y, MASK, cap=2.),
                                         MASK))
    return sum(jnp.sum(w.weight) + jnp.sum(w.log_ratio) for w in some)
  for grad in jax.grad(total, argnums=(0, 1, 2))(num, behaviour, adv):
    np.testing.assert_array_equal(grad, 0)
  for name in ("token_veto", "vaco_tv"):
    many = {c: v * np.float32([1, .5, 2]) for c, v in CASES[name].items()}
    got = jax.vmap(
        lambda c: _op(name, num, behaviour, adv, MASK, **c).keep)(many)
    for i in range(3):
      one = {c: v[i] for c, v in many.items()}
      np.testing.assert_array_equal(
          got[i], _op(name, num, behaviour, adv, MASK, **one).keep)


def test_rows_may_be_permuted():
  args = (*_args(11), MASK)
  order = np.array([2, 0, 3, 1])
  want = _jitted(*args)
  got = _jitted(*(x[order] for x in args))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y[order], rtol=1e-6, atol=1e-7), got, want)


@pytest.mark.parametrize("name", [*CASES, "k_rejection"])
def test_errors_name_the_argument(name):
  x = np.zeros((2, 3), np.float32)
  good = dict(num=x, behaviour=x, adv=x, mask=x)
  shown = dict(behaviour="logp_behaviour", adv="adv", mask="mask")
  constants = dict(upper=1.) if name == "k_rejection" else {}
  outer = "ratio_mask" if name == "geometric_mask" else name
  for arg, argument in shown.items():
    if arg == "adv" and name not in ("opsm", "vaco_tv"):
      continue
    with pytest.raises(ValueError, match=f"{outer}: {argument}: .*shape"):
      _op(name, **{**good, arg: x[:1]}, **constants)
    if arg != "mask":
      with pytest.raises(ValueError, match=f"{outer}: {argument}: .*floating"):
        _op(name, **{**good, arg: x.astype(int)}, **constants)
  if name == "k_rejection":
    for choice in ("estimator", "statistic", "direction"):
      with pytest.raises(ValueError, match=f"{choice}: unknown name 'kk'"):
        _op(name, **good, upper=1., **{choice: "kk"})


def test_bfloat16_in_float32_out():
  args = [jnp.asarray(x, jnp.bfloat16) for x in _args(12)]
  for got in _all(*args, MASK):
    assert got.weight.dtype == got.log_ratio.dtype == jnp.float32


def test_tis_floor():
  # w = .1, .6, 3: raised to 0.5, left, cut to 2.
  num, behaviour, mask = _row(np.log([.1, .6, 3]))
  tis = functools.partial(corrections.tis, num, behaviour, mask, cap=2.)
  np.testing.assert_allclose(tis(floor=.5).weight[0, :3], [.5, .6, 2],
                             rtol=1e-6)
  np.testing.assert_array_equal(tis(floor=0.).weight, tis().weight)
  np.testing.assert_array_equal(tis(floor=.5).keep, mask)


def test_trace_is_the_product_of_truncated_ratios():
  """Ratios [2, 1/2, 1/4], cap 1: [1 * 1/2 * 1/4, 1/2 * 1/4, 1/4]; the product
  truncated afterwards (tis at level suffix) would be min(1/4, 1) first."""
  from rl_is.ops import corrections
  num = jnp.log(jnp.array([[2.0, 0.5, 0.25, 7.0]]))
  mask = jnp.array([[True, True, True, False]])
  got = corrections.trace(num, jnp.zeros_like(num), mask, cap=1.0)
  np.testing.assert_allclose(got.weight, [[1 / 8, 1 / 8, 1 / 4, 0]], rtol=1e-6)
  wide = corrections.trace(num, jnp.zeros_like(num), mask, cap=jnp.inf).weight
  tis = corrections.tis(num, jnp.zeros_like(num), mask, cap=jnp.inf,
                        level="suffix").weight
  np.testing.assert_allclose(wide, tis, rtol=1e-6)


def test_k_rejection_may_clamp_every_estimator():
  """verl: a token beyond 20 nats counts as 20 in a row's k1."""
  num, behaviour = np.float32([[-35, -1]]), np.float32([[-5, -21]])
  mask = np.ones((1, 2), bool)  # l = -30, 20: -k1 sums to -10, clamped to 0
  op = functools.partial(
      rejection.k_rejection, num, behaviour, mask, estimator="k1",
      statistic="sum", lower=-1., upper=1.)
  np.testing.assert_array_equal(op().keep, False)
  np.testing.assert_array_equal(op(clamped="all").keep, True)
  np.testing.assert_array_equal(
      op(clamped="all", max_log_ratio=25.).keep, False)
  with pytest.raises(ValueError, match="clamped"):
    op(clamped="k2")
