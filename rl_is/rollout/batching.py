"""Problems to padded arrays and back, on the host. Floor 3."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from rl_is.core.types import Batch, Prompts, Rollout
from rl_is.rollout.verify import Scores
from rl_is.tasks import Problem
from rl_is.tasks.tokenizer import Tokenizer


LAGS = 9  # parts of the histogram of ages in `describe`


def problem_index(seed: int, cursor: int, count: int) -> int:
  """Which of `count` problems stands at a place of the endless stream.

  Every epoch is another permutation, derived from the seed: nothing is carried,
  so a resumed run reads the same stream.
  """
  epoch, place = divmod(cursor, count)
  return int(_permutation(seed, epoch, count)[place])


def sample_of(problems: Sequence[Problem], count: int) -> list[Problem]:
  """The first `count` problems of a fixed shuffle: all of them if they are few.

  Tasks enumerate: the first of them in their own order are the small ones.
  """
  order = _permutation(0, 0, len(problems))
  return [problems[i] for i in order[:count]]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
  return np.random.default_rng([seed, epoch]).permutation(count)


def encode_prompts(tokenizer: Tokenizer, problems: Sequence[Problem],
                   cursors: Sequence[int], group_size: int, width: int
                   ) -> Prompts:
  """Left-padded prompts, each repeated `group_size` times; numpy."""
  tokens = np.full((len(problems), width), tokenizer.pad_id, np.int32)
  valid = np.zeros((len(problems), width), bool)
  for row, problem in enumerate(problems):
    ids = tokenizer.encode_prompt(problem.prompt)
    if len(ids) > width:
      raise ValueError(f"prompt {problem.prompt!r}: expected at most {width} "
                       f"tokens, got {len(ids)}")
    tokens[row, width - len(ids):] = ids
    valid[row, width - len(ids):] = True
  repeat = lambda x: np.repeat(x, group_size, axis=0)
  return Prompts(
      repeat(tokens), repeat(valid),
      cursor=repeat(np.asarray(cursors, np.int32)),
      sample=np.tile(np.arange(group_size, dtype=np.int32), len(problems)))


def demonstrations(tokenizer: Tokenizer, problems: Sequence[Problem],
                   prompt_width: int, answer_width: int) -> Batch:
  """Prompts with their answers and an EOS, as if sampled with reward 1; numpy.

  `pg` on it with the `reward` advantage is maximum likelihood.
  """
  prompts = encode_prompts(tokenizer, problems, range(len(problems)), 1,
                           prompt_width)
  shape = (len(problems), answer_width)
  answer, mask = np.full(shape, tokenizer.pad_id, np.int32), np.zeros(shape, bool)
  for row, problem in enumerate(problems):
    ids = tokenizer.encode(problem.answer) + [tokenizer.eos_ids[0]]
    if len(ids) > answer_width:
      raise ValueError(f"demonstration {problem.answer!r}: expected at most "
                       f"{answer_width} tokens with EOS, got {len(ids)}")
    answer[row, :len(ids)] = ids
    mask[row, :len(ids)] = True
  rows = len(problems)
  return Batch(
      tokens=np.concatenate([prompts.tokens, answer], axis=1),
      valid=np.concatenate([prompts.valid, mask], axis=1),
      mask=np.concatenate([np.zeros_like(prompts.valid), mask], axis=1),
      reward=np.ones(rows, np.float32), group=np.arange(rows, dtype=np.int32))


def answers(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
  """The sampled text of each row, by the mask: never by token values."""
  return [tokenizer.decode(tokens[mask])
          for tokens, mask in zip(rollout.tokens, rollout.mask)]


def assemble(rollout: Rollout, scores: Scores, group_size: int) -> Batch:
  """Rollouts of whole groups, in order, with their rewards; numpy."""
  rows = rollout.tokens.shape[0]
  return Batch(
      tokens=rollout.tokens, valid=rollout.valid, mask=rollout.mask,
      reward=scores.reward, failed=scores.failed,
      group=np.arange(rows, dtype=np.int32) // group_size,
      logp_behaviour=rollout.logp_behaviour, version=rollout.version,
      kept_ids=rollout.kept_ids, head_ids=rollout.head_ids,
      head_logp_behaviour=rollout.head_logp_behaviour, routes=rollout.routes,
      stop_token=rollout.stop_token)


def groups(batch: Batch, group_size: int) -> list[Batch]:
  """A batch of whole groups, in order -> a batch a group, numbered 0."""
  rows = range(0, batch.tokens.shape[0], group_size)
  cut = lambda first: jax.tree.map(lambda x: x[first:first + group_size], batch)
  return [_numbered(cut(first), group_size) for first in rows]


def join(parts: Sequence[Batch], group_size: int) -> Batch:
  """Batches of whole groups, one after another; the inverse of `groups`."""
  return _numbered(jax.tree.map(lambda *xs: np.concatenate(xs), *parts),
                   group_size)


def _numbered(batch: Batch, group_size: int) -> Batch:
  rows = np.arange(batch.tokens.shape[0], dtype=np.int32)
  return batch.replace(group=rows // group_size)


def check_lag(batch: Batch, learner_version: int, max_lag: int) -> None:
  """Every sampled token is of a known version, at most `max_lag` updates old."""
  versions = batch.version[batch.mask]
  wrong = (versions < 0) | (versions > learner_version) | (
      learner_version - versions > max_lag)
  if wrong.any():
    raise RuntimeError(
        f"rollout: expected tokens of versions {max(0, learner_version - max_lag)}"
        f" to {learner_version} (rollout.max_lag = {max_lag}), got "
        f"{np.unique(versions[wrong]).tolist()}")


def describe(batch: Batch, learner_version: int) -> dict[str, float]:
  """Host metrics of a batch as the learner meets it; NaN where nothing counts."""
  scored = ~np.isnan(batch.reward)
  lag = (learner_version - batch.version)[batch.mask]
  length = batch.mask.sum(axis=1)
  failed = np.zeros_like(scored) if batch.failed is None else batch.failed
  groups = [batch.reward[(batch.group == g) & scored]
            for g in np.unique(batch.group)]
  # Of one answer: above 0 where it went on under newer weights.
  span = max((np.ptp(v[m]) for v, m in zip(batch.version, batch.mask)
              if m.any()), default=float("nan"))
  has_signal = [len(r) > 0 and r.min() < r.max() for r in groups]
  mean = lambda x: float(np.mean(x)) if len(x) else float("nan")
  return {
      "reward/mean": mean(batch.reward[scored]),
      "reward/groups_with_signal": mean(has_signal),
      # By reason: the verifier abstained, or failed and was to be skipped.
      "reward/unscorable": float(np.sum(~scored & ~failed)),
      "reward/failed": float(np.sum(failed)),
      "rollout/staleness_mean": mean(lag),
      "rollout/staleness_max": float(lag.max()) if len(lag) else float("nan"),
      # Share of the tokens of each age; the last is "or older".
      **{f"rollout/lag{k}_frac": mean(np.minimum(lag, LAGS - 1) == k)
         for k in range(LAGS)},
      "rollout/version_span_max": mean([span]),
      "rollout/tokens": float(batch.mask.sum()),
      "rollout/length_mean": mean(length),
      # Of the answers that are in a loss, and of those that no score lets in.
      "rollout/length_scored_mean": mean(length[scored]),
      "rollout/length_unscorable_mean": mean(length[~scored]),
      "rollout/stopped_frac": mean(batch.stop_token >= 0),
  }
