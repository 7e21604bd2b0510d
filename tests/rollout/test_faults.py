"""What fails, and what the user is told: a row a fault, each within seconds."""

import dataclasses
import signal
import threading
import time

import jax
import numpy as np
import pytest

from rl_is.core.types import Batch
from rl_is.rollout import asynchronous, batching
from rl_is.rollout.asynchronous import Asynchronous
from rl_is.rollout.buffer import LagQueue
from rl_is.rollout.lagged import Lagged
from rl_is.rollout.publisher import Publisher
from rl_is.rollout.verify import Verifier
from rl_is.tasks import CharTokenizer, Problem, Task

LIMIT = 5.0  # seconds
GOOD, BAD = Problem("1+1=", "2"), Problem("bad", "0")


@pytest.fixture(autouse=True)
def within_seconds_and_no_thread_left():
  before, began = set(threading.enumerate()), time.monotonic()
  yield
  assert time.monotonic() - began < LIMIT
  left = [t.name for t in set(threading.enumerate()) - before]
  assert not left, left


# ---- Verifiers -------------------------------------------------------------


def raises(problem, text):
  raise KeyError("gold")


def spins(problem, text):
  while True:
    time.sleep(0.001)


def swallows(problem, text):
  """As the sandboxes of careless verifiers do."""
  while True:
    try:
      time.sleep(0.001)
    except Exception:
      pass


def alarms(problem, text):
  signal.signal(signal.SIGALRM, lambda *_: None)
  return 1.0


FAULTS = {
    # name: (what happens to the answers to BAD, error, what it says)
    "raises": (raises, RuntimeError, "'bad': the verifier raised KeyError"),
    "hangs": (spins, TimeoutError, "'bad': the verifier took longer than 0.2 s"),
    "hangs, swallowing": (swallows, TimeoutError, "longer than 0.2 s"),
    "NaN": (lambda *_: float("nan"), ValueError, "finite number or None.*nan"),
    "inf": (lambda *_: np.inf, ValueError, "finite number or None.*inf"),
    "a list": (lambda *_: [1.0], ValueError, r"finite number or None.*\[1.0\]"),
    "an array": (lambda *_: np.ones(2), ValueError, "finite number or None.*arr"),
    "text": (lambda *_: "1", ValueError, "finite number or None.*'1'"),
    "a signal": (alarms, RuntimeError, "signal only works in main thread"),
    "exits": (lambda *_: exit(3), RuntimeError, "raised SystemExit"),
}


def verifier(fault, **changes):
  task = Task("sums", CharTokenizer("0123456789+=bad"), (GOOD, BAD), (
      Problem("1+2=", "3"),), lambda problem, text: fault(problem, text) if (
          problem is BAD) else float(text == problem.answer))
  return Verifier(task, seconds=0.2, **changes)


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_verifier_stops_the_run_and_says_where(name):
  fault, error, words = FAULTS[name]
  with pytest.raises(error, match=words) as raised:
    verifier(fault).scores([GOOD, BAD, GOOD], ["2", "7", "2"])
  assert "'sums'" in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize("name", FAULTS)
def test_or_is_skipped_and_counted(name, caplog):
  """The answers before and after it are scored: the worker is usable."""
  scores = verifier(FAULTS[name][0], on_failure="skip").scores(
      [GOOD, BAD, GOOD, BAD, GOOD], ["2", "7", "3", "8", "2"])
  np.testing.assert_array_equal(scores.reward, [1, np.nan, 0, np.nan, 1])
  np.testing.assert_array_equal(scores.failed, [0, 1, 0, 1, 0])
  assert scores.reward.dtype == np.float32


def test_an_abstention_is_no_failure():
  scores = verifier(lambda *_: None).scores([GOOD, BAD], ["2", "7"])
  np.testing.assert_array_equal(scores.reward, [1, np.nan])
  assert not scores.failed.any()


