"""ops/advantages.py and token_advantages.py: the forms beyond GRPO's four."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import advantages as twins
from reference import draws
from rl_is.core.types import Advantages
from rl_is.ops import advantages, token_advantages

N, T = 16, 5  # one shape in nearly every test


@functools.partial(jax.jit, static_argnames=("module", "name", "std", "lone"))
def _jitted(module, name, *args, **constants):
  return getattr(module, name)(*args, **constants)


def _run(name, *args, **constants):
  module = advantages if hasattr(advantages, name) else token_advantages
  return jax.device_get(_jitted(module, name, *args, **constants))


def _batch(seed, nan=0.2, dtype=np.float32):
  """Rewards, ragged shuffled groups (one of one row, one unscorable), mask."""
  rng = np.random.default_rng(seed)
  group = rng.permutation(np.repeat([0, 3, 4, 7, 15], [6, 4, 3, 1, 2]))
  reward = rng.normal(size=N)
  reward[rng.random(N) < nan] = np.nan
  reward[group == 15] = np.nan
  mask = np.arange(T) < rng.integers(0, T + 1, size=(N, 1))
  mask[:, 2] &= rng.random(N) < .7  # holes
  return reward.astype(dtype), group.astype(np.int32), mask


def _extra(seed, dtype=np.float32):
  rng = np.random.default_rng(seed + 50)
  logp = -rng.exponential(size=(N, T))
  sum_sq = np.exp(2 * logp) + .1 * rng.random((N, T))
  weight = np.exp(rng.normal(size=(N, T)))
  return tuple(x.astype(dtype) for x in (logp, sum_sq, weight))


# name -> (extra arguments, constants, twin), from (reward, group, mask, extra).
def _forms(r, g, mask, extra):
  logp, sum_sq, w = extra
  length, base = mask.sum(axis=1), np.where(g == 3, np.nan, w[:, 0])
  row_w, norm = w[:, 1], w[:, 2]
  forms = {f"grpo {std}": ("grpo", (), dict(std=std), twins.grpo(r, g, std))
           for std in advantages.STDS}
  forms.update({
      "remax": ("remax", (base,), {}, twins.remax(r, g, base)),
      "opo": ("opo", (length,), {}, twins.weighted(r, g, length)),
      "optimal_baseline": ("optimal_baseline", (row_w, norm), {},
                           twins.weighted(r, g, row_w**2 * norm)),
      "gpg": ("gpg", (), {}, twins.gpg(r, g)),
      "pass_at_k": ("pass_at_k", (), {}, twins.pass_at_k(r, g)),
      "pass_at_k std": ("pass_at_k", (), dict(std="unbiased"),
                        twins.pass_at_k(r, g, "unbiased")),
      "max_rl": ("max_rl", (), {}, twins.max_rl(r, g)),
      "reinforce_pp": ("reinforce_pp", (mask, .1 * w), dict(gamma=.9),
                       twins.reinforce_pp(r, mask, .9, .1 * w)),
      "reinforce_pp plain": ("reinforce_pp", (mask,), dict(ddof=0),
                             twins.reinforce_pp(r, mask, ddof=0)),
      "reinforce_pp_baseline": (
          "reinforce_pp_baseline", (mask, .1 * w), {}, twins.whiten(
              twins.weighted(r, g, np.ones(N))[:, None] - .1 * w,
              mask & ~np.isnan(r)[:, None])),
      "otb": ("optimal_token_baseline", (mask, logp, sum_sq, w), {},
              twins.optimal_token_baseline(r, g, mask, logp, sum_sq, w)),
      "otb lone": ("optimal_token_baseline", (mask, logp, sum_sq),
                   dict(lone="reward"), twins.optimal_token_baseline(
                       r, g, mask, logp, sum_sq, lone="reward")),
  })
  return forms


FORMS = tuple(_forms(*_batch(0), _extra(0)))
SOME = ("grpo leave_one_out", "optimal_baseline", "reinforce_pp", "otb")


def test_literal():
  # One group: rewards 4, 1, 1, 2 (mean 2), lengths 1, 2, 3, 2.
  r, g = np.float32([4, 1, 1, 2]), np.zeros(4, np.int32)
  run = lambda name, *args, **kw: getattr(advantages, name)(r, g, *args, **kw).adv
  for got, want in (
      # variance (4 + 1 + 1 + 0) / 4; of all but one: 1, 1, 2 -> 1/3 around 4/3,
      # 4, 1, 2 -> 7/3 around 7/3, and 4, 1, 1 -> 3 around 2.
      (run("grpo", std="biased", std_eps=0.), np.divide([2, -1, -1, 0], 1.5**.5)),
      (run("grpo", std="leave_one_out", std_eps=0.),
       [(4 - 4 / 3) * 3**.5, -(4 / 3) * (3 / 7)**.5, -(4 / 3) * (3 / 7)**.5, 0]),
      (run("remax", np.float32([1, 1, 1, 2])), [3, 0, 0, 0]),
      # (4 + 2 + 3 + 4) / 8 = 13 / 8.
      (run("opo", np.int32([1, 2, 3, 2])), np.subtract(r, 13 / 8)),
      # w^2 |g|^2 = 4, 0, 0, 4: (16 + 8) / 8 = 3.
      (run("optimal_baseline", np.float32([2, 0, 1, 1]),
           np.float32([1, 9, 0, 4])), [1, -2, -2, -1]),
      (run("gpg"), [2, -1, -1, 0]),  # no zero reward: factor 1
      (run("pass_at_k"), [2, 0, 0, 0]),
      (run("max_rl", mean_eps=0.), [1, -.5, -.5, 0])):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  r = np.float32([1, 0, 0, 0])  # factor 4 / 1
  np.testing.assert_allclose(run("gpg"), [3, -1, -1, -1])
  r = np.float32([3, 3, 1, 0])  # a tie for the best
  np.testing.assert_array_equal(run("pass_at_k"), 0)


def test_literal_tokens():
  # Two rows of a group, R = 3 and 1, lengths 2 and 1: returns 3, 3 | 1: mean
  # 7/3, variance (4/9 + 4/9 + 16/9) / 2 = 4/3; gamma .5: 1.5, 3 | 1.
  r, g = np.float32([3, 1]), np.zeros(2, np.int32)
  mask = np.bool_([[1, 1, 0], [1, 0, 0]])
  got = token_advantages.reinforce_pp(r, g, mask, var_eps=0.)
  s = np.sqrt(4 / 3)
  np.testing.assert_allclose(
      got.adv, [[2 / 3 / s, 2 / 3 / s, 0], [-4 / 3 / s, 0, 0]], rtol=1e-5)
  got = token_advantages.reinforce_pp(r, g, mask, gamma=.5).adv
  np.testing.assert_allclose(got, twins.whiten(
      [[1.5, 3, 9], [1, 9, 9]], mask), rtol=1e-5)
  # A hole: its first turn has no return if that starts anew there.
  hole = np.bool_([[1, 0, 1], [1, 0, 0]])
  for holes, first in (("carry", 3), ("restart", 0)):
    got = token_advantages.reinforce_pp(r, g, hole, holes=holes).adv
    np.testing.assert_allclose(got, twins.whiten(
        [[first, 9, 3], [1, 9, 9]], hole), rtol=1e-5, atol=1e-6)
  # Energy 1 - 2 p + sum p^2: p = .5, sums .5 and 1 -> .5, then 1.5 | 1:
  # B_1 = (.5 * 3 + 1 * 1) / 1.5 = 5/3; nobody else has a second token.
  logp = np.full((2, 3), np.log(.5), np.float32)
  sum_sq = np.float32([[.5, 1, 9], [1, 9, 9]])
  for lone, last in (("zero", 0), ("reward", 3)):
    got = token_advantages.optimal_token_baseline(
        r, g, mask, logp, sum_sq, lone=lone).adv
    np.testing.assert_allclose(got, [[4 / 3, last, 0], [-2 / 3, 0, 0]],
                               rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_twin(form):
  for x64, dtype, tol in ((False, np.float32, 2e-4), (True, np.float64, 1e-10)):
    if x64 and form not in SOME:
      continue
    r, g, mask = _batch(1, dtype=dtype)
    if form == "max_rl":
      r = np.abs(r)
    name, args, constants, want = _forms(r, g, mask, _extra(1, dtype))[form]
    with jax.enable_x64(x64):
      got = _run(name, r, g, *args, **constants)
    assert got.adv.dtype == dtype
    np.testing.assert_allclose(got.adv, want, rtol=tol, atol=tol)
    unscorable = np.isnan(r) | (np.isnan(args[0]) if name == "remax" else False)
    np.testing.assert_array_equal(got.keep, ~unscorable)
    np.testing.assert_array_equal(got.adv[unscorable], 0)


@pytest.mark.parametrize("form", FORMS)
def test_order_and_equal_rewards(form):
  r, g, mask = _batch(2)
  r = np.abs(r)
  extra = _extra(2)
  name, args, constants, _ = _forms(r, g, mask, extra)[form]
  want = _run(name, r, g, *args, **constants)
  rng = np.random.default_rng(2)
  order, names = rng.permutation(N), rng.permutation(N).astype(np.int32)
  got = _run(name, r[order], names[g][order], *[a[order] for a in args],
             **constants)
  np.testing.assert_allclose(got.adv, want.adv[order], rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(got.keep, want.keep[order])
  if form in SOME:
    module = advantages if hasattr(advantages, name) else token_advantages
    eager = getattr(module, name)(r, g, *args, **constants)
    np.testing.assert_allclose(eager.adv, want.adv, rtol=1e-4, atol=1e-5)
  if name in ("remax", "reinforce_pp", "reinforce_pp_baseline"):
    return
  for value in (.1, 1 / 3, .7):  # case A19: exactly nothing, whatever the size
    same = np.full(N, value, np.float32)
    got = _run(name, same, g, *args, **dict(constants))
    if constants.get("lone") != "reward":
      np.testing.assert_array_equal(got.adv, 0)


def test_case_A18_leave_one_out_std():
  # The others of the odd one are equal: their std is exactly 0, not rounding.
  g = np.zeros(8, np.int32)
  run = jax.jit(jax.vmap(
      lambda r: advantages.grpo(r, g, std="leave_one_out").adv))
  r = np.float32([[k / 100] * 7 + [0.] for k in range(1, 101)])
  got = np.asarray(run(r))
  assert np.abs(got).max() <= 10
  np.testing.assert_allclose(got[34], [1 / 7**.5] * 7 + [-.35], rtol=1e-4)
  # Nearly equal others: two passes keep the std where one would lose it.
  r = np.float32([.35, .3501, .3502, .3501, .35, .3502, .3501, 100.])
  got = advantages.grpo(r, g, std="leave_one_out").adv
  np.testing.assert_allclose(got, twins.grpo(r, g, "leave_one_out"), rtol=1e-3)


def test_identities():
  r, g, mask = _batch(3)
  ones = np.ones(N, np.float32)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  mean = _run("dr_grpo", r, g).adv
  close(_run("opo", r, g, ones).adv, mean)
  close(_run("optimal_baseline", r, g, 1e30 * ones, ones).adv, mean)
  length = np.float32(mask.sum(axis=1))
  close(_run("opo", r, g, length).adv,
        _run("optimal_baseline", r, g, ones, length).adv)
  close(_run("opo", r, g, 0 * ones).adv, mean)  # no length at all
  got = _run("batch_norm", Advantages(mean, ~np.isnan(r)))
  kept = got.adv[got.keep]
  assert abs(kept.mean()) < 1e-5 and abs(kept.std(ddof=1) - 1) < 1e-4
  # Success p of a group weighs 1 / p (MaxRL), for 0/1 rewards.
  r = np.float32([1, 0, 0, 0])
  close(advantages.max_rl(r, np.zeros(4, np.int32), mean_eps=0.).adv,
        [3, -1, -1, -1])
  # Tokens: one baseline for all, and with a token a row the batch's own.
  one = np.arange(T) < np.ones((N, 1))
  r, g, mask = _batch(4)
  a = _run("reinforce_pp_baseline", r, g, one).adv[:, 0]
  b = _run("batch_norm", _run("dr_grpo", r, g)).adv
  close(a, b)


def test_junk_under_the_mask():
  r, g, mask = _batch(5)
  logp, sum_sq, w = _extra(5)
  seen = mask & ~np.isnan(r)[:, None]
  bad = [draws.fill(x, seen, draws.JUNK) for x in (logp, sum_sq, w)]
  for name, args, junk in (
      ("reinforce_pp", (mask, w), (mask, bad[2])),
      ("reinforce_pp_baseline", (mask, w), (mask, bad[2])),
      ("optimal_token_baseline", (mask, logp, sum_sq, w), (mask, *bad))):
    np.testing.assert_array_equal(_run(name, r, g, *args).adv,
                                  _run(name, r, g, *junk).adv)
  logp[np.argmax(seen.any(axis=1)), 0] = np.nan  # but an unmasked one is seen
  assert np.isnan(_run("optimal_token_baseline", r, g, mask, logp, sum_sq,
                       w).adv).any()


def test_no_rows_and_constants():
  none = np.zeros(0, np.float32), np.zeros(0, np.int32)
  for std in advantages.STDS:
    assert advantages.grpo(*none, std=std).adv.shape == (0,)
  r, g, _ = _batch(6)
  eps = np.float32([0, .1])
  many = jax.vmap(lambda c: advantages.grpo(
      r, g, std_eps=c, std="leave_one_out").adv)(eps)
  for got, c in zip(many, eps):
    np.testing.assert_allclose(
        got, twins.grpo(r, g, "leave_one_out", float(c)), rtol=1e-4, atol=1e-5)
  half = _run("max_rl", jnp.bfloat16(r), g)
  assert half.adv.dtype == np.float32


def test_errors_name_the_argument():
  r, g, mask = np.zeros(4, np.float32), np.zeros(4, np.int32), np.ones((4, 3))
  x = np.zeros((4, 3), np.float32)
  for name, args in (("remax", (r,)), ("opo", (r,)),
                     ("optimal_baseline", (r, r)), ("gpg", ()),
                     ("pass_at_k", ()), ("max_rl", ())):
    fn = getattr(advantages, name)
    with pytest.raises(ValueError, match=f"{name}: .*equal length"):
      fn(r, g[:3], *args)
    if args:
      with pytest.raises(ValueError, match=f"{name}: .*equal length"):
        fn(r, g, *args[:-1], r[:3])
    if name != "remax":  # which does not use it
      with pytest.raises(ValueError, match=f"{name}: group: .*integer"):
        fn(r, g.astype(np.float32), *args)
  for name, args in (("reinforce_pp", ()), ("reinforce_pp_baseline", ()),
                     ("optimal_token_baseline", (x, x))):
    with pytest.raises(ValueError, match=f"{name}: mask"):
      getattr(token_advantages, name)(r, g, mask[:2], *args)
  with pytest.raises(ValueError, match="optimal_token_baseline: sum_prob_sq"):
    token_advantages.optimal_token_baseline(r, g, mask, x, x[:2])
  with pytest.raises(ValueError, match="grpo: std: .*unbiased"):
    advantages.grpo(r, g, std="unbiase")
  with pytest.raises(ValueError, match="pass_at_k: std"):
    advantages.pass_at_k(r, g, std="batch")
  with pytest.raises(ValueError, match="lone: .*zero"):
    token_advantages.optimal_token_baseline(r, g, mask, x, x, lone="zer")


def test_group_ids_out_of_range_are_refused_or_nan():
  """Dataset prompt ids are a natural mistake: never an advantage of 0."""
  reward, group = jnp.array([1.0, 0.0, 1.0]), jnp.array([7, 7, 8])
  for fn in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
    with pytest.raises(ValueError, match=r"group: expected values in \[0, 3\)"):
      fn(reward, group)
    assert np.isnan(jax.jit(fn)(reward, group).adv).all()
