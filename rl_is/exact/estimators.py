"""The exact mean and variance of an objective's gradient. Floor 3.

The estimator of one sequence is g = J^T c: J [TV, P] are the scores of all next
tokens along it, c [T, V] is minus the derivative of the objective's loss by each
log-prob. J belongs to the policy: many settings of constants share it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import flatten_util, lax

from rl_is import ops
from rl_is.core.types import Array, Batch, Params, PolicyOutputs
from rl_is.exact import enumerate as enum
from rl_is.exact.policies import Policy
from rl_is.exact.precision import in_float64
from rl_is.objective import constants as constants_lib
from rl_is.objective import presets, settings
from rl_is.objective import spec as spec_lib
from rl_is.objective.compose import Objective
from rl_is.objective.settings import Corrections
from rl_is.objective.spec import Spec

_INF = float("inf")


class Moments(NamedTuple):
  """Of one sequence's estimate of grad E_p[R]; first axis: settings."""

  mean: Array  # [M, P] E_q[g]
  second: Array  # [M] E_q[|g|^2]

  def variance(self) -> np.ndarray:
    """Trace of the covariance, [M]."""
    return np.asarray(self.second) - np.sum(np.asarray(self.mean) ** 2, axis=1)


class Quality(NamedTuple):
  """Against the exact gradient g; [M] each, all relative to |g|."""

  bias: np.ndarray  # |E_q[estimate] - g| / |g|
  cosine: np.ndarray  # of E_q[estimate] with g
  variance: np.ndarray  # trace of the covariance of one sequence's / |g|^2

  def mse(self, batch: int | np.ndarray) -> np.ndarray:
    """Relative mean squared error of the mean over a batch."""
    return self.bias**2 + self.variance / batch


def named(name: str, corrections: Corrections = {}
          ) -> tuple[Objective, dict[str, float]]:
  """An estimator by a name of `settings.named`.

  Its advantage, aggregation and regularizer are replaced: A is R less
  E_q[R], a sequence's loss is the sum over its tokens, nothing is added, and no
  log ratio is clamped.
  """
  spec, values, extra = settings.named(name, corrections)
  spec = plain(spec)
  takes = constants_lib.taken(spec, extra)
  values = {k: v for k, v in values.items() if k in takes}
  if "max_log_ratio" in takes:
    values["max_log_ratio"] = _INF
  return (Objective(spec, extra=tuple(extra.items()), full_diagnostics=False),
          constants_lib.resolve(spec, values, {}, extra))


def plain(spec: Spec) -> Spec:
  """With A given, a constant denominator and no regularizer."""
  kept = ops.SURROGATES[spec.surrogate].options
  return dataclasses.replace(
      spec, advantage="given", advantage_norm="none", aggregation="token_sum",
      denominator="all", regularizer="none", kl_weight="none",
      options=tuple((k, v) for k, v in spec.options if k in kept))


def names() -> list[str]:
  """Every estimator whose expectation is a sum over single sequences."""
  return [*settings.PLAIN, *(n for n, p in presets.PRESETS.items()
                     if not is_coupled(p.spec))]


def is_coupled(spec: Spec, extra: spec_lib.Extra = {}) -> bool:
  """A piece compares the sequences of a batch: see `monte_carlo`."""
  pieces = spec_lib.rows(plain(spec), extra).values()
  return any(row.is_coupled for row in pieces)


def batch_of(tokens: Array, logp: Array, logq_all: Array, drawn: Array,
             adv: Array, lag: Array | float) -> Batch:
  """Rows as a sampler would have recorded them; `drawn` [N]: where q > 0."""
  shape, on = tokens.shape, drawn[:, None]
  vocab = logq_all.shape[-1]
  head = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), logq_all.shape)
  return Batch(
      tokens=tokens, valid=jnp.ones(shape, bool),
      mask=jnp.broadcast_to(on, shape), reward=adv,
      group=jnp.zeros(shape[0], jnp.int32),
      logp_behaviour=jnp.where(on, enum.at_tokens(logq_all, tokens), 0.0),
      version=jnp.zeros(shape, jnp.int32),
      version_now=jnp.full(shape[0], lag, jnp.int32), logp_prox=logp,
      head_ids=jnp.where(logq_all > -jnp.inf, head, -1),
      head_logp_behaviour=jnp.where(logq_all > -jnp.inf, logq_all, 0.0),
      adv=jnp.broadcast_to(adv[:, None], shape))


def coefficients(objective: Objective, constants: Mapping[str, Array],
                 logp_all: Array, logp_prox_all: Array, logq_all: Array,
                 tokens: Array, drawn: Array, adv: Array, lag) -> Array:
  """c [N, T, V]: what each score is multiplied by, to go up."""
  batch = objective.prepare(batch_of(
      tokens, enum.at_tokens(logp_prox_all, tokens), logq_all, drawn, adv, lag),
      constants)

  loss = lambda logp_all: objective.loss(
      outputs_of(objective, batch, logp_all), batch, constants)[0]
  return -jax.grad(loss)(logp_all)


def outputs_of(objective: Objective, batch: Batch, logp_all: Array
               ) -> PolicyOutputs:
  """What scoring would return for rows of `batch_of`."""
  ids = (jnp.where(batch.head_ids >= 0, logp_all, -1e30)
         if objective.needs_head else None)
  return PolicyOutputs(enum.at_tokens(logp_all, batch.tokens), logp_ids=ids)


