"""ops/corrections.py: detached weights and masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import draws, losses
from rl_is.core.types import Weights
from rl_is.ops import aggregate, corrections, diagnostics, ratios, surrogates

LEVELS = sorted(ratios.LEVELS)
CONSTANTS = {
    "tis": dict(cap=1.5),
    "mis": dict(cap=1.5),
    "icepop": dict(low=.7, high=1.5),
}
NAMES = sorted(CONSTANTS)
ALL = [(name, level) for name in NAMES for level in LEVELS]


def _op(name, num, behaviour, mask, level="token", **constants):
  return getattr(corrections, name)(num, behaviour, mask, level=level,
                                    **{**CONSTANTS[name], **constants})


@functools.partial(jax.jit, static_argnames=("name", "level"))
def _jitted(name, level, constants, num, behaviour, mask):
  return _op(name, num, behaviour, mask, level, **constants)


def _run(name, num, behaviour, mask, level="token", **constants):
  # Constants are traced: one compilation for all their values.
  return jax.device_get(_jitted(
      name, level, {**CONSTANTS[name], **constants}, num, behaviour, mask))


def _tokens(name, log_ratio, **constants):
  """Weights of those log ratios; up to B of them are one-token rows."""
  n = np.size(log_ratio)
  got = _run(name, draws.put(log_ratio), draws.put([]),
             draws.put(np.ones(n), bool), **constants)
  return jax.tree.map(lambda x: draws.take(x, n), got)


# w = [2, 0.5, 1 | 1.2, 3, -]; the last position is masked.
_LITERAL = {name: draws.pad(x) for name, x in dict(
    num=np.log([[.8, .2, .5], [.6, .9, .1]]),
    behaviour=np.log([[.4, .4, .5], [.5, .3, .9]]),
    mask=np.bool_([[1, 1, 1], [1, 1, 0]])).items()}


@pytest.mark.parametrize("name,weight,keep", [
    # 2 and 3 are cut to the cap.
    ("tis", [[1.5, .5, 1], [1.2, 1.5, 0]], [[1, 1, 1], [1, 1, 0]]),
    # 2 and 3 are dropped.
    ("mis", [[0, .5, 1], [1.2, 0, 0]], [[0, 1, 1], [1, 0, 0]]),
    # 2, 3 and 0.5 are outside [0.7, 1.5].
    ("icepop", [[0, 0, 1], [1.2, 0, 0]], [[0, 0, 1], [1, 0, 0]])])
def test_literal(name, weight, keep):
  got = _run(name, **_LITERAL)
  np.testing.assert_allclose(got.weight, draws.pad(weight), rtol=1e-5)
  np.testing.assert_array_equal(got.keep, draws.pad(keep))
  np.testing.assert_allclose(
      got.log_ratio, draws.pad(np.log([[2, .5, 1], [1.2, 3, 1]])), rtol=1e-5,
      atol=1e-6)


@pytest.mark.parametrize("name,level,x64", [
    *((*one, False) for one in ALL),
    *((*one, True) for one in ALL if one[1] != "sequence_mean_token")])
def test_twin(name, level, x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  mask = draws.mask()
  num, behaviour, _ = draws.tokens(1, dtype=dtype)
  with jax.enable_x64(x64):
    got = _run(name, num, behaviour, mask, level)
    assert got.weight.dtype == got.log_ratio.dtype == dtype
  weight, keep = getattr(losses, name)(
      num, behaviour, mask, level=level, **CONSTANTS[name])
  np.testing.assert_allclose(got.weight, weight, rtol=tol, atol=tol)
  np.testing.assert_array_equal(got.keep, keep)
  np.testing.assert_allclose(
      got.log_ratio, losses.log_ratio(num, behaviour, mask, level), rtol=tol,
      atol=tol)


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_detached(name):
  num, behaviour, _ = draws.tokens(2)
  def total(x, y):
    got = _op(name, x, y, draws.mask())
    return jnp.sum(got.weight) + jnp.sum(got.log_ratio)
  for grad in jax.jit(jax.grad(total, argnums=(0, 1)))(num, behaviour):
    np.testing.assert_array_equal(grad, 0)


# Identities.


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_bound_all_are_plain_importance_sampling(level):
  args = (*draws.tokens(3)[:2], draws.mask())
  w = np.exp(losses.log_ratio(*args, level)) * args[-1]
  tis = _run("tis", *args, level, cap=np.inf)
  np.testing.assert_allclose(tis.weight, w, rtol=1e-5)
  for other in (_run("mis", *args, level, cap=np.inf),
                _run("icepop", *args, level, low=1e-9, high=np.inf)):
    np.testing.assert_array_equal(other.weight, tis.weight)
    np.testing.assert_array_equal(other.keep, args[-1])


@pytest.mark.parametrize("name", NAMES)
def test_equal_policies_have_weight_one(name):
  num, _, _ = draws.tokens(4)
  for level in LEVELS:
    got = _run(name, num, num, draws.mask(), level)
    np.testing.assert_array_equal(got.weight, draws.mask())
    np.testing.assert_array_equal(got.keep, draws.mask())


@pytest.mark.parametrize("name", NAMES)
def test_one_token_a_row_is_the_same_at_every_level(name):
  args = (*draws.tokens(5)[:2], draws.put(np.ones(draws.B), bool))
  want = _run(name, *args)
  for level in LEVELS:
    jax.tree.map(np.testing.assert_array_equal, _run(name, *args, level), want)


def test_bounds_are_inclusive():
  edges = np.asarray(jnp.log(jnp.float32([.5, 5.])))
  got = _tokens("icepop", edges, low=.5, high=5.)
  np.testing.assert_array_equal(got.keep, True)
  np.testing.assert_allclose(got.weight, [.5, 5], rtol=1e-6)
  out = np.nextafter(edges, np.float32([-9, 9]))
  got = _tokens("icepop", out, low=.5, high=5.)
  np.testing.assert_array_equal(got.keep, False)
  np.testing.assert_array_equal(got.weight, 0)
  for l, keep in zip((edges[1:], out[1:]), (True, False)):
    assert _tokens("mis", l, cap=5.).keep == keep


def test_bounds_of_a_row_bind_only_where_its_statistic_is_outside():
  """Row 0: sum .6, max 1, both above log 1.5; row 1: max .3 is inside, its sum
  -1 is below log .9. Means .3, -.5; weights at the mean."""
  l = np.float32([[1, -.4], [.3, -1.3]])
  ones, zeros = np.ones((2, 2), bool), np.zeros((2, 2), np.float32)
  for binds, want in (("always", [1.34985881, .9]), ("sum", [1.34985881, .9]),
                      ("max", [1.34985881, np.exp(-.5)])):
    got = corrections.tis(l, zeros, ones, cap=1.5, floor=.9, binds=binds,
                          level="sequence_mean")
    np.testing.assert_allclose(got.weight[:, 0], want, rtol=1e-6)
  got = corrections.tis(l[:1], zeros[:1], ones[:1], cap=1.2, binds="max",
                        level="sequence_mean")
  np.testing.assert_allclose(got.weight, 1.2, rtol=1e-6)
  with pytest.raises(ValueError, match="binds"):
    corrections.tis(l, zeros, ones, cap=1.5, binds="min")


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios(name):
  l = np.float32([-1000, -30, 30, 1000])
  got = _tokens(name, l)
  assert np.isfinite(got.weight).all()
  np.testing.assert_array_equal(got.log_ratio, l)
  weight, keep = getattr(losses, name)(
      l[:, None], 0 * l[:, None], np.ones((4, 1)), **CONSTANTS[name])
  np.testing.assert_allclose(got.weight, weight[:, 0], rtol=1e-5)
  np.testing.assert_array_equal(got.keep, keep[:, 0])
  # Without the clamp too: a cap acts before the exp.
  np.testing.assert_array_equal(
      _tokens(name, l, max_log_ratio=np.inf).keep, got.keep)
  assert np.isfinite(_tokens(name, l, max_log_ratio=np.inf).weight).all()


# Masks, dtypes, transformations.


@pytest.mark.parametrize("name,level", ALL)
@pytest.mark.parametrize("junk", [*draws.JUNK, draws.JUNK])
def test_junk_off_the_mask(name, level, junk):
  mask = draws.mask()
  args = draws.tokens(6)[:2]
  clean = [draws.fill(x, mask, 0) for x in args]
  dirty = [draws.fill(x, mask, junk) for x in args]
  got = _run(name, *dirty, mask, level)
  jax.tree.map(np.testing.assert_array_equal, got,
               _run(name, *clean, mask, level))
  for x in jax.tree.leaves(got):
    np.testing.assert_array_equal(x[~mask], 0)


@pytest.mark.parametrize("name", NAMES)
def test_jit_and_kinds_of_mask(name):
  mask = draws.mask()
  args = [draws.fill(x, mask, 0) for x in draws.tokens(7)[:2]]
  eager = _op(name, *args, mask)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
               eager, _run(name, *args, mask))
  dirty = [draws.fill(x, mask, draws.JUNK) for x in args]
  for kind in (bool, np.int32, np.float32):
    jax.tree.map(np.testing.assert_array_equal,
                 _op(name, *dirty, mask.astype(kind)), eager)


@pytest.mark.parametrize("name", NAMES)
def test_constants_may_be_an_axis(name):
  args = (*draws.tokens(8)[:2], draws.mask())
  many = {constant: c * np.float32([1, .9, 1.1, 1.2])
          for constant, c in CONSTANTS[name].items()}
  got = np.asarray(
      jax.jit(jax.vmap(lambda c: _op(name, *args, **c).weight))(many))
  for i in range(4):
    one = {constant: float(c[i]) for constant, c in many.items()}
    np.testing.assert_allclose(got[i], _run(name, *args, **one).weight,
                               rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_in_float32_out(name):
  args = [jnp.asarray(x, jnp.bfloat16) for x in draws.tokens(9)[:2]]
  got = _op(name, *args, draws.mask())
  assert got.weight.dtype == got.log_ratio.dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
def test_empty(name):
  args = draws.tokens(10)[:2]
  got = _run(name, *args, np.zeros((draws.B, draws.T), bool))
  for x in jax.tree.leaves(got):
    np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_argument(name):
  x = np.zeros((2, 3), np.float32)
  good = dict(num=x, behaviour=x, mask=x)
  shown = dict(num="logp_num", behaviour="logp_behaviour", mask="mask")
  for arg in good:
    named = f"{name}: {shown[arg]}: |log_ratio: {shown[arg]}: "
    if arg != "num":
      with pytest.raises(ValueError, match=named):
        _op(name, **{**good, arg: x[:1]})
    if arg != "mask":
      with pytest.raises(ValueError, match=f"({named}).*floating"):
        _op(name, **{**good, arg: x.astype(np.int32)})
  with pytest.raises(ValueError, match=f"{name}: logp_num: .*rank 2"):
    _op(name, x[0], x[0], x[0])
  with pytest.raises(ValueError, match="level: unknown name 'tokn'.*token"):
    _op(name, x, x, x, level="tokn")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(draws.B)),
       junk=st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_rows_may_be_permuted_and_padding_is_free(name, seed, order, junk):
  mask = draws.mask()
  args = draws.tokens(seed)[:2]
  want = _run(name, *args, mask, "sequence_mean")
  dirty = (draws.fill(x, mask, junk)[order] for x in args)
  got = _run(name, *dirty, mask[order], "sequence_mean")
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y[np.array(order)], rtol=1e-6, atol=1e-7), got, want)


# Published cases.


@pytest.mark.parametrize("kind", [bool, np.float32])
@pytest.mark.parametrize("jit", [False, True])
def test_case_A01_a_rejected_token_cannot_poison_the_loss(kind, jit):
  prox, behaviour, adv = draws.put([]), draws.put([-1000]), draws.put([1, 1])
  mask = draws.put([1, 1], kind)
  def loss(cur):
    w = corrections.icepop(prox, behaviour, mask, low=.5, high=5.)
    token = surrogates.ppo_clip(cur, prox, adv, mask, eps_low=.2, eps_high=.2)
    return aggregate.token_mean(w.weight * token.loss, mask).value(), w
  fn = jax.value_and_grad(loss, has_aux=True)
  (value, w), grad = (jax.jit(fn) if jit else fn)(prox)
  np.testing.assert_array_equal(w.weight, draws.put([0, 1]))
  np.testing.assert_array_equal(value, -.5)
  np.testing.assert_array_equal(grad, draws.put([0, -.5]))


def test_case_A08_the_weight_is_proximal_over_behaviour():
  # w = e^(-1.2 + 1.5) = 1.349859, r = e^(-1.0 + 1.2) = 1.221403.
  cur, prox, beh = (np.float32([[x]]) for x in (-1., -1.2, -1.5))
  one = np.ones((1, 1), np.float32)
  def loss(cur, prox, beh):
    w = corrections.tis(prox, beh, one, cap=2.).weight
    r = surrogates.ppo_clip(cur, prox, one, one, eps_low=.3, eps_high=.3)
    return jnp.sum(w * r.loss)
  grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
  value, grads = grad(cur, prox, beh)
  np.testing.assert_allclose(value, -1.648721, rtol=1e-6)
  np.testing.assert_allclose(grads[0], [[-1.648721]], rtol=1e-6)
  np.testing.assert_array_equal(grads[1:], 0)


def test_case_A22_weight_and_raw_log_ratio_disagree_only_when_counted():
  l = [25., 1., -25., 0.]
  got = _tokens("tis", l, cap=8.)
  np.testing.assert_array_equal(got.log_ratio, l)
  np.testing.assert_allclose(got.weight, [8, np.e, np.exp(-20), 1], rtol=1e-5)
  mask = draws.put(np.ones(4), bool)
  args = draws.put(l), draws.put([]), mask
  out = diagnostics.finish(
      diagnostics.correction("tis", _run("tis", *args, cap=8.), mask))
  assert out["tis/changed_frac"] == .25


@pytest.mark.parametrize("name,constants,want", [
    ("tis", dict(cap=2.), [.1, .5, .8, 1, 1.28, 2, 2, 2]),
    ("icepop", dict(low=.5, high=5.), [0, .5, .8, 1, 1.28, 2, 5, 0])])
def test_weight_curve(name, constants, want):
  """methods.md 3.1: what multiplies A * score at each ratio."""
  l = np.float32(np.log([.1, .5, .8, 1, 1.28, 2, 5, 6]) * (1 - 1e-6))
  mask = draws.put(np.ones(8), bool)
  behaviour, adv = draws.put([]), draws.put(np.full(8, -2))
  def loss(logp):
    w = _op(name, logp, behaviour, mask, **constants)
    return jnp.sum(w.weight * surrogates.pg(logp, adv, mask).loss)
  grad = draws.take(jax.jit(jax.grad(loss))(draws.put(l)), 8)
  np.testing.assert_allclose(grad / 2, want, rtol=1e-5)


@pytest.mark.parametrize("name,kwargs", [
    ("tis", dict(cap=2.)), ("mis", dict(cap=2.)),
    ("icepop", dict(low=.5, high=5.))])
def test_an_unmasked_nan_is_seen(name, kwargs):
  """Never dropped in silence: the weight is NaN, where it was."""
  num = np.array([[-1., np.nan]], np.float32)
  got = getattr(corrections, name)(num, num * 0 - 1, np.ones((1, 2), bool),
                                   **kwargs)
  assert got.keep.all()
  np.testing.assert_array_equal(np.isnan(got.weight), [[False, True]])


def test_icepop_may_weigh_by_zero_what_it_would_drop():
  num, behaviour = np.log(np.float32([[.3, 1, 4]])), np.zeros((1, 3), "f4")
  mask = np.ones((1, 3), bool)
  drop, zero = (corrections.icepop(num, behaviour, mask, low=.5, high=2.,
                                   outside=o) for o in ("drop", "zero"))
  np.testing.assert_allclose(zero.weight, [[0, 1, 0]], rtol=1e-6)
  np.testing.assert_array_equal(zero.weight, drop.weight)
  np.testing.assert_array_equal(drop.keep, [[0, 1, 0]])
  np.testing.assert_array_equal(zero.keep, mask)
  with pytest.raises(ValueError, match="outside"):
    corrections.icepop(num, behaviour, mask, low=.5, high=2., outside="cap")


def test_geometric_mean_of_the_weights_of_a_row():
  w = np.float32([[2, 8, 99], [4, 0, 1]])
  mask = np.bool_([[1, 1, 0], [1, 1, 1]])
  given_ = Weights(w, mask, np.zeros_like(w))
  got = corrections.geometric_mean(given_, mask)
  zero = (4 * 1e-10) ** (1 / 3)
  np.testing.assert_allclose(got.weight, [[4, 4, 0], [zero] * 3], rtol=1e-5)
  assert got.keep is given_.keep and got.log_ratio is given_.log_ratio
  exact = corrections.geometric_mean(given_, mask, log_eps=0.)
  np.testing.assert_allclose(exact.weight, [[4, 4, 0], [0] * 3], rtol=1e-6)
  nan = corrections.geometric_mean(
      Weights(np.where(w == 8, np.nan, w), mask, w), mask)
  assert np.isnan(nan.weight[0, :2]).all() and not np.isnan(nan.weight[1]).any()
  grad = jax.grad(lambda x: corrections.geometric_mean(
      Weights(x, mask, w), mask).weight.sum())(w)
  np.testing.assert_array_equal(grad, 0)
