"""A generator beside the learner, never more than `max_lag` updates ahead. Floor 3.

Admission control: a group of answers is started only if, waiting its turn, it
can still be trained on. So nothing is generated to be thrown away, and long
answers are not starved, as they are where late ones are discarded.

Several processes have a generator and a queue each, of an equal share of every
batch: what one of them does in between, the others need not know.
"""

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from absl import logging

from rl_is.core import checks
from rl_is.core.types import Batch, Params
from rl_is.infra import hosts
from rl_is.infra.preemption import Preemption
from rl_is.rollout import batching
from rl_is.rollout.generator import Generator
from rl_is.rollout.publisher import Publisher, Weights

ORDERS = ("oldest", "freshest")
# Groups that wait to be trained on, and cursors: of them, and to begin again.
Snapshot = tuple[list[Batch], dict[str, list[int]]]
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

    batch_size: of all processes together.
    waiting: groups of a checkpoint, with the cursors of their prompts.
    restart: cursors of the groups that were being generated.
    """
    processes = jax.process_count()
    self._generator, self._publisher = generator, publisher
    self._stop = stop or Preemption()
    self._order, self._group_size = order, group_size
    self._groups, self._per_call = (
        batch_size // group_size // processes, groups_per_call)
    self._limits = dict(updates_per_batch=updates_per_batch, max_lag=max_lag)
    self._batch_size = batch_size // processes
    self._trained = first * self._groups
    # What is left is dealt out, the oldest first, to however many processes.
    groups = sorted(zip(cursors, waiting, strict=True),
                    key=lambda x: (_version(x[1]), x[0]))
    begun = self._trained * processes + len(groups) + len(restart)
    to_come = [*sorted(restart), *range(begun, batches * self._groups * processes)]
    mine = slice(jax.process_index(), None, processes)
    self._waiting = sorted(groups[mine], key=lambda x: x[0])
    mine = slice((jax.process_index() - len(groups)) % processes, None, processes)
    self._cursors, self._next = to_come[mine], 0
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
    taken = sorted(sum(hosts.everyones(taken), []), key=lambda x: x[0])
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
      if hosts.is_alone():  # the others may not be waiting: asked after the batch
        self._stop.check()
      if time.monotonic() - told >= _PATIENCE:
        told = time.monotonic()
        logging.warning("batch %d waits for the generator, which is at prompts "
                        "%s", n, sorted(self._running))

  def snapshot(self) -> Callable[[], Snapshot]:
    """What is sampled and not yet trained on, and which prompts are begun: as it
    is now; of all processes, put together when all of them call the result."""
    with self._changed:
      waiting, running, at = list(self._waiting), list(self._running), self._next
    return functools.partial(self._together, waiting, running, at)

  def _together(self, waiting: list[tuple[int, Batch]], running: list[int],
                at: int) -> Snapshot:
    newest = hosts.largest(self._cursors[at - 1] if at else -1)
    behind = [c for c in self._cursors[at:] if c < newest]  # of a slower process
    every = hosts.everyones((waiting, running + behind))
    groups = sorted(sum((w for w, _ in every), []), key=lambda x: x[0])
    return [group for _, group in groups], dict(
        cursors=[cursor for cursor, _ in groups],
        restart=sorted(sum((r for _, r in every), [])))

  def metrics(self) -> dict[str, float]:
    """Of the time since the last call; `depth` is of groups, at the last batch.

    Of several processes: what there is, added; seconds, their mean.
    """
    with self._changed:
      spent, self._spent = self._spent, collections.Counter()
    every = hosts.everyones(dict(spent, depth=float(self._depth)))
    total = lambda name: float(sum(x.get(name, 0.0) for x in every))
    return {"rollout/buffer_depth": total("depth"),
            "rollout/sampled_tokens": total("tokens"),
            **{f"time/{name}_s": total(name) / len(every) for name in (
                "generator", "generator_wait", "learner_wait")}}

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
          # One shape: the last call of a resumed run is filled up.
          batch = self._generator.groups(
              (cursors * self._per_call)[:self._per_call], weights,
              self._publisher.latest)
        with self._changed:
          for cursor, group in zip(cursors, batching.groups(
              batch, self._group_size)):
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
      self._changed.wait_for(lambda: self._stopping or self._is_done()
                             or self._may_start())
      if self._stopping or self._is_done():
        return None
      weights = self._publisher.latest()
      cursors = self._cursors[self._next:self._next + self._per_call]
      self._next += len(cursors)
      self._running |= dict.fromkeys(cursors, weights.version)
      return cursors, weights

  def _is_done(self) -> bool:
    return self._next == len(self._cursors)

  def _may_start(self) -> bool:
    begun = self._trained + len(self._waiting) + len(self._running)
    count = min(self._per_call, len(self._cursors) - self._next)
    return may_start((begun + count) * self._group_size,
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
