"""ops/ratios.py: sum, prefix, suffix and segment levels, and the anchors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import draws, surrogates as twins
from rl_is.ops import ratios

LEVELS = ["sequence_sum", "prefix", "suffix", "segment"]
ALL = sorted(ratios.LEVELS)
_ONES = np.ones((draws.B, draws.T), np.float32)


@functools.partial(jax.jit, static_argnames="level")
def _jitted(logp, anchor, mask, out, level):
  def total(x):
    value = ratios.log_ratio(x, anchor, mask, level=level)
    return jnp.sum(out * value), value
  return jax.grad(total, has_aux=True)(logp)[::-1]


def _run(*args):
  """(value, gradient of sum(out * value) in `logp`)."""
  return jax.device_get(_jitted(*args))


def test_there_are_these_levels():
  assert set(LEVELS) | {"token", "sequence_mean", "sequence_mean_token"} == set(
      ALL)


@pytest.mark.parametrize("level,value,grad", [
    # Row 0: l = .1, -.2, _, .3, .5 in runs {0, 1} and {3, 4}; row 1: .4, .2.
    ("sequence_sum", [[.7, .7, 0, .7, .7], [.6, .6, 0, 0, 0]],
     [[4, 4, 0, 4, 4], [2, 2, 0, 0, 0]]),
    ("prefix", [[.1, -.1, 0, .2, .7], [.4, .6, 0, 0, 0]],
     [[4, 3, 0, 2, 1], [2, 1, 0, 0, 0]]),
    ("suffix", [[.7, .6, 0, .8, .5], [.6, .2, 0, 0, 0]],
     [[1, 2, 0, 3, 4], [1, 2, 0, 0, 0]]),
    # (.1 - .2) / 2 = -.05, (.3 + .5) / 2 = .4; (.4 + .2) / 2 = .3.
    ("segment", [[-.05, -.05, 0, .4, .4], [.3, .3, 0, 0, 0]],
     [[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]])])
def test_literal(level, value, grad):
  logp = draws.pad([[.1, -.2, 9, .3, .5], [.4, .2, 9, 9, 9]])
  mask = draws.pad(np.bool_([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]]))
  got, slope = _run(logp, 0 * logp, mask, _ONES, level)
  np.testing.assert_allclose(got, draws.pad(value), atol=1e-6)
  np.testing.assert_allclose(slope, draws.pad(grad), rtol=1e-6)


@pytest.mark.parametrize("level", ALL)
def test_twin(level):
  mask = draws.mask()
  logp, anchor, out = draws.tokens(1, dtype=np.float64)
  with jax.enable_x64(True):
    got, grad = _run(logp, anchor, mask, out, level)
    assert got.dtype == np.float64
  np.testing.assert_allclose(
      got, twins.log_ratio(logp, anchor, mask, level), rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(
      grad, twins.to_logp(out, mask, level), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_junk_off_the_mask_and_kinds_of_mask(level):
  mask = draws.mask()
  logp, anchor, _ = draws.tokens(3)
  want = _run(*(draws.fill(x, mask, 0) for x in (logp, anchor)), mask, _ONES,
              level)
  for junk in (*draws.JUNK, draws.JUNK):
    dirty = [draws.fill(x, mask, junk) for x in (logp, anchor)]
    for got, x in zip(_run(*dirty, mask, _ONES, level), want):
      np.testing.assert_array_equal(got, x)
      np.testing.assert_array_equal(got[~mask], 0)
  eager = ratios.log_ratio(logp, anchor, mask.astype(np.int32), level=level)
  np.testing.assert_allclose(eager, want[0], rtol=1e-6, atol=1e-6)


def test_who_a_broken_token_reaches():
  """Exactly those whose ratio holds it: a run ends where the mask does."""
  logp, anchor, _ = draws.tokens(8)
  mask = draws.mask()  # row 0: runs {0, 1} and {3, 4}
  for bad in (np.nan, np.inf):
    x = logp.copy()
    x[0, 1] = bad
    for level, reached in (
        ("sequence_sum", [0, 1, 3, 4]), ("prefix", [1, 3, 4]),
        ("suffix", [0, 1]), ("segment", [0, 1])):
      got, _ = _run(x, anchor, mask, _ONES, level)
      assert np.flatnonzero(~np.isfinite(got[0])).tolist() == reached, level
      assert np.isfinite(got[1:]).all()


def test_identities():
  mask = draws.mask()
  logp, anchor, _ = draws.tokens(4)
  l = {level: np.asarray(ratios.log_ratio(logp, anchor, mask, level=level))
       for level in ALL}
  n = mask.sum(axis=1, keepdims=True)
  np.testing.assert_allclose(l["sequence_sum"], l["sequence_mean"] * n,
                             rtol=1e-5, atol=1e-6)
  # What is before, what is after, and the token itself twice.
  np.testing.assert_allclose(
      l["prefix"] + l["suffix"], l["sequence_sum"] + l["token"], rtol=1e-5,
      atol=1e-6)
  whole = draws.mask(full=True)
  np.testing.assert_allclose(
      ratios.log_ratio(logp, anchor, whole, level="segment"),
      ratios.log_ratio(logp, anchor, whole, level="sequence_mean"), rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_alternating_mask_no_tokens_and_no_rows(level):
  """As many runs as a row can have."""
  logp, anchor, _ = draws.tokens(5)
  mask = np.zeros((draws.B, draws.T), bool)
  for x in _run(logp, anchor, mask, _ONES, level):
    np.testing.assert_array_equal(x, 0)
  mask[:, ::2] = True
  np.testing.assert_allclose(
      _run(logp, anchor, mask, _ONES, level)[0],
      twins.log_ratio(logp, anchor, mask, level), rtol=1e-5, atol=1e-6)
  none = np.zeros((0, draws.T), np.float32)
  assert ratios.log_ratio(none, none, none, level=level).shape == none.shape


# Anchors.


def test_behaviour_share():
  # Gaps 0, 1, 2, 4 and -1: 1/d, and `fresh` where nothing is stale.
  version = np.int32([[7, 6, 5, 3, 8]])
  got = ratios.behaviour_share(version, 7)
  np.testing.assert_array_equal(got, np.float32([[0, 1, .5, .25, 0]]))
  # AReaL: 1 - (v_prox - v) / (v_now - v), v_prox = v_now - 2, clipped.
  got = ratios.behaviour_share(version, 7, steps=2., fresh=1.)
  np.testing.assert_array_equal(got, np.float32([[1, 1, 1, .5, 1]]))
  with pytest.raises(ValueError, match="version: .*integer"):
    ratios.behaviour_share(np.zeros((1, 2), np.float32), 7)


def test_log_linear_anchor():
  mask = draws.mask()
  logp, behaviour, _ = draws.tokens(6)
  # .25 of the behaviour: .25 * -4 + .75 * -2 = -2.5.
  one = np.full((1, 1), -2, np.float32)
  np.testing.assert_array_equal(
      ratios.log_linear_anchor(one, 2 * one, one, alpha=.25), -2.5)
  for alpha, want in ((0., logp), (1., behaviour)):
    np.testing.assert_array_equal(
        ratios.log_linear_anchor(logp, behaviour, mask, alpha=alpha),
        np.where(mask, want, 0))
  # One share a token; the ratio to it is (p/q)^alpha.
  alpha = np.random.default_rng(0).random(mask.shape).astype(np.float32)
  dirty = [draws.fill(x, mask, draws.JUNK) for x in (logp, behaviour, alpha)]
  anchor = ratios.log_linear_anchor(*dirty[:2], mask, alpha=dirty[2])
  np.testing.assert_allclose(
      ratios.log_ratio(logp, anchor, mask), np.where(
          mask, alpha * (logp - behaviour), 0), rtol=1e-4, atol=1e-6)
  grad = jax.grad(lambda x: ratios.log_linear_anchor(
      x, behaviour, mask, alpha=alpha).sum())(logp)
  np.testing.assert_array_equal(grad, 0)
  with pytest.raises(ValueError, match="log_linear_anchor: alpha.*shape"):
    ratios.log_linear_anchor(logp, behaviour, mask, alpha=alpha[:1])
  with pytest.raises(ValueError, match="log_linear_anchor: logp_behaviour"):
    ratios.log_linear_anchor(logp, behaviour[:1], mask, alpha=.5)


def test_ewma():
  ema = {"w": jnp.float32([1, 2]), "b": {"x": jnp.bfloat16(4)}}
  new = {"w": jnp.float32([2, 0]), "b": {"x": jnp.bfloat16(8)}}
  got = ratios.ewma(ema, new, .75)  # .75 * 1 + .25 * 2 = 1.25; 1.5; 5
  np.testing.assert_array_equal(got["w"], [1.25, 1.5])
  assert got["b"]["x"] == 5 and got["b"]["x"].dtype == jnp.bfloat16
  assert jax.tree.structure(got) == jax.tree.structure(new)
  grad = jax.grad(lambda p: ratios.ewma(ema, p, .75)["w"].sum())(new)
  np.testing.assert_array_equal(grad["w"], 0)
  with pytest.raises(ValueError):
    ratios.ewma(ema, {"w": new["w"]}, .75)


def test_ewma_age_and_the_batch_rule():
  # 1 / (1 - .9) - 1 = 9. Hilton et al.: c = 2, 4, 8 -> .947, .973, .986.
  np.testing.assert_allclose(ratios.ewma_age(.9), 9, rtol=1e-12)
  for divide_by, want in ((1, .9), (2, .947), (4, .973), (8, .986)):
    decay, rate = ratios.ewma_batch_rule(divide_by, decay=.9, learning_rate=.1)
    assert abs(decay - want) < 6e-4
    np.testing.assert_allclose(rate, .1 / np.sqrt(divide_by), rtol=1e-12)
  # The mean age of what is averaged, by running it: ages 0, 1, 2, ... of mass
  # (1 - b) b^age.
  ages = np.arange(2000)
  np.testing.assert_allclose(np.sum(.1 * .9 ** ages * ages),
                             ratios.ewma_age(.9), rtol=1e-9)
