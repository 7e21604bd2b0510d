"""core/types.py: pytrees, and metrics that add."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.core import masked, types
from rl_is.core.types import Batch, Max, Mean

PYTREES = [cls for cls in vars(types).values()
           if dataclasses.is_dataclass(cls)]


def _mean(total, count):
  return Mean(jnp.float32(total), jnp.float32(count))


@pytest.mark.parametrize("cls", PYTREES)
def test_pytrees_are_frozen_and_round_trip(cls):
  names = [f.name for f in dataclasses.fields(cls)]
  x = cls(**{name: np.full(2, i) for i, name in enumerate(names)})
  doubled = jax.tree.map(lambda leaf: 2 * leaf, x)
  assert type(doubled) is cls
  for i, name in enumerate(names):
    np.testing.assert_array_equal(getattr(doubled, name), 2 * i)
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(x, names[0], 0)
  assert cls.__doc__ and len(PYTREES) >= 9


def test_static_fields_are_structure():
  @types.pytree
  class Thing:
    x: types.Array
    n: int = types.static(3)

  thing = Thing(np.ones(2))
  assert len(jax.tree.leaves(thing)) == 1
  assert jax.tree.map(lambda x: x, thing).n == 3
  assert jax.tree.structure(thing) != jax.tree.structure(Thing(np.ones(2), 4))


def test_optional_fields_may_be_absent():
  base = dict(tokens=np.zeros((2, 3), np.int32), valid=np.ones((2, 3), bool),
              mask=np.ones((2, 3), bool), reward=np.zeros(2), group=np.zeros(2))
  batch = Batch(**base)
  assert len(jax.tree.leaves(batch)) == 5
  more = batch.replace(adv=np.zeros((2, 3)))
  assert len(jax.tree.leaves(more)) == 6 and batch.adv is None
  assert more.tokens is batch.tokens


def test_means_add_before_they_divide():
  # (6 + 1) / (3 + 1); not the mean of 2 and 1.
  mean = _mean(6, 3) + _mean(1, 1)
  assert mean.value() == 1.75
  swapped = _mean(1, 1) + _mean(6, 3)
  assert swapped.value() == 1.75
  parts = [_mean(i, 1) for i in range(5)]
  assert functools.reduce(Mean.__add__, parts).value() == 2


def test_a_mean_may_have_trailing_axes():
  mean = Mean(jnp.float32([2, 4]), jnp.float32(2))
  np.testing.assert_array_equal((mean + mean).value(), [1, 2])
  np.testing.assert_array_equal(
      Mean(jnp.zeros(2), jnp.float32(0)).value(), np.nan)


def test_a_mean_of_nothing_is_absent_with_a_finite_gradient():
  assert np.isnan(_mean(0, 0).value())
  grad = jax.grad(lambda x: Mean(x, jnp.float32(0)).value())(jnp.float32(0))
  assert np.isfinite(grad)


def test_max():
  got = Max(jnp.float32(2)) + Max(jnp.float32(-3))
  assert got.value() == 2
  assert np.isnan((got + Max(jnp.float32(np.nan))).value())  # not hidden


def test_means_cross_jit_and_scan():
  def step(carry, x):
    return carry + Mean(x, jnp.float32(1)), None
  mean, _ = jax.jit(lambda xs: jax.lax.scan(step, _mean(0, 0), xs))(
      jnp.arange(4.))
  assert mean.value() == 1.5


def test_case_J02_nan_free_totals():
  window = [_mean(.5, 1), _mean(0, 0), _mean(.7, 1)]
  mean = functools.reduce(Mean.__add__, window)
  np.testing.assert_allclose((mean.value(), mean.count), (.6, 2), rtol=1e-6)


def test_case_J04_a_sentinel_under_the_mask_is_not_in_the_entropy():
  # The estimate: -logp of the sampled tokens.
  mean = masked.mean(-np.float32([[-1, -2, 1]]), np.array([[1, 1, 0]], bool))
  assert mean.value() == 1.5
