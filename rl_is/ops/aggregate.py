"""From token losses to one number, with the denominator told apart. Floor 1.

Every aggregation is linear: total = sum_t weight_t loss_t, divided by a count
that adds over rows. `Parts` holds the two, so that a mean over minibatches,
microbatches, devices and hosts is exact: totals and counts add, and the
division happens once.

`mask` says which tokens contribute; `counted` which of them the denominator
counts ("kept" = the same, "all" = before corrections dropped some). A row that
`counted` leaves empty is excluded from sequence denominators.
"""

import dataclasses

import jax.numpy as jnp

from rl_is.core import checks, masked
from rl_is.core.types import Array, Mean


@dataclasses.dataclass(frozen=True)
class Parts:
  weight: Array  # [B, T] `dtype`: what a token's loss is multiplied by
  count: Array  # [B] `dtype`: what a row adds to the denominator


def _masks(fn, mask, counted, dtype):
  if jnp.ndim(mask) != 2:
    raise ValueError(f"{fn}: mask: expected rank 2 [B, T], got shape "
                     f"{jnp.shape(mask)}")
  mask = checks.as_mask(fn, mask, jnp.shape(mask))
  counted = mask if counted is None else checks.as_mask(
      fn, counted, jnp.shape(mask))
  return mask.astype(dtype), counted.astype(dtype)


def token_mean_parts(mask: Array, counted: Array | None = None,
                     dtype=jnp.float32) -> Parts:
  mask, counted = _masks("token_mean", mask, counted, dtype)
  return Parts(mask, counted.sum(axis=1))


def sequence_mean_token_mean_parts(
    mask: Array, counted: Array | None = None, dtype=jnp.float32) -> Parts:
  mask, counted = _masks("sequence_mean_token_mean", mask, counted, dtype)
  length = counted.sum(axis=1)
  return Parts(mask / jnp.maximum(length, 1)[:, None],
               (length > 0).astype(dtype))


def constant_length_parts(
    mask: Array, counted: Array | None = None, dtype=jnp.float32, *,
    length: Array | float) -> Parts:
  mask, counted = _masks("constant_length", mask, counted, dtype)
  return Parts(mask / length, jnp.any(counted > 0, axis=1).astype(dtype))


def _mean(parts_of, loss: Array, mask: Array, **constants) -> Mean:
  mask = checks.as_mask("aggregate", mask, jnp.shape(loss))
  loss = masked.fill(masked.wide(loss), mask)
  parts = parts_of(mask, dtype=loss.dtype, **constants)
  return Mean(jnp.sum(parts.weight * loss), jnp.sum(parts.count))


def token_mean(loss: Array, mask: Array) -> Mean:
  """Mean over all tokens of the batch.

    sum_it loss_it / sum_i |y_i|

  **Source**: Yu et al., "DAPO", 2025, https://arxiv.org/abs/2503.14476, eq. 8.
  **Departs**: nothing; the count is of the whole minibatch, never of a
    microbatch (a mean of means weighs short microbatches more).

  Args:
    loss: [B, T] float.
    mask: [B, T] bool or 0/1.

  Returns:
    Mean: total and count, float32 or wider; differentiable in `loss`.

  Raises:
    ValueError: if the shapes differ.

  Limits: an empty mask gives total 0, count 0; `value()` is then NaN, absent.
  """
  return _mean(token_mean_parts, loss, mask)


def sequence_mean_token_mean(loss: Array, mask: Array) -> Mean:
  """Mean over sequences of the mean over their tokens.

    (1/B) sum_i (1/|y_i|) sum_t loss_it

  **Source**: Shao et al., "DeepSeekMath" (GRPO), 2024,
    https://arxiv.org/abs/2402.03300, eq. 3.
  **Departs**: B counts the rows that have a token (as verl, Tunix, OpenRLHF;
    TRL, NeMo-RL and SkyRL count empty rows too).

  Args:
    loss: [B, T] float.
    mask: [B, T] bool or 0/1.

  Returns:
    Mean: total and count, float32 or wider; differentiable in `loss`.

  Raises:
    ValueError: if the shapes differ.

  Limits: a token of a long answer weighs less than one of a short answer.
  """
  return _mean(sequence_mean_token_mean_parts, loss, mask)


def constant_length(loss: Array, mask: Array, *, length: Array | float) -> Mean:
  """Mean over sequences of their token sum divided by a constant.

    (1/B) sum_i (1/length) sum_t loss_it

  **Source**: Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025,
    https://arxiv.org/abs/2503.20783, section 3.2.
  **Departs**: B counts the rows that have a token; the padded width plays no
    part (in verl it is the default for `length`).

  Args:
    loss: [B, T] float.
    mask: [B, T] bool or 0/1.
    length: tokens, > 0; usually the longest answer allowed.

  Returns:
    Mean: total and count, float32 or wider; differentiable in `loss`.

  Raises:
    ValueError: if the shapes differ.

  Limits: the gradient scales with 1/length: a change of it is a change of the
    learning rate for an optimizer that is not scale-free.
  """
  return _mean(constant_length_parts, loss, mask, length=length)
