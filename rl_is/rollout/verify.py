"""Scores of answers, in a thread with a time limit for each. Floor 3.

Not in the main thread: a verifier may run for long, and a signal must still be
obeyed. A thread and not a process: verifiers are closures, and a process with
JAX in it cannot be forked.
"""

import ctypes
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from rl_is.core import checks
from rl_is.tasks import Problem, Task, base, reward

ON_FAILURE = ("stop", "skip")
_SAID = 3  # failures of a call that are told one by one
_GRACE = 1.0  # seconds in which a thread that is told to end must do so


class Scores(NamedTuple):
  reward: np.ndarray  # [B] float32; NaN: unscorable
  failed: np.ndarray  # [B] bool: unscorable because the verifier failed


@dataclasses.dataclass(frozen=True)
class Verifier:
  """A task's verifier, what it may take for an answer, and what if it fails.

  It fails where it raises, takes longer than `seconds`, or returns what is no
  score. "stop": that ends the run. "skip": the answer is unscorable, and counted.
  """

  task: Task
  seconds: float = 10.0
  on_failure: str = "stop"

  def __post_init__(self):
    checks.choice("config.verify.on_failure", self.on_failure, ON_FAILURE)

  def scores(self, problems: Sequence[Problem], texts: Sequence[str]) -> Scores:
    """Of each answer to its problem, whatever thread this is called from."""
    left = dict(enumerate(zip(problems, texts, strict=True)))
    done: dict[int, float | Exception] = {}
    failures = {}
    while left:
      done |= self._run(left)
      left = {i: job for i, job in left.items() if i not in done}
      failures = {i: x for i, x in done.items() if isinstance(x, Exception)}
      if failures and self.on_failure == "stop":
        raise failures[min(failures)]
    for i in sorted(failures)[:_SAID]:
      logging.warning("skipped: %s", failures[i])
    if len(failures) > _SAID:
      logging.warning("skipped: %d more answers", len(failures) - _SAID)
    return Scores(
        np.asarray([np.nan if i in failures else done[i]
                    for i in range(len(done))], np.float32),
        np.asarray([i in failures for i in range(len(done))], bool))

  def _run(self, jobs: dict[int, tuple[Problem, str]]
           ) -> dict[int, float | Exception]:
    """Until all is done, or one of them has taken too long."""
    worker = _Worker(self.task, jobs, stop_at_failure=self.on_failure == "stop")
    try:
      while not worker.over.wait(self.seconds - worker.spent()):
        late = worker.at
        if worker.spent() > self.seconds:
          worker.end()
          if late in worker.done:  # it was only just in time
            break
          problem, text = jobs[late]
          return worker.done | {late: TimeoutError(
              f"{base.where(self.task, problem)}: the verifier took longer than "
              f"{self.seconds:g} s (config.verify.seconds) on the answer "
              f"{base.short(text)}")}
    finally:
      worker.end()
    return worker.done


class _Over(SystemExit):
  """Raised in a worker from outside: no `except Exception` takes it.

  A SystemExit, as a thread that one ends, late, says nothing.
  """


class _Worker:
  """A thread that scores one answer after another."""

  def __init__(self, task: Task, jobs: dict[int, tuple[Problem, str]],
               stop_at_failure: bool):
    self._task, self._jobs, self._stops = task, jobs, stop_at_failure
    self._told = False
    self.done: dict[int, float | Exception] = {}
    self.at, self._began = next(iter(jobs)), time.monotonic()
    self.over = threading.Event()
    self._thread = threading.Thread(target=self._work, name="verifier",
                                    daemon=True)
    self._thread.start()

  def spent(self) -> float:
    """Seconds on the answer it is at."""
    return time.monotonic() - self._began

  def _work(self) -> None:
    try:
      for i, (problem, text) in self._jobs.items():
        self._began, self.at = time.monotonic(), i
        if self._told:
          return
        self.done[i] = self._score(problem, text)
        if self._stops and isinstance(self.done[i], Exception):
          return
    except _Over:
      pass
    finally:
      self.over.set()

  def _score(self, problem: Problem, text: str) -> float | Exception:
    try:
      return reward(self._task, problem, text)
    except _Over:
      raise
    except SystemExit as error:  # it would end this thread, and say nothing
      return base.raised(self._task, problem, text, error)
    except Exception as error:
      return error

  def end(self) -> None:
    """At once if it runs Python; one that waits in C is left behind."""
    self._told = True
    if not self.over.is_set():
      ctypes.pythonapi.PyThreadState_SetAsyncExc(
          ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Over))
    self._thread.join(_GRACE)
    if self._thread.is_alive():
      logging.warning("a verifier of task %r does not end; its thread stays "
                      "behind", self._task.name)
