"""ops/values.py: recursions over the tokens of a row, and the value loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import advantages as twins_adv
from reference import draws, values as twins
from rl_is.ops import values

NAMES = ("gae", "vtrace", "retrace", "importance_corrected_td_errors")


@functools.partial(jax.jit, static_argnames=("name", "mask_rule"))
def _jitted(name, *args, **constants):
  return getattr(values, name)(*args, **constants)


def _run(*args, **constants):
  return jax.device_get(_jitted(*args, **constants))


def _inputs(seed=0, dtype=np.float32):
  """logp, behaviour, reward, q, value; the mask has a hole and an empty row."""
  logp, behaviour, r = draws.tokens(seed, dtype=dtype)
  q, v, _ = draws.tokens(seed + 100, dtype=dtype)
  return logp, behaviour, r, q, v


def _args(name, logp, behaviour, r, q, v):
  return dict(gae=(r, v), retrace=(logp, behaviour, r, q, v)).get(
      name, (logp, behaviour, r, v))


def test_literal():
  # One row: r = [1, 2], V = [3, 5], gamma .5, lam .5; then a hole before the
  # second token, and the row again.
  r = draws.pad([[1, 2], [1, 2]])
  v = draws.pad([[3, 5], [3, 5]])
  mask = draws.pad(np.bool_([[1, 1], [1, 1]]))
  r[1, :3], v[1, :3], mask[1, :3] = [1, 99, 2], [3, 99, 5], [1, 0, 1]
  got = _run("gae", r, v, mask, gamma=.5, lam=.5)
  # d = [1 + 2.5 - 3, 2 - 5] = [.5, -3]; A = [.5 - .75, -3].
  np.testing.assert_allclose(got.adv[0, :2], [-.25, -3])
  np.testing.assert_allclose(got.adv[1, :3], [-.25, 0, -3])
  np.testing.assert_allclose(got.target[0, :2], [2.75, 2])
  # k = [4, 1/2], bars 2 (rho), 1 (c), 3 (pg), lam 1: e_2 = .5 * -3 = -1.5,
  # e_1 = 2 * .5 + .5 * 1 * -1.5 = .25; q = [1 + .5 (5 - 1.5), 2];
  # A = [3 (2.75 - 3), .5 (2 - 5)].
  l = draws.pad(np.log([[4, .5], [4, .5]]))
  l[1, :3] = np.log([4, 9, .5])
  got = _run("vtrace", l, np.zeros_like(l), r, v, mask, gamma=.5, lam=1.,
             rho_bar=2., c_bar=1., pg_bar=3.)
  for row, at in ((0, [0, 1]), (1, [0, 2])):
    np.testing.assert_allclose(got.target[row, at], [3.25, 3.5], rtol=1e-6)
    np.testing.assert_allclose(got.q[row, at], [2.75, 2], rtol=1e-6)
    np.testing.assert_allclose(got.adv[row, at], [-.75, -1.5], rtol=1e-6)
  # e_2 = .5 * -3 = -1.5; e_1 = 4 (.5 + .25 * -1.5) = .5.
  got = _run("importance_corrected_td_errors", l, np.zeros_like(l), r, v, mask,
             gamma=.5, lam=.5)
  np.testing.assert_allclose(got[0, :2], [.5, -1.5], rtol=1e-6)
  # q = [2, 4]: d = [1 + 2.5 - 2, 2 - 4] = [1.5, -2], c_2 = .5 * .5;
  # target = [2 + 1.5 + .5 * .25 * -2, 4 - 2] = [3.25, 2].
  q = draws.pad([[2, 4], [0, 0]])
  got = _run("retrace", l, np.zeros_like(l), r, q, v, mask, gamma=.5, lam=.5)
  np.testing.assert_allclose(got.target[0, :2], [3.25, 2], rtol=1e-6)
  np.testing.assert_allclose(got.adv[0, :2], [.25, -3], rtol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_twins(x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  mask = draws.mask()
  close = functools.partial(np.testing.assert_allclose, rtol=tol, atol=tol)
  g = dict(gamma=.9, lam=.8)
  logp, behaviour, r, q, v = _inputs(1, dtype)
  with jax.enable_x64(x64):
    adv = _run("gae", r, v, mask, **g).adv
    assert adv.dtype == dtype
    close(adv, twins.gae(r, v, mask, **g))
    more = dict(g, rho_bar=1.5, c_bar=1.2, pg_bar=2., leak=.2)
    got = _run("vtrace", logp, behaviour, r, v, mask, **more)
    for x, y in zip((got.adv, got.target, got.q),
                    twins.vtrace(logp, behaviour, r, v, mask, **more)):
      close(x, y)
    close(_run("retrace", logp, behaviour, r, q, v, mask, **g).target,
          twins.retrace(logp, behaviour, r, q, v, mask, **g))
    close(_run("importance_corrected_td_errors", logp, behaviour, r, v, mask,
               **g), twins.td_errors(logp, behaviour, r, v, mask, **g))
    for ddof in (0, 1):
      close(_run("whiten", v, mask, ddof=ddof),
            twins_adv.whiten(v, mask, ddof))


def test_value_loss():
  # old 1, G 3, clip 1 -> V within [0, 2]; V = [1.5, 4, 2.9, -1, 2]: free
  # [2.25, 1, .01, 16, 1], bound [2.25, 1, 1, 9, 1]: only the third binds.
  value = draws.put([1.5, 4, 2.9, -1, 2])
  old, target = draws.put(np.ones(5)), draws.put(np.full(5, 3))
  mask = draws.put(np.ones(5), bool)
  loss = lambda v: jnp.sum(
      values.value_loss(v, old, target, mask, clip=1.).loss)
  got = values.value_loss(value, old, target, mask, clip=1.)
  np.testing.assert_allclose(draws.take(got.loss, 5), [1.125, .5, .5, 8, .5])
  np.testing.assert_array_equal(
      draws.take(got.aux["clip_value"], 5), [0, 0, 1, 0, 0])
  np.testing.assert_allclose(
      draws.take(jax.grad(loss)(value), 5), [-1.5, 1, 0, -4, -1])
  v, old, target = draws.tokens(5)
  mask = draws.mask()
  want = twins.value_loss(v, old, target, mask, .2)
  one = lambda v: values.value_loss(v, old, target, mask, clip=.2)
  np.testing.assert_allclose(one(v).loss, want[0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(jax.grad(lambda v: one(v).loss.sum())(v), want[1],
                             rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(one(v).aux["clip_value"], want[2])
  plain = values.value_loss(v, old, target, mask, clip=jnp.inf)
  np.testing.assert_allclose(plain.loss, mask * (v - target)**2 / 2, rtol=1e-5)
  junk = [draws.fill(x, mask, draws.JUNK) for x in (v, old, target)]
  again = lambda v: values.value_loss(v, *junk[1:], mask, clip=.2).loss
  np.testing.assert_array_equal(again(junk[0]), one(v).loss)
  np.testing.assert_array_equal(jax.grad(lambda v: again(v).sum())(junk[0]),
                                jax.grad(lambda v: one(v).loss.sum())(v))


def test_identities():
  logp, behaviour, r, q, v = _inputs(2)
  mask = draws.mask()
  g = dict(gamma=.9, lam=.8)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  gae = _run("gae", r, v, mask, **g)
  # On-policy, every correction is the lambda return.
  close(_run("vtrace", logp, logp, r, v, mask, **g).target, gae.target)
  close(v * mask + _run("importance_corrected_td_errors", logp, logp, r, v,
                        mask, **g), gae.target)
  close(_run("retrace", logp, logp, r, v, v, mask, **g).target, gae.target)
  # lam = 1: the return minus the value; leak 1: no cap at all.
  close(_run("gae", r, v, mask, gamma=.9, lam=1.).target,
        values.returns(r, mask, gamma=.9))
  free = _run("vtrace", logp, behaviour, r, v, mask, rho_bar=np.inf,
              c_bar=np.inf, **g)
  close(free.target - v * mask,
        _run("importance_corrected_td_errors", logp, behaviour, r, v, mask, **g))
  close(free.target, _run("vtrace", logp, behaviour, r, v, mask, leak=1.,
                          **g).target)
  full = np.ones_like(mask)
  close(_run("gae", r, v, mask, mask_rule="ignore", **g).adv,
        mask * _run("gae", r, v, full, **g).adv)
  # The next position's value in place of the next token's (rlax).
  after = np.pad(v[:, 1:], [(0, 0), (0, 1)])
  close(_run("vtrace", logp, behaviour, r, v, full, after, **g).adv,
        _run("vtrace", logp, behaviour, r, v, full, **g).adv)


def test_outcome_reward_is_a_suffix_product():
  # A constant value b and a reward at the end: prod_{i >= t} min(1, k_i) (R - b).
  logp, behaviour, *_ = _inputs(3)
  mask = draws.mask()
  reward = np.float32([2, -1, .5, 3])
  r = values.at_last(reward, mask)
  np.testing.assert_array_equal(
      np.asarray(r).sum(axis=1), [2, -1, .5, 0])  # an empty row has no token
  got = _run("vtrace", logp, behaviour, r, np.full_like(logp, .25), mask,
             gamma=1., lam=1.)
  for i in range(draws.B):
    for t in np.flatnonzero(mask[i]):
      k = np.minimum(1, np.exp(logp - behaviour))[i, t:][mask[i, t:]]
      np.testing.assert_allclose(
          got.adv[i, t], k.prod() * (reward[i] - .25), rtol=1e-5)
      np.testing.assert_allclose(got.target[i, t], .25 + got.adv[i, t],
                                 rtol=1e-5)


def test_vtrace_converges_to_its_policy():
  # One step, three actions: E_mu[rho (r - V)] = 0 at V = sum_a pi_rho(a) r(a).
  pi, mu = np.float32([.7, .2, .1]), np.float32([.2, .3, .5])
  r = np.float32([1, -2, 4])
  for rho_bar in (.5, 1., 2., 10.):
    policy = np.exp(values.vtrace_policy(np.log(pi), np.log(mu),
                                         rho_bar=rho_bar))
    at = np.broadcast_to(policy @ r, (3, 1))
    for c_bar in (.5, 1.):
      got = _run("vtrace", np.log(pi)[:, None], np.log(mu)[:, None], r[:, None],
                 at, np.ones((3, 1)), rho_bar=rho_bar, c_bar=c_bar)
      assert abs(mu @ np.asarray(got.target - at)[:, 0]) < 1e-5
  np.testing.assert_allclose(policy, pi, rtol=1e-5)  # rho_bar above every ratio


@pytest.mark.parametrize("name", NAMES)
def test_mask_dtypes_and_gradients(name):
  mask, g = draws.mask(), dict(gamma=.9, lam=.8)
  args = _args(name, *_inputs(4))
  want = _run(name, *args, mask, **g)
  eager = getattr(values, name)(*args, mask, **g)
  junk = _run(name, *[draws.fill(x, mask, draws.JUNK) for x in args],
              mask.astype(np.int32), **g)
  for x, y, z in zip(*map(jax.tree.leaves, (want, eager, junk))):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(x, z)
    np.testing.assert_array_equal(x[~mask], 0)
  half = _run(name, *[jnp.bfloat16(x) for x in args], mask, **g)
  assert {x.dtype for x in jax.tree.leaves(half)} == {np.dtype(np.float32)}
  total = lambda *a: sum(jnp.sum(x) for x in jax.tree.leaves(
      getattr(values, name)(*a, mask, **g)))
  for x in jax.grad(total, tuple(range(len(args))))(*args):
    np.testing.assert_array_equal(x, 0)  # detached
  nan = [x.copy() for x in args]
  nan[0][0, 1] = np.nan
  out = jax.tree.leaves(_run(name, *nan, mask, **g))[0]
  # (retrace does not use the first ratio of a token, only the one before does.)
  assert np.isnan(out[0, :2]).any() and np.isfinite(out[1:]).all()


@pytest.mark.parametrize("size", [30, 1000])
def test_extreme_ratios_are_finite(size):
  mask = np.ones((draws.B, draws.T), bool)
  logp, behaviour, r, q, v = _inputs(6)
  logp = behaviour + np.float32(size) * np.sign(logp - behaviour)
  for name in NAMES[1:]:
    args = _args(name, logp, behaviour, r, q, v)
    for x in jax.tree.leaves(_run(name, *args, mask, gamma=1., lam=1.)):
      assert np.isfinite(x).all(), name
  up = behaviour + np.float32(size)  # e^20 on each of five tokens
  for x in jax.tree.leaves([
      _run("vtrace", up, behaviour, r, v, mask, gamma=1., lam=1., leak=.2),
      _run("importance_corrected_td_errors", up, behaviour, r, v, mask,
           gamma=1., lam=1.)]):
    assert np.isfinite(x).all()


def test_whiten():
  # [1, 3 | 5]: mean 3, var (4 + 0 + 4) / 2 = 4 (ddof 1).
  mask = draws.put(np.ones(3), bool)
  x = draws.put([1, 3, 5])
  got = values.whiten(draws.fill(x, mask, draws.JUNK), mask, var_eps=0.)
  np.testing.assert_allclose(draws.take(got, 3), [-1, 0, 1], atol=1e-6)
  got = values.whiten(x, mask, ddof=0, var_eps=0.)
  np.testing.assert_allclose(draws.take(got, 3)[0], -np.sqrt(1.5), rtol=1e-6)
  same = values.whiten(np.full_like(x, .7), np.ones_like(mask), var_eps=0.)
  np.testing.assert_array_equal(same, 0)
  np.testing.assert_array_equal(values.whiten(x, np.zeros_like(mask)), 0)
  few = draws.put(np.ones(1), bool)
  np.testing.assert_array_equal(values.whiten(x, few, var_eps=0.), 0)


def test_vmap_over_a_constant():
  logp, behaviour, r, _, v = _inputs(7)
  mask = draws.mask()
  bars = np.float32([.5, 1, 2])
  many = jax.vmap(lambda b: values.vtrace(
      logp, behaviour, r, v, mask, rho_bar=b).target)(bars)
  for got, bar in zip(many, bars):
    want = twins.vtrace(logp, behaviour, r, v, mask, rho_bar=float(bar))[1]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_errors_name_the_argument():
  x, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
  g = dict(gamma=1., lam=1.)
  for name in NAMES:
    args = _args(name, x, x, x, x, x)
    with pytest.raises(ValueError, match=f"{name}: value: .*like"):
      getattr(values, name)(*args[:-1], x[:1], mask, **g)
    with pytest.raises(ValueError, match=f"{name}: mask: .*shape"):
      getattr(values, name)(*args, mask[:1], **g)
    with pytest.raises(ValueError, match=f"{name}: .*floating"):
      getattr(values, name)(*args[:-1], x.astype(int), mask, **g)
  with pytest.raises(ValueError, match="gae: mask_rule: .*carry"):
    values.gae(x, x, mask, mask_rule="carri", **g)
  with pytest.raises(ValueError, match="value_loss: target"):
    values.value_loss(x, x, x[:1], mask, clip=1.)
  with pytest.raises(ValueError, match="whiten: mask"):
    values.whiten(x, mask[:1])
  with pytest.raises(ValueError, match="at_last: mask: .*B = 3"):
    values.at_last(np.zeros(3), mask)
