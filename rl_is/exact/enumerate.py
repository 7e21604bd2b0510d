"""All V^T sequences, and expectations over them. Floor 3.

Everything here runs in float64, in chunks of sequences: what is summed is
written for a chunk, and `over_chunks` adds up. Public functions are
`in_float64`, whatever the session's precision.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from rl_is.core.types import Array, Params
from rl_is.exact.policies import Policy
from rl_is.exact.precision import in_float64

MAX_SEQUENCES = 10**6
_BUDGET = 2**23  # numbers that a chunk may hold at once


def count(vocab: int, length: int) -> int:
  """V^T, or one line that says what to reduce."""
  for name, x in (("V", vocab), ("T", length)):
    if x < 1:
      raise ValueError(f"exact: {name}: expected at least 1, got {x}")
  n = vocab**length
  if n > MAX_SEQUENCES:
    t = int(math.log(MAX_SEQUENCES) / math.log(vocab) + 1e-9)
    v = int(MAX_SEQUENCES ** (1 / length) + 1e-9)
    raise ValueError(
        f"exact: V^T = {vocab}^{length} = {n:,} sequences: expected at most "
        f"{MAX_SEQUENCES:,}; reduce T to {t} or V to {v}")
  return n


def sequences(index: Array, vocab: int, length: int) -> Array:
  """The sequences of these numbers: digits to base V, the first one first."""
  powers = vocab ** jnp.arange(length - 1, -1, -1)
  return (index[:, None] // powers[None]) % vocab


def at_tokens(logp_all: Array, tokens: Array) -> Array:
  """[N, T, V] at the tokens, [N, T]."""
  return jnp.take_along_axis(logp_all, tokens[..., None], axis=-1)[..., 0]


def over_chunks(fn: Callable[[Array, Array], Any], vocab: int, length: int,
                width: int) -> Any:
  """Sum of fn(tokens [n, T], real [n] bool) over chunks of all sequences.

  width: numbers that fn holds for a sequence.
  """
  total = count(vocab, length)
  size = max(1, min(total, _BUDGET // max(width, 1)))
  chunks = -(-total // size)

  def one(i):
    index = i * size + jnp.arange(size)
    real = index < total
    return fn(sequences(jnp.where(real, index, 0), vocab, length), real)

  if chunks == 1:
    return one(jnp.int64(0))
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                      jax.eval_shape(one, jnp.int64(0)))
  return lax.fori_loop(
      0, chunks, lambda i, acc: jax.tree.map(jnp.add, acc, one(i)), zero)


class Divergence(NamedTuple):
  """Of whole sequences; nats, float64."""

  kl_qp: Array  # E_q[log q/p]
  kl_pq: Array  # E_p[log p/q]
  chi2: Array  # E_q[(p/q)^2] - 1
  ess: Array  # a sample's: E_q[p/q]^2 / E_q[(p/q)^2]
  lost: Array  # mass of p where q is 0
  value: Array  # E_p[R]
  value_q: Array  # E_q[R]


@in_float64
def divergence(policy: Policy, params: Params, behaviour: Policy,
               behaviour_params: Params, reward: Callable) -> Divergence:
  """How far the sampler is, and what both earn."""
  return _divergence(params, behaviour_params, policy, behaviour, reward)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _divergence(params, behaviour_params, policy, behaviour, reward):
  def sums(tokens, real):
    logp = at_tokens(policy.logp(params, tokens), tokens).sum(axis=1)
    logq = at_tokens(behaviour.logp(behaviour_params, tokens), tokens).sum(axis=1)
    drawn = real & (logq > -jnp.inf)
    total = lambda x, on=drawn: jnp.sum(jnp.where(on, x, 0))
    p, q, R = jnp.exp(logp), jnp.exp(logq), reward(tokens, policy.vocab)
    log_w = jnp.where(drawn, logp - logq, 0)
    w = jnp.exp(log_w)
    return (total(-q * log_w), total(p * log_w), total(q * w**2),
            total(q * w), total(p, real & ~drawn), total(p * R, real),
            total(q * R))

  kl_qp, kl_pq, second, first, lost, value, value_q = over_chunks(
      sums, policy.vocab, policy.length, 8 * policy.length * policy.vocab)
  lost_all = lambda x: jnp.where(lost > 0, jnp.inf, x)
  return Divergence(kl_qp, lost_all(kl_pq), lost_all(second - 1),
                    first**2 / second, lost, value, value_q)


@in_float64
def gradient(policy: Policy, params: Params, reward: Callable) -> Params:
  """The gradient of E_p[R]: what every estimator is measured against."""
  return _gradient(params, policy, reward)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gradient(params, policy, reward):
  def value(params, tokens, real):
    logp = at_tokens(policy.logp(params, tokens), tokens).sum(axis=1)
    return jnp.sum(jnp.where(real, jnp.exp(logp) * reward(
        tokens, policy.vocab), 0))

  return over_chunks(
      lambda tokens, real: jax.grad(value)(params, tokens, real),
      policy.vocab, policy.length, 8 * policy.length * policy.vocab)


@in_float64
def ascend(policy: Policy, params: Params, reward: Callable, *, steps: int,
           learning_rate: float) -> list[Params]:
  """A training run by exact gradients: parameters before it and after each step.

  Adam with optax's defaults. Staleness as in a real run: one of these is the
  learner, an earlier one the sampler.
  """
  tx = optax.adam(learning_rate)

  def step(carry, _):
    params, state = carry
    up = jax.tree.map(jnp.negative, _gradient(params, policy, reward))
    moves, state = tx.update(up, state, params)
    params = optax.apply_updates(params, moves)
    return (params, state), params

  _, path = jax.jit(lambda c: lax.scan(step, c, length=steps))(
      (params, tx.init(params)))
  return [params] + [jax.tree.map(lambda x: x[i], path) for i in range(steps)]
