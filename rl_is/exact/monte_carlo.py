"""The same questions by sampling, for pieces that compare a batch's rows. Floor 3.

Group advantages, means over a batch's tokens, self-normalised weights and M2PO
have no expectation as a sum over single sequences; batches are drawn from the
enumerated sampler, and every number has its standard error.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import flatten_util, lax

from rl_is.core import checks
from rl_is.core.types import Params
from rl_is.exact import enumerate as enum
from rl_is.exact import estimators
from rl_is.exact.policies import Policy
from rl_is.exact.precision import in_float64
from rl_is.objective.compose import Objective

# All sequences have T tokens, so these are a T-th of the sum over tokens.
_MEANS = ("token_mean", "sequence_mean_token_mean", "prompt_mean")


class Estimate(NamedTuple):
  value: float
  se: float  # standard error

  def __str__(self) -> str:
    return f"{self.value:.3g} +- {self.se:.1g}"


class Sampled(NamedTuple):
  """Of a batch's estimate, relative to the exact gradient."""

  bias: Estimate
  cosine: Estimate
  variance: Estimate  # of the whole batch's estimate
  mse: Estimate
  draws: np.ndarray  # [D, P] the gradients themselves


@in_float64
def sampled(policy: Policy, params: Params, behaviour: Policy,
            behaviour_params: Params, reward: Callable, objective: Objective,
            constants: Mapping[str, float], exact: Params, *, batch: int,
            draws: int = 200, group: int = 8, seed: int = 0, lag: int = 8
            ) -> Sampled:
  """`draws` batches of `batch` sequences, in groups of `group` for one prompt.

  With the advantage "given", A = R - E_q[R]. A mean over tokens is multiplied by
  T, and a sum over a batch divided by its rows, so that all speak of a sequence.
  """
  checks.divisible("exact: batch", batch, "group", group)
  if draws < 10:
    raise ValueError(f"exact: draws: expected at least 10, got {draws}")
  values = {k: jnp.asarray(v, jnp.float64) for k, v in constants.items()}
  if objective.spec.aggregation in _MEANS:
    scale = policy.length
  else:
    scale = 1 / batch if objective.spec.aggregation == "token_sum" else 1
  found = scale * _draws(
      params, behaviour_params, values, jax.random.key(seed), jnp.float64(lag),
      policy=policy, behaviour=behaviour, reward=reward, objective=objective,
      shape=(draws, batch, group))
  g = np.asarray(flatten_util.ravel_pytree(exact)[0])
  return _summary(np.asarray(found), g)


@functools.partial(jax.jit, static_argnames=(
    "policy", "behaviour", "reward", "objective", "shape"))
def _draws(params, behaviour_params, constants, key, lag, *, policy, behaviour,
           reward, objective, shape):
  draws, batch, group = shape
  V, T = policy.vocab, policy.length
  flat, unravel = flatten_util.ravel_pytree(params)
  total = enum.count(V, T)
  every = enum.sequences(jnp.arange(total), V, T)
  logq = enum.at_tokens(behaviour.logp(behaviour_params, every), every).sum(1)
  mean_reward = jnp.sum(jnp.exp(logq) * reward(every, V))

  def one(key):
    key, own = jax.random.split(key)
    tokens = every[jax.random.categorical(key, logq, shape=(batch,))]
    R = reward(tokens, V)
    logq_all = behaviour.logp(behaviour_params, tokens)
    logp = enum.at_tokens(policy.logp(params, tokens), tokens)
    rows = estimators.batch_of(
        tokens, logp, logq_all, jnp.ones(batch, bool), R - mean_reward, lag)
    rows = rows.replace(reward=R, group=jnp.arange(batch) // group)
    prepared = objective.prepare(rows, constants, own)

    def loss(flat):
      outputs = estimators.outputs_of(
          objective, prepared, policy.logp(unravel(flat), tokens))
      return objective.loss(outputs, prepared, constants, own)[0]

    return -jax.grad(loss)(flat)

  return lax.map(one, jax.random.split(key, draws))


def _summary(draws: np.ndarray, g: np.ndarray) -> Sampled:
  """Each with a jackknife error over the draws."""
  D, norm = len(draws), np.linalg.norm(g)
  errors = np.sum((draws - g)**2, axis=1) / norm**2

  def of(mean, squares, n):
    """mean [.., P] of n draws, squares [..] the mean of |draw|^2."""
    spread = (squares - np.sum(mean**2, axis=-1)) * n / (n - 1)
    # |mean - g|^2 is too large by the variance of the mean.
    bias2 = np.sum((mean - g)**2, axis=-1) - spread / n
    lengths = np.linalg.norm(mean, axis=-1)
    return (np.sqrt(np.maximum(bias2, 0)) / norm, mean @ g / (lengths * norm),
            spread / norm**2)

  mean, square = draws.mean(axis=0), np.sum(draws**2, axis=1)
  whole = of(mean, square.mean(), D)
  left_out = of((D * mean - draws) / (D - 1),
                (square.sum() - square) / (D - 1), D - 1)
  se = [np.sqrt((D - 1) * np.var(x)) for x in left_out]
  bias, cosine, variance = (Estimate(float(v), float(s))
                            for v, s in zip(whole, se))
  return Sampled(bias, cosine, variance, Estimate(
      float(errors.mean()), float(errors.std(ddof=1) / D**0.5)), draws)
