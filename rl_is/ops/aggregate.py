"""From token losses to one number, with the denominator told apart. Floor 1.

Every aggregation is linear: total = sum_t weight_t loss_t, divided by a count
that adds over rows. `Parts` holds the two, so that a mean over minibatches,
microbatches, devices and hosts is exact: totals and counts add, and the
division happens once.

`mask` says which tokens contribute; `counted` which of them the denominator
counts ("kept" = the same, "all" = before corrections dropped some). `empty`:
does a row that `counted` leaves without a token add to a denominator over
sequences? "exclude": no (verl, Tunix, OpenRLHF); "count": yes (TRL, NeMo-RL,
SkyRL, ROLL, TorchRL).
"""

import dataclasses

import jax
import jax.numpy as jnp

from rl_is.core import checks, masked
from rl_is.core.types import Array, Mean

EMPTY = ("exclude", "count")


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


def _rows(fn, counted, empty):
  """What each row adds to a denominator over sequences. [B]"""
  checks.choice(f"{fn}: empty", empty, EMPTY)
  rows = jnp.any(counted > 0, axis=1).astype(counted.dtype)
  return jnp.ones_like(rows) if empty == "count" else rows


def token_mean_parts(mask: Array, counted: Array | None = None,
                     dtype=jnp.float32) -> Parts:
  mask, counted = _masks("token_mean", mask, counted, dtype)
  return Parts(mask, counted.sum(axis=1))


def token_sum_parts(mask: Array, counted: Array | None = None,
                    dtype=jnp.float32) -> Parts:
  """Count 0: nothing to divide by, which an objective does not."""
  mask, counted = _masks("token_sum", mask, counted, dtype)
  return Parts(mask, jnp.zeros_like(counted[:, 0]))


def sequence_mean_token_mean_parts(
    mask: Array, counted: Array | None = None, dtype=jnp.float32, *,
    empty: str = "exclude") -> Parts:
  fn = "sequence_mean_token_mean"
  mask, counted = _masks(fn, mask, counted, dtype)
  length = counted.sum(axis=1)
  return Parts(mask / jnp.maximum(length, 1)[:, None],
               _rows(fn, counted, empty))


def sequence_mean_token_sum_parts(
    mask: Array, counted: Array | None = None, dtype=jnp.float32, *,
    empty: str = "exclude") -> Parts:
  fn = "sequence_mean_token_sum"
  mask, counted = _masks(fn, mask, counted, dtype)
  return Parts(mask, _rows(fn, counted, empty))


@checks.ranged()
def constant_length_parts(
    mask: Array, counted: Array | None = None, dtype=jnp.float32, *,
    length: Array | float, empty: str = "exclude") -> Parts:
  mask, counted = _masks("constant_length", mask, counted, dtype)
  return Parts(mask / length, _rows("constant_length", counted, empty))


def prompt_mean_parts(
    mask: Array, counted: Array | None = None, dtype=jnp.float32, *,
    group: Array, empty: str = "exclude") -> Parts:
  """A row counts as its share of its prompt's tokens: the shares add to 1.

  So a prompt whose rows are in two minibatches is split in the same shares.
  """
  fn = "prompt_mean"
  mask, counted = _masks(fn, mask, counted, dtype)
  length = counted.sum(axis=1)
  checks.choice(f"{fn}: empty", empty, EMPTY)
  checks.vector(fn, mask=length, group=group)
  rows = length.shape[0]
  checks.group_ids(fn, group, rows)
  of_group = lambda x: jax.ops.segment_sum(x, group, rows)[group]
  # Traced ids cannot be refused: NaN, which is seen, not 0, which is not.
  tokens = jnp.where((group >= 0) & (group < rows), of_group(length), jnp.nan)
  share = length / jnp.maximum(tokens, 1)
  if empty == "count":
    share = jnp.where(tokens > 0, share, 1 / of_group(jnp.ones_like(length)))
  return Parts(mask / jnp.maximum(tokens, 1)[:, None], share)


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


def token_sum(loss: Array, mask: Array) -> Mean:
  """Sum over all tokens; nothing is divided.

    sum_it loss_it

  **Source**: verl's `token-sum`, 2026, https://github.com/volcengine/verl.
  **Departs**: nothing.

  Args:
    loss: [B, T] float.
    mask: [B, T] bool or 0/1.

  Returns:
    Mean: total, float32 or wider, and a count of 1; differentiable in `loss`.

  Raises:
    ValueError: if the shapes differ.

  Limits: grows with the batch and with the answers. Over a split of the batch
    add the totals: the counts of two sums add to 2.
  """
  return dataclasses.replace(_mean(token_sum_parts, loss, mask),
                             count=jnp.ones((), masked.wide(loss).dtype))


