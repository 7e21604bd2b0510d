"""Bias and variance: closed forms, identities, orderings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is import lab, ops
from rl_is.core.types import Weights
from rl_is.exact import enumerate as enum
from rl_is.exact import estimators, monte_carlo, policies
from rl_is.exact.precision import in_float64
from rl_is.objective import presets, settings
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec

KEY = jax.random.key(0)
V, T = 3, 4
POLICY = policies.bigram(V, T)


@pytest.fixture(scope="module")
def sampler():
  params = POLICY.init(KEY)
  return (POLICY, params, POLICY,
          policies.noisy(params, jax.random.key(1), 0.6), policies.graded)


@pytest.fixture(scope="module")
def exact(sampler):
  return enum.gradient(*sampler[:2], sampler[4])


def found(sampler, exact, name, **sweep):
  objective, defaults = estimators.named(name)
  points = settings.points(objective.spec, defaults, sweep)
  return estimators.quality(estimators.moments(
      *sampler, objective, settings.stacked(points)), exact)


def by_hand(sampler, weight):
  """E_q[w A score] and E_q[|w A score|^2], in a plain numpy loop of sequences.

  weight(logp [T], logq [T]) -> [T].
  """
  policy, params, _, q_params, reward = sampler
  with jax.enable_x64(True):
    tokens = enum.sequences(jnp.arange(V**T), V, T)
    at = lambda p: enum.at_tokens(policy.logp(p, tokens), tokens)
    logp, logq = np.asarray(at(jnp.float64(params))), np.asarray(at(q_params))
    scores = np.asarray(jax.jacrev(at)(jnp.float64(params))).reshape(V**T, T, -1)
    R = np.asarray(reward(tokens, V))
  q = np.exp(logq.sum(1))
  A = R - q @ R
  mean, second = 0, 0
  for i in range(V**T):
    g = (weight(logp[i], logq[i]) * A[i]) @ scores[i]
    mean, second = mean + q[i] * g, second + q[i] * g @ g
  return mean, second


@pytest.mark.parametrize("name,weight", [
    ("none", lambda p, q: np.ones(T)),
    ("token_tis", lambda p, q: np.minimum(np.exp(p - q), 2)),
    ("token_mis", lambda p, q: np.exp(p - q) * (np.exp(p - q) <= 2)),
    ("prefix_is", lambda p, q: np.exp(np.cumsum(p - q))),
    ("seq_is", lambda p, q: np.full(T, np.exp((p - q).sum()))),
    ("geometric_is", lambda p, q: np.full(T, np.exp((p - q).mean()))),
    ("sequence_tis", lambda p, q: np.full(T, min(np.exp((p - q).sum()), 2)))])
def test_moments_by_a_loop(sampler, name, weight):
  objective, values = estimators.named(name)
  got = estimators.moments(*sampler, objective, values)
  mean, second = by_hand(sampler, weight)
  np.testing.assert_allclose(got.mean[0], mean, rtol=1e-10, atol=1e-14)
  np.testing.assert_allclose(got.second[0], second, rtol=1e-10)


def test_sequence_importance_sampling_is_unbiased(sampler, exact):
  q = found(sampler, exact, "seq_is")
  assert q.bias[0] < 1e-10 and abs(q.cosine[0] - 1) < 1e-12
  assert found(sampler, exact, "token_is").bias[0] > 0.01  # what is not so


def test_score_centring_takes_the_drift_out(sampler):
  """With one advantage for all, A E_q[score] is all there is: centred, zero."""
  same = lambda tokens, vocab: jnp.ones(len(tokens))
  drift = lambda name: np.abs(_uncentred((*sampler[:4], same), name)).max()
  assert drift("none") > 1e-3
  assert drift("score_centering") < 1e-12


def _uncentred(sampler, name):
  """The mean gradient with A = R: the closed forms have no baseline."""
  objective, values = estimators.named(name)
  return _mean_of(*sampler, objective, tuple(values.items()))


@in_float64
def _mean_of(policy, params, behaviour, q_params, reward, objective, values):
  n = policy.vocab**policy.length
  tokens = enum.sequences(jnp.arange(n), policy.vocab, policy.length)
  logq_all = behaviour.logp(q_params, tokens)
  q = jnp.exp(enum.at_tokens(logq_all, tokens).sum(1))
  logp_all, back = jax.vjp(lambda p: policy.logp(p, tokens), params)
  c = estimators.coefficients(
      objective, dict(values), logp_all, logp_all, logq_all, tokens, q > 0,
      reward(tokens, policy.vocab), 0.0)
  return np.asarray(back(q[:, None, None] * c)[0])


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_token_importance_sampling_by_closed_form(length):
  """A7: all tokens must be right, p and q a token: the relative bias of token IS
  is 1 - (q/p)^(T-1), without IS 1 - (q/p)^T."""
  p, q = 0.7, 0.55
  policy = policies.Policy(
      2, length, lambda x, tokens: jnp.broadcast_to(
          jax.nn.log_softmax(jnp.stack([jnp.zeros_like(x), x])),
          (*tokens.shape, 2)), lambda key: jnp.zeros(()))
  reward = lambda tokens, vocab: jnp.prod(tokens, axis=1).astype(float)
  logit = lambda p: np.log(p / (1 - p))
  sampler = policy, logit(p), policy, logit(q), reward
  exact = float(enum.gradient(policy, logit(p), reward))
  bias = lambda name: abs(float(_uncentred(sampler, name) - exact) / exact)
  assert abs(bias("token_is") - (1 - (q / p)**(length - 1))) < 1e-10
  # Without IS the score's mean under q stands in it too: q (1-p) less q^T (1-p).
  assert abs(bias("none") - (1 - (q / p)**length)) < 1e-10
  assert bias("seq_is") < 1e-10


@pytest.fixture(scope="module")
def pilot():
  """V = 4, T = 6 as in the figure: 4096 sequences."""
  at = lab.setting(steps=0, seed=3)
  rows = lab.table(at=at, behaviours=["noise:0.5", "noise:1"],
                   names=("none", "token_tis", "token_is", "prefix_is", "seq_is"))
  return {text: {r["estimator"]: r for r in rows if r["behaviour"] == text}
          for text in ("noise:0.5", "noise:1")}


def test_orderings_of_bias_and_variance(pilot):
  """Of the pilot, on this policy. No law: on others neighbours change places,
  as experiments/fig_bias_variance counts."""
  order = ("none", "token_tis", "token_is", "prefix_is", "seq_is")
  for rows in pilot.values():
    assert rows["none"]["chi2"] > 1
    bias = [rows[name]["bias"] for name in order]
    variance = [rows[name]["variance"] for name in order]
    assert bias == sorted(bias, reverse=True) and bias[-1] < 1e-10
    assert variance[1:] == sorted(variance[1:])


def test_a_larger_batch_wants_less_bias(pilot):
  """The crossing: what is best at 1, 64 and 4096 sequences has ever less bias."""
  rows = pilot["noise:0.5"].values()
  best = [min(rows, key=lambda r: r[f"mse_{n}"])["bias"] for n in lab.BATCHES]
  assert best == sorted(best, reverse=True) and best[0] > best[-1]


def test_a_looser_cap_has_less_bias_and_more_variance():
  rows = lab.table(["sequence_tis", "token_tis"], at=lab.setting(steps=0, seed=3),
                   sweep=dict(cap=[1.0, 1.5, 2.0, 3.0, 5.0, np.inf]))
  for name in ("sequence_tis", "token_tis"):
    bias, variance = ([r[k] for r in rows if r["estimator"] == name]
                      for k in ("bias", "variance"))
    # Beyond the largest weight a cap does nothing: equal, not falling.
    assert (np.diff(bias) <= 1e-12).all() and bias[0] > bias[-1]
    assert (np.diff(variance) >= -1e-12).all() and variance[0] < variance[-1]


def test_many_settings_are_one_program_and_the_same(sampler, exact):
  objective, defaults = estimators.named("token_tis")
  points = settings.points(objective.spec, defaults, dict(cap=[1.5, 3.0]))
  both = estimators.moments(*sampler, objective, settings.stacked(points))
  for i, point in enumerate(points):
    alone = estimators.moments(*sampler, objective, point)
    np.testing.assert_allclose(both.mean[i], alone.mean[0], rtol=1e-12)
    np.testing.assert_allclose(both.second[i], alone.second[0], rtol=1e-12)


def test_on_policy_nothing_is_biased(sampler):
  policy, params, *_, reward = sampler
  same = policy, params, policy, params, reward
  exact = enum.gradient(policy, params, reward)
  for name in ("none", "geometric_is", "token_tis", "ppo", "gspo", "cispo", "sapo",
               "dppo_tv", "vespo", "aspo"):
    objective, values = estimators.named(name)
    q = estimators.quality(estimators.moments(*same, objective, values), exact)
    assert abs(q.cosine[0] - 1) < 1e-9, name


def test_every_preset_has_a_mean_or_says_why_not(sampler):
  listed = set(estimators.names())
  for name in set(presets.PRESETS) - listed:
    objective, values = estimators.named(name)
    with pytest.raises(ValueError, match="use monte_carlo"):
      estimators.moments(*sampler, objective, values)
  assert "m2po" not in listed and "ppo" in listed


def test_lost_support_is_named(sampler):
  policy, params, *_, reward = sampler
  cut = policies.nucleus(policy)
  objective, values = estimators.named("token_is")
  with pytest.raises(ValueError, match=r"gives sequence \[.*importance sampling is"):
    estimators.moments(policy, params, cut, (0.7, params), reward, objective, values)
  kept = estimators.moments(policy, params, cut, (0.7, params), reward, objective,
                            values, may_lose_support=True)
  apart = enum.divergence(policy, params, cut, (0.7, params), reward)
  assert np.isfinite(kept.mean).all() and 0 < float(apart.lost) < 1
  assert np.isinf(apart.chi2)


def test_constants_of_another_length_are_refused(sampler):
  objective, values = estimators.named("icepop_is")
  with pytest.raises(ValueError, match="expected a number or shape"):
    estimators.moments(*sampler, objective, dict(
        values, low=jnp.ones(2), high=jnp.ones(3)))


def test_a_zero_gradient_is_no_measure(sampler):
  policy, params, *_ = sampler
  flat = lambda tokens, vocab: jnp.ones(len(tokens))
  with pytest.raises(ValueError, match="exact gradient is 0"):
    estimators.quality(estimators.Moments(jnp.zeros((1, 12)), jnp.zeros(1)),
                       jax.tree.map(jnp.zeros_like, params))
  assert np.abs(enum.gradient(policy, params, flat)).max() < 1e-12


def test_sampling_agrees_with_enumeration(sampler, exact):
  """Of a batch of 1: the same bias, cosine and variance within 4 errors."""
  objective, values = estimators.named("token_tis")
  q = found(sampler, exact, "token_tis")
  got = monte_carlo.sampled(*sampler, objective, values, exact, batch=4,
                            draws=4000, group=1)
  for name, truth in (("cosine", q.cosine[0]), ("variance", q.variance[0] / 4),
                      ("mse", q.mse(4)[0])):
    value, se = getattr(got, name)
    assert abs(value - truth) < 4 * se and se < 0.1 * max(truth, 1), name


def test_the_real_sampler_agrees_with_enumeration():
  """Token IS on what `models.sampler` draws from other weights, and records."""
  from rl_is.core.types import Prompts
  from rl_is.models import sampler as sampler_lib
  from tests.exact.test_enumerate import tiny_transformer
  model = tiny_transformer()
  policy = policies.transformer(model, 3)
  params, other = model.init(KEY), model.init(jax.random.key(5))
  q_params = jax.tree.map(lambda a, b: a + 0.3 * b, params, other)
  N = 4096
  prompts = Prompts(jnp.zeros((N, 1), jnp.int32), jnp.ones((N, 1), bool),
                    jnp.arange(N, dtype=jnp.int32), jnp.zeros(N, jnp.int32))
  drawn = jax.jit(functools.partial(
      sampler_lib.sample, model=model, sampling=sampler_lib.Sampling(
          1.0, max_new_tokens=3)))(q_params, prompts, jax.random.key(2), 0)
  tokens, logq = drawn.tokens[:, 1:], drawn.logp_behaviour[:, 1:]
  truth = estimators.moments(policy, params, policy, q_params, policies.graded,
                             *estimators.named("token_is"))
  value = enum.divergence(policy, params, policy, q_params, policies.graded).value_q

  @in_float64
  @jax.jit
  @functools.partial(jax.vmap, in_axes=(None, 0, 0))
  def estimates(params, tokens, logq):
    def surrogate(params):
      logp = enum.at_tokens(policy.logp(params, tokens[None]), tokens[None])[0]
      w = jnp.exp(jax.lax.stop_gradient(logp) - logq)
      return jnp.sum(w * logp) * (policies.graded(tokens[None], 3)[0] - value)
    return jax.flatten_util.ravel_pytree(jax.grad(surrogate)(params))[0]

  g = np.asarray(estimates(params, tokens, logq))
  error = g.std(axis=0, ddof=1) / N**0.5
  off = np.abs(g.mean(axis=0) - np.asarray(truth.mean[0]))
  live = error > 1e-7
  assert live.sum() > 100 and (off[live] < 5 * error[live]).all()
  # Many places: the sum of squares is far sharper than the largest alone.
  assert np.mean((off[live] / error[live])**2) < 2
  # What was recorded is what was drawn: frequencies too.
  exact = in_float64(lambda q, tokens: enum.at_tokens(policy.logp(q, tokens), tokens))
  gap = np.asarray(exact(q_params, tokens)) - np.asarray(logq)
  assert abs(np.mean(np.exp(gap)) - 1) < 1e-3


@in_float64
def kl_gradients(params, q_params, drawn_from):
  """E of the gradients of k1, k2, k3 of KL(p || q), and the KL's own."""
  tokens = enum.sequences(jnp.arange(V**T), V, T)
  at = lambda x: enum.at_tokens(POLICY.logp(x, tokens), tokens)
  logq = at(q_params)
  weight = jnp.exp(at(params if drawn_from == "p" else q_params).sum(1))
  def mean(name):
    ones = jnp.ones((V**T, T), bool)
    kl = lambda x: jnp.sum(weight[:, None] * ops.REGULARIZERS[name].fn(
        at(x), logq, ones))
    return jax.grad(kl)(params)
  def true(x):
    logp_all, logq_all = POLICY.logp(x, tokens), POLICY.logp(q_params, tokens)
    each = jnp.sum(jnp.exp(logp_all) * (logp_all - logq_all), -1)
    # Of a place's next token, at prefixes as p draws them: no flow through those.
    return jnp.sum(jax.lax.stop_gradient(jnp.exp(at(params).sum(1)))[:, None] * each)
  def reverse(x):
    logp_all, logq_all = POLICY.logp(x, tokens), POLICY.logp(q_params, tokens)
    each = jnp.sum(jnp.exp(logq_all) * (logq_all - logp_all), -1)
    return jnp.sum(jnp.exp(logq.sum(1))[:, None] * each)
  names = ("k1", "k2", "k3", "k1_straight", "k3_straight")
  return ({n: np.asarray(mean(n)) for n in names}, np.asarray(jax.grad(true)(params)),
          np.asarray(jax.grad(reverse)(params)))


