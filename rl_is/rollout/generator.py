"""Samples groups of answers and scores them. Host side. Floor 3."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rl_is.core import masked
from rl_is.core.types import Batch, Params, Rollout
from rl_is.infra import mesh as mesh_lib
from rl_is.models import sampler
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.rollout import batching
from rl_is.rollout.publisher import Publisher
from rl_is.tasks import Problem, Task, reward

# One program for every run of one structure in this process.
_sample = jax.jit(sampler.sample, static_argnames=("model",))


def sample(params: Params, task: Task, problems: Sequence[Problem],
           cursors: Sequence[int], key: jax.Array, version: int, *,
           group_size: int, prompt_width: int, model: Model,
           sampling: Sampling, mesh: Mesh) -> tuple[Rollout, np.ndarray]:
  """`group_size` answers to each problem, and the verifier's rewards; numpy."""
  prompts = batching.encode_prompts(
      task.tokenizer, problems, cursors, group_size, prompt_width)
  prompts = jax.device_put(prompts, mesh_lib.rows(mesh))
  rollout = jax.device_get(_sample(
      params, prompts, key, version, model=model, sampling=sampling))
  texts = batching.answers(task.tokenizer, rollout)
  rewards = [reward(task, problems[row // group_size], text)
             for row, text in enumerate(texts)]
  return rollout, np.asarray(rewards, np.float32)


class Generator:
  """Batch n of the run, from the newest published weights.

  Which prompts, and every draw, follow from the seed and the cursor: batch n
  holds the prompts n * prompts_per_batch onwards of the stream.
  """

  def __init__(self, task: Task, publisher: Publisher, *, key: jax.Array,
               seed: int, batch_size: int, group_size: int, model: Model,
               sampling: Sampling, mesh: Mesh, record_logp: bool = True):
    self._task, self._publisher, self._seed = task, publisher, seed
    self._prompts_per_batch = batch_size // group_size
    self._group_size, self._record_logp = group_size, record_logp
    self._sample = functools.partial(
        sample, task=task, key=key, group_size=group_size, model=model,
        prompt_width=task.max_prompt_tokens, sampling=sampling, mesh=mesh)

  def batch(self, n: int) -> Batch:
    """Whole groups, numpy: a queue of them is small and easily saved."""
    version, params = self._publisher.latest()
    first = n * self._prompts_per_batch
    cursors = range(first, first + self._prompts_per_batch)
    problems = [self._task.train[batching.problem_index(
        self._seed, cursor, len(self._task.train))] for cursor in cursors]
    rollout, rewards = self._sample(
        params, problems=problems, cursors=cursors, version=version)
    _check_finite(rollout, n)
    batch = batching.assemble(rollout, rewards, self._group_size)
    return batch if self._record_logp else batch.replace(logp_behaviour=None)


def _check_finite(rollout: Rollout, n: int) -> None:
  """A sampler that returns NaN has broken logits for the row: stop, say where."""
  bad = int(masked.first_bad(rollout.mask, rollout.logp_behaviour))
  if bad >= 0:
    row, token = divmod(bad, rollout.mask.shape[1])
    raise FloatingPointError(
        f"sampler: non-finite log-prob at batch {n}, sample {row}, token {token}:"
        f" {rollout.logp_behaviour[row, token]}")
