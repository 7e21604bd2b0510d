"""Stopping on SIGTERM or Ctrl-C without losing a complete step. Floor 2.

A signal is obeyed at once where being cut loses nothing (`at_once`), and else
where the code next asks (`check`).
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from rl_is.infra import hosts

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
  """A run was told to stop, and did; every complete step is on disk.

  Not an Exception: a verifier's `except Exception` must let it pass.
  """

  def __init__(self, signum: int, step: int = 0):
    self.signum, self.step = signum, step
    when = f"after step {step}" if step else "before its first step"
    super().__init__(f"stopped by {signal.Signals(signum).name} {when}; the same "
                     "command goes on")


class Preemption:
  """Inside its `with`, in the main thread, the first signal ends the run.

  A second one changes nothing: the first is being obeyed. In another thread
  Python gives no signals, and this does nothing.
  """

  def __init__(self):
    self.step = 0  # the last complete one; the run keeps it up to date
    self._signum: int | None = None
    self._is_cutting = False
    self._old = {}

  def __enter__(self) -> "Preemption":
    if threading.current_thread() is threading.main_thread():
      for signum in SIGNALS:
        old = signal.getsignal(signum)
        # Ignored since before us (a job in the background): it stays so. None:
        # not Python's, as where jax.distributed waits for SIGTERM itself.
        if old not in (signal.SIG_IGN, None):
          self._old[signum] = signal.signal(signum, self._on_signal)
    return self

  def __exit__(self, kind, error, trace) -> None:
    for signum, old in self._old.items():
      signal.signal(signum, old)
    if kind is None:  # it came too late to cut anything, but it came
      self.check()

  def check(self) -> None:
    """Raises `Stopped` if a signal came, to any of several processes."""
    signum = hosts.largest(self._signum or 0)
    if signum:
      raise Stopped(signum, self.step)

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """A signal cuts what is inside, wherever it stands."""
    try:
      self._is_cutting = True
      self.check()
      yield
    except Exception:
      if hosts.is_alone():
        self.check()  # what is inside may have taken the cut for a failure
      raise
    finally:
      self._is_cutting = False
    self.check()  # or swallowed it

  def _on_signal(self, signum, frame) -> None:
    del frame
    if self._signum is not None:
      return
    self._signum = signum
    # Several processes stop at one place: where all of them ask.
    if self._is_cutting and hosts.is_alone():
      self.check()


@contextlib.contextmanager
def on_stop(save: Callable[[], None]) -> Iterator[None]:
  """Calls `save` if what is inside is stopped."""
  try:
    yield
  except Stopped:
    save()
    raise
