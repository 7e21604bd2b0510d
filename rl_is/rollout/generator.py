"""Samples groups of answers and scores them. Host side. Floor 3."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

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
from rl_is.tasks import Problem, Task, reward

# One program each for every run of one structure in this process.
_sample = jax.jit(sampler.sample, static_argnames=("model",))
_begin = jax.jit(sampler.begin, static_argnames=("model",))
_decode = jax.jit(sampler.decode, static_argnames=("model",), donate_argnums=1)
_read_again = jax.jit(sampler.read_again, static_argnames=("model",),
                      donate_argnums=1)

CACHES = ("keep", "read_again")
Weights = tuple[int, Params]  # a version and its parameters


@dataclasses.dataclass(frozen=True)
class Swaps:
  """Newer weights in the middle of an answer: what is drawn stays."""

  tokens: int  # decoded between two looks for newer weights
  cache: str  # of keys and values: "keep" the old ones, or "read_again"


def sample(params: Params, task: Task, problems: Sequence[Problem],
           cursors: Sequence[int], key: jax.Array, version: int, *,
           group_size: int, prompt_width: int, model: Model,
           sampling: Sampling, mesh: Mesh, swaps: Swaps | None = None,
           latest: Callable[[], Weights] | None = None
           ) -> tuple[Rollout, np.ndarray]:
  """`group_size` answers to each problem, and the verifier's rewards; numpy.

  With `swaps` and `latest`, which gives the newest weights, an answer may go on
  under newer ones.
  """
  prompts = batching.encode_prompts(
      task.tokenizer, problems, cursors, group_size, prompt_width)
  prompts = jax.device_put(prompts, mesh_lib.rows(mesh))
  how = dict(model=model, sampling=sampling)
  rollout = jax.device_get(
      _swapping(params, prompts, key, version, swaps, latest, **how)
      if swaps and latest else _sample(params, prompts, key, version, **how))
  texts = batching.answers(task.tokenizer, rollout)
  rewards = [reward(task, problems[row // group_size], text)
             for row, text in enumerate(texts)]
  return rollout, np.asarray(rewards, np.float32)


def _swapping(params, prompts, key, version, swaps, latest, *, model, sampling
              ) -> Rollout:
  """`sampler.sample` in pieces, each under the newest weights."""
  state = _begin(params, prompts, key, model=model, sampling=sampling)
  while True:
    state = _decode(params, state, version, swaps.tokens, model=model,
                    sampling=sampling)
    if state["t"] >= sampling.max_new_tokens or state["done"].all():
      return sampler.finish(state)
    newest, params = latest()
    if newest != version and swaps.cache == "read_again":
      state = _read_again(params, state, model=model)
    version = newest


class Generator:
  """Groups of answers to prompts of the stream, by their cursors.

  Which problem stands at a cursor, and every draw, follow from the seed and the
  cursor alone.
  """

  def __init__(self, task: Task, *, key: jax.Array, seed: int, group_size: int,
               model: Model, sampling: Sampling, mesh: Mesh,
               record_logp: bool = True, swaps: Swaps | None = None):
    self._task, self._seed = task, seed
    self._group_size, self._record_logp = group_size, record_logp
    self._sample = functools.partial(
        sample, task=task, key=key, group_size=group_size, model=model,
        prompt_width=task.max_prompt_tokens, sampling=sampling, mesh=mesh,
        swaps=swaps)

  def groups(self, cursors: Sequence[int], version: int, params: Params,
             latest: Callable[[], Weights] | None = None) -> Batch:
    """Whole groups, numpy: a queue of them is small and easily saved.

    latest: gives newer weights, for the swaps of this generator.
    """
    problems = [self._task.train[batching.problem_index(
        self._seed, cursor, len(self._task.train))] for cursor in cursors]
    rollout, rewards = self._sample(
        params, problems=problems, cursors=cursors, version=version,
        latest=latest)
    _check_finite(rollout, cursors, self._group_size)
    batch = batching.assemble(rollout, rewards, self._group_size)
    return batch if self._record_logp else batch.replace(logp_behaviour=None)


def _check_finite(rollout: Rollout, cursors: Sequence[int], group_size: int
                  ) -> None:
  """A sampler that returns NaN has broken logits for the row: stop, say where."""
  bad = int(masked.first_bad(rollout.mask, rollout.logp_behaviour))
  if bad >= 0:
    row, token = divmod(bad, rollout.mask.shape[1])
    raise FloatingPointError(
        f"sampler: non-finite log-prob at prompt {cursors[row // group_size]}, "
        f"sample {row % group_size}, token {token}: "
        f"{rollout.logp_behaviour[row, token]}")
