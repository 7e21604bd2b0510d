"""The pytree types that cross module borders. Floor 0.

Axes, everywhere: `B` sequences, `T` tokens, `G` group size, `K` kept or top-k
ids, `V` vocabulary, `D` embed, `H` query heads, `F` mlp.
Position t of every `[B, T]` array speaks of token t: `logp[:, t]` is the
log-prob **of** token t, in nats.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Array = Any  # a jax or numpy array, or a tracer
Params = Any  # a nested dict of arrays


def pytree(cls):
  """A frozen dataclass that jax treats as a container of its fields."""
  cls = dataclasses.dataclass(frozen=True, kw_only=False)(cls)
  return jax.tree_util.register_dataclass(cls)


def static(default=dataclasses.MISSING):
  """A field that is part of the structure: a change of it recompiles."""
  return dataclasses.field(default=default, metadata=dict(static=True))


@pytree
class Mean:
  """An additive mean: totals and counts add over splits, then divide once.

  `total` may carry trailing axes (moments, histogram bins).
  """

  total: Array
  count: Array

  def __add__(self, other: "Mean") -> "Mean":
    return Mean(self.total + other.total, self.count + other.count)

  def unstacked(self) -> "Mean":
    """The sum over a first axis, where a scan has stacked many of them."""
    return Mean(self.total.sum(axis=0), self.count.sum(axis=0))

  def value(self) -> Array:
    """total / count; NaN where nothing was counted (absent, never 0)."""
    empty = self.count == 0
    return jnp.where(empty, jnp.nan, self.total / jnp.where(empty, 1, self.count))


@pytree
class Max:
  """A running maximum; "adding" two keeps the larger; -inf: nothing was seen."""

  largest: Array

  def __add__(self, other: "Max") -> "Max":
    return Max(jnp.maximum(self.largest, other.largest))

  def unstacked(self) -> "Max":
    return Max(self.largest.max(axis=0))

  def value(self) -> Array:
    """The maximum; NaN where nothing was seen (absent, never 0)."""
    return jnp.where(self.largest == -jnp.inf, jnp.nan, self.largest)


@pytree
class Each:
  """Values kept one by one, for statistics that no sums give; they concatenate."""

  values: Array  # [n]
  keep: Array  # [n] bool

  def __add__(self, other: "Each") -> "Each":
    return Each(*(jnp.concatenate([x, y]) for x, y in (
        (self.values, other.values), (self.keep, other.keep))))

  def unstacked(self) -> "Each":
    return Each(self.values.reshape(-1), self.keep.reshape(-1))


@pytree
class PolicyOutputs:
  """What scoring returns, differentiable. float32 or wider."""

  logp: Array  # [B, T] nats; 0 at t = 0, which nothing predicts
  entropy: Array | None = None  # [B, T] nats, exact, of the scored distribution
  value: Array | None = None  # [B, T]
  logp_ids: Array | None = None  # [B, T, K] of the batch's head_ids


@pytree
class TokenLoss:
  """A surrogate's per-token loss (minimised) and what it did, all [B, T].

  `aux["clip_low"]`, `aux["clip_high"]`: bool, True only where the bound binds,
  that is where it changes the loss given the sign of the advantage.
  """

  loss: Array
  aux: dict[str, Array]


@pytree
class Weights:
  """A correction: detached weight and keep mask, and the raw log ratio."""

  weight: Array  # [B, T] effective, detached
  keep: Array  # [B, T] bool, detached
  log_ratio: Array  # [B, T] raw: before any clamp, cap or mask, detached


@pytree
class Advantages:
  """One number a sequence; `keep` is False where the reward was NaN."""

  adv: Array  # [B] float32
  keep: Array  # [B] bool


@pytree
class Prompts:
  """Left-padded prompts and the counters that their draws derive from."""

  tokens: Array  # [B, P] int32
  valid: Array  # [B, P] bool
  cursor: Array  # [B] int32: position in the stream of prompts, never reset
  sample: Array  # [B] int32: which of the G samples of that prompt


@pytree
class Rollout:
  """What a sampler returns. T = P + new tokens; prompts are left-padded."""

  tokens: Array  # [B, T] int32
  valid: Array  # [B, T] bool: a real token, attended to
  mask: Array  # [B, T] bool: sampled by the policy, with a recorded log-prob
  # [B, T] float32 nats, of the distribution drawn from: after the sampler's
  # temperature and kept set; 0 where not `mask`.
  logp_behaviour: Array
  version: Array  # [B, T] int32 optimizer updates behind the weights; -1 off mask
  stop_token: Array  # [B] int32: the EOS id that ended it; -1: the length limit
  kept_ids: Array | None = None  # [B, T, K] int32; -1 marks an unused slot
  # The most likely tokens of the distribution that was sampled from, first of
  # kept_ids where there are any; -1 marks an unused slot, whose log-prob is 0.
  head_ids: Array | None = None  # [B, T, K] int32
  head_logp_behaviour: Array | None = None  # [B, T, K] float32 nats
  # The experts that each token went through; -1: it was not fed.
  routes: Array | None = None  # [B, T, layers, k] int16


@pytree
class Batch:
  """What the learner consumes: rollouts, rewards, and what `prepare` adds.

  Log-probs are all of tempered distributions: `logp_behaviour` (and the head's)
  at the sampler's temperature, the others at the learner's, rollout.temperature.
  The two are the same unless mismatch.temperature sets them apart.
  """

  tokens: Array  # [B, T] int32
  valid: Array  # [B, T] bool
  mask: Array  # [B, T] bool
  reward: Array  # [B] float32; NaN = unscorable
  group: Array  # [B] int32 in [0, B): the prompt a sequence belongs to
  logp_behaviour: Array | None = None  # [B, T] float32; None: not recorded
  version: Array | None = None  # [B, T] int32
  # [B, T] the learner's score at `version`; NaN where it was not asked for
  logp_version: Array | None = None
  kept_ids: Array | None = None  # [B, T, K]
  head_ids: Array | None = None  # [B, T, K]; see `Rollout`
  head_logp_behaviour: Array | None = None  # [B, T, K]
  routes: Array | None = None  # [B, T, layers, k]; see `Rollout`
  stop_token: Array | None = None  # [B] int32: EOS id; -1: the length limit
  failed: Array | None = None  # [B] bool: NaN because the verifier failed
  logp_prox: Array | None = None  # [B, T] scored at the start of the update
  logp_ref: Array | None = None  # [B, T] scored by the KL reference
  version_now: Array | None = None  # [B] int32: the learner's, at prepare
  # What some advantages need, and this loop does not record:
  baseline: Array | None = None  # [B] reward of a baseline answer
  value: Array | None = None  # [B, T] of a critic, at the time of sampling
  # Written by objective.prepare (`adv` is read with the advantage "given"):
  adv: Array | None = None  # [B, T]
  weight: Array | None = None  # [B, T] product of corrections without logp
  keep: Array | None = None  # [B, T] bool
  token_weight: dict[str, Array] | None = None  # term -> [B, T], divided

  def replace(self, **changes) -> "Batch":
    return dataclasses.replace(self, **changes)