def test_the_two_reasons_are_counted_apart():
  """Rewards 1, abstained, failed: 1 unscorable, 1 failed, mean 1."""
  mask = np.array([[1, 1], [1, 0], [1, 1]], bool)
  out = batching.describe(Batch(
      tokens=None, valid=None, mask=mask, group=np.zeros(3, int),
      reward=np.array([1, np.nan, np.nan], np.float32),
      failed=np.array([0, 0, 1], bool), version=np.where(mask, 0, -1),
      stop_token=np.full(3, -1)), 0)
  assert out["reward/unscorable"] == out["reward/failed"] == 1
  assert out["reward/mean"] == 1
  assert out["rollout/length_unscorable_mean"] == 1.5


def test_many_failures_are_told_in_a_few_lines(caplog):
  scores = verifier(raises, on_failure="skip").scores([BAD] * 9, ["7"] * 9)
  assert scores.failed.all()
  assert sum("skipped" in r.message for r in caplog.records) == 4
  assert "6 more" in caplog.text


def test_it_scores_outside_the_main_thread_and_the_same():
  seen = []
  watch = lambda problem, text: seen.append(threading.current_thread()) or 0.5
  scores = verifier(watch).scores([BAD, BAD], ["7", "8"])
  assert {t.name for t in seen} == {"verifier"} and (scores.reward == 0.5).all()
  assert verifier(watch).task.verify(BAD, "7") == 0.5


def test_one_that_waits_in_c_is_left_behind_and_said(caplog, monkeypatch):
  from rl_is.rollout import verify
  monkeypatch.setattr(verify, "_GRACE", 0.1)
  lock = threading.Lock()
  lock.acquire()
  waits = lambda *_: lock.acquire(timeout=3) and 0.0
  scores = verifier(waits, on_failure="skip").scores([BAD, GOOD], ["7", "2"])
  np.testing.assert_array_equal(scores.reward, [np.nan, 1])
  assert "stays behind" in caplog.text
  lock.release()  # and it ends as soon as it can
  for thread in threading.enumerate():
    if thread.name == "verifier":
      thread.join(2)


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="on_failure.*'ignore'.*skip, stop"):
    verifier(raises, on_failure="ignore")


# ---- Generator and learner -------------------------------------------------


class Fake:
  """Groups of two rows and one token, made by `act` beforehand."""

  def __init__(self, act=lambda cursors: None, version=None):
    self._act, self._version = act, version

  def groups(self, cursors, weights, latest=None):
    self._act(cursors)
    rows = 2 * len(cursors)
    version = weights.version if self._version is None else self._version
    return Batch(
        tokens=np.zeros((rows, 1), np.int32), valid=np.ones((rows, 1), bool),
        mask=np.ones((rows, 1), bool), reward=np.zeros(rows, np.float32),
        group=np.arange(rows, dtype=np.int32) // 2,
        version=np.full((rows, 1), version, np.int32))


def asynchronous_of(fake, **changes):
  kwargs = dict(max_lag=1, order="oldest", updates_per_batch=1, batch_size=4,
                group_size=2, groups_per_call=1, batches=6)
  return Asynchronous(fake, Publisher(), **(kwargs | changes))


def lagged_of(fake, **changes):
  kwargs = dict(lag=1, updates_per_batch=1, prompts_per_batch=2, batches=6)
  return Lagged(fake, Publisher(), **(kwargs | changes))


def learn(source, steps, first=0):
  try:
    for n in range(first, first + steps):
      source.publish(n, {"w": jax.numpy.zeros(1)})
      source.batch(n)
  finally:
    source.close()


def at(cursor, error):
  def act(cursors):
    if cursor in cursors:
      raise error
  return act