def sequence_mean_token_mean(loss: Array, mask: Array, *,
                             empty: str = "exclude") -> Mean:
  """Mean over sequences of the mean over their tokens.

    (1/B) sum_i (1/|y_i|) sum_t loss_it

  **Source**: Shao et al., "DeepSeekMath" (GRPO), 2024,
    https://arxiv.org/abs/2402.03300, eq. 3.
  **Departs**: B counts the rows that have a token, unless `empty` is "count".

  Args:
    loss: [B, T] float.
    mask: [B, T] bool or 0/1.
    empty: one of `EMPTY`.

  Returns:
    Mean: total and count, float32 or wider; differentiable in `loss`.

  Raises:
    ValueError: if the shapes differ or `empty` is unknown.

  Limits: a token of a long answer weighs less than one of a short answer.
  """
  return _mean(sequence_mean_token_mean_parts, loss, mask, empty=empty)


def sequence_mean_token_sum(loss: Array, mask: Array, *,
                            empty: str = "exclude") -> Mean:
  """Mean over sequences of the sum over their tokens.

    (1/B) sum_i sum_t loss_it

  **Source**: verl's `seq-mean-token-sum`, 2025,
    https://github.com/volcengine/verl; the policy gradient of Williams 1992.
  **Departs**: B counts the rows that have a token, unless `empty` is "count".

  Args:
    loss: [B, T] float.
    mask: [B, T] bool or 0/1.
    empty: one of `EMPTY`.

  Returns:
    Mean: total and count, float32 or wider; differentiable in `loss`.

  Raises:
    ValueError: if the shapes differ or `empty` is unknown.

  Limits: its scale grows with the length of the answers; see `constant_length`.
  """
  return _mean(sequence_mean_token_sum_parts, loss, mask, empty=empty)


def constant_length(loss: Array, mask: Array, *, length: Array | float,
                    empty: str = "exclude") -> Mean:
  """Mean over sequences of their token sum divided by a constant.

    (1/B) sum_i (1/length) sum_t loss_it

  **Source**: Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025,
    https://arxiv.org/abs/2503.20783, section 3.2.
  **Departs**: B counts the rows that have a token, unless `empty` is "count";
    the padded width plays no part (in verl it is the default for `length`).

  Args:
    loss: [B, T] float.
    mask: [B, T] bool or 0/1.
    length: tokens, > 0; usually the longest answer allowed.
    empty: one of `EMPTY`.

  Returns:
    Mean: total and count, float32 or wider; differentiable in `loss`.

  Raises:
    ValueError: if the shapes differ or `empty` is unknown.

  Limits: the gradient scales with 1/length: a change of it is a change of the
    learning rate for an optimizer that is not scale-free.
  """
  return _mean(constant_length_parts, loss, mask, length=length, empty=empty)


def prompt_mean(loss: Array, mask: Array, *, group: Array,
                empty: str = "exclude") -> Mean:
  """Mean over prompts of the mean over all tokens of a prompt's answers.

    (1/P) sum_p (1 / sum_{i in p} |y_i|) sum_{i in p, t} loss_it

  **Source**: Khatri et al., "The Art of Scaling Reinforcement Learning Compute
    for LLMs" (ScaleRL), 2025, https://arxiv.org/abs/2510.13786 (eq. number
    unverified).
  **Departs**: P counts the prompts that have a token, unless `empty` is "count"
    (then those with a row). TorchRL's `prompt_mean` is over rows: it is
    `sequence_mean_token_mean` with `empty` "count".

  Args:
    loss: [B, T] float.
    mask: [B, T] bool or 0/1.
    group: [B] int in [0, B): a row's prompt.
    empty: one of `EMPTY`.

  Returns:
    Mean: total and count, float32 or wider; differentiable in `loss`.

  Raises:
    ValueError: if the shapes differ, `empty` is unknown, `group` is a float or
      out of range.

  Limits: adds over splits that keep a prompt's rows together.
  """
  return _mean(prompt_mean_parts, loss, mask, group=group, empty=empty)
