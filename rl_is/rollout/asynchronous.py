"""A generator beside the learner, never more than `max_lag` updates ahead. Floor 3.

Admission control: a group of answers is started only if, waiting its turn, it
can still be trained on. So nothing is generated to be thrown away, and long
answers are not starved, as they are where late ones are discarded.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
from absl import logging

from rl_is.core import checks
from rl_is.core.types import Batch, Params
from rl_is.infra.preemption import Preemption
from rl_is.rollout import batching
from rl_is.rollout.generator import Generator
from rl_is.rollout.publisher import Publisher, Weights

ORDERS = ("oldest", "freshest")
_PATIENCE = 60.0  # seconds between two words about a wait
_LOOK = 0.2  # seconds between two looks whether the run is told to stop


def may_start(started: int, version: int, *, batch_size: int,
              updates_per_batch: int, max_lag: int) -> bool:
  """Whether a sequence begun now can be trained on within `max_lag` updates.

    U floor((started - 1) / B) - version <= max_lag

  `started` counts every sequence begun in the run, this one included: the last
  one of them is trained on in batch floor((started - 1) / B).
  """
  turn = updates_per_batch * ((started - 1) // batch_size)
  return turn - version <= max_lag


def choose(versions: Sequence[int], running: Sequence[int], count: int, *,
           now: int, updates_per_batch: int, max_lag: int, order: str
           ) -> list[int]:
  """Which `count` of the waiting groups to train on at version `now`.

  "oldest" takes them by age. "freshest" takes the newest, as far as those left
  behind can still be trained on in time, `count` at each of the next updates.

  Args:
    versions: of the waiting groups, in the order of their prompts.
    running: of the groups that are being generated.

  Returns:
    Indices into `versions`, ascending.
  """
  checks.choice("rollout.order", order, ORDERS)
  by_age = sorted(range(len(versions)), key=lambda i: (versions[i], i))
  if order == "oldest":
    return sorted(by_age[:count])
  for oldest in range(count + 1):  # how many of the oldest must go first
    rest = len(by_age) - (count - oldest)
    left = sorted([versions[i] for i in by_age[oldest:rest]] + list(running))
    turns = [(v + max_lag - now) // updates_per_batch for v in left]
    if all(i < count * turn for i, turn in enumerate(turns)):
      break
  return sorted(by_age[:oldest] + by_age[rest:])


class Asynchronous:
  """Whole groups from a thread of its own; `close` ends it.

  The learner's thread calls `publish`, `batch`, `snapshot` and `metrics`.
  """

  def __init__(self, generator: Generator, publisher: Publisher, *,
               max_lag: int, order: str, updates_per_batch: int,
               batch_size: int, group_size: int, groups_per_call: int,
               batches: int, first: int = 0, waiting: Iterable[Batch] = (),
               cursors: Sequence[int] = (), restart: Sequence[int] = (),
               stop: Preemption | None = None):
    """From batch `first` to `batches`; what `snapshot` gave; who may end a wait.

    waiting: groups of a checkpoint, with the cursors of their prompts.
    restart: cursors of the groups that were being generated.
    """
    self._generator, self._publisher = generator, publisher
    self._stop = stop or Preemption()
    self._order, self._group_size = order, group_size
    self._groups, self._per_call = batch_size // group_size, groups_per_call
    self._limits = dict(updates_per_batch=updates_per_batch, max_lag=max_lag)
    self._batch_size, self._total = batch_size, batches * self._groups
    self._trained = first * self._groups
    self._waiting = list(zip(cursors, waiting, strict=True))
    begun = self._trained + len(self._waiting) + len(restart)
    self._cursors = collections.deque([*restart, *range(begun, self._total)])
    self._running: dict[int, int] = {}  # cursor -> version
    self._failure: BaseException | None = None
    self._stopping = False
    self._depth = 0
    self._spent = collections.Counter()  # since the last `metrics`
    self._changed = threading.Condition()
    self._thread = threading.Thread(
        target=self._generate, name="generator", daemon=True)

  # The learner's side.

  def publish(self, version: int, params: Params) -> None:
    with self._changed:
      self._publisher.publish(version, params)
      self._changed.notify_all()
    if not self._thread.ident:
      self._thread.start()

  def batch(self, n: int) -> Batch:
    """Batch n, all of it at most `max_lag` updates old; waits until it is there."""
    with self._changed, self._timed("learner_wait"):
      self._wait_for_groups(n)
      if self._failure:
        raise RuntimeError(
            f"generator, at prompts {sorted(self._running)}: "
            f"{type(self._failure).__name__}: {self._failure}"
        ) from self._failure
      self._depth = len(self._waiting)
      now = n * self._limits["updates_per_batch"]
      chosen = set(choose(
          [_version(group) for _, group in self._waiting],
          list(self._running.values()), self._groups, now=now,
          order=self._order, **self._limits))
      taken = [x for i, x in enumerate(self._waiting) if i in chosen]
      self._waiting = [x for i, x in enumerate(self._waiting) if i not in chosen]
      self._trained += self._groups
    batch = batching.join([group for _, group in taken], self._group_size)
    batching.check_lag(batch, now, self._limits["max_lag"])
    return batch

  def _wait_for_groups(self, n: int) -> None:
    told = time.monotonic()
    # A signal is looked for, and cuts nothing: cut between taking the lock and
    # the `with` that gives it back, the generator would wait for it for ever.
    while not self._changed.wait_for(
        lambda: self._failure or len(self._waiting) >= self._groups,
        timeout=min(_LOOK, _PATIENCE)):
      self._stop.check()
      if time.monotonic() - told >= _PATIENCE:
        told = time.monotonic()
        logging.warning("batch %d waits for the generator, which is at prompts "
                        "%s", n, sorted(self._running))

  def snapshot(self) -> tuple[list[Batch], dict[str, list[int]]]:
    """What is sampled and not yet trained on, and which prompts are begun."""
    with self._changed:
      return [group for _, group in self._waiting], dict(
          cursors=[cursor for cursor, _ in self._waiting],
          restart=sorted(self._running))

  def metrics(self) -> dict[str, float]:
    """Of the time since the last call; `depth` is of groups, at the last batch."""
    with self._changed:
      spent, self._spent = self._spent, collections.Counter()
    return {"rollout/buffer_depth": float(self._depth),
            "rollout/sampled_tokens": spent["tokens"],
            "time/generator_s": spent["generator"],
            "time/generator_wait_s": spent["generator_wait"],
            "time/learner_wait_s": spent["learner_wait"]}

  def close(self) -> None:
    """Ends the thread: at once where it waits, else after the call it is in."""
    with self._changed:
      self._stopping = True
      self._changed.notify_all()
    if self._thread.ident:
      self._thread.join()

  # The generator's side.

  def _generate(self) -> None:
    try:
      while (begun := self._begin()) is not None:
        cursors, weights = begun
        with self._timed("generator"):
          batch = self._generator.groups(
              cursors, weights, self._publisher.latest)
        with self._changed:
          for cursor, group in zip(cursors, batching.groups(
              batch, self._group_size), strict=True):
            del self._running[cursor]
            self._waiting.append((cursor, group))
          self._waiting.sort(key=lambda x: x[0])
          self._spent["tokens"] += float(batch.mask.sum())
          self._changed.notify_all()
    except BaseException as error:  # it must reach the learner, whatever it is
      with self._changed:
        self._failure = error
        self._changed.notify_all()

  def _begin(self) -> tuple[list[int], Weights] | None:
    """The next prompts and weights, once they may start; None at the end."""
    with self._changed, self._timed("generator_wait"):
      self._changed.wait_for(lambda: self._stopping or not self._cursors
                             or self._may_start())
      if self._stopping or not self._cursors:
        return None
      weights = self._publisher.latest()
      cursors = [self._cursors.popleft() for _ in range(self._per_call)]
      self._running |= dict.fromkeys(cursors, weights.version)
      return cursors, weights

  def _may_start(self) -> bool:
    begun = self._trained + len(self._waiting) + len(self._running)
    return may_start((begun + self._per_call) * self._group_size,
                     self._publisher.latest().version, batch_size=self._batch_size,
                     **self._limits)

  @contextlib.contextmanager
  def _timed(self, what: str):
    began = time.perf_counter()
    try:
      yield
    finally:
      with self._changed:
        self._spent[what] += time.perf_counter() - began


def _version(group: Batch) -> int:
  """Of its oldest token; a group without tokens is as young as can be."""
  versions = group.version[group.mask]
  return int(np.min(versions)) if versions.size else np.iinfo(np.int32).max
