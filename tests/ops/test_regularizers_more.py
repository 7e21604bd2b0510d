"""ops/regularizers.py: clamps, straight-through and weighted forms, entropy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import draws, rejection as twins
from rl_is.ops import regularizers

MASK = draws.mask()
CLAMPED = ("k1", "k2", "k3", "abs_kl", "k1_straight", "k3_straight")
FORMS = (*CLAMPED, "k3_unbiased", "k3_score", "k3_weighted")


def _op(name, logp, ref, anchor, mask, **constants):
  """Any of the forms from the same arguments."""
  if name == "k3_unbiased":
    return regularizers.k3_unbiased(logp, ref, mask, logp_anchor=anchor,
                                    **constants)
  if name == "k3_score":
    return regularizers.with_score(
        regularizers.k3(logp, ref, mask), logp, mask, **constants)
  if name == "k3_weighted":
    return regularizers.importance_weighted(
        regularizers.k3(logp, ref, mask), logp, anchor, mask, **constants)
  return getattr(regularizers, name)(logp, ref, mask, **constants)


@functools.partial(jax.jit, static_argnames="name")
def _run(name, constants, logp, ref, anchor, mask):
  def total(x):
    value = _op(name, x, ref, anchor, mask, **constants)
    return jnp.sum(value), value
  return jax.grad(total, has_aux=True)(logp)[::-1]


def _twin(name, logp, ref, anchor, mask, **constants):
  name = {"k3_weighted": "k3_unbiased"}.get(name, name)
  return twins.kl(name, logp, ref, mask, anchor=anchor, **constants)


def _args(seed, dtype=np.float32):
  logp, ref, _ = draws.tokens(seed, dtype=dtype)
  anchor = logp + .3 * draws.tokens(seed + 50, dtype=dtype)[2]
  return [draws.fill(x, MASK, 0) for x in (logp, ref, anchor)]


# x = logp - ref = [log 2, -log 2, 0], anchor: r = [1.5, 1, 1].
# k3 = e^-x - 1 + x: .5 - 1 + .693147 = .193147; 2 - 1 - .693147 = .306853; 0.
_LOGP = np.full((1, 3), -1, np.float32)
_REF = np.float32(-1 - np.log([[2, .5, 1]]))
_ANCHOR = np.float32(-1 - np.log([[1.5, 1, 1]]))
_LOG2, _A, _B = np.log(2), np.log(2) - .5, 1 - np.log(2)


@pytest.mark.parametrize("name,value,grad", [
    ("abs_kl", [_LOG2, _LOG2, 0], [1, -1, 0]),
    ("k1_straight", [_LOG2, -_LOG2, 0], [_LOG2, -_LOG2, 0]),
    ("k3_straight", [_A, _B, 0], [_LOG2, -_LOG2, 0]),
    # d k3 = 1 - e^-x: .5, -1, 0; the score part adds k3 itself.
    ("k3_score", [_A, _B, 0], [_A + .5, _B - 1, 0]),
    # r (k3 + d k3) = 1.5 (.193147 + .5) = 1.039721.
    ("k3_unbiased", [1.5 * _A, _B, 0], [1.5 * (_A + .5), _B - 1, 0]),
    ("k3_weighted", [1.5 * _A, _B, 0], [1.5 * (_A + .5), _B - 1, 0])])
def test_literal(name, value, grad):
  got, slope = _run(name, {}, _LOGP, _REF, _ANCHOR, np.ones((1, 3), bool))
  np.testing.assert_allclose(got, [value], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(slope, [grad], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_twin(name):
  for max_kl in (np.inf, .05):
    args = _args(1)
    got = _run(name, dict(max_kl=max_kl), *args, MASK)
    for x, want in zip(got, _twin(name, *args, MASK, max_kl=max_kl)):
      np.testing.assert_allclose(x, want, rtol=1e-4, atol=1e-6)
  args = _args(2, np.float64)
  with jax.enable_x64(True):
    got = _op(name, *args, MASK, max_kl=.05)
    assert got.dtype == np.float64
  np.testing.assert_allclose(
      got, _twin(name, *args, MASK, max_kl=.05)[0], rtol=1e-11, atol=1e-12)


def test_the_output_clamp_acts_before_the_exp_can_overflow():
  # d = -1000 .. 1000 without an input clamp: value the bound, gradient 0.
  ref = draws.put([-1000, -30, 30, 1000])
  zero, mask = draws.put([]), draws.put(np.ones(4), bool)
  for name, want in (("k1", [10, 10, -10, -10]), ("k2", [10] * 4),
                     ("k3", [10] * 4), ("abs_kl", [10] * 4)):
    value, grad = _run(name, dict(max_log_ratio=np.inf, max_kl=10.), zero, ref,
                       zero, mask)
    np.testing.assert_array_equal(draws.take(value, 4), want)
    np.testing.assert_array_equal(grad, 0)
  value, grad = _run("k3_unbiased", dict(max_log_ratio=np.inf, max_kl=10.),
                     zero, ref, zero, mask)
  np.testing.assert_array_equal(draws.take(value, 4), 10)
  np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("name", FORMS)
def test_extreme_ratios_and_clamps(name):
  ref = draws.put([-1000, -30, 30, 1000])
  zero, mask = draws.put([]), draws.put(np.ones(4), bool)
  for anchor in (ref, -ref):
    for constants in ({}, dict(max_kl=10.)):
      for x in _run(name, constants, zero, ref, anchor, mask):
        assert np.isfinite(x).all()
  # At a bound the gradient passes whole, beyond it there is none.
  edge, out = np.float32([[-.5]]), np.float32([[-.500001]])
  if name in ("k1", "abs_kl"):
    for ref, want in ((edge, 1), (out, 0)):
      for bound in ("max_kl", "max_log_ratio"):
        grad = jax.grad(lambda x: jnp.sum(_op(
            name, x, ref, x, np.ones((1, 1)), **{bound: .5})))(0 * edge)
        np.testing.assert_array_equal(grad, want)


@pytest.mark.parametrize("name", CLAMPED)
def test_the_input_clamp_is_a_clamped_reference(name):
  logp, ref, anchor = _args(3)
  near = logp + np.clip(ref - logp, -.3, .3)
  value = _op(name, logp, ref, anchor, MASK, max_log_ratio=.3)
  np.testing.assert_allclose(
      value, _op(name, logp, near, anchor, MASK), rtol=1e-4, atol=1e-6)


def test_expectations_by_enumeration():
  """Over a vocabulary of 4: what the value and the gradient estimate."""
  with jax.enable_x64(True):
    rng = np.random.default_rng(0)
    z, ref, q = (rng.normal(size=(1, 4)) for _ in range(3))
    log_ref, log_q = jax.nn.log_softmax(ref), jax.nn.log_softmax(q)
    ones = np.ones((1, 4), bool)
    def exact(z):
      logp = jax.nn.log_softmax(z)
      return jnp.sum(jnp.exp(logp) * (logp - log_ref))
    def mean(z, sampler, fn):
      return jnp.sum(jnp.exp(sampler) * fn(jax.nn.log_softmax(z)))
    want, slope = jax.value_and_grad(exact)(z)
    p = jax.nn.log_softmax(z)
    kl = lambda name, x: getattr(regularizers, name)(x, log_ref, ones)
    for sampler, fn in (
        (p, lambda x: kl("k1_straight", x)),
        (p, lambda x: kl("k3_straight", x)),
        (p, lambda x: regularizers.with_score(kl("k1", x), x, ones)),
        (p, lambda x: regularizers.with_score(kl("k3", x), x, ones)),
        (log_q, lambda x: regularizers.k3_unbiased(
            x, log_ref, ones, logp_anchor=log_q)),
        (log_q, lambda x: regularizers.importance_weighted(
            kl("k1", x), x, log_q, ones))):
      got, grad = jax.value_and_grad(mean)(z, sampler, fn)
      np.testing.assert_allclose(got, want, rtol=1e-12)
      np.testing.assert_allclose(grad, slope, rtol=1e-10, atol=1e-14)
    # The sampled entropy: right in value; its gradient is 0, or the entropy's.
    entropy = lambda z: -jnp.sum(
        jnp.exp(jax.nn.log_softmax(z)) * jax.nn.log_softmax(z))
    one = lambda x: regularizers.entropy_sampled(x, ones)
    got, grad = jax.value_and_grad(mean)(z, p, one)
    np.testing.assert_allclose(got, entropy(z), rtol=1e-12)
    np.testing.assert_allclose(grad, 0, atol=1e-14)
    grad = jax.grad(mean)(
        z, p, lambda x: regularizers.with_score(one(x), x, ones))
    np.testing.assert_allclose(grad, jax.grad(entropy)(z), rtol=1e-10)


def test_levels_of_the_unbiased_form():
  logp, ref, anchor = _args(4)
  got = regularizers.k3_unbiased(logp, ref, MASK, logp_anchor=anchor,
                                 level="sequence_mean")
  r = [np.exp(np.mean((logp - anchor)[i][MASK[i]])) if MASK[i].any() else 1
       for i in range(draws.B)]
  np.testing.assert_allclose(
      got, np.array(r)[:, None] * regularizers.k3(logp, ref, MASK), rtol=1e-5)


@pytest.mark.parametrize("name", [*FORMS, "entropy_sampled"])
def test_junk_jit_kinds_of_mask_and_errors(name):
  args = _args(5)
  op = (lambda x, ref, anchor, mask: regularizers.entropy_sampled(x, mask)) if (
      name == "entropy_sampled") else functools.partial(_op, name)
  fn = jax.value_and_grad(lambda x, *rest: (lambda v: (jnp.sum(v), v))(
      op(x, *rest)), has_aux=True)
  jitted = jax.jit(fn)
  dirty = [draws.fill(x, MASK, draws.JUNK) for x in args]
  want = jitted(*args, MASK)
  jax.tree.map(np.testing.assert_array_equal, jitted(*dirty, MASK), want)
  for x in (want[0][1], want[1]):
    np.testing.assert_array_equal(x[~MASK], 0)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5,
                                                       atol=1e-6),
               fn(*dirty, MASK.astype(np.float32)), want)
  assert op(*(jnp.asarray(x, jnp.bfloat16) for x in args),
            MASK).dtype == jnp.float32
  nan = args[0].copy()
  nan[0, 1] = np.nan
  assert np.isnan(op(nan, *args[1:], MASK)[0, 1])
  with pytest.raises(ValueError, match="mask: .*shape"):
    op(*args, MASK[:1])
  with pytest.raises(ValueError, match="floating"):
    op(*(x.astype(int) for x in args), MASK)
  if name != "entropy_sampled":
    with pytest.raises(ValueError, match="logp_(ref|anchor): .*shape"):
      op(args[0], args[1][:1], args[2][:1], MASK)
