"""The queue that makes a batch exactly k optimizer updates old. Floor 3.

With U updates a batch, batch n is trained from version n U and must have been
sampled from version max(0, n U - k). So k / U sampled *batches* wait in line;
no old parameters are kept.
"""

import collections
from collections.abc import Iterable

import numpy as np

from rl_is.core import checks
from rl_is.core.types import Batch


class LagQueue:
  """First in, first out; refuses a batch of the wrong age."""

  def __init__(self, lag: int, updates_per_batch: int,
               waiting: Iterable[Batch] = (), first: int = 0):
    """waiting: the batches of a checkpoint, numbered `first`, `first` + 1..."""
    if lag < 0:
      raise ValueError(f"rollout.lag: expected >= 0, got {lag}")
    checks.divisible("rollout.lag", lag, "train.updates_per_batch",
                     updates_per_batch, zero=True)
    self._lag, self._updates = lag, updates_per_batch
    self._queue = collections.deque(enumerate(waiting, first))

  @property
  def depth(self) -> int:
    return self._lag // self._updates

  def due(self, n: int, total: int) -> range:
    """The batches to sample from version n U: all up to n + depth, as the
    first `depth` of them have no older weights to come from."""
    newest = self._queue[-1][0] + 1 if self._queue else n
    return range(newest, min(n + self.depth + 1, total))

  def push(self, n: int, batch: Batch) -> None:
    expected = self._queue[-1][0] + 1 if self._queue else n
    if n != expected:
      raise ValueError(f"lag queue: expected batch {expected}, got {n}")
    self._queue.append((n, batch))

  def pop(self, n: int) -> Batch:
    """Batch n, whose every sampled token has exactly the version it must."""
    number, batch = self._queue.popleft()
    version = max(0, n * self._updates - self._lag)
    found = np.unique(batch.version[batch.mask])
    if number != n or (found.size and found.tolist() != [version]):
      raise RuntimeError(f"lag queue: expected batch {n} of version {version}, "
                         f"got batch {number} of versions {found.tolist()}")
    return batch

  def waiting(self) -> list[Batch]:
    return [batch for _, batch in self._queue]
