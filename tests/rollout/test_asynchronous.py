"""The generator beside the learner: admission, order, failures, an end."""

import itertools
import threading
import time

import numpy as np
import pytest

from rl_is.core.types import Batch
from rl_is.rollout import asynchronous, batching
from rl_is.rollout.asynchronous import Asynchronous
from rl_is.rollout.publisher import Publisher, Weights


def test_a_group_starts_only_if_it_will_be_in_time():
  """B = 4, U = 2, max_lag = 4: sequence N is trained on at 2 floor((N - 1) / 4).

  At version 0 that may be at most 4, so N <= 12; each two updates allow 4 more.
  """
  allowed = lambda version: [n for n in range(1, 30) if asynchronous.may_start(
      n, version, batch_size=4, updates_per_batch=2, max_lag=4)]
  assert [max(allowed(v)) for v in (0, 1, 2, 4)] == [12, 12, 16, 20]
  # The bound is inclusive: max_lag 0 allows the batch of this very version.
  assert asynchronous.may_start(4, 0, batch_size=4, updates_per_batch=1,
                                max_lag=0)
  assert not asynchronous.may_start(5, 0, batch_size=4, updates_per_batch=1,
                                    max_lag=0)


@pytest.mark.parametrize("order,versions,running,max_lag,want", [
    ("oldest", [3, 1, 2, 1], [], 9, [1, 3]),
    ("freshest", [3, 1, 2, 1], [], 9, [0, 2]),
    # At 4 with max_lag 3 the two of version 1 have their last chance.
    ("freshest", [3, 1, 2, 1], [], 3, [1, 3]),
    # One of version 1 must go now; the newest fills up.
    ("freshest", [3, 1, 2, 2], [], 3, [0, 1]),
    # Of three of version 2 two can go at 5, so one goes now: the newest prompt.
    ("freshest", [4, 2, 2, 2], [], 3, [0, 3]),
    # One that is still being generated will need its place at 5.
    ("freshest", [4, 2, 2, 2], [2], 3, [1, 2]),
])
def test_which_groups_are_trained_on(order, versions, running, max_lag, want):
  got = asynchronous.choose(versions, running, 2, now=4, updates_per_batch=1,
                            max_lag=max_lag, order=order)
  assert got == want


class Fake:
  """Groups of one token a row; what was asked for is written down."""

  def __init__(self, seconds=0.0, fails_at=None, group_size=2, error=None):
    self.calls, self.seconds, self.error = [], seconds, error
    self.fails_at, self.group_size = fails_at, group_size

  def groups(self, cursors, weights, latest=None):
    version = weights.version
    assert weights.params["version"] == version
    time.sleep(self.seconds)
    self.calls.append((tuple(cursors), version))
    if self.fails_at in cursors:
      raise self.error
    rows = len(cursors) * self.group_size
    column = lambda x, dtype: np.full((rows, 1), x, dtype)
    return Batch(
        tokens=np.repeat(np.asarray(cursors, np.int32), self.group_size)[:, None],
        valid=column(True, bool), mask=column(True, bool),
        reward=np.zeros(rows, np.float32),
        group=np.arange(rows, dtype=np.int32) // self.group_size,
        version=column(version, np.int32))


def fake_groups(cursors, version):
  params = {"version": version}
  return Fake().groups(cursors, Weights(version, params, params))


def make(fake, **changes):
  kwargs = dict(max_lag=2, order="oldest", updates_per_batch=1, batch_size=4,
                group_size=2, groups_per_call=1, batches=6)
  return Asynchronous(fake, Publisher(), **(kwargs | changes))


def learn(source, first, last, U=1, seconds=0.0):
  """The learner's loop; the tokens of each batch (cursors) and its versions."""
  out = []
  for n in range(first, last):
    source.publish(n * U, {"version": n * U})
    batch = source.batch(n)
    time.sleep(seconds)
    out.append((sorted(set(batch.tokens[:, 0].tolist())),
                (n * U - batch.version).max()))
  return out


@pytest.mark.parametrize("order", asynchronous.ORDERS)
@pytest.mark.parametrize("max_lag,U,per_call", [(0, 1, 1), (2, 1, 2), (5, 2, 1)])
@pytest.mark.parametrize("slow", ["learner", "generator"])
def test_every_prompt_once_and_never_too_old(order, max_lag, U, per_call, slow):
  fake = Fake(0.004 if slow == "generator" else 0.0)
  source = make(fake, order=order, max_lag=max_lag, updates_per_batch=U,
                groups_per_call=per_call, batches=12)
  got = learn(source, 0, 12, U, 0.01 if slow == "learner" else 0.0)
  source.close()
  trained = sorted(itertools.chain(*(cursors for cursors, _ in got)))
  assert trained == list(range(24))
  assert all(0 <= lag <= max_lag for _, lag in got)
  if slow == "learner":  # and the bound is used: the generator runs ahead
    assert got[-1][1] == max_lag - max_lag % U
  if max_lag == 0 or order == "oldest":
    assert [cursors for cursors, _ in got] == [[2 * n, 2 * n + 1]
                                               for n in range(12)]


def test_the_learner_may_die_while_the_generator_waits():
  before = threading.active_count()
  source = make(Fake())
  learn(source, 0, 1)
  began = time.perf_counter()
  source.close()  # as `contextlib.closing` does when the learner raises
  assert time.perf_counter() - began < 5
  assert threading.active_count() == before


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_going_on_skips_no_prompt_and_repeats_none(stop):
  fake = Fake(0.002)
  source = make(fake)
  first = learn(source, 0, stop)
  waiting, begun = source.snapshot()()
  source.close()
  assert begun["cursors"] == [int(g.tokens[0, 0]) for g in waiting]
  again = make(Fake(), first=stop, waiting=waiting, **begun)
  second = learn(again, stop, 6)
  again.close()
  trained = sorted(itertools.chain(*(c for c, _ in first + second)))
  assert trained == list(range(12))
  assert all(lag <= 2 for _, lag in first + second)


def test_groups_and_join_are_inverse():
  batch = fake_groups([4, 7, 5], 3)
  parts = batching.groups(batch, 2)
  assert [p.group.tolist() for p in parts] == [[0, 0]] * 3
  again = batching.join(parts, 2)
  for name in ("tokens", "group", "version", "mask"):
    np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))


def test_time_and_depth_are_told():
  source = make(Fake(0.01))
  learn(source, 0, 2)
  got = source.metrics()
  source.close()
  assert got["time/generator_s"] >= 0.03  # four calls at the least
  assert got["time/learner_wait_s"] > 0 and got["rollout/buffer_depth"] >= 2
  assert got["rollout/sampled_tokens"] >= 8
