"""A generator that takes turns with the learner: lag(k), deterministic. Floor 3."""

import time
from collections.abc import Callable, Iterable

from rl_is.core.types import Batch, Params
from rl_is.infra.preemption import Preemption
from rl_is.rollout.buffer import LagQueue
from rl_is.rollout.generator import Generator
from rl_is.rollout.publisher import Publisher


class Lagged:
  """Batch n is exactly `lag` updates old; nothing runs beside the learner.

  Batch n holds the prompts n * prompts_per_batch onwards of the stream.
  """

  def __init__(self, generator: Generator, publisher: Publisher, *, lag: int,
               updates_per_batch: int, prompts_per_batch: int, batches: int,
               first: int = 0, waiting: Iterable[Batch] = (),
               stop: Preemption | None = None):
    self._generator, self._publisher = generator, publisher
    self._stop = stop or Preemption()  # it may cut the sampling
    self._prompts, self._total = prompts_per_batch, batches
    self._queue = LagQueue(lag, updates_per_batch, waiting, first)
    self._seconds = self._tokens = 0.0

  def publish(self, version: int, params: Params) -> None:
    self._publisher.publish(version, params)

  def batch(self, n: int) -> Batch:
    began, self._tokens = time.perf_counter(), 0.0
    for m in self._queue.due(n, self._total):
      cursors = range(m * self._prompts, (m + 1) * self._prompts)
      with self._stop.at_once():
        batch = self._generator.groups(cursors, self._publisher.latest())
      self._queue.push(m, batch)
      self._tokens += float(batch.mask.sum())
    self._seconds = time.perf_counter() - began
    return self._queue.pop(n)

  def snapshot(self) -> Callable[[], tuple[list[Batch], dict]]:
    """The batches that wait, for a checkpoint; their cursors follow from n."""
    waiting = self._queue.waiting()
    return lambda: (waiting, {})

  def metrics(self) -> dict[str, float]:
    return {"rollout/sampled_tokens": self._tokens,
            "time/generator_s": self._seconds}

  def close(self) -> None:
    pass
