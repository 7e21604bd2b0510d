"""Live progress on standard error: step, reward, time left. Floor 2."""

import sys
import time

from rich.console import Console
from rich.progress import (BarColumn, MofNCompleteColumn, Progress, TextColumn,
                           TimeElapsedColumn, TimeRemainingColumn)

from rl_is.infra import hosts


class Steps:
  """A bar on a terminal; elsewhere (CI, a file) a line every few seconds."""

  def __init__(self, label: str, total: int, done: int = 0,
               every_s: float = 10.0):
    self._label, self._total, self._every_s = label, total, every_s
    self._first, self._start = done, time.monotonic()
    self._last = self._start
    self._is_warm = False
    self._bar = None
    self._is_quiet = not hosts.is_first()  # one of several processes tells
    if not self._is_quiet and sys.stderr.isatty():
      self._bar = Progress(
          TextColumn("{task.description:<28}"), BarColumn(None),
          MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
          TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
          console=Console(stderr=True))
      self._task = self._bar.add_task(label, total=total, completed=done,
                                      note="")
      self._bar.start()

  def __enter__(self) -> "Steps":
    return self

  def __exit__(self, *exc) -> None:
    if self._bar:
      self._bar.stop()

  def update(self, done: int, note: str) -> None:
    if self._is_quiet:
      return
    if self._bar:
      self._bar.update(self._task, completed=done, note=note)
      return
    now = time.monotonic()
    if not self._is_warm:  # what came before was compilation
      self._first, self._start, self._is_warm = done, now, True
    if now - self._last < self._every_s and done < self._total:
      return
    self._last = now
    per_step = (now - self._start) / max(done - self._first, 1)
    print(f"{self._label}: step {done}/{self._total}  {note}  "
          f"ETA {per_step * (self._total - done):.0f} s", file=sys.stderr,
          flush=True)
