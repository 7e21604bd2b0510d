"""ops/surrogates.py: values, gradients, identities, extremes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import draws, losses
from rl_is.ops import ratios, surrogates

LEVELS = sorted(ratios.LEVELS)
CONSTANTS = {
    "pg": {},
    "ppo_clip": dict(eps_low=.2, eps_high=.28),
    "dual_clip": dict(eps_low=.2, eps_high=.28, clip_c=1.5),
    "cispo": dict(cap=1.28, floor=.7),
}
NAMES = sorted(CONSTANTS)
CLIPPED = [n for n in NAMES if n != "pg"]
EXTREMES = (-1000., -30., -20., 0., 20., 30., 1000.)


def _op(name, logp, anchor, adv, mask, level="token", **constants):
  """The TokenLoss of any surrogate: `pg` takes no anchor and no level."""
  if name == "pg":
    return surrogates.pg(logp, adv, mask)
  return getattr(surrogates, name)(logp, anchor, adv, mask, level=level,
                                   **{**CONSTANTS[name], **constants})


def _eager(name, level, constants, logp, anchor, adv, mask, out):
  """(TokenLoss, d sum(out * loss) / d logp)."""
  def total(x):
    got = _op(name, x, anchor, adv, mask, level, **constants)
    return jnp.sum(out * got.loss), got
  return jax.grad(total, has_aux=True)(jnp.asarray(logp))[::-1]


_jitted = jax.jit(_eager, static_argnames=("name", "level"))


def _run(name, logp, anchor, adv, mask, out=None, level="token", fn=_jitted,
         **constants):
  # Constants are traced: one compilation for all their values.
  out = np.ones(np.shape(logp), np.asarray(logp).dtype) if out is None else out
  return jax.device_get(fn(
      name, level, {**CONSTANTS[name], **constants}, logp, anchor, adv, mask,
      out))


def _loss(*args, **kwargs):
  return _run(*args, **kwargs)[0]


def _grad(*args, **kwargs):
  return _run(*args, **kwargs)[1]


def _twin(name, logp, anchor, adv, mask, out=None, **kwargs):
  if name == "pg":
    return losses.pg(logp, adv, mask, out)
  return getattr(losses, name)(logp, anchor, adv, mask, out=out,
                               **{**CONSTANTS[name], **kwargs})


def _levels(name):
  return [{}] if name == "pg" else [dict(level=level) for level in LEVELS]


ALL = [(name, kwargs) for name in NAMES for kwargs in _levels(name)]


def _batch(log_ratio, adv):
  """Up to B one-token rows with these log ratios (the anchor is 0)."""
  n = np.size(log_ratio)
  adv = np.broadcast_to(adv, n)
  return (draws.put(log_ratio), draws.put([]), draws.put(adv),
          draws.put(np.ones(n), bool))


def _tokens(name, log_ratio, adv, **kwargs):
  """(loss, grad) of those tokens, and the TokenLoss."""
  got, grad = _run(name, *_batch(log_ratio, adv), **kwargs)
  n = np.size(log_ratio)
  return draws.take(got.loss, n), draws.take(grad, n), got


# Literal cases: 2 x 3, the last position masked.

_LITERAL = {name: draws.pad(x) for name, x in dict(
    logp=np.log([[.9, .2, .5], [.8, .3, .5]]),
    anchor=np.log([[.6, .4, .5], [.5, .3, .1]]),
    # r = [1.5, 0.5, 1 | 1.6, 1, -]
    adv=[[2, -1, 1], [-1, 3, 1]],
    mask=np.bool_([[1, 1, 1], [1, 1, 0]])).items()}


@pytest.mark.parametrize("name,loss,grad", [
    # -A logp; gradient -A.
    ("pg", [[-2 * np.log(.9), np.log(.2), -np.log(.5)],
            [np.log(.8), -3 * np.log(.3), 0]],
     [[-2, 1, -1], [1, -3, 0]]),
    # r = 1.5, A = 2: -1.28 * 2 = -2.56, clipped. r = .5, A = -1: .8, clipped.
    # r = 1: -1. r = 1.6, A = -1: +1.6, free to pull back. r = 1, A = 3: -3.
    ("ppo_clip", [[-2.56, .8, -1], [1.6, -3, 0]],
     [[0, 0, -1], [1.6, -3, 0]]),
    # As ppo_clip, but r = 1.6 with A = -1 stops at clip_c = 1.5.
    ("dual_clip", [[-2.56, .8, -1], [1.5, -3, 0]],
     [[0, 0, -1], [0, -3, 0]]),
    # Weights min(max(r, .7), 1.28) = [1.28, .7, 1 | 1.28, 1].
    ("cispo", [[-1.28 * 2 * np.log(.9), .7 * np.log(.2), -np.log(.5)],
               [1.28 * np.log(.8), -3 * np.log(.3), 0]],
     [[-2.56, .7, -1], [1.28, -3, 0]])])
def test_literal(name, loss, grad):
  got, slope = _run(name, **_LITERAL)
  np.testing.assert_allclose(got.loss, draws.pad(loss), rtol=1e-5)
  np.testing.assert_allclose(slope, draws.pad(grad), rtol=1e-5)


@pytest.mark.parametrize("name,clips", [
    ("ppo_clip", dict(low=[[0, 1, 0], [0, 0, 0]], high=[[1, 0, 0], [0, 0, 0]])),
    ("dual_clip", dict(low=[[0, 1, 0], [0, 0, 0]], high=[[1, 0, 0], [0, 0, 0]],
                       dual=[[0, 0, 0], [1, 0, 0]])),
    ("cispo", dict(low=[[0, 1, 0], [0, 0, 0]], high=[[1, 0, 0], [1, 0, 0]]))])
def test_literal_clips(name, clips):
  aux = _loss(name, **_LITERAL).aux
  assert set(aux) == {"log_ratio", *(f"clip_{side}" for side in clips)}
  for side, want in clips.items():
    assert aux[f"clip_{side}"].dtype == bool
    np.testing.assert_array_equal(aux[f"clip_{side}"], draws.pad(want))
  np.testing.assert_allclose(
      aux["log_ratio"], draws.pad(np.log([[1.5, .5, 1], [1.6, 1, 1]])),
      rtol=1e-5, atol=1e-6)


def test_literal_gspo():
  # Row means: (.3 + .1) / 2 = .2 and (-.3 - .1) / 2 = -.2, eps .1: A = 1 clips
  # row 0 at 1.1; row 1 keeps e^-.2, and each of its two tokens has half of the
  # gradient of both: -(1 + 3) e^-.2 / 2. The token variant leaves them apart.
  logp = draws.pad([[.3, .1, 9], [-.3, -.1, 9]])
  adv = draws.pad([[1, 1, 1], [1, 3, 1]])
  mask = draws.pad(np.bool_([[1, 1, 0], [1, 1, 0]]))
  args = (logp, 0 * logp, adv, mask)
  kwargs = dict(eps_low=.1, eps_high=.1)
  w = np.exp(-.2)
  for level, grad in (("sequence_mean", [[0, 0, 0], [-2 * w, -2 * w, 0]]),
                      ("sequence_mean_token", [[0, 0, 0], [-w, -3 * w, 0]])):
    got, slope = _run("ppo_clip", *args, level=level, **kwargs)
    np.testing.assert_allclose(
        got.loss, draws.pad([[-1.1, -1.1, 0], [-w, -3 * w, 0]]), rtol=1e-5)
    np.testing.assert_allclose(slope, draws.pad(grad), rtol=1e-5)


# Twins.


@pytest.mark.parametrize("name,kwargs,x64", [
    *((name, kwargs, False) for name, kwargs in ALL),
    *((name, kwargs, True) for name, kwargs in ALL
      if kwargs.get("level") != "sequence_mean_token")])
def test_twin(name, kwargs, x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  mask = draws.mask()
  args = (*draws.tokens(1, dtype=dtype), mask)
  out = draws.tokens(2, dtype=dtype)[2]
  with jax.enable_x64(x64):
    got = _loss(name, *args, **kwargs)
    grad = _grad(name, *args, out=out, **kwargs)
    assert got.loss.dtype == dtype and grad.dtype == dtype
  loss, want = _twin(name, *args, out=out, **kwargs)
  np.testing.assert_allclose(got.loss, loss, rtol=tol, atol=tol)
  np.testing.assert_allclose(grad, want, rtol=tol, atol=tol)


def test_twin_data_meets_every_branch():
  """Else the comparison above would prove little."""
  args = (*draws.tokens(1), draws.mask())
  for name in CLIPPED:
    for clip, hit in _loss(name, *args).aux.items():
      if clip != "log_ratio":
        assert hit.any(), (name, clip)


@pytest.mark.parametrize("name,kwargs", ALL)
def test_extreme_ratios(name, kwargs):
  for a in (-2., 0., 2.):
    for l in (EXTREMES[:4], EXTREMES[4:]):
      loss, grad, _ = _tokens(name, l, a, **kwargs)
      assert np.isfinite(loss).all() and np.isfinite(grad).all()
      want = _twin(name, *_batch(l, a), **kwargs)
      for got, x in zip((loss, grad), want):
        np.testing.assert_allclose(got, draws.take(x, len(l)), rtol=1e-4)


# At a bound.


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip"])
def test_gradient_at_a_bound_is_whole(name):
  off = dict(eps_low=np.inf, eps_high=np.inf)
  if name == "dual_clip":
    off["clip_c"] = np.inf
  # With A = -1 and no bound the loss is r, as this very program computes it;
  # 1 +- eps is then r again without rounding.
  up, down = (float(r) for r in _tokens(name, [.2, -.2], -1., **off)[0])
  checks = [(.2, 2., dict(eps_high=up - 1)), (-.2, -2., dict(eps_low=1 - down))]
  if name == "dual_clip":
    checks.append((.2, -2., dict(clip_c=up)))
  for l, a, bound in checks:
    (loss,), (grad,), got = _tokens(name, [l], a, **{**off, **bound})
    assert loss == grad == -a * np.float32(up if l > 0 else down)
    assert not any(got.aux[clip].any() for clip in got.aux
                   if clip != "log_ratio")
    # A hair inside the bound there is none left.
    tight = {k: v * (1 - 1e-5) for k, v in bound.items()}
    assert _tokens(name, [l], a, **{**off, **tight})[1] == 0


def test_gradient_at_the_log_clamp_is_whole():
  for l, a in ((20., -2.), (-20., 2.)):
    _, grad, _ = _tokens("ppo_clip", [l], a)
    np.testing.assert_allclose(grad, -a * np.exp(l), rtol=1e-5)


def test_case_G07_bound_at_one_has_the_whole_gradient():
  for eps in (0., .2):
    for name in ("ppo_clip", "dual_clip"):
      _, grad, _ = _tokens(name, [0., 0.], [3., -3.], eps_low=eps, eps_high=eps)
      np.testing.assert_array_equal(grad, [-3, 3])


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "cispo"])
def test_without_the_log_clamp_a_clipped_token_is_still_finite(name):
  """l = 1000 overflows exp; what is clipped has value and no NaN gradient."""
  a = 2. if name != "dual_clip" else -2.
  loss, grad, _ = _tokens(name, [1000., 1000.], a, max_log_ratio=np.inf)
  assert np.isfinite(loss).all() and np.isfinite(grad).all()
  if name != "cispo":
    np.testing.assert_array_equal(grad, 0)


# Identities.


@pytest.mark.parametrize("name,kwargs", ALL)
def test_on_policy_the_gradient_is_that_of_pg(name, kwargs):
  logp, _, adv = draws.tokens(3)
  if kwargs.get("level") == "sequence_mean":  # spreads A over the row
    adv = np.repeat(adv[:, :1], draws.T, axis=1)
  if kwargs.get("level") in ("sequence_sum", "prefix", "suffix", "segment"):
    return  # there a token's gradient is that of several ratios
  args = (logp, logp, adv, draws.mask())
  np.testing.assert_allclose(
      _grad(name, *args, **kwargs), _grad("pg", *args), rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_infinite_eps_is_plain_importance_sampling(level):
  mask = draws.mask()
  logp, anchor, adv = draws.tokens(4)
  got = _loss("ppo_clip", logp, anchor, adv, mask, eps_low=np.inf,
              eps_high=np.inf, level=level)
  r = np.exp(losses.log_ratio(logp, anchor, mask, level))
  np.testing.assert_allclose(got.loss, -adv * r * mask, rtol=1e-5)
  assert not got.aux["clip_low"].any() and not got.aux["clip_high"].any()


@pytest.mark.parametrize("level", LEVELS)
def test_dual_clip_without_its_bound_is_ppo(level):
  args = (*draws.tokens(5), draws.mask())
  dual = _loss("dual_clip", *args, clip_c=np.inf, level=level)
  ppo = _loss("ppo_clip", *args, level=level)
  np.testing.assert_array_equal(dual.loss, ppo.loss)
  np.testing.assert_array_equal(
      _grad("dual_clip", *args, clip_c=np.inf, level=level),
      _grad("ppo_clip", *args, level=level))


@pytest.mark.parametrize("name", CLIPPED)
def test_one_token_a_row_gspo_is_ppo(name):
  mask = draws.put(np.ones(draws.B), bool)
  args = (*draws.tokens(6), mask)
  for level in LEVELS:
    np.testing.assert_array_equal(_loss(name, *args, level=level).loss,
                                  _loss(name, *args).loss)
    np.testing.assert_array_equal(_grad(name, *args, level=level),
                                  _grad(name, *args))


@pytest.mark.parametrize("name", CLIPPED)
def test_gspo_token_against_gspo(name):
  logp, anchor, adv = draws.tokens(7, scale=.2)
  mask = draws.mask()
  mean, token = (functools.partial(_loss, name, level=level) for level in
                 ("sequence_mean", "sequence_mean_token"))
  args = (logp, anchor, adv, mask)
  np.testing.assert_array_equal(mean(*args).loss, token(*args).loss)
  # Alike in gradient where the advantage is one number a row.
  args = (logp, anchor, np.repeat(adv[:, :1], draws.T, axis=1), mask)
  np.testing.assert_allclose(
      _grad(name, *args, level="sequence_mean"),
      _grad(name, *args, level="sequence_mean_token"), rtol=1e-5, atol=1e-6)


def test_cispo_with_an_infinite_cap_is_the_gradient_of_is():
  args = (*draws.tokens(8), draws.mask())
  np.testing.assert_allclose(
      _grad("cispo", *args, cap=np.inf, floor=0.),
      _grad("ppo_clip", *args, eps_low=np.inf, eps_high=np.inf), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_only_logp_has_a_gradient(name):
  logp, anchor, adv = draws.tokens(9)
  grads = jax.jit(jax.grad(
      lambda a, b: _op(name, logp, a, b, draws.mask()).loss.sum(),
      argnums=(0, 1)))(anchor, adv)
  for grad in grads:
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("name", CLIPPED)
def test_aux_is_detached(name):
  logp, *args = draws.tokens(9)
  grad = jax.jit(jax.grad(lambda x: _op(
      name, x, *args, draws.mask()).aux["log_ratio"].sum()))(logp)
  np.testing.assert_array_equal(grad, 0)


# Masks, dtypes, transformations.


@pytest.mark.parametrize("name,kwargs", ALL)
@pytest.mark.parametrize("junk", [*draws.JUNK, draws.JUNK])
def test_junk_off_the_mask(name, kwargs, junk):
  mask = draws.mask()
  args = draws.tokens(10)
  clean = (*(draws.fill(x, mask, 0) for x in args), mask)
  dirty = (*(draws.fill(x, mask, junk) for x in args), mask)
  want, got = _loss(name, *clean, **kwargs), _loss(name, *dirty, **kwargs)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  np.testing.assert_array_equal(got.loss[~mask], 0)
  grad = _grad(name, *dirty, **kwargs)
  np.testing.assert_array_equal(grad, _grad(name, *clean, **kwargs))
  np.testing.assert_array_equal(grad[~mask], 0)


@pytest.mark.parametrize("name,kwargs", ALL)
def test_jit_and_kinds_of_mask(name, kwargs):
  mask = draws.mask()
  args = [draws.fill(x, mask, 0) for x in draws.tokens(11)]
  want = _run(name, *args, mask, **kwargs)
  eager = _run(name, *args, mask, fn=_eager, **kwargs)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=1e-6, atol=1e-6), eager, want)
  dirty = [draws.fill(x, mask, draws.JUNK) for x in args]
  for kind in (bool, np.int32, np.float32):
    got = _run(name, *dirty, mask.astype(kind), fn=_eager, **kwargs)
    jax.tree.map(np.testing.assert_array_equal, got, eager)


@pytest.mark.parametrize("name", CLIPPED)
def test_constants_may_be_an_axis(name):
  args = (*draws.tokens(12), draws.mask())
  many = {constant: c * np.float32([1, .9, 1.1, 1.2])
          for constant, c in CONSTANTS[name].items()}
  got = np.asarray(
      jax.jit(jax.vmap(lambda c: _op(name, *args, **c).loss))(many))
  for i in range(4):
    one = {constant: float(c[i]) for constant, c in many.items()}
    np.testing.assert_allclose(
        got[i], _loss(name, *args, **one).loss, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_in_float32_out(name):
  args = [jnp.asarray(x, jnp.bfloat16) for x in draws.tokens(13)]
  got = _op(name, *args, draws.mask())
  assert got.loss.dtype == jnp.float32
  wide = [np.asarray(x, np.float32) for x in args]
  np.testing.assert_array_equal(got.loss, _op(name, *wide, draws.mask()).loss)


@pytest.mark.parametrize("name,kwargs", ALL)
def test_empty(name, kwargs):
  args = draws.tokens(14)
  off = np.zeros((draws.B, draws.T), bool)
  got = _loss(name, *args, off, **kwargs)
  for x in jax.tree.leaves(got):
    np.testing.assert_array_equal(x, 0)
  np.testing.assert_array_equal(_grad(name, *args, off, **kwargs), 0)


def test_no_rows():
  none = np.zeros((0, draws.T), np.float32)
  for name in NAMES:
    assert _loss(name, none, none, none, none).loss.shape == none.shape


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_argument(name):
  x = np.zeros((2, 3), np.float32)
  good = dict(logp=x, anchor=x, adv=x, mask=x)
  shown = dict(anchor="logp_anchor")
  for arg in good:
    if name == "pg" and arg == "anchor":
      continue
    named = f"{name}: {shown.get(arg, arg)}: "
    if arg != "logp":
      with pytest.raises(ValueError, match=named):
        _op(name, **{**good, arg: x[:1]})
    if arg != "mask":
      with pytest.raises(ValueError, match=f"{named}.*floating"):
        _op(name, **{**good, arg: x.astype(np.int32)})
  with pytest.raises(ValueError, match=f"{name}: logp: .*rank 2"):
    _op(name, x[0], x[0], x[0], x[0])
  if name != "pg":
    with pytest.raises(ValueError, match="level: unknown name 'tokn'.*token"):
      _op(name, x, x, x, x, level="tokn")


# Properties. Fixed shapes and jit: one compilation each.

_SETTINGS = settings(max_examples=20, deadline=None)


@pytest.mark.parametrize("name", NAMES)
@_SETTINGS
@given(seed=st.integers(0, 999), order=st.permutations(range(draws.B)))
def test_rows_may_be_permuted(name, seed, order):
  args = (*draws.tokens(seed), draws.mask())
  want = _run(name, *args, level="sequence_mean")
  got = _run(name, *(x[order] for x in args), level="sequence_mean")
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y[np.array(order)], rtol=1e-6, atol=1e-7), got, want)


@pytest.mark.parametrize("name", NAMES)
@_SETTINGS
@given(seed=st.integers(0, 999), junk=st.lists(
    st.floats(width=32), min_size=1, max_size=6))
def test_padding_columns_do_nothing(name, seed, junk):
  args = (*draws.tokens(seed), draws.mask())
  want = _run(name, *args, level="sequence_mean")
  mask = np.pad(args[-1], ((0, 0), (0, 2)))
  wide = [draws.fill(np.pad(x, ((0, 0), (0, 2))), mask, junk)
          for x in args[:-1]]
  got = _run(name, *wide, mask, level="sequence_mean")
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x[:, :draws.T], y, rtol=1e-6, atol=1e-7), got, want)
  jax.tree.map(lambda x: np.testing.assert_array_equal(x[:, draws.T:], 0), got)


# Published cases.


def test_case_A04_zero_advantage_contributes_nothing():
  for l in (100., -100., np.inf):
    for name in NAMES:
      loss, grad, _ = _tokens(name, [l, .1], [0., 1.])
      assert loss[0] == grad[0] == 0, name
      assert np.isfinite(loss[1]) and np.isfinite(grad[1])
  for name, kwargs in ALL:  # a broken log-prob is not hidden by A = 0
    loss, _, _ = _tokens(name, [np.nan, .1], [0., 1.], **kwargs)
    assert np.isnan(loss[0]) and np.isfinite(loss[1]), name


def test_case_A09_two_policies_still_clip():
  # cur = -1, beh = -2, A = 1: r = e, clipped at 1.2. Not -1 with gradient -1.
  cur, one = draws.put([-1]), draws.put([1])
  eps = dict(eps_low=.2, eps_high=.2)
  got, grad = _run("ppo_clip", cur, draws.put([-2]), one, one, **eps)
  np.testing.assert_allclose(draws.take(got.loss, 1), -1.2, rtol=1e-6)
  np.testing.assert_array_equal(grad, 0)
  got, grad = _run("ppo_clip", cur, draws.put([-1.1]), one, one, **eps)
  np.testing.assert_allclose(draws.take(got.loss, 1), -np.exp(.1), rtol=1e-6)


def test_case_A11_dual_clip_leaves_positive_advantages():
  loss, _, got = _tokens("dual_clip", np.log([1., 10., 10.]), [1., -1., 1.],
                         eps_low=.2, eps_high=.2, clip_c=3.)
  np.testing.assert_allclose(loss, [-1, 3, -1.2], rtol=1e-6)
  for clip, hit in (("dual", [0, 1, 0]), ("high", [0, 0, 1])):
    np.testing.assert_array_equal(
        draws.take(got.aux[f"clip_{clip}"], 3), np.bool_(hit))


def test_case_A22_the_exported_log_ratio_is_raw():
  # 25 nats: the loss uses e^20, the log ratio says 25; neither is a mixture.
  loss, _, got = _tokens("ppo_clip", [25.], -1.)
  assert draws.take(got.aux["log_ratio"], 1) == 25
  np.testing.assert_allclose(loss, np.exp(20.), rtol=1e-5)


def test_case_J01_clip_counts_only_where_the_bound_binds():
  batch = list(_batch(np.log([.7, .7, 1.3, 1.3, .7]), [1, -1, 1, -1, -1]))
  batch[-1] = draws.put([1, 1, 1, 1, 0])  # the last one is off
  aux = _loss("ppo_clip", *batch, eps_low=.2, eps_high=.2).aux
  np.testing.assert_array_equal(
      draws.take(aux["clip_low"], 5), np.bool_([0, 1, 0, 0, 0]))
  np.testing.assert_array_equal(
      draws.take(aux["clip_high"], 5), np.bool_([0, 0, 1, 0, 0]))


_X = [.1, .5, .8, 1, 1.28, 2, 5, 6]


@pytest.mark.parametrize("name,a,constants,want", [
    ("ppo_clip", 1., dict(eps_low=.2, eps_high=.2),
     [.1, .5, .8, 1, 0, 0, 0, 0]),
    ("ppo_clip", -1., dict(eps_low=.2, eps_high=.2),
     [0, 0, .8, 1, 1.28, 2, 5, 6]),
    ("ppo_clip", 1., dict(eps_low=.2, eps_high=.28),
     [.1, .5, .8, 1, 1.28, 0, 0, 0]),
    ("cispo", 1., dict(cap=1.28, floor=0.),
     [.1, .5, .8, 1, 1.28, 1.28, 1.28, 1.28])])
def test_weight_curve(name, a, constants, want):
  """methods.md 3.1: what multiplies A * score at each ratio."""
  # A hair towards 1, so that a bound is met from inside.
  _, grad, _ = _tokens(name, np.log(_X) * (1 - 4e-6), a, **constants)
  np.testing.assert_allclose(grad / -a, want, rtol=2e-5)