SOURCES = {
    # name: (what makes the source, error, what it says)
    "async, the generator raises": (
        lambda: asynchronous_of(Fake(at(5, KeyError("gold")))), RuntimeError,
        r"prompts \[5\]: KeyError: 'gold'"),
    "lag, the generator raises": (
        lambda: lagged_of(Fake(at(5, KeyError("gold")))), KeyError, "gold"),
    "async, it exits": (
        lambda: asynchronous_of(Fake(at(2, SystemExit(1)))), RuntimeError,
        r"prompts \[2\]: SystemExit"),
    "async, memory": (
        lambda: asynchronous_of(Fake(at(0, MemoryError()))), RuntimeError,
        r"prompts \[0\]: MemoryError"),
    "async, a version of the future": (
        lambda: asynchronous_of(Fake(version=7)), RuntimeError,
        r"versions 0 to 0.*got \[7\]"),
    "async, an unknown version": (
        lambda: asynchronous_of(Fake(version=-1)), RuntimeError, r"got \[-1\]"),
    "lag, another version": (
        lambda: lagged_of(Fake(version=3)), RuntimeError,
        r"version 0.*versions \[3\]"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_failing_source_stops_the_learner_and_says_why(name):
  make, error, words = SOURCES[name]
  with pytest.raises(error, match=words):
    learn(make(), 6)


def test_all_too_old_is_an_error_before_any_update():
  """Sampled at 0, and the learner is at 9 with at most 1."""
  source = asynchronous_of(Fake(), batches=10)
  source.publish(0, {"w": jax.numpy.zeros(1)})
  with pytest.raises(RuntimeError, match=r"versions 8 to 9.*got \[0\]"):
    try:
      source.batch(9)
    finally:
      source.close()
  queue = LagQueue(1, 1)
  with pytest.raises(ValueError, match="expected batch 1, got 3"):
    queue.push(0, None)
    queue.push(3, None)


def test_a_learner_that_dies_ends_the_generator_in_its_call():
  entered, go_on = threading.Event(), threading.Event()
  def slow(cursors):
    entered.set()
    go_on.wait(2)
  source = asynchronous_of(Fake(slow))
  with pytest.raises(ZeroDivisionError):
    try:
      source.publish(0, {"w": jax.numpy.zeros(1)})
      entered.wait(2)
      raise ZeroDivisionError
    finally:
      go_on.set()
      source.close()


def test_a_learner_that_dies_ends_a_generator_that_may_not_start():
  """The buffer is full: four groups for batches 0 and 1, none more at lag 1."""
  source = asynchronous_of(Fake())
  source.publish(0, {"w": jax.numpy.zeros(1)})
  deadline = time.monotonic() + 2
  while len(source.snapshot()()[0]) < 4 and time.monotonic() < deadline:
    time.sleep(0.01)
  assert len(source.snapshot()()[0]) == 4
  source.close()


@pytest.mark.parametrize("make", [asynchronous_of, lagged_of])
def test_the_end_of_the_prompts_is_the_end_of_the_run(make):
  """Six batches are asked for, six are made; the generator ends by itself."""
  drawn = []
  learn(make(Fake(drawn.extend)), 6)
  assert sorted(drawn) == list(range(12))


def test_a_source_that_never_started_closes():
  asynchronous_of(Fake()).close()


def test_a_failed_push_stops_the_run(monkeypatch):
  source = asynchronous_of(Fake())
  monkeypatch.setattr(Publisher, "publish", lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    learn(source, 2)


def test_a_long_wait_names_the_prompts(monkeypatch, caplog):
  monkeypatch.setattr(asynchronous, "_PATIENCE", 0.05)
  learn(asynchronous_of(Fake(lambda cursors: time.sleep(0.15))), 1)
  assert "batch 0 waits for the generator" in caplog.text
  assert "prompts [0]" in caplog.text or "prompts [1]" in caplog.text


def test_an_empty_split_is_refused():
  task = verifier(raises).task
  with pytest.raises(ValueError, match="train.*at least 1|no problem"):
    dataclasses.replace(task, train=())