def test_whose_gradient_is_the_kl_s(sampler):
  """Tokens from p: k2's is KL(p||q)'s, k1's is zero, k3's another. From q: k3's
  is that of the reverse KL(q||p), k2's of neither."""
  _, params, _, q_params, _ = sampler
  got, kl, _ = kl_gradients(params, q_params, "p")
  size = np.abs(kl).max()
  assert np.abs(got["k1"]).max() < 1e-12 < size
  for name in ("k2", "k1_straight", "k3_straight"):
    np.testing.assert_allclose(got[name], kl, atol=1e-12)
  assert np.abs(got["k3"] - kl).max() > 0.01 * size
  got, kl, reverse = kl_gradients(params, q_params, "q")
  assert np.abs(got["k2"] - kl).max() > 0.01 * size
  # k3 of p against q has d/dp (q/p + log p): 1 - q/p times the score; E_q of it
  # is no KL. k1's, E_q[score], is minus the gradient of KL(q||p).
  np.testing.assert_allclose(got["k1"], -reverse, atol=1e-12)


def test_ones_own_correction_is_measured(sampler, exact):
  def half(num, den, mask, *, level="token"):
    l = jax.lax.stop_gradient(num) - den
    return Weights(jnp.where(mask, jnp.exp(0.5 * l), 0), mask, l)
  objective, values = estimators.named("half", {"half": half})
  got = estimators.moments(*sampler, objective, values)
  mean, second = by_hand(sampler, lambda p, q: np.exp(0.5 * (p - q)))
  np.testing.assert_allclose(got.mean[0], mean, rtol=1e-10, atol=1e-14)
  np.testing.assert_allclose(got.second[0], second, rtol=1e-10)


def test_a_structure_of_one_s_own(sampler, exact):
  """Not only names: PPO under a token mask."""
  spec = Spec(surrogate="ppo_clip", advantage="given", aggregation="token_sum",
              anchor="proximal", corrections=(Correction("tis"),))
  objective = Objective(spec, full_diagnostics=False)
  got = estimators.moments(*sampler, objective, dict(
      eps_low=0.2, eps_high=0.2, cap=2.0, floor=0.0, tis_max_log_ratio=20.0,
      max_log_ratio=20.0, entropy_coef=0.0))
  # At the first update on a batch the clipped ratio is 1: TIS alone.
  np.testing.assert_allclose(got.mean, estimators.moments(
      *sampler, *estimators.named("token_tis")).mean, rtol=1e-10, atol=1e-14)
