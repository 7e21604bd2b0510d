"""ops/centering.py: the sampler's expected score, taken out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import rejection as twins
from rl_is.ops import centering, corrections, surrogates

WEIGHTS = [("none", {}), ("tis", dict(low=.5, high=1.3)), ("tis", {}),
           ("icepop", dict(low=.7, high=1.4))]
V = 6
# Eager, its many small operations compile one by one.
_term = jax.jit(centering.score_centering, static_argnames="weight")


def _policies(seed=0):
  rng = np.random.default_rng(seed)
  z, q = rng.normal(size=V), rng.normal(size=V)
  return z, np.exp(q) / np.exp(q).sum()


def _gradient(z, q, head, ids_mask=None, adv=1., **kwargs):
  """-d loss / d logits of the term at one token whose head is `head`."""
  def loss(z):
    logp = jax.nn.log_softmax(z)[head]
    mask = np.ones((1, 1, len(head)), bool) if ids_mask is None else ids_mask
    return jnp.sum(_term(
        logp[None, None], jnp.log(q)[head][None, None], mask,
        jnp.full((1, 1), adv), np.ones((1, 1), bool), **kwargs).loss)
  return -jax.grad(loss)(jnp.asarray(z))


def test_literal():
  # p = (.6, .4), q = (.5, .5), f = 1: sum_v q_v s_v = q - p = (-.1, .1); the
  # term takes A = 2 times that away.
  z, q = np.log(np.float32([.6, .4])), np.float32([.5, .5])
  np.testing.assert_allclose(
      _gradient(z, q, np.arange(2), adv=2.), [.2, -.2], rtol=1e-5)
  # TIS with cap 1.1: w = (1.1, .8), qw = (.55, .4): qw - p sum(qw) =
  # (.55 - .57, .4 - .38) = (-.02, .02).
  np.testing.assert_allclose(
      _gradient(z, q, np.arange(2), weight="tis", high=1.1), [.02, -.02],
      rtol=1e-4)
  # The value is A sum_v q_v log p_v = 2 (.5 log .6 + .5 log .4).
  got = _term(
      z[None, None], np.log(q)[None, None], np.ones((1, 1, 2)),
      np.full((1, 1), 2, np.float32), np.ones((1, 1)))
  np.testing.assert_allclose(got.loss, [[np.log(.24)]], rtol=1e-5)
  np.testing.assert_allclose(got.aux["head_mass_behaviour"], [[1]], rtol=1e-6)


@pytest.mark.parametrize("weight,bounds", WEIGHTS)
def test_the_whole_vocabulary_is_exact(weight, bounds):
  with jax.enable_x64(True):
    z, q = _policies(1)
    p = np.exp(z) / np.exp(z).sum()
    got = _gradient(z, q, np.arange(V), adv=-1., weight=weight, **bounds)
  want = twins.expected_score(p, q, weight, **bounds)
  np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
  if weight == "tis" and not bounds:
    np.testing.assert_allclose(got, 0, atol=1e-14)  # exact weights: no drift


@pytest.mark.parametrize("weight,bounds", WEIGHTS)
def test_the_expected_update_is_zero(weight, bounds):
  """E_q of surrogate + term, by enumeration, with a tail where q = a p."""
  with jax.enable_x64(True):
    z, q = _policies(2)
    head = np.array([4, 0, 2])
    p = np.exp(z) / np.exp(z).sum()
    rest = np.setdiff1d(np.arange(V), head)
    q[rest] = p[rest] * (1 - q[head].sum()) / p[rest].sum()
    logq, ones = jnp.log(q)[:, None], np.ones((V, 1), bool)
    adv = np.full((V, 1), 1.7)
    def parts(z):
      """A row for each token that may be drawn, weighted by q."""
      logp = jax.nn.log_softmax(z)
      num = logp[:, None]
      w = {"none": lambda: jnp.ones((V, 1)),
           "tis": lambda: corrections.tis(
               num, logq, ones, cap=bounds.get("high", jnp.inf),
               floor=bounds.get("low", 0.)).weight,
           "icepop": lambda: corrections.icepop(
               num, logq, ones, **bounds).weight}[weight]()
      policy = w * surrogates.pg(num, adv, ones).loss
      tile = lambda x: jnp.tile(x[head], (V, 1))[:, None]
      term = centering.score_centering(
          tile(logp), tile(jnp.log(q)), np.ones((V, 1, len(head))), adv, ones,
          weight=weight, **bounds).loss
      return jnp.sum(q[:, None] * policy), jnp.sum(q[:, None] * term)
    drift, term = jax.jit(jax.jacrev(lambda z: jnp.stack(parts(z))))(
        jnp.asarray(z))
  if bounds or weight == "none":
    assert np.abs(drift).max() > 1e-2
  np.testing.assert_allclose(drift + term, 0, atol=1e-12)


def test_unused_slots_and_masked_tokens_have_no_influence():
  rng = np.random.default_rng(3)
  shape = (2, 3, 4)
  logp = np.float32(-1 - rng.random(shape))
  logq = np.float32(-1 - rng.random(shape))
  adv = np.float32([[1, -2, 0], [.5, 1, 1]])
  mask = np.bool_([[1, 1, 1], [1, 0, 0]])
  ids = rng.random(shape) < .7
  ids[0, 2, 0] = True
  run = jax.jit(jax.value_and_grad(
      lambda x, y, a, **kw: (lambda t: (jnp.sum(t.loss), t))(
          centering.score_centering(x, y, ids, a, mask, weight="tis", high=2.)),
      has_aux=True))
  want = run(logp, logq, adv)
  off = ~(ids & mask[..., None])
  for junk in (np.inf, -np.inf, np.nan, 1e30):
    dirty = (np.where(off, np.float32(junk), x) for x in (logp, logq))
    got = run(*dirty, np.where(mask, adv, np.float32(junk)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
  (_, term), grad = want
  np.testing.assert_array_equal(grad[off], 0)
  np.testing.assert_array_equal(grad[0, 2], 0)  # A = 0
  np.testing.assert_array_equal(term.loss[0, 2], 0)
  eager = centering.score_centering(
      logp, logq, ids.astype(int), adv, mask.astype(np.float32), weight="tis",
      high=2.)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5,
                                                       atol=1e-6), eager, term)
  nan = logp.copy()
  nan[0, 2, 0] = np.nan
  assert np.isnan(run(nan, logq, adv)[0][1].loss[0, 2])  # seen though A = 0
  low = centering.score_centering(jnp.asarray(logp, jnp.bfloat16), logq, ids,
                                  adv, mask)
  assert low.loss.dtype == jnp.float32


@pytest.mark.parametrize("weight,bounds", WEIGHTS)
def test_extreme_ratios_are_finite(weight, bounds):
  # p or q of a head of two: nothing, everything; ratios to e^+-1000.
  logp = np.float32([[[-1000, -1e-3], [-30, -.1], [-1e-3, -1000], [-.1, -30]]])
  logq = logp[:, ::-1]
  args = np.ones_like(logp, bool), np.ones((1, 4), np.float32), np.ones((1, 4))
  def total(x):
    return jnp.sum(_term(x, logq, *args, weight=weight, **bounds).loss)
  value, grad = jax.value_and_grad(total)(logp)
  assert np.isfinite(value) and np.isfinite(grad).all()


def test_errors_name_the_argument():
  x, y = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
  good = dict(logp_ids=x, ids_logp_behaviour=x, ids_mask=x, adv=y, mask=y)
  run = functools.partial(centering.score_centering, **good)
  for arg, bad in (("logp_ids", x[:1]), ("ids_logp_behaviour", x[..., :1]),
                   ("ids_mask", y), ("mask", y[:1])):
    with pytest.raises(ValueError, match=f"score_centering: {arg}: .*shape"):
      run(**{arg: bad})
  for arg in ("logp_ids", "ids_logp_behaviour", "adv"):
    with pytest.raises(ValueError, match=f"score_centering: {arg}: .*floating"):
      run(**{arg: good[arg].astype(int)})
  with pytest.raises(ValueError, match="score_centering: adv: .*rank 2"):
    run(adv=y[0])
  with pytest.raises(ValueError, match="weight: unknown name 'mis'"):
    run(weight="mis")
