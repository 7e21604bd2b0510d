"""Several processes are one run: on CPUs, with gloo between them."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from infra.test_preemption import prompts_of, stream_of
from rollout.test_asynchronous import Fake, fake_groups, make

from configs import addition
from rl_is import build
from rl_is.infra import hosts, metrics
from rl_is.infra import mesh as mesh_lib
from rl_is.infra.checkpoint import Checkpoints
from rl_is.rollout import generator
from rl_is.rollout.verify import Scores

ROOT = pathlib.Path(__file__).parents[2]
# What a test does to one of the processes, before the command begins.
PATCHES = {
    "": "",
    "raises": """
from rl_is import train
learn = train._learn
def broken(*args):
  if jax.process_index() == 1 and args[-1] == 2:
    raise ValueError("out of cheese")
  return learn(*args)
train._learn = broken
""",
    "is killed": """
from rl_is import train
learn = train._learn
def broken(*args):
  if jax.process_index() == 1 and args[-1] == 2:
    os.kill(os.getpid(), 9)
  return learn(*args)
train._learn = broken
"""}
SCRIPT = "import os, sys\nimport jax\n{}\nfrom rl_is import main\nmain.main()\n"


def free_port():
  """With the next one free too."""
  while True:
    with socket.socket() as a, socket.socket() as b:
      a.bind(("", 0))
      port = a.getsockname()[1]
      try:
        b.bind(("", port + 1))
        return port
      except OSError:
        continue


def start(path, *more, count=2, of=None, devices=1, patch="", timeout=20):
  """`count` processes of a run of `of`."""
  port, of = free_port(), of or count
  words = ["--config=configs/addition.py:tiny", f"--workdir={path}",
           "--config.objective.preset=ppo", "--config.evaluate.prompts=0",
           "--config.warm_start.steps=0", *more]
  environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_"
                     f"count={devices}", PYTHONPATH=str(ROOT))
  join = [[]] if of == 1 else [
      [f"--coordinator=localhost:{port}", f"--processes={of}", f"--process={i}",
       f"--host_timeout={timeout}"] for i in range(count)]
  return [subprocess.Popen(
      [sys.executable, "-c", SCRIPT.format(PATCHES[patch]), *words, *hosts_],
      cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE) for hosts_ in join]


def ends(processes, seconds=150):
  """(exit codes, what each said)."""
  out = []
  deadline = time.monotonic() + seconds
  for process in processes:
    try:
      _, told = process.communicate(timeout=deadline - time.monotonic())
    except subprocess.TimeoutExpired:
      for other in processes:
        other.kill()
      raise
    out.append((process.returncode, told))
  return [code for code, _ in out], [told for _, told in out]


def params_of(path, step=6):
  """Restored here, on one device, from what any number of processes saved."""
  config = addition.get_config("tiny").unlock()
  config.objective.preset = "ppo"
  parts = build.build(config, devices=jax.devices()[:1])
  checkpoints = Checkpoints(str(path))
  saved = checkpoints.restore(step, build.abstract_state(config, parts))
  checkpoints.close()
  return saved.state["learner"].params


def close(a, b, rtol=0.0):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=0, atol=rtol * np.abs(y).max()), a, b)


def rows_of(path):
  return [{k: x for k, x in row.items() if not k.startswith("time/")}
          for row in metrics.read(str(path))]


def test_two_processes_are_one_run(tmp_path):
  """The same parameters and rows as one process with two devices."""
  for name, how in (("two", dict()), ("one", dict(of=1, devices=2))):
    codes, told = ends(start(tmp_path / name, **how))
    assert set(codes) == {0}, told[0][-2000:]
    if name == "two":  # the first tells, and the other one only of what is wrong
      assert "train: step 6/6" in told[0] and "step 6/6" not in told[1]
  assert rows_of(tmp_path / "two") == rows_of(tmp_path / "one")
  assert [r["step"] for r in rows_of(tmp_path / "two")] == [1, 2, 3, 4, 5, 6]
  close(params_of(tmp_path / "two"), params_of(tmp_path / "one"))
  assert len((tmp_path / "two" / "provenance.jsonl").read_text()
             .splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
def test_parameters_over_two_hosts(tmp_path, mesh):
  """Sharded over both: 2 x 2 devices; lag, KL, store.

  SGD: Adam's first steps are signs of gradients, which turn the last bit of one
  that is nearly 0 into a whole step.
  """
  more = [f"--config.mesh.{mesh}=4", "--config.mesh.data=1",
          "--config.model.heads=4", "--config.model.kv_heads=4",
          "--config.optimizer.name=sgd", "--config.optimizer.learning_rate=0.3",
          "--config.rollout.lag=2", "--config.objective.regularizer=k3",
          "--config.objective.constants.kl_coef=0.1", "--config.store.every=1",
          "--config.train.updates_per_batch=2", "--config.evaluate.prompts=8",
          "--config.evaluate.every=3"]
  for name, how in (("two", dict(devices=2)), ("one", dict(of=1, devices=4))):
    codes, told = ends(start(tmp_path / name, *more, **how))
    assert set(codes) == {0}, told[-1][-3000:]
  for got, want in zip(rows_of(tmp_path / "two"), rows_of(tmp_path / "one"),
                       strict=True):
    assert got.keys() == want.keys()
    for key, value in want.items():
      # A quotient of differences of float32 sums: untrained, all probabilities
      # are alike, and few digits of it are left.
      near = dict(abs=0.02) if key == "is/prob_pearson" else dict(
          rel=1e-4, abs=1e-6)
      assert got[key] == (value if value is None else pytest.approx(
          value, **near)), key
  files = [sorted(p.name for p in (tmp_path / name / "rollouts").iterdir())
           for name in ("two", "one")]
  assert files[0] == files[1] and len(files[0]) == 6


@pytest.mark.slow
def test_resumed_by_another_number_of_processes(tmp_path):
  """Stopped by a signal to one of two; goes on as one process."""
  more = ["--config.train.steps=400", "--config.checkpoint.every=500"]
  processes = start(tmp_path, *more)
  while len(metrics.read(str(tmp_path))) < 20:
    assert all(p.poll() is None for p in processes)
    time.sleep(0.02)
  processes[1].send_signal(signal.SIGTERM)
  codes, told = ends(processes)
  assert codes == [0, 0], told
  step = len(metrics.read(str(tmp_path)))
  assert step < 400
  for text in told:
    assert f"stopped by SIGTERM after step {step}" in text
  codes, told = ends(start(tmp_path, *more, of=1, devices=2))
  assert codes == [0] and f"resuming after step {step}" in told[0]
  assert [r["step"] for r in rows_of(tmp_path)] == list(range(1, 401))


ASYNC = ("--config.rollout.mode=async", "--config.objective.preset=tis")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_async_with_max_lag_0_is_the_run_in_turns(tmp_path, devices):
  """A generator a process, on half of its devices; against one process, lag 0."""
  codes, told = ends(start(tmp_path / "two", *ASYNC, devices=devices))
  assert set(codes) == {0}, told[0][-3000:] + told[1][-3000:]
  codes, told = ends(start(tmp_path / "one", ASYNC[1], of=1, devices=2))
  assert codes == [0], told[0][-3000:]
  for got, want in zip(rows_of(tmp_path / "two"), rows_of(tmp_path / "one"),
                       strict=True):
    for key, value in want.items():
      assert got[key] == (value if value is None else pytest.approx(
          value, rel=1e-4, abs=1e-6)), key


@pytest.mark.slow
def test_async_on_two_processes_is_resumed_by_one_and_by_two(tmp_path):
  """Every prompt is trained on once, whoever generates it, never too late."""
  more = [*ASYNC, "--config.train.steps=200", "--config.rollout.max_lag=4",
          "--config.store.every=1", "--config.rollout.rows_per_call=4",
          "--config.checkpoint.every=1000"]
  for of, until in ((2, 20), (1, 100), (2, None)):
    processes = start(tmp_path, *more, count=of, of=of)
    while until and len(metrics.read(str(tmp_path))) < until:
      assert all(p.poll() is None for p in processes)
      time.sleep(0.02)
    if until:
      processes[-1].send_signal(signal.SIGTERM)
    codes, told = ends(processes)
    assert set(codes) == {0}, told[0][-3000:]
  rows = rows_of(tmp_path)
  assert [r["step"] for r in rows] == list(range(1, 201))
  assert max(r["rollout/staleness_max"] for r in rows) <= 4
  assert prompts_of(tmp_path) == stream_of(addition.get_config("tiny"), 200)


@pytest.mark.slow
@pytest.mark.parametrize("patch", ["raises", "is killed"])
def test_one_that_fails_ends_both(tmp_path, patch):
  began = time.monotonic()
  codes, told = ends(start(tmp_path, patch=patch))
  assert all(codes) and time.monotonic() - began < 120
  if patch == "raises":
    assert "process 1: error: out of cheese" in told[1]
    assert "process 0: process 1 failed: out of cheese" in told[0]


@pytest.mark.slow
def test_one_that_is_missing_is_counted(tmp_path):
  began = time.monotonic()
  codes, told = ends(start(tmp_path, count=2, of=3, timeout=6))
  assert codes == [1, 1] and time.monotonic() - began < 60
  for text in told:
    assert "error: expected 3 processes, saw 2 within 6 s" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("how,word", [
    (dict(coordinator="nowhere", processes=2, process=0), "host:port"),
    (dict(coordinator="localhost:1", processes=2, process=2), "--process: .*0 to 1")])
def test_flags_that_make_no_sense(how, word):
  with pytest.raises(ValueError, match=word):
    hosts.start(timeout=1, **how)


@pytest.mark.parametrize("count,rows", [(1, 5), (2, 8), (3, 8), (4, 3), (5, 16)])
def test_F03_the_shares_are_disjoint_and_all_rows(monkeypatch, count, rows):
  monkeypatch.setattr(jax, "process_count", lambda: count)
  shares = []
  for i in range(count):
    monkeypatch.setattr(jax, "process_index", lambda i=i: i)
    shares.append(list(hosts.share(rows)))
  assert sum(shares, []) == list(range(rows))
  assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("rows", [8, 7])
def test_a_union_is_in_the_order_of_the_rows(monkeypatch, rows):
  whole = np.arange(rows, dtype=np.float32)
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  parts = []
  for i in range(3):
    monkeypatch.setattr(jax, "process_index", lambda i=i: i)
    mine = hosts.share(rows)
    parts.append(whole[mine.start:mine.stop])
  longest = max(map(len, parts))
  every = np.stack([np.pad(p, (0, longest - len(p))) for p in parts])
  monkeypatch.setattr(hosts.multihost_utils, "process_allgather",
                      lambda x: every)
  np.testing.assert_array_equal(hosts.union(parts[0], rows), whole)


def test_alone_nothing_is_asked_of_others(monkeypatch):
  monkeypatch.setattr(hosts, "multihost_utils", None)
  mesh = mesh_lib.make(dict(data=8, fsdp=1, tensor=1))
  x = hosts.place(np.arange(8.0), mesh_lib.rows(mesh))
  np.testing.assert_array_equal(hosts.fetch(x), np.arange(8.0))
  assert hosts.largest(3) == 3 and hosts.is_first() and hosts.is_alone()
  np.testing.assert_array_equal(hosts.union(np.ones(3), 3), np.ones(3))
  done = []
  hosts.first(lambda: done.append(1))
  with pytest.raises(KeyError), hosts.together():
    raise KeyError
  assert done == [1]


class Verdicts:
  """A verifier for `generator.sample`: the rewards that a process has."""

  def __init__(self, task, reward):
    self.task, self._reward = task, reward

  def scores(self, problems, texts):
    rows = len(texts)
    return Scores(np.full(rows, self._reward, np.float32), np.zeros(rows, bool))


def test_F05_what_is_asked_of_others_does_not_depend_on_what_one_has(
    monkeypatch, one_device):
  """One process has no valid answer: it must ask as often as the others do."""
  config = addition.get_config("tiny").unlock()
  config.objective.preset = "ppo"
  parts = build.build(config, devices=one_device)
  task, params = parts.task, parts.model.init(jax.random.key(0))
  asked = []
  monkeypatch.setattr(hosts, "is_alone", lambda mesh=None: False)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda x: (
      asked[-1].append(np.shape(x)), np.stack([x, x]))[1])
  for process, reward in ((0, 1.0), (1, np.nan)):
    monkeypatch.setattr(jax, "process_index", lambda i=process: i)
    asked.append([])
    _, scores = generator.sample(
        params, Verdicts(task, reward), task.train[:2], [0, 1],
        jax.random.key(1), 0, group_size=4, model=parts.model,
        prompt_width=task.max_prompt_tokens, sampling=parts.sampling,
        mesh=parts.mesh)
    assert scores.reward.shape == (8,)
  assert asked[0] == asked[1] and len(asked[0]) == 2  # rewards, failures


def test_F06_a_meeting_is_named_by_its_purpose_not_by_a_count(monkeypatch):
  """What one process did more before must not part them."""
  met = []
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(hosts.multihost_utils, "sync_global_devices", met.append)

  def tidy():
    pass

  for _ in range(2):
    hosts.first(tidy)
  assert met[0] == met[1] and "tidy" in met[0]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_what_is_left_is_dealt_out_whoever_had_it(monkeypatch, processes):
  """3 groups wait and 2 are begun again, of 4 x 3 behind the first batch."""
  waiting = [fake_groups([c], version) for c, version in ((4, 2), (7, 1), (5, 0))]
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  had, left = [], []
  for i in range(processes):
    monkeypatch.setattr(jax, "process_index", lambda i=i: i)
    source = make(Fake(), batch_size=8, batches=4, first=1, waiting=waiting,
                  cursors=[4, 7, 5], restart=[8, 6])
    had += [cursor for cursor, _ in source._waiting]
    left += source._cursors
    assert len(source._waiting) + len(source._cursors) == 12 // processes
    assert sorted(source._cursors) == source._cursors
  assert sorted(had) == [4, 5, 7]
  assert sorted(left) == [6, *range(8, 16)]
