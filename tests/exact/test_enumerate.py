"""Enumeration: every sequence once, and expectations that are sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.exact import enumerate as enum
from rl_is.exact import policies
from rl_is.exact.precision import in_float64

KEY = jax.random.key(0)


def tiny_transformer():
  from rl_is.models.config import TransformerConfig
  from rl_is.models.transformer import Model
  return Model(TransformerConfig(vocab_size=3, embed=8, layers=1, heads=2,
                                 kv_heads=2, head_dim=4, mlp=8))


@pytest.fixture(scope="module", params=["tabular", "bigram", "transformer"])
def policy(request):
  if request.param == "transformer":
    return policies.transformer(tiny_transformer(), 4)
  return getattr(policies, request.param)(3, 4)


def test_every_sequence_stands_once_the_first_token_in_front():
  every = np.asarray(enum.sequences(jnp.arange(27), 3, 3))
  assert len({tuple(x) for x in every}) == 27
  # 5 = 0 * 9 + 1 * 3 + 2
  assert every[5].tolist() == [0, 1, 2]


def test_probabilities_add_up_to_one(policy):
  found = enum.divergence(policy, policy.init(KEY), policy, policy.init(KEY),
                          lambda tokens, vocab: jnp.ones(len(tokens)))
  assert abs(float(found.value) - 1) < 1e-12
  assert abs(float(found.kl_qp)) < 1e-12 and abs(float(found.chi2)) < 1e-12
  assert abs(float(found.ess) - 1) < 1e-12


@in_float64
def test_a_policy_is_causal(policy):
  """Place t is before token t: a change of token 2 moves places 3 on alone."""
  params = policy.init(KEY)
  a, b = jnp.array([[0, 1, 2, 0]]), jnp.array([[0, 1, 0, 0]])
  same = np.asarray(policy.logp(params, a) == policy.logp(params, b)).all(-1)[0]
  np.testing.assert_array_equal(same, [True, True, True, False])


def test_chunks_change_nothing(monkeypatch):
  policy = policies.bigram(3, 4)
  params = policy.init(KEY)
  whole = enum.gradient(policy, params, policies.graded)
  monkeypatch.setattr(enum, "_BUDGET", 8 * 3 * 4 * 7)  # 7 sequences, 81 = 11 x 7 + 4
  other = policies.bigram(3, 4)  # another identity: compiled anew
  np.testing.assert_allclose(
      enum.gradient(other, params, policies.graded), whole, rtol=1e-12)


def test_gradient_by_hand():
  """One token of two, reward for token 1: dE/d(logits) = p1 (1 - p1) (-1, 1)."""
  policy = policies.Policy(2, 1, lambda x, tokens: jnp.broadcast_to(
      jax.nn.log_softmax(x), (len(tokens), 1, 2)), lambda key: jnp.zeros(2))
  # softmax(0, log 3) = (1/4, 3/4): 3/16
  found = enum.gradient(policy, jnp.log(jnp.array([1.0, 3.0])),
                        lambda tokens, vocab: (tokens[:, 0] == 1).astype(float))
  np.testing.assert_allclose(found, [-3 / 16, 3 / 16], rtol=1e-7)
  assert found.dtype == np.float64


def test_divergences_by_hand():
  """p = (1/2, 1/2), q = (1/4, 3/4) for one token."""
  policy = policies.Policy(2, 1, lambda x, tokens: jnp.broadcast_to(
      jax.nn.log_softmax(x), (len(tokens), 1, 2)), lambda key: jnp.zeros(2))
  found = enum.divergence(
      policy, jnp.zeros(2), policy, jnp.log(jnp.array([1.0, 3.0])),
      lambda tokens, vocab: tokens[:, 0].astype(float))
  # E_q[w^2] = (1/4) 4 + (3/4) (4/9) = 4/3
  assert abs(float(found.chi2) - 1 / 3) < 1e-7
  assert abs(float(found.ess) - 3 / 4) < 1e-7
  kl = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
  assert abs(float(found.kl_qp) - kl) < 1e-7
  assert (abs(float(found.value) - 0.5) + abs(float(found.value_q) - 0.75)) < 1e-7


def test_training_by_exact_gradients_earns_more():
  policy = policies.bigram(3, 4)
  path = enum.ascend(policy, policy.init(KEY), policies.graded, steps=5,
                     learning_rate=0.1)
  earned = [float(enum.divergence(policy, x, policy, x, policies.graded).value)
            for x in path]
  assert len(path) == 6 and earned == sorted(earned)


@pytest.mark.parametrize("vocab,length,reduce", [
    (11, 6, "reduce T to 5 or V to 10"), (2, 20, "reduce T to 19 or V to 1")])
def test_too_many_sequences_are_refused(vocab, length, reduce):
  with pytest.raises(ValueError, match=reduce) as error:
    enum.count(vocab, length)
  assert f"{vocab**length:,}" in str(error.value)


def test_the_bound_itself_is_allowed():
  assert enum.count(10, 6) == 10**6


@pytest.mark.parametrize("vocab,length", [(0, 3), (3, 0)])
def test_nothing_to_enumerate(vocab, length):
  with pytest.raises(ValueError, match="expected at least 1"):
    enum.count(vocab, length)


def test_nucleus_keeps_the_smallest_set_of_the_mass():
  policy = policies.Policy(4, 1, lambda x, tokens: jnp.broadcast_to(
      jnp.log(x), (len(tokens), 1, 4)), lambda key: jnp.zeros(4))
  probs = jnp.array([0.5, 0.3, 0.15, 0.05])
  found = jnp.exp(policies.nucleus(policy).logp((0.75, probs), jnp.zeros((1, 1), int)))
  np.testing.assert_allclose(found[0, 0], [0.625, 0.375, 0, 0], rtol=1e-6)


def test_noise_and_rounding_are_of_every_leaf():
  params = dict(a=jnp.zeros(50), b=jnp.zeros(50))
  noisy = jax.tree.map(np.asarray, policies.noisy(params, KEY, 0.5))
  assert abs(noisy["a"] - noisy["b"]).min() > 0 and noisy["a"].dtype == np.float64
  np.testing.assert_allclose(
      policies.rounded(dict(a=jnp.array([0.3, -0.6])), 0.5)["a"], [0.5, -0.5])


@pytest.mark.parametrize("name,scores", [
    ("graded", [1, 2 / 3, 1 / 3]), ("first_run", [1, 2 / 3, 0]),
    ("exact", [1, 0, 0])])
def test_rewards_by_hand(name, scores):
  tokens = jnp.array([[1, 2, 0], [1, 2, 2], [0, 2, 1]])  # the target is 1 2 0
  np.testing.assert_allclose(policies.reward(name)(tokens, 3), scores, rtol=1e-6)


def test_an_unknown_reward():
  with pytest.raises(ValueError, match="did you mean graded"):
    policies.reward("grade")
