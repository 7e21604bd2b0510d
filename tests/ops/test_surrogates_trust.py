"""ops/surrogates_trust.py: values, gradients, masks, bounds and draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import draws, surrogates as twins
from rl_is.ops import regularizers, surrogates, surrogates_trust as trust

_KEY = jax.random.key(0)
# row -> (function, static or unused-by-the-twin keywords, constants)
_TV = dict(delta_low=.1, delta_high=.1, cap=1.5)
ROWS = {
    "dppo_tv": ("dppo_tv", {}, _TV),
    "dppo_tv_ratio": ("dppo_tv", dict(form="ratio"), dict(_TV, kl_tau=.3)),
    "dppo_tv_ipo": ("dppo_tv", dict(form="ratio", sides="both"), _TV),
    "dppo_kl": ("dppo_kl", {}, dict(delta_low=.04, delta_high=.05, cap=1.5)),
    "dppo_kl_ratio": ("dppo_kl", dict(form="ratio"),
                      dict(delta_low=.04, delta_high=.05, cap=1.5)),
    "bapo": ("bapo", {}, dict(low=.6, low_max=.8, low_step=.05, high=1.2,
                              high_max=2., high_step=.05, target=.5)),
    "clip_cov": ("clip_cov", {}, dict(eps_low=.2, eps_high=.28, cov_low=.2,
                                      cov_high=5.)),
    "kl_cov": ("kl_cov", {}, dict(cov_ratio=.4, kl_coef=1.)),
}
NAMES = sorted(ROWS)
EXTREMES = (-1000., -30., 30., 1000.)


def _op(name, *args, **kwargs):
  fn, static, constants = ROWS[name]
  if fn == "clip_cov":
    static = dict(key=_KEY, cov_ratio=1.)
  return getattr(trust, fn)(*args, **{**static, **constants, **kwargs})


def _traced(name, *args, **kwargs):
  """The types and shapes that `_op` gives; it compiles nothing."""
  return jax.eval_shape(lambda *a: _op(name, *a, **kwargs), *args)


def _eager(name, level, constants, logp, anchor, adv, mask, out):
  """(TokenLoss, d sum(out * loss) / d logp)."""
  def total(x):
    got = _op(name, x, anchor, adv, mask, level=level, **constants)
    return jnp.sum(out * got.loss), got
  return jax.grad(total, has_aux=True)(jnp.asarray(logp))[::-1]


_jitted = jax.jit(_eager, static_argnames=("name", "level"))


def _run(name, logp, anchor, adv, mask, out=None, level="token", fn=_jitted,
         **kw):
  out = np.ones(np.shape(logp), np.asarray(logp).dtype) if out is None else out
  constants = {**ROWS[name][2], "max_log_ratio": 20., **kw}
  return jax.device_get(
      fn(name, level, constants, logp, anchor, adv, mask, out))


def _tokens(name, log_ratio, adv, **kwargs):
  n = np.size(log_ratio)
  # logp is 1 nat down, and down again so that it stays a log-prob.
  anchor = -1 - np.maximum(log_ratio, 0)
  args = (draws.put(anchor + log_ratio), draws.put(anchor),
          draws.put(np.broadcast_to(adv, n)), draws.put(np.ones(n), bool))
  got, grad = _run(name, *args, **kwargs)
  return draws.take(got.loss, n), draws.take(grad, n), got


def _twin(name, *args, **kwargs):
  fn, static, constants = ROWS[name]
  return getattr(twins, fn)(*args, **{**static, **constants, **kwargs})


# Literal cases.

_LITERAL = {name: draws.pad(x) for name, x in dict(
    # p - q: .4, -.2, .05 | .4, -.2
    logp=np.log([[.8, .2, .1], [.8, .2, .1]]),
    anchor=np.log([[.4, .4, .05], [.4, .4, .1]]),
    adv=[[1, 1, 1], [-1, -2, 1]],
    mask=np.bool_([[1, 1, 1], [1, 1, 0]])).items()}


@pytest.mark.parametrize("name,loss,grad,low,high", [
    # .4 up with A > 0 and -.2 with A < 0 are dropped; r = .5, 2 | 2, where 2
    # stops at 1.5.
    ("dppo_tv", [[0, -.5 * np.log(.2), -1.5 * np.log(.1)],
                 [1.5 * np.log(.8), 0, 0]],
     [[0, -.5, -1.5], [1.5, 0, 0]], [[0, 0, 0], [0, 1, 0]],
     [[1, 0, 0], [0, 0, 0]]),
    # The gradient is through r, so none where r is at the cap; and .3 l^2 with
    # its gradient .6 l on all tokens: l = ln 2, -ln 2.
    ("dppo_tv_ratio", [[0, -.5, -1.5], [1.5, 0, 0]],
     [[0, -.5, 0], [0, 0, 0]], [[0, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 0, 0]]),
    # Either sign of A: only the third token moved by less than .1.
    ("dppo_tv_ipo", [[0, 0, -1.5], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]],
     [[0, 1, 0], [0, 1, 0]], [[1, 0, 0], [1, 0, 0]]),
    # KL(.4 | .8) = .382, KL(.4 | .2) = .105, KL(.05 | .1) = .0167: drops as tv.
    ("dppo_kl", [[0, -.5 * np.log(.2), -1.5 * np.log(.1)],
                 [1.5 * np.log(.8), 0, 0]],
     [[0, -.5, -1.5], [1.5, 0, 0]], [[0, 0, 0], [0, 1, 0]],
     [[1, 0, 0], [0, 0, 0]])])
def test_literal_dppo(name, loss, grad, low, high):
  l = np.where(_LITERAL["mask"], _LITERAL["logp"] - _LITERAL["anchor"], 0)
  pull = ROWS[name][2].get("kl_tau", 0.)
  got, slope = _run(name, **_LITERAL)
  np.testing.assert_allclose(
      got.loss, draws.pad(loss) + pull * l ** 2, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
      slope, draws.pad(grad) + 2 * pull * l, rtol=1e-5, atol=1e-6)
  assert set(got.aux) == {"log_ratio", "clip_low", "clip_high", "clip_cap"}
  np.testing.assert_array_equal(got.aux["clip_low"], draws.pad(np.bool_(low)))
  np.testing.assert_array_equal(got.aux["clip_high"], draws.pad(np.bool_(high)))


def test_literal_bapo_bounds():
  # r = 1.5, A = 1; r = .5, 1, A = -1. At (.6, 1.2): 1.2 / (1.2 + 1.6) = .4286.
  # To .8 first: 1.2 / 3 = .4. Then high to 1.4: 1.4 / 3.2 = .4375 >= .43.
  args = (draws.put(np.log([1.5, .5, 1])), draws.put([]),
          draws.put([1, -1, -1]), draws.put(np.ones(3), bool))
  got = trust.bapo_bounds(None, *args, target=.43)
  np.testing.assert_allclose([got.low, got.high, got.share], [.8, 1.4, .4375],
                             rtol=1e-5)
  # The last bounds as the next start: nothing is left to be done.
  again = trust.bapo_bounds(got, *args, target=.43)
  jax.tree.map(np.testing.assert_array_equal, again, got)
  # Met at once, and never: stay, or both maxima. A step of 0 ends too.
  stay = trust.bapo_bounds(None, *args, target=.42)
  np.testing.assert_allclose([stay.low, stay.high], [.6, 1.2], rtol=1e-6)
  never = trust.bapo_bounds(None, *args, target=.99, high_step=0.)
  np.testing.assert_allclose([never.low, never.high], [.8, 1.2], rtol=1e-6)
  # Nor does one for ever that is lost in the rounding of .6 and 1.2.
  lost = trust.bapo_bounds(None, *args, target=.99, low_step=1e-9,
                           high_step=1e-9)
  np.testing.assert_allclose([lost.low, lost.high], [.6, 1.2], rtol=1e-6)


def test_literal_cov():
  # Mean A = 0, mean logp = -2: cov = [1, 1 | 2, 0]; on-policy, so L = -A.
  logp = draws.pad([[-3, -1], [-4, 0]])
  adv = draws.pad([[-1, 1], [-1, 1]])
  mask = draws.pad(np.bool_([[1, 1], [1, 1]]))
  cov = draws.pad([[1, 1], [2, 2]])
  # Above 1 and below 5: both of row 1 are silenced.
  got, grad = _run("clip_cov", logp, logp, adv, mask, cov_low=1.)
  np.testing.assert_array_equal(got.loss, np.where(cov == 2, 0, -adv))
  np.testing.assert_array_equal(got.aux["clip_cov"], cov == 2)
  np.testing.assert_array_equal(grad, got.loss)
  # floor(.5 * 4) = 2 tokens: those with 2. With l = .1 there: -A e^.1 + .1.
  anchor = logp - np.where(cov == 2, np.float32(.1), 0)
  got, grad = _run("kl_cov", logp, anchor, adv, mask, cov_ratio=.5)
  np.testing.assert_array_equal(got.aux["clip_cov"], cov == 2)
  np.testing.assert_allclose(
      got.loss, np.where(cov == 2, -adv * np.exp(.1) + .1, -adv), rtol=1e-5)
  np.testing.assert_allclose(
      grad, np.where(cov == 2, -adv * np.exp(.1) + 1, -adv), rtol=1e-5)


# Twins.


@pytest.mark.parametrize("name,level", [
    *((name, "token") for name in NAMES), ("dppo_tv_ratio", "sequence_mean"),
    ("kl_cov", "segment")])
def test_twin(name, level):
  mask = draws.mask()
  args = (*draws.tokens(1, scale=1., dtype=np.float64), mask)
  out = draws.tokens(2, dtype=np.float64)[2]
  args[0][:] = np.minimum(args[0], -1e-3)  # probabilities, for the binary KL
  args[1][:] = np.minimum(args[1], -1e-3)
  loss, grad = _twin(name, *args, out=out, level=level)
  with jax.enable_x64(True):
    got, slope = _run(name, *args, out=out, level=level)
    assert got.loss.dtype == slope.dtype == np.float64
  np.testing.assert_allclose(got.loss, loss, rtol=1e-11, atol=1e-12)
  np.testing.assert_allclose(slope, grad, rtol=1e-11, atol=1e-12)
  if level == "token":
    for clip, hit in got.aux.items():
      assert hit.any(), clip  # each branch is met


@pytest.mark.parametrize("seed", range(4))
def test_bapo_bounds_twin(seed):
  args = (*draws.tokens(seed, scale=1.), draws.mask())
  for target in (.3, .5, .7):
    got = trust.bapo_bounds(None, *args, target=target)
    want = twins.bapo_bounds(*args, target=target)
    np.testing.assert_allclose([got.low, got.high, got.share], want, rtol=1e-5)
    assert got.share >= target or (got.low, got.high) == (
        np.float32(.8), np.float32(2.))


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios(name):
  for a in (-2., 0., 2.):
    loss, grad, _ = _tokens(name, EXTREMES, a)
    assert np.isfinite(loss).all() and np.isfinite(grad).all()
    if a == 0 and name not in ("dppo_tv_ratio", "kl_cov"):  # they have a pull
      np.testing.assert_array_equal(loss, 0)
      np.testing.assert_array_equal(grad, 0)


def test_dropped_tokens_are_finite_without_the_log_clamp():
  """prime-rl: a dropped token with an infinite ratio gives 0 * inf = NaN."""
  # q = e^-1000, p = 1: 1 up, dropped.
  args = (draws.put([0.]), draws.put([-1000.]), draws.put([1.]),
          draws.put([1.], bool))
  for name in ("dppo_tv", "dppo_tv_ipo", "dppo_kl"):
    got, grad = _run(name, *args, max_log_ratio=np.inf)
    assert not got.loss.any() and not grad.any()
    assert got.aux["clip_high"].sum() == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_log_prob_is_seen(name):
  for a in (0., 1., -1.):
    loss, _, _ = _tokens(name, [np.nan, .1], [a, 1.])
    assert np.isnan(loss[0]) and np.isfinite(loss[1]), a


@pytest.mark.parametrize("name", NAMES)
def test_junk_off_the_mask_jit_and_kinds_of_mask(name):
  mask = draws.mask()
  args = draws.tokens(10)
  clean = [draws.fill(x, mask, 0) for x in args]
  want = _run(name, *clean, mask)
  np.testing.assert_array_equal(want[0].loss[~mask], 0)
  np.testing.assert_array_equal(want[1][~mask], 0)
  for junk in (*draws.JUNK, draws.JUNK):
    dirty = [draws.fill(x, mask, junk) for x in args]
    jax.tree.map(np.testing.assert_array_equal, _run(name, *dirty, mask), want)
  eager = _run(name, *dirty, mask.astype(np.int32), fn=_eager)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=1e-5, atol=1e-6), eager, want)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_gradient_is_that_of_pg(name):
  logp, _, adv = draws.tokens(3)
  kwargs = dict(cov_low=1e9) if name == "clip_cov" else {}
  _, grad = _run(name, logp, logp, adv, draws.mask(), **kwargs)
  np.testing.assert_allclose(grad, -adv * draws.mask(), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_only_logp_has_a_gradient_and_constants_may_be_an_axis(name):
  logp, anchor, adv = draws.tokens(9)
  mask = draws.mask()
  def total(a, b, x):
    return (_op(name, logp, a, b, mask).loss
            + _op(name, x, anchor, adv, mask).aux["log_ratio"]).sum()
  many = {k: c * np.float32([1, 1.1]) for k, c in ROWS[name][2].items()}
  got, grads = jax.device_get(jax.jit(lambda *args: (
      jax.vmap(lambda c: _op(name, logp, anchor, adv, mask, **c).loss)(many),
      jax.grad(total, argnums=(0, 1, 2))(*args)))(anchor, adv, logp))
  jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)
  for i in range(2):
    one = {k: c[i] for k, c in many.items()}
    np.testing.assert_allclose(
        got[i], _run(name, logp, anchor, adv, mask, **one)[0].loss, rtol=1e-5,
        atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_empty_no_rows_and_bfloat16(name):
  args = draws.tokens(14)
  got, grad = _run(name, *args, np.zeros((draws.B, draws.T), bool))
  for x in (got.loss, grad, got.aux["log_ratio"]):
    np.testing.assert_array_equal(x, 0)
  assert not any(got.aux[k].any() for k in got.aux if k.startswith("clip_"))
  none = np.zeros((0, draws.T), np.float32)
  assert _traced(name, none, none, none, none).loss.shape == none.shape
  narrow = [x.astype(jnp.bfloat16) for x in args]
  assert _traced(name, *narrow, draws.mask()).loss.dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_argument(name):
  x = np.zeros((2, 3), np.float32)
  with pytest.raises(ValueError, match="logp_anchor: .*shape"):
    _traced(name, x, x[:1], x, x)
  with pytest.raises(ValueError, match="adv: .*shape"):
    _traced(name, x, x, x[:1], x)
  with pytest.raises(ValueError, match="mask: .*shape"):
    _traced(name, x, x, x, x[:1])
  with pytest.raises(ValueError, match="logp: .*floating"):
    _traced(name, x.astype(np.int32), x, x, x)
  with pytest.raises(ValueError, match="level: unknown name 'tokn'.*token"):
    _traced(name, x, x, x, x, level="tokn")
  if name.startswith("dppo"):
    with pytest.raises(ValueError, match="form: unknown name 'rato'.*ratio"):
      _traced(name, x, x, x, x, form="rato")
  if name.startswith("dppo_tv"):
    with pytest.raises(ValueError, match="sides: unknown name 'bot'.*both"):
      _traced(name, x, x, x, x, sides="bot")


# Identities.


def test_the_pull_of_dppo_is_k2_to_the_anchor():
  logp, anchor, adv = draws.tokens(4)
  args = (logp, anchor, adv, draws.mask())
  with_, without = (_op("dppo_tv", *args, kl_tau=tau).loss for tau in (.3, 0.))
  k2 = regularizers.k2(logp, anchor, draws.mask())
  np.testing.assert_allclose(with_ - without, 2 * .3 * k2, rtol=1e-4, atol=1e-5)


def test_wide_dppo_is_plain_importance_sampling():
  args = (*draws.tokens(4), draws.mask())
  off = dict(cap=np.inf, delta_low=2., delta_high=2.)
  inf = dict(eps_low=np.inf, eps_high=np.inf)
  want = surrogates.ppo_clip(*args, **inf).loss
  got, grad = _run("dppo_tv_ipo", *args, **off)
  np.testing.assert_allclose(got.loss, want, rtol=1e-6)
  # The score form has another value and the same gradient.
  np.testing.assert_allclose(_run("dppo_tv", *args, **off)[1], grad, rtol=1e-6)


def test_bapo_is_ppo_under_its_bounds():
  args = (*draws.tokens(5), draws.mask())
  bounds = trust.bapo_bounds(None, *args)
  want = surrogates.ppo_clip(*args, eps_low=1 - bounds.low,
                             eps_high=bounds.high - 1)
  got = trust.bapo(*args)
  np.testing.assert_array_equal(got.loss, want.loss)
  for side in ("low", "high"):
    np.testing.assert_array_equal(
        got.aux[f"bound_{side}"],
        np.full(np.shape(args[0]), getattr(bounds, side)))


def test_clip_cov_draws_that_many_candidates():
  args = (*draws.tokens(6), draws.mask())
  fn = jax.jit(lambda key, ratio: trust.clip_cov(
      *args, key=key, eps_low=.9, eps_high=9., cov_ratio=ratio, cov_low=-9.,
      cov_high=9.).aux["clip_cov"])
  keys = [jax.random.key(i) for i in range(20)]
  n = int(args[-1].sum())
  for ratio, want in ((0., 0), (1e-9, 1), (3.5 / n, 3), (1., n)):
    assert all(fn(key, ratio).sum() == want for key in keys[:3])
  np.testing.assert_array_equal(fn(keys[0], .3), fn(keys[0], .3))
  hits = np.mean([fn(key, .3) for key in keys], axis=0)
  assert (hits[args[-1]] > 0).sum() > n / 2  # not always the same ones
  assert not hits[~args[-1]].any()


def test_kl_cov_has_no_pull_at_a_ratio_of_one():
  """torch's slope of |x| at 0, which is 0 (jnp.abs has 1)."""
  logp, _, adv = draws.tokens(7)
  args = (logp, logp, adv, draws.mask())
  np.testing.assert_array_equal(_run("kl_cov", *args, cov_ratio=1.)[1],
                                -adv * draws.mask())
  assert not _run("kl_cov", *args, cov_ratio=0.)[0].aux["clip_cov"].any()