@in_float64
def moments(policy: Policy, params: Params, behaviour: Policy,
            behaviour_params: Params, reward: Callable, objective: Objective,
            constants: Mapping[str, Array], *, prox_params: Params | None = None,
            lag: int = 8, may_lose_support: bool = False) -> Moments:
  """Exact mean and second moment of an objective's gradient.

  constants: each a number, or [M]: many settings are one program. prox_params:
  of the proximal policy; the current ones by default, as at the first update on
  a batch. lag: how old the batch is said to be, for pieces that read versions.
  may_lose_support: take the expectation over what the sampler draws, where that
  is less than what the policy does.

  Raises:
    ValueError: a piece that compares the rows of a batch; a sequence that the
      sampler never draws and the policy does, where importance sampling is
      undefined (`lost_support` names the first).
  """
  if is_coupled(objective.spec, dict(objective.extra)):
    raise ValueError(
        f"exact: {objective.spec.surrogate!r} with corrections "
        f"{[str(c) for c in objective.spec.corrections]} compares the sequences "
        "of a batch; its mean is not a sum over sequences: use monte_carlo")
  values = {k: jnp.asarray(v, jnp.float64) for k, v in constants.items()}
  M = max((len(v) for v in values.values() if v.ndim), default=1)
  for name, v in values.items():
    if v.ndim > 1 or (v.ndim and len(v) != M):
      raise ValueError(f"exact: constants: {name}: expected a number or shape "
                       f"({M},), got {v.shape}")
  values = {k: jnp.broadcast_to(v, (M,)) for k, v in values.items()}
  if not may_lose_support:
    bad = lost_support(policy, params, behaviour, behaviour_params)
    if bad is not None:
      raise ValueError(bad)
  return _moments(params, params if prox_params is None else prox_params,
                  behaviour_params, values, jnp.float64(lag), policy=policy,
                  behaviour=behaviour, reward=reward, objective=objective)


@functools.partial(jax.jit, static_argnames=(
    "policy", "behaviour", "reward", "objective"))
def _moments(params, prox_params, behaviour_params, constants, lag, *, policy,
             behaviour, reward, objective):
  V, T = policy.vocab, policy.length
  flat, unravel = flatten_util.ravel_pytree(params)
  logp = lambda flat, tokens: policy.logp(unravel(flat), tokens)
  at = lambda tokens: behaviour.logp(behaviour_params, tokens)
  q_of = lambda tokens: jnp.exp(enum.at_tokens(at(tokens), tokens).sum(axis=1))
  mean_reward = enum.over_chunks(
      lambda tokens, real: jnp.sum(jnp.where(
          real, q_of(tokens) * reward(tokens, V), 0)), V, T, 8 * T * V)

  def sums(tokens, real):
    scores = jax.vmap(jax.jacrev(
        lambda flat, x: logp(flat, x[None])[0].reshape(-1)), (None, 0))(
            flat, tokens)  # [n, TV, P]
    logp_all, logq_all = logp(flat, tokens), at(tokens)
    prox_all = policy.logp(prox_params, tokens)
    q = q_of(tokens)
    drawn = real & (q > 0)
    adv = jnp.where(drawn, reward(tokens, V) - mean_reward, 0)

    def setting(constants):
      c = coefficients(objective, constants, logp_all, prox_all, logq_all,
                       tokens, drawn, adv, lag).reshape(len(tokens), -1)
      g = jnp.einsum("na,nap->np", jnp.where(drawn[:, None], c, 0), scores)
      weight = jnp.where(drawn, q, 0)
      return weight @ g, weight @ jnp.sum(g**2, axis=1)

    return lax.map(setting, constants)

  mean, second = enum.over_chunks(sums, V, T, 2 * T * V * len(flat))
  return Moments(mean, second)


def lost_support(policy: Policy, params: Params, behaviour: Policy,
                 behaviour_params: Params) -> str | None:
  """The first sequence that p draws and q does not, as one line; else None."""
  V, T = policy.vocab, policy.length
  first = int(_first_lost(params, behaviour_params, policy, behaviour))
  if first == V**T:
    return None
  tokens = np.asarray(enum.sequences(jnp.asarray([first]), V, T))[0]
  return (f"exact: the behaviour policy gives sequence {tokens.tolist()} "
          "probability 0 and the target does not: importance sampling is "
          "undefined there (a top_p of which the learner is not told?)")


@functools.partial(jax.jit, static_argnums=(2, 3))
def _first_lost(params, behaviour_params, policy, behaviour):
  total = enum.count(policy.vocab, policy.length)
  size = min(total, 2**16)

  def one(i, first):
    index = i * size + jnp.arange(size)
    tokens = enum.sequences(jnp.minimum(index, total - 1), policy.vocab,
                            policy.length)
    of = lambda p, x: enum.at_tokens(p.logp(x, tokens), tokens).sum(axis=1)
    lost = (of(behaviour, behaviour_params) == -jnp.inf) & (
        of(policy, params) > -jnp.inf)
    return jnp.minimum(first, jnp.where(lost, index, total).min())

  return lax.fori_loop(0, -(-total // size), one, jnp.asarray(total))


def quality(found: Moments, exact: Params) -> Quality:
  """Bias, cosine and variance against the exact gradient."""
  g = np.concatenate([np.asarray(x, np.float64).reshape(-1)
                      for x in jax.tree.leaves(exact)])
  mean, norm = np.asarray(found.mean), np.linalg.norm(g)
  if not norm > 0:
    raise ValueError("exact: the exact gradient is 0: nothing to compare with")
  lengths = np.linalg.norm(mean, axis=1)
  cosine = mean @ g / np.where(lengths > 0, lengths * norm, np.nan)
  return Quality(np.linalg.norm(mean - g, axis=1) / norm, cosine,
                 found.variance() / norm**2)
