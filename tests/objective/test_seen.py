"""objective/compose.py: which tokens the later pieces of a chain see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.core.types import Batch, PolicyOutputs
from rl_is.objective import constants as constants_lib, spec as spec_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec

ADV = jnp.array([[2., 5, -1], [1, 1, 1]])


def _batch(beh, mask=jnp.ones((2, 3), bool)):
  zeros = jnp.zeros((2, 3))
  return Batch(jnp.zeros((2, 3), int), mask, mask, jnp.ones(2),
               jnp.zeros(2, int), logp_behaviour=-beh, logp_prox=zeros,
               logp_ref=zeros, adv=ADV)


def _run(spec, batch, logp, **numbers):
  constants = constants_lib.resolve(spec, {}, numbers)
  objective = Objective(spec)
  prepared = objective.prepare(batch, constants)
  return prepared, jax.value_and_grad(lambda l: objective.loss(
      PolicyOutputs(l), prepared, constants)[0])(logp)


def test_unseen_tokens_count_but_are_in_no_ratio_and_no_mean():
  """Row 0 keeps its tokens 0 and 2: l = .1, .3 -> mean .2; A = 2, -1 -> .5."""
  logp = jnp.array([[.1, 7, .3], [0, 0, 0]])
  batch = _batch(jnp.array([[0., 9, 0], [0, 0, 0]]))
  spec = Spec("ppo_clip", "proximal", "sequence_mean", advantage="given",
              corrections=(Correction("ratio_mask"),), denominator="unseen",
              options=(("over", "sequence"),))
  prepared, (loss, grad) = _run(spec, batch, logp, low=.5, high=2., eps_low=.5,
                                eps_high=.5)
  np.testing.assert_allclose(prepared.adv[0], [.5, 0, .5])
  row = .5 * np.exp(.2)
  np.testing.assert_allclose(loss, -(2 * row + 3) / 6, rtol=1e-6)
  np.testing.assert_allclose(grad[0], [-row / 6, 0, -row / 6], rtol=1e-6)


def test_a_correction_over_what_is_kept():
  """Row 0: ratios e^.1, e^9, e^.2: without the second the product is e^.3."""
  batch = _batch(jnp.array([[.1, 9, .2], [.1, .1, .1]]))
  weights = {}
  for over in ("all", "kept"):
    spec = Spec(advantage="given", corrections=(
        Correction("ratio_mask"), Correction(
            "tis", level="sequence_sum", options=(("over", over),))))
    weights[over] = _run(spec, batch, jnp.zeros((2, 3)), low=.5, high=2.,
                         cap=5.)[0].weight
  np.testing.assert_allclose(weights["kept"][0, ::2], np.exp(.3), rtol=1e-6)
  np.testing.assert_allclose(weights["all"][0, ::2], 5, rtol=1e-6)
  np.testing.assert_allclose(weights["kept"][1], weights["all"][1])
  with pytest.raises(ValueError, match="over"):
    spec_lib.check(Spec(corrections=(
        Correction("tis", options=(("over", "keptt"),)),)))


def test_a_regularizer_averaged_over_rows():
  """k1 = .3 on three tokens, .6 on one: (.3 + .6) / 2; and an empty row."""
  logp = jnp.array([[.3, .3, .3], [.6, 5, 5]])
  for mask, want in (([[1, 1, 1], [1, 0, 0]], .45), ([[1, 1, 1], [0, 0, 0]],
                                                     .15)):
    batch = _batch(jnp.zeros((2, 3)), jnp.array(mask, bool)).replace(
        adv=jnp.zeros((2, 3)))
    spec = Spec(advantage="given", regularizer="k1",
                options=(("kl_mean", "rows"),))
    loss = _run(spec, batch, logp, kl_coef=1.)[1][0]
    np.testing.assert_allclose(loss, want, rtol=1e-6)
  with pytest.raises(ValueError, match="kl_mean"):
    spec_lib.check(Spec(options=(("kl_mean", "rows"),)))


@pytest.mark.parametrize("level,want", [
    ("token", [.2 * np.exp(.2), .4 * np.exp(.4)]),
    ("policy", [.2 * np.exp(.3), .4 * np.exp(.3)])])
def test_the_level_of_a_regularizers_weight(level, want):
  """k1 = l = .2, .4 of a row, times e^l or e^{their mean}; A = 0."""
  logp = jnp.array([[.2, .4, 9], [0, 0, 0]])
  batch = _batch(jnp.zeros((2, 3)), jnp.array([[1, 1, 0], [1, 1, 0]], bool))
  spec = Spec("ppo_clip", "proximal", "sequence_mean", advantage="given",
              regularizer="k1", kl_weight="proximal",
              options=(("kl_level", level),))
  batch = batch.replace(adv=jnp.zeros((2, 3)))
  loss, grad = _run(spec, batch, logp, eps_low=.2, eps_high=.2, kl_coef=1.)[1]
  np.testing.assert_allclose(loss, sum(want) / 4, rtol=1e-6)
  l = np.array([.2, .4])  # d/dl of the sum of l r: r + what r's gradient adds
  r = np.exp(l) if level == "token" else np.full(2, np.exp(.3))
  more = l * r if level == "token" else sum(want) / 2
  np.testing.assert_allclose(grad[0, :2], (r + more) / 4, rtol=1e-6)


def test_a_weights_level_needs_a_weight():
  for weight in ("none", "score"):
    with pytest.raises(ValueError, match="kl_level"):
      spec_lib.check(Spec(regularizer="k1", kl_weight=weight,
                          options=(("kl_level", "policy"),)))
