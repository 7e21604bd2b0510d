"""ops/surrogates_soft.py and the two-sided cap: values, gradients, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import draws, surrogates as twins
from rl_is.ops import aggregate, surrogates, surrogates_soft as soft

CONSTANTS = {
    "two_sided": dict(eps_low=.2, eps_high=.28, delta=1.5),
    "sapo": dict(tau_pos=1., tau_neg=1.05),
    "gmpo": dict(log_low=.2, log_high=.3),
    "topr": dict(cap=1.),
    "vespo": dict(k_pos=2., lambda_pos=3., k_neg=3., lambda_neg=2.),
    "aspo": dict(eps_low=.2, eps_high=.28, clip_c=1.6, cap=1.4),
    "dro": dict(beta=.5),
    "opmd": dict(tau=.5),
}
NAMES = sorted(CONSTANTS)
PENALTIES = ("dro", "opmd")  # act where A = 0 too
EXTREMES = (-1000., -30., 30., 1000.)


def _op(name, *args, **kwargs):
  fn = getattr(surrogates if name == "two_sided" else soft, name)
  return fn(*args, **{**CONSTANTS[name], **kwargs})


def _traced(name, *args, **kwargs):
  """The types and shapes that `_op` gives; it compiles nothing."""
  return jax.eval_shape(lambda *a: _op(name, *a, **kwargs), *args)


def _eager(name, level, constants, logp, anchor, adv, mask, out):
  """(TokenLoss, d sum(out * loss) / d logp)."""
  def total(x):
    kwargs = constants if level is None else dict(constants, level=level)
    got = _op(name, x, anchor, adv, mask, **kwargs)
    return jnp.sum(out * got.loss), got
  return jax.grad(total, has_aux=True)(jnp.asarray(logp))[::-1]


_jitted = jax.jit(_eager, static_argnames=("name", "level"))


def _run(name, logp, anchor, adv, mask, out=None, level=None, fn=_jitted, **kw):
  out = np.ones(np.shape(logp), np.asarray(logp).dtype) if out is None else out
  constants = {**CONSTANTS[name], "max_log_ratio": 20., **kw}
  return jax.device_get(
      fn(name, level, constants, logp, anchor, adv, mask, out))


def _tokens(name, log_ratio, adv, **kwargs):
  """(loss, grad) of one-token rows with these log ratios; the anchor is 0."""
  n = np.size(log_ratio)
  args = (draws.put(log_ratio), draws.put([]),
          draws.put(np.broadcast_to(adv, n)), draws.put(np.ones(n), bool))
  got, grad = _run(name, *args, **kwargs)
  return draws.take(got.loss, n), draws.take(grad, n), got


# Literal cases: the log ratios of row 0 are ln 2, -ln 4; of row 1 ln 2.

_LITERAL = {name: draws.pad(x) for name, x in dict(
    logp=np.log([[.8, .1], [.6, .5]]), anchor=np.log([[.4, .4], [.3, .1]]),
    adv=[[1, 1], [-2, 1]], mask=np.bool_([[1, 1], [1, 0]])).items()}
_H2, _HQ = 1 / (1 + np.exp(-1.)), 1 / (1 + np.exp(.75))  # h(2), h(.25), tau 1
_N2 = 1 / (1 + np.exp(-1.05))
_R = np.exp((.3 - np.log(4)) / 2)  # ln 2 stops at .3; -ln 4 is free for A > 0


@pytest.mark.parametrize("name,loss,grad", [
    # r = 2, A = 1: clipped at 1.28. r = .25: free. r = 2, A = -2: delta = 1.5.
    ("two_sided", [[-1.28, -.25], [3, 0]], [[0, -.25], [0, 0]]),
    # -A (4/tau) h; the gradient is -A 4 h (1 - h) r.
    ("sapo", [[-4 * _H2, -4 * _HQ], [2 * 4 / 1.05 * _N2, 0]],
     [[-8 * _H2 * (1 - _H2), -_HQ * (1 - _HQ)],
      [16 * _N2 * (1 - _N2), 0]]),
    # Row 1, A = -2: ln 2 is above -.2, so R = 2. Row 0: only token 1 moves,
    # with half of the pull of both tokens: -(1 + 1) R / 2.
    ("gmpo", [[-_R, -_R], [4, 0]], [[0, -_R], [4, 0]]),
    # A > 0 weighs 1; row 1: min(2, 1) = 1, times -A = 2.
    ("topr", [[-np.log(.8), -np.log(.1)], [2 * np.log(.6), 0]],
     [[-1, -1], [2, 0]]),
    # W = 2/4 = .5: .25 e^1.5 = 1.12042. W = 2, A < 0: 8 e^-2 = 1.08268.
    ("vespo", [[-1.12042 * np.log(.8), -1.12042 * np.log(.1)],
               [1.08268 * 2 * np.log(.6), 0]],
     [[-1.12042, -1.12042], [2.16536, 0]]),
    # r = 2 > 1.28: 1/1.28, no gradient. r = .25: 1/r = 4 stops at 1.4, and
    # pulls on. A = -2, r = 2: stops at 1.6.
    ("aspo", [[-.78125, -1.4], [3.2, 0]], [[0, -1.4], [0, 0]]),
    # .25 l^2 - A logp; gradient .5 l - A.
    ("dro", [[.25 * np.log(2) ** 2 - np.log(.8),
              .25 * np.log(4) ** 2 - np.log(.1)],
             [.25 * np.log(2) ** 2 + 2 * np.log(.6), 0]],
     [[.5 * np.log(2) - 1, -.5 * np.log(4) - 1], [.5 * np.log(2) + 2, 0]]),
    # Row 0: S = -ln 2, .25 S^2 / 2 a token; gradient tau S - A. Row 1: ln 2.
    ("opmd", [[.125 * np.log(2) ** 2 - np.log(.8),
               .125 * np.log(2) ** 2 - np.log(.1)],
              [.25 * np.log(2) ** 2 + 2 * np.log(.6), 0]],
     [[-.5 * np.log(2) - 1] * 2, [.5 * np.log(2) + 2, 0]])])
def test_literal(name, loss, grad):
  got, slope = _run(name, **_LITERAL)
  np.testing.assert_allclose(got.loss, draws.pad(loss), rtol=2e-5)
  np.testing.assert_allclose(slope, draws.pad(grad), rtol=2e-5)


@pytest.mark.parametrize("name,clips", [
    ("two_sided", dict(low=[[0, 0], [0, 0]], high=[[1, 0], [0, 0]],
                       dual=[[0, 0], [1, 0]])),
    ("gmpo", dict(low=[[0, 0], [0, 0]], high=[[1, 0], [0, 0]])),
    ("topr", dict(high=[[0, 0], [1, 0]])),
    ("aspo", dict(low=[[0, 0], [0, 0]], high=[[1, 0], [0, 0]],
                  dual=[[0, 0], [1, 0]], cap=[[0, 1], [0, 0]])),
    *((name, {}) for name in ("sapo", "vespo", "dro", "opmd"))])
def test_literal_clips(name, clips):
  aux = _run(name, **_LITERAL)[0].aux
  assert set(aux) == {"log_ratio", *(f"clip_{side}" for side in clips)}
  for side, want in clips.items():
    np.testing.assert_array_equal(aux[f"clip_{side}"],
                                  draws.pad(np.bool_(want)))


@pytest.mark.parametrize("name,level", [
    *((name, None) for name in NAMES), ("sapo", "sequence_mean"),
    ("gmpo", "prefix"), ("aspo", "segment"), ("topr", "token")])
def test_twin(name, level):
  mask = draws.mask()
  args = (*draws.tokens(1, dtype=np.float64), mask)
  out = draws.tokens(2, dtype=np.float64)[2]
  kwargs = {} if level is None else dict(level=level)
  loss, grad = getattr(twins, name)(*args, out=out, **CONSTANTS[name], **kwargs)
  with jax.enable_x64(True):
    got, slope = _run(name, *args, out=out, level=level)
    assert got.loss.dtype == slope.dtype == np.float64
  np.testing.assert_allclose(got.loss, loss, rtol=1e-11, atol=1e-12)
  np.testing.assert_allclose(slope, grad, rtol=1e-11, atol=1e-12)
  for clip, hit in got.aux.items():
    assert clip == "log_ratio" or level or hit.any(), clip  # each branch is met


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios(name):
  for a in (-2., 0., 2.):
    loss, grad, _ = _tokens(name, EXTREMES, a)
    assert np.isfinite(loss).all() and np.isfinite(grad).all()
    want = getattr(twins, name)(
        draws.put(EXTREMES), draws.put([]), draws.put(np.full(4, a)),
        draws.put(np.ones(4), bool), **CONSTANTS[name])
    for got, x in zip((loss, grad), want):
      np.testing.assert_allclose(got, draws.take(x, 4), rtol=1e-4, atol=1e-37)
    if a == 0 and name not in PENALTIES:
      np.testing.assert_array_equal(loss, 0)
      np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_log_prob_is_seen(name):
  for a in (0., 1., -1.):
    loss, _, _ = _tokens(name, [np.nan, .1], [a, 1.])
    assert np.isnan(loss[0]) and np.isfinite(loss[1]), a
  anchor = draws.put([np.nan])
  one = draws.put([1])
  for a in (0., 1., -1.):
    got, _ = _run(name, -one, anchor, a * one, one)
    assert np.isnan(draws.take(got.loss, 1)), a


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
  adv = np.repeat(adv[:, :1], draws.T, axis=1)
  _, grad = _run(name, logp, logp, adv, draws.mask())
  np.testing.assert_allclose(grad, -adv * draws.mask(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_only_logp_has_a_gradient_and_constants_may_be_an_axis(name):
  logp, anchor, adv = draws.tokens(9)
  mask = draws.mask()
  def total(a, b, x):
    return (_op(name, logp, a, b, mask).loss
            + _op(name, x, anchor, adv, mask).aux["log_ratio"]).sum()
  many = {k: c * np.float32([1, 1.1]) for k, c in CONSTANTS[name].items()}
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
  off = np.zeros((draws.B, draws.T), bool)
  jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0),
               _run(name, *args, off))
  none = np.zeros((0, draws.T), np.float32)
  assert _traced(name, none, none, none, none).loss.shape == none.shape
  narrow = [x.astype(jnp.bfloat16) for x in args]
  assert _traced(name, *narrow, draws.mask()).loss.dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_argument(name):
  x = np.zeros((2, 3), np.float32)
  with pytest.raises(ValueError, match=f"{name}: logp_anchor: .*shape"):
    _traced(name, x, x[:1], x, x)
  with pytest.raises(ValueError, match=f"{name}: adv: .*shape"):
    _traced(name, x, x, x[:1], x)
  with pytest.raises(ValueError, match=f"{name}: mask: .*shape"):
    _traced(name, x, x, x, x[:1])
  with pytest.raises(ValueError, match=f"{name}: logp: .*floating"):
    _traced(name, x.astype(np.int32), x, x, x)
  with pytest.raises(ValueError, match="level: unknown name 'tokn'.*token"):
    _traced(name, x, x, x, x, level="tokn")


# Identities and published numbers.


def test_two_sided_is_dual_clip_where_delta_is_above_the_clip():
  args = (*draws.tokens(5), draws.mask())
  for delta in (1.28, 1.5, np.inf):
    want = surrogates.dual_clip(*args, eps_low=.2, eps_high=.28, clip_c=delta)
    got = surrogates.two_sided(*args, eps_low=.2, eps_high=.28, delta=delta)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_two_sided_below_the_clip_caps_both_signs():
  # delta 1.1 < 1.2: A > 0 stops at 1.1; A < 0 at 1.2, as clip(r) then decides.
  loss, grad, _ = _tokens("two_sided", np.log([1.15, 1.15, 2.]), [1, -1, -1],
                          eps_high=.2, delta=1.1)
  np.testing.assert_allclose(loss, [-1.1, 1.15, 1.2], rtol=1e-6)
  np.testing.assert_allclose(grad, [0, 1.15, 0], rtol=1e-6)


_X = [.1, .5, .8, 1, 1.28, 2, 5, 6]


@pytest.mark.parametrize("name,a,want", [
    ("sapo", 1., [.082, .470, .792, 1, 1.255, 1.573, .353, .160]),
    ("sapo", -1., [.081, .467, .791, 1, 1.253, 1.536, .291, .125]),
    ("vespo", 1., [.149, 1.120, 1.166, 1, .707, .199, .0002, 0]),
    ("vespo", -1., [.006, .340, .764, 1, 1.198, 1.083, .042, .010]),
    ("topr", 1., [1] * 8),
    ("topr", -1., [.1, .5, .8, 1, 1, 1, 1, 1]),
    ("aspo", 1., [3, 2, 1.25, 1, .78125, 0, 0, 0])])
def test_weight_curve(name, a, want):
  """methods.md 3.1: what multiplies A * score at each ratio."""
  # A hair towards 1, so that a bound is met from inside.
  grad = np.concatenate([_tokens(
      name, np.log(x) * (1 - 4e-6), a,
      **(dict(clip_c=3., cap=3.) if name == "aspo" else {}))[1]
                         for x in (_X[:4], _X[4:])])
  np.testing.assert_allclose(grad / -a, want, atol=6e-4)


def test_vespo_peaks_at_k_over_lambda():
  for a, peak in ((1., 2 / 3), (-1., 3 / 2)):
    _, grad, _ = _tokens("vespo", np.log(np.multiply(peak, [.98, 1, 1.02])), a)
    assert abs(grad[1]) > max(abs(grad[0]), abs(grad[2]))


def test_vespo_takes_a_sampler_weight_through_its_anchor():
  # W (prod w) with w = 2 on both tokens of a row: l grows by ln 4.
  args = dict(_LITERAL, adv=np.abs(_LITERAL["adv"]))
  shifted = dict(args, anchor=args["anchor"] - np.float32(np.log(2)))
  W = .5 * 4
  want = W ** 2 * np.exp(3 * (1 - W))
  _, grad = _run("vespo", **shifted)
  np.testing.assert_allclose(grad[0, :2], -want, rtol=1e-5)


def test_gmpo_against_gspo_on_one_outlier():
  # log r = 3 on one of 50 tokens: GMPO e^(.4/50), GSPO e^(3/50) = e^.06.
  logp = np.zeros((1, 50), np.float32)
  logp[0, 7] = 3
  one = np.ones_like(logp)
  gmpo, gspo = jax.jit(lambda x: (
      soft.gmpo(x, 0 * x, one, one, log_low=.4, log_high=.4).loss,
      surrogates.ppo_clip(x, 0 * x, one, one, eps_low=.4, eps_high=.4,
                          level="sequence_mean").loss))(logp)
  np.testing.assert_allclose(-gmpo, np.exp(.4 / 50), rtol=1e-6)
  np.testing.assert_allclose(-gspo, np.exp(.06), rtol=1e-6)


def test_opmd_and_dro_rest_at_the_closed_form():
  """p ~ p_i exp(R / tau) on a bandit has no gradient with A = R - tau log Z."""
  rng = np.random.default_rng(0)
  start, reward, tau = rng.dirichlet(np.ones(4)), rng.normal(size=4), .7
  z = np.sum(start * np.exp(reward / tau))
  logp = np.log(start * np.exp(reward / tau) / z)
  args = (draws.put(logp), draws.put(np.log(start)),
          draws.put(reward - tau * np.log(z)), draws.put(np.ones(4), bool))
  for name, constant in (("opmd", "tau"), ("dro", "beta")):
    _, grad = _run(name, *args, **{constant: tau})
    np.testing.assert_allclose(grad, 0, atol=1e-6)


def test_opmd_sums_to_the_squared_sequence_ratio():
  logp, anchor, adv = draws.tokens(6)
  mask = draws.mask()
  got = soft.opmd(logp, anchor, 0 * adv, mask, tau=.5)
  S = np.where(mask, logp - anchor, 0).sum(axis=1)
  np.testing.assert_allclose(got.loss.sum(axis=1), .25 * S ** 2, rtol=1e-5)


def test_luspo_is_gspo_summed_over_tokens():
  """(1/B) sum_i |y_i| L_i: no function of its own."""
  args = (*draws.tokens(7), draws.mask())
  adv = np.repeat(args[2][:, :1], draws.T, axis=1)
  loss = surrogates.ppo_clip(args[0], args[1], adv, args[3], eps_low=.2,
                             eps_high=.2, level="sequence_mean").loss
  n, rows = args[3].sum(axis=1), args[3].any(axis=1).sum()
  # constant_length with a length of 1 is the sum over a row's tokens.
  got = aggregate.constant_length(loss, args[3], length=1.).value()
  np.testing.assert_allclose(got, np.sum(n * loss[:, 0]) / rows, rtol=1e-5)
