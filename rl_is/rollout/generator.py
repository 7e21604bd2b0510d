"""Samples groups of answers and scores them. Host side. Floor 3."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rl_is.core import masked
from rl_is.core.types import Batch, Params, Rollout
from rl_is.infra import hosts
from rl_is.infra import mesh as mesh_lib
from rl_is.models import sampler, scoring
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.rollout import batching
from rl_is.rollout.publisher import Weights
from rl_is.rollout.verify import Scores, Verifier
from rl_is.tasks import Problem

# One program each for every run of one structure in this process.
_sample = jax.jit(sampler.sample, static_argnames=("model",))
_begin = jax.jit(sampler.begin, static_argnames=("model",))
_decode = jax.jit(sampler.decode, static_argnames=("model",), donate_argnums=1)
_read_again = jax.jit(sampler.read_again, static_argnames=("model",),
                      donate_argnums=1)

_score = jax.jit(scoring.score, static_argnames=("model",))

CACHES = ("keep", "read_again")


@dataclasses.dataclass(frozen=True)
class Swaps:
  """Newer weights in the middle of an answer: what is drawn stays."""

  tokens: int  # decoded between two looks for newer weights
  cache: str  # of keys and values: "keep" the old ones, or "read_again"


def sample(params: Params, verifier: Verifier, problems: Sequence[Problem],
           cursors: Sequence[int], key: jax.Array, version: int, *,
           group_size: int, prompt_width: int, model: Model,
           sampling: Sampling, mesh: Mesh, swaps: Swaps | None = None,
           latest: Callable[[], Weights] | None = None
           ) -> tuple[Rollout, Scores]:
  """`group_size` answers to each problem, and their scores; numpy.

  With `swaps` and `latest`, which gives the newest weights, an answer may go on
  under newer ones.
  """
  prompts = batching.encode_prompts(
      verifier.task.tokenizer, problems, cursors, group_size, prompt_width)
  prompts = hosts.place(prompts, mesh_lib.rows(mesh))
  how = dict(model=model, sampling=sampling)
  with mesh_lib.use(mesh):
    rollout = hosts.fetch(
        _swapping(params, prompts, key, version, swaps, latest, **how)
        if swaps and latest else _sample(params, prompts, key, version, **how))
  texts = batching.answers(verifier.task.tokenizer, rollout)
  mine = hosts.share(len(texts), mesh)
  scores = verifier.scores([problems[row // group_size] for row in mine],
                           [texts[row] for row in mine])
  return rollout, Scores(*(hosts.union(x, len(texts), mesh) for x in scores))


def _swapping(params, prompts, key, version, swaps, latest, *, model, sampling
              ) -> Rollout:
  """`sampler.sample` in pieces, each under the newest weights."""
  state = _begin(params, prompts, key, model=model, sampling=sampling)
  while True:
    state = _decode(params, state, version, swaps.tokens, model=model,
                    sampling=sampling)
    if state["t"] >= sampling.max_new_tokens or state["done"].all():
      return sampler.finish(state)
    newer = latest()
    if newer.version != version and swaps.cache == "read_again":
      state = _read_again(newer.params, state, model=model)
    version, params = newer.version, newer.params


class Generator:
  """Groups of answers to prompts of the stream, by their cursors.

  Which problem stands at a cursor, and every draw, follow from the seed and the
  cursor alone.
  """

  def __init__(self, verifier: Verifier, *, key: jax.Array, seed: int, group_size: int,
               model: Model, sampling: Sampling, mesh: Mesh,
               record_logp: bool = True, swaps: Swaps | None = None,
               rescore_share: float = 0.0, temperature: float = 1.0):
    """swaps: may put newer weights under an answer; None: never.

    rescore_share: of the rows, scored as the learner does, at its `temperature`
    and with its parameters of the version that sampled.
    """
    self._task, self._seed, self._mesh = verifier.task, seed, mesh
    self._share = rescore_share
    self._score = functools.partial(_score, model=model, temperature=temperature)
    self._group_size, self._record_logp = group_size, record_logp
    self._sample = functools.partial(
        sample, verifier=verifier,
        key=hosts.move(key, mesh_lib.replicated(mesh), mesh),
        group_size=group_size, model=model,
        prompt_width=verifier.task.max_prompt_tokens, sampling=sampling,
        mesh=mesh, swaps=swaps)

  def groups(self, cursors: Sequence[int], weights: Weights,
             latest: Callable[[], Weights] | None = None) -> Batch:
    """Whole groups, numpy: a queue of them is small and easily saved.

    latest: gives newer weights, for the swaps of this generator.
    """
    problems = [self._task.train[batching.problem_index(
        self._seed, cursor, len(self._task.train))] for cursor in cursors]
    rollout, scores = self._sample(
        weights.params, problems=problems, cursors=cursors,
        version=weights.version, latest=latest)
    _check_finite(rollout, cursors, self._group_size)
    batch = batching.assemble(rollout, scores, self._group_size)
    if self._share:
      batch = batch.replace(logp_version=self._logp_version(batch, weights))
    return batch if self._record_logp else batch.replace(logp_behaviour=None)

  def _logp_version(self, batch: Batch, weights: Weights) -> np.ndarray:
    """By the learner's scorer at the version that sampled; NaN: not scored.

    The first rows, a multiple of the devices. An answer of two versions, whose
    old keys and values no one version would make, is left out.
    """
    devices = mesh_lib.data_size(self._mesh)
    rows = devices * math.ceil(self._share * len(batch.reward) / devices)
    part = jax.tree.map(lambda x: x[:rows], batch)
    with mesh_lib.use(self._mesh):
      scored = hosts.fetch(self._score(weights.learner, hosts.place(
          part, mesh_lib.rows(self._mesh))).logp)
    out = np.full(batch.mask.shape, np.nan, np.float32)
    one = (~part.mask | (part.version == weights.version)).all(axis=1)
    out[:rows] = np.where(part.mask & one[:, None], scored, np.nan)
    return out


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
