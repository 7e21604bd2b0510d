"""Policies over V^T sequences, and what sets a sampler apart from them. Floor 3.

A policy is a pure function of parameters and tokens that gives the log-prob of
every next token at every place. A behaviour policy is one too: the same function
with other parameters, or a `tempered` or `nucleus` form of it.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from rl_is.core import checks
from rl_is.core.types import Array, Params
from rl_is.exact.precision import in_float64
from rl_is.kernels import logits as logits_lib
from rl_is.models.transformer import Model


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Policy:
  """`logp(params, tokens [N, T]) -> [N, T, V]`: place t is before token t."""

  vocab: int
  length: int
  logp: Callable[[Params, Array], Array]
  init: Callable[[Array], Params]  # of a key


@functools.lru_cache  # the same one twice compiles nothing
def tabular(vocab: int = 4, length: int = 6) -> Policy:
  """A row of logits for every prefix: any policy there is can be written so."""
  starts = [0]
  for t in range(length):
    starts.append(starts[-1] + vocab**t)

  def logp(table, tokens):
    powers = (vocab ** jnp.arange(length))[None]
    # The prefix before t as a number, behind all shorter prefixes.
    code = jnp.cumsum(tokens * powers, axis=1) - tokens * powers
    rows = code + jnp.asarray(starts[:-1])[None]
    return jax.nn.log_softmax(table[rows])

  return Policy(vocab, length, logp, lambda key: jax.random.normal(
      key, (starts[-1], vocab)))


@functools.lru_cache
def bigram(vocab: int = 4, length: int = 6) -> Policy:
  """A row of logits for every token before, and one for the first place."""
  def logp(table, tokens):
    before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=vocab)
    return jax.nn.log_softmax(table[before])

  return Policy(vocab, length, logp, lambda key: jax.random.normal(
      key, (vocab + 1, vocab)))


@functools.lru_cache
def transformer(model: Model, length: int = 6) -> Policy:
  """The run's own model; each sequence answers the prompt of one token, 0."""
  c = dataclasses.replace(model.config, dtype="float64", param_dtype="float64")
  wide = Model(c)

  def logp(params, tokens):
    fed = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    hidden = wide.hidden(params, fed, jnp.ones(fed.shape, bool))
    logits = logits_lib.transform(
        logits_lib.head_logits(hidden, wide.unembed(params), c.head_precision),
        temperature=1.0, vocab_size=c.vocab_size, logit_softcap=c.logit_softcap)
    return jax.nn.log_softmax(logits[..., :c.vocab_size])

  return Policy(c.vocab_size, length, logp, model.init)


@functools.lru_cache
def tempered(policy: Policy) -> Policy:
  """Sampled at another temperature; parameters: (temperature, params)."""
  def logp(both, tokens):
    temperature, params = both
    return jax.nn.log_softmax(policy.logp(params, tokens) / temperature)

  return dataclasses.replace(policy, logp=logp)


@functools.lru_cache
def nucleus(policy: Policy) -> Policy:
  """Sampled from the smallest sets of mass top_p; parameters: (top_p, params).

  A tie with the last one in stays too. What is out has log-prob -inf.
  """
  def logp(both, tokens):
    top_p, params = both
    x = policy.logp(params, tokens)
    kept, _ = logits_lib.kept_set(x, top_k=policy.vocab, top_p=top_p)
    least = jnp.min(jnp.where(kept > logits_lib.FLOOR, kept, jnp.inf), axis=-1,
                    keepdims=True)
    return jax.nn.log_softmax(jnp.where(x < least, -jnp.inf, x))

  return dataclasses.replace(policy, logp=logp)


@in_float64
def noisy(params: Params, key: Array, sd: Array | float) -> Params:
  """Normal noise on every parameter: for tables, on every logit."""
  return jax.tree.map(lambda x, z: x + sd * z, params,
                      optax.tree.random_like(key, params))


@in_float64
def rounded(params: Params, step: Array | float) -> Params:
  """Every parameter at the nearest multiple of `step`: a coarse sampler."""
  return jax.tree.map(lambda x: jnp.round(x / step) * step, params)


# ---- Rewards, [N, T] -> [N]: pure functions of a whole sequence.


def _target(tokens: Array, vocab: int) -> Array:
  """t + 1 mod V, a sequence in which every token follows from the one before."""
  return jnp.arange(1, tokens.shape[1] + 1)[None] % vocab


def graded(tokens: Array, vocab: int) -> Array:
  """The share of places that hold the target's token."""
  return jnp.mean(tokens == _target(tokens, vocab), axis=1, dtype=float)


def exact(tokens: Array, vocab: int) -> Array:
  """1 for the target sequence alone."""
  return jnp.all(tokens == _target(tokens, vocab), axis=1).astype(float)


def first_run(tokens: Array, vocab: int) -> Array:
  """The share of places before the first that misses the target."""
  right = jnp.cumprod(tokens == _target(tokens, vocab), axis=1)
  return jnp.mean(right, axis=1, dtype=float)


REWARDS = dict(graded=graded, first_run=first_run, exact=exact)


def reward(name: str) -> Callable[[Array, int], Array]:
  checks.choice("exact: reward", name, REWARDS)
  return REWARDS[name]
