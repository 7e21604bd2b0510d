"""ops/advantages.py: per group, with NaN rewards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import draws, losses
from rl_is.ops import advantages, aggregate

NAMES = ("grpo", "dr_grpo", "rloo", "reward")
GROUPED = NAMES[:3]
N = 16  # rows in every test: one compilation each


@functools.partial(jax.jit, static_argnames="name")
def _jitted(name, reward, group, **constants):
  return getattr(advantages, name)(reward, group, **constants)


def _run(*args, **kwargs):
  return jax.device_get(_jitted(*args, **kwargs))


def _batch(seed, nan=0.2, dtype=np.float32):
  """Ragged shuffled groups (one of a single row, one all NaN) and rewards."""
  rng = np.random.default_rng(seed)
  group = rng.permutation(np.repeat([0, 3, 4, 7, 15], [6, 4, 3, 1, 2]))
  reward = rng.normal(size=N)
  reward[rng.random(N) < nan] = np.nan
  reward[group == 15] = np.nan
  return reward.astype(dtype), group.astype(np.int32)


def _rows(values, group=None):
  """Those rewards as group 0 (or `group`), the rest groups of one."""
  n = len(values)
  reward = np.ones(N, np.float32)
  reward[:n] = values
  numbers = np.arange(N)
  numbers[:n] = 0 if group is None else group
  return reward, numbers.astype(np.int32)


def test_literal():
  # Group 0 = rows 0 1 2: rewards 1, 0, 2: mean 1, variance (0 + 1 + 1) / 2 = 1.
  # Group 1 = rows 3 4 5: rewards 4, 4, 1: mean 3, variance (1 + 1 + 4) / 2 = 3.
  reward, group = _rows([1, 0, 2, 4, 4, 1], [0, 0, 0, 1, 1, 1])
  s = np.sqrt(3)
  for name, want in (
      ("grpo", [0, -1, 1, 1 / s, 1 / s, -2 / s]),
      ("dr_grpo", [0, -1, 1, 1, 1, -2]),
      # 1 - (0 + 2) / 2, 0 - 3 / 2, 2 - 1 / 2; 4 - 5 / 2, the same, 1 - 4.
      ("rloo", [0, -1.5, 1.5, 1.5, 1.5, -3]),
      ("reward", [1, 0, 2, 4, 4, 1])):
    got = _run(name, reward, group)
    np.testing.assert_allclose(got.adv[:6], want, rtol=2e-6, atol=1e-7)
    # Groups of one.
    np.testing.assert_array_equal(got.adv[6:], float(name == "reward"))
    np.testing.assert_array_equal(got.keep, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("x64", [False, True])
def test_twin(name, x64):
  dtype, tol = (np.float64, 1e-12) if x64 else (np.float32, 1e-5)
  for seed in range(4):
    reward, group = _batch(seed, dtype=dtype)
    with jax.enable_x64(x64):
      got = _run(name, reward, group)
      assert got.adv.dtype == dtype
    np.testing.assert_allclose(
        got.adv, getattr(losses, name)(reward, group), rtol=tol, atol=tol)
    np.testing.assert_array_equal(got.keep, ~np.isnan(reward))


def test_identities():
  for seed in range(4):
    reward, group = _batch(seed)
    dr, rl, gr = (_run(name, reward, group).adv
                  for name in ("dr_grpo", "rloo", "grpo"))
    for g in np.unique(group):
      rows = (group == g) & ~np.isnan(reward)
      n = rows.sum()
      if n > 1:  # rloo = G / (G - 1) dr_grpo, over the scorable rows
        np.testing.assert_allclose(rl[rows], dr[rows] * n / (n - 1), rtol=1e-5,
                                   atol=1e-6)
      for adv in (dr, rl, gr):
        assert abs(float(adv[rows].sum())) < 1e-5
      if n > 1:
        np.testing.assert_allclose(np.std(gr[rows], ddof=1), 1, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), shift=st.integers(-8, 8))
def test_order_numbering_and_offset(name, seed, shift):
  reward, group = _batch(seed)
  want = _run(name, reward, group)
  rng = np.random.default_rng(seed)
  order, names = rng.permutation(N), rng.permutation(N).astype(np.int32)
  got = _run(name, reward[order], names[group][order])
  np.testing.assert_allclose(got.adv, want.adv[order], rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(got.keep, want.keep[order])
  moved = _run(name, reward + np.float32(shift), group).adv
  offset = shift * want.keep if name == "reward" else 0
  np.testing.assert_allclose(moved - offset, want.adv, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_jit_and_dtypes(name):
  reward, group = _batch(1)
  eager = getattr(advantages, name)(reward, group)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=1e-5, atol=1e-6), eager, _run(name, reward, group))
  half = _run(name, jnp.bfloat16(reward), group)
  assert half.adv.dtype == jnp.float32 and half.keep.dtype == bool


def test_no_rows():
  none = _run("grpo", np.zeros(0, np.float32), np.zeros(0, np.int32))
  assert none.adv.shape == none.keep.shape == (0,)


# Not "leave_one_out", which does not divide where the others are equal.
@pytest.mark.parametrize("std", ["unbiased", "biased", "batch"])
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e20, 1e37])
def test_grpo_does_not_depend_on_the_scale(std, scale):
  """Exactly, over powers of two; squares alone would give 0 at both ends."""
  reward, group = _batch(2)
  scale = np.float32(2.0 ** np.round(np.log2(scale)))
  plain, scaled = (advantages.grpo(r, group, std_eps=0.0, std=std).adv
                   for r in (reward, reward * scale))
  np.testing.assert_array_equal(scaled, plain)
  assert np.nanmax(np.abs(plain)) > 0.5


def test_an_infinite_reward_is_seen():
  reward = np.float32([np.inf, 0, 1, 2])
  for name in ("grpo", "pass_at_k", "dr_grpo", "rloo"):
    adv = getattr(advantages, name)(reward, np.zeros(4, np.int32)).adv
    assert not np.isfinite(adv).all(), name


def test_any_integer_that_holds_the_rows_names_a_group():
  reward, ids = np.arange(200, dtype=np.float32), np.arange(200) % 100
  want = advantages.grpo(reward, ids.astype(np.int32)).adv
  for dtype in (np.uint8, np.int16, np.uint32):
    np.testing.assert_array_equal(
        advantages.grpo(reward, ids.astype(dtype)).adv, want)
  with pytest.raises(ValueError, match="grpo: group: .*holds 200.*got int8"):
    advantages.grpo(reward, ids.astype(np.int8))


def test_std_eps_may_be_an_axis():
  reward, group = _batch(2)
  values = np.float32([0, 1e-4, 1])
  many = jax.jit(jax.vmap(
      lambda c: advantages.grpo(reward, group, std_eps=c).adv))(values)
  for got, c in zip(np.asarray(many), values):
    np.testing.assert_allclose(
        got, losses.grpo(reward, group, std_eps=float(c)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_argument(name):
  fn = getattr(advantages, name)
  reward, group = np.zeros(4, np.float32), np.zeros(4, np.int32)
  with pytest.raises(ValueError, match=f"{name}: group: .*equal length"):
    fn(reward, group[:3])
  with pytest.raises(ValueError, match=f"{name}: reward: .*rank 1"):
    fn(reward.reshape(2, 2), group)
  if name != "reward":  # which does not use it
    with pytest.raises(ValueError, match=f"{name}: group: .*integer"):
      fn(reward, group.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_case_A19_equal_rewards_have_no_advantage(dtype):
  for value in (.1, .3, 1 / 3, .7):
    for size in range(2, 17):
      reward, group = _rows([value] * size)
      for name in GROUPED:
        constants = dict(std_eps=0.) if name == "grpo" else {}
        got = _run(name, jnp.asarray(reward, dtype), group, **constants)
        np.testing.assert_array_equal(got.adv, 0, err_msg=f"{value} {size}")


def test_one_odd_reward_is_moderate():
  # Case A18's kind: a two-pass variance. |A| <= (n - 1) / sqrt(n) < 3.
  for k in range(1, 101):
    reward, group = _rows([k / 100] * 7 + [0.])
    got = _run("grpo", reward, group, std_eps=0.).adv[:8]
    np.testing.assert_allclose(
        got, [1 / np.sqrt(8)] * 7 + [-7 / np.sqrt(8)], rtol=1e-4)


@pytest.mark.parametrize("name,want", [
    ("dr_grpo", [2 / 3, 0, -1 / 3, -1 / 3]), ("rloo", [1, 0, -.5, -.5]),
    # Variance (4 + 1 + 1) / 9 / 2 = 1 / 3.
    ("grpo", [2 / np.sqrt(3), 0, -1 / np.sqrt(3), -1 / np.sqrt(3)]),
    ("reward", [1, 0, 0, 0])])
def test_case_A20_unscorable_rewards(name, want):
  reward, group = _rows([1, np.nan, 0, 0])
  got = _run(name, reward, group)
  np.testing.assert_allclose(got.adv[:4], want, rtol=1e-5, atol=1e-7)
  np.testing.assert_array_equal(got.keep[:4], [1, 0, 1, 1])
  # Its tokens are in no numerator and no denominator: (1 + 3 + 4) / 3.
  loss = np.repeat(np.float32([[1], [np.nan], [3], [4]]), draws.T, axis=1)
  mask = np.arange(draws.T) < got.keep[:4, None]
  mean = aggregate.token_mean(loss, mask)
  np.testing.assert_allclose((mean.total, mean.count), (8, 3))
  if name in GROUPED:  # one scorable left, and none
    for left in ([1, np.nan], [np.nan, np.nan]):
      got = _run(name, *_rows(left))
      np.testing.assert_array_equal(got.adv[:2], 0)
      np.testing.assert_array_equal(got.keep[:2], ~np.isnan(left))


@pytest.mark.parametrize("name,kwargs,want", [
    ("grpo", {}, [.5, .70710578, -.70710578]), ("dr_grpo", {}, [.5, .5, -.5]),
    ("rloo", {}, [.5, 1, -1]), ("gpg", {}, [.75, .75, -.75]),
    ("max_rl", dict(mean_eps=0.), [.5, 1, -1]),
    ("opo", dict(length=np.float32([7, 1, 3])), [.5, .75, -.25])])
def test_a_group_of_one_may_keep_its_reward(name, kwargs, want):
  args = np.float32([.5, 1, 0]), np.int32([2, 0, 0])
  fn = getattr(advantages, name)
  got = fn(*args, lone="reward", **kwargs).adv
  np.testing.assert_allclose(got, want, rtol=2e-6)
  zero = fn(*args, **kwargs).adv
  np.testing.assert_allclose(zero, [0, *want[1:]], rtol=2e-6)
  with pytest.raises(ValueError, match="lone"):
    fn(*args, lone="R", **kwargs)
  nan = fn(np.float32([np.nan, 1, 0]), args[1], lone="reward", **kwargs)
  assert nan.adv[0] == 0 and not nan.keep[0]
