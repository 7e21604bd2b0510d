"""A run that is told to stop, or killed, loses nothing that was complete."""

import collections
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import pytest
from test_train import equal, tiny

from configs import addition
from rl_is import build, evaluate, overrides, train
from rl_is.infra import metrics
from rl_is.infra.checkpoint import Checkpoints
from rl_is.infra.preemption import Preemption, Stopped
from rl_is.rollout import batching, generator, store
from rl_is.rollout.asynchronous import Asynchronous

ROOT = pathlib.Path(__file__).parents[2]
# Where the signal comes: (owner, name), the call, and how many steps are kept.
PHASES = {
    "compiling": (build, "build", 1, 0),
    "sampling": (generator, "sample", 5, 2),  # 3 are made before step 1
    "learning": (train, "_learn", 3, 3),
    "evaluating": (evaluate, "evaluate", 1, 3),
    "writing a row": (metrics.MetricsWriter, "write", 4, 4),
    "saving": (Checkpoints, "save", 2, 4)}


def send(signum=signal.SIGTERM):
  signal.raise_signal(signum)  # to this thread: several come in their order


def signalled(patch, owner, name, call, signums=(signal.SIGTERM,)):
  """At the start of the call-th call of it, once."""
  real, calls = getattr(owner, name), []

  def watched(*args, **kwargs):
    calls.append(name)
    if len(calls) == call:
      for signum in signums:
        send(signum)
    return real(*args, **kwargs)

  patch.setattr(owner, name, watched)


def config_of(warm, **changes):
  return tiny(warm, "lag=2", **{**dict(
      objective__preset="ppo", evaluate__every=3, evaluate__prompts=4),
                                **changes})


@pytest.fixture(scope="module")
def whole(warm, tmp_path_factory, one_device):
  """The run that nobody stopped: (parameters, rows without times)."""
  path = tmp_path_factory.mktemp("whole")
  params = train.run(config_of(warm), str(path), devices=one_device).params
  return jax.device_get(params), rows_of(path)


def rows_of(path):
  """Times differ; so does the host's count of what it sampled in a call."""
  return [{k: x for k, x in row.items() if not k.startswith("time/")}
          for row in metrics.read(str(path))]


def finish(config, path, devices, whole):
  """The same command again: the end is that of the run nobody stopped."""
  result = train.run(config, str(path), devices=devices)
  params, rows = whole
  equal(jax.device_get(result.params), params)
  for got, want in zip(rows_of(path), rows, strict=True):
    assert got == want, got["step"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_ends_it_and_loses_nothing(
    warm, tmp_path, one_device, whole, phase):
  owner, name, call, kept = PHASES[phase]
  with pytest.MonkeyPatch.context() as patch:
    signalled(patch, owner, name, call)
    with pytest.raises(Stopped) as stopped:
      train.run(config_of(warm), str(tmp_path), devices=one_device)
  assert (stopped.value.signum, stopped.value.step) == (signal.SIGTERM, kept)
  saved = tmp_path / "checkpoints"
  assert not kept or str(kept) in {p.name for p in saved.iterdir()}
  finish(config_of(warm), tmp_path, one_device, whole)


@pytest.fixture
def sigint():
  """A shell's job in the background ignores it, and so would the run."""
  old = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, old)


def test_a_second_signal_changes_nothing(warm, tmp_path, one_device, whole,
                                         sigint):
  with pytest.MonkeyPatch.context() as patch:
    signalled(patch, train, "_learn", 3,
              (signal.SIGINT, signal.SIGTERM, signal.SIGINT))
    with pytest.raises(Stopped) as stopped:
      train.run(config_of(warm), str(tmp_path), devices=one_device)
  assert (stopped.value.signum, stopped.value.step) == (signal.SIGINT, 3)
  finish(config_of(warm), tmp_path, one_device, whole)


def test_stopped_again_and_again_at_every_step(warm, tmp_path, one_device,
                                               whole):
  """Each life makes one step; the handlers of the caller come back each time."""
  before = signal.getsignal(signal.SIGTERM)
  for step in range(1, 6):
    with pytest.MonkeyPatch.context() as patch:
      signalled(patch, train, "_learn", 1)
      with pytest.raises(Stopped) as stopped:
        train.run(config_of(warm), str(tmp_path), devices=one_device)
    assert stopped.value.step == step
    assert signal.getsignal(signal.SIGTERM) is before
  finish(config_of(warm), tmp_path, one_device, whole)


def test_a_signal_in_the_warm_start_begins_it_again(tmp_path, one_device):
  """It is made once and whole; cut, it leaves nothing that is taken for one."""
  config = tiny(str(tmp_path / "start"), evaluate__prompts=0, train__steps=1)
  with pytest.MonkeyPatch.context() as patch:
    signalled(patch, batching, "demonstrations", 3)
    with pytest.raises(Stopped, match="before its first step"):
      train.run(config, str(tmp_path / "run"), devices=one_device)
  assert not (tmp_path / "start" / "done.json").exists()
  assert train.run(config, str(tmp_path / "run"),
                   devices=one_device).last["step"] == 1


@pytest.mark.parametrize("name", ["batch", "_wait_for_groups"])
def test_a_signal_while_the_learner_waits_for_the_generator(
    warm, tmp_path, one_device, name):
  """Async: every prompt of the stream is trained on, and once."""
  config = tiny(warm, rollout__mode="async", rollout__max_lag=2,
                evaluate__prompts=0, store__every=1)
  with pytest.MonkeyPatch.context() as patch:
    signalled(patch, Asynchronous, name, 3)
    with pytest.raises(Stopped) as stopped:
      train.run(config, str(tmp_path), devices=one_device)
  assert stopped.value.step == 2
  train.run(config, str(tmp_path), devices=one_device)
  assert prompts_of(tmp_path) == stream_of(config, steps=6)


def prompts_of(path):
  """The prompts of all steps, one of each group, by what the run has stored."""
  records = list(store.read(str(path)))
  assert [r.step for r in records] == list(range(1, len(records) + 1))
  return collections.Counter(
      record.prompt[row] for record in records
      for row in range(0, len(record.prompt), 4))


def stream_of(config, steps):
  task = build.make_task(config.task.name, **config.task.kwargs.to_dict())
  count = steps * config.rollout.batch_size // config.rollout.group_size
  return collections.Counter(task.train[batching.problem_index(
      config.seed, cursor, len(task.train))].prompt for cursor in range(count))


def test_in_another_thread_there_are_no_signals(warm, tmp_path, one_device):
  import threading
  out = []
  thread = threading.Thread(target=lambda: out.append(train.run(
      tiny(warm, train__steps=1, evaluate__prompts=0), str(tmp_path),
      devices=one_device)))
  thread.start()
  thread.join()
  assert out[0].last["step"] == 1


def test_what_was_ignored_stays_ignored():
  old = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    with Preemption() as stop:
      assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
      send(signal.SIGINT)
      stop.check()
  finally:
    signal.signal(signal.SIGINT, old)


# ---- The command, from outside.


def command(path, mode, *more):
  how = dict(lag=["--config.rollout.lag=3"], **{"async": [
      "--config.rollout.mode=async", "--config.rollout.max_lag=3"]})[mode]
  return [sys.executable, "-m", "rl_is.main",
          "--config=configs/addition.py:tiny", f"--workdir={path}", *how,
          "--config.objective.preset=gspo", "--config.evaluate.prompts=0",
          "--config.checkpoint.every=3", "--config.store.every=1", *more]


def start(words, **kwargs):
  environment = dict(os.environ, XLA_FLAGS="")
  return subprocess.Popen(words, cwd=ROOT, env=environment, text=True,
                          stderr=subprocess.PIPE, **kwargs)


def test_the_command_ends_well_and_says_how_to_go_on(tmp_path):
  process = start(command(tmp_path, "lag", "--config.train.steps=100000"))
  deadline = time.monotonic() + 120
  while len(metrics.read(str(tmp_path))) < 3:
    assert time.monotonic() < deadline and process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  _, told = process.communicate(timeout=60)
  assert process.returncode == 0, told[-2000:]
  step = len(metrics.read(str(tmp_path)))
  assert f"stopped by SIGTERM after step {step}; the same command goes on" in told
  assert (tmp_path / "checkpoints" / str(step)).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lag", "async"])
def test_killed_at_20_moments_it_ends_as_if_it_had_not_been(tmp_path, mode):
  """SIGKILL at random moments, from its start on, however fast the machine is."""
  steps, draw = 120, random.Random(0)
  words = command(tmp_path / "cut", mode, f"--config.train.steps={steps}")
  for path in ("whole", "timed"):  # the first one may compile
    words[4] = f"--workdir={tmp_path / path}"
    began = time.monotonic()
    start(words).communicate(timeout=300)
    whole_seconds = time.monotonic() - began
  words[4] = f"--workdir={tmp_path / 'cut'}"
  lives = []
  for life in range(20):
    process = start(words)
    # The first ones mostly before the first step, the last ones far behind it.
    seconds = draw.uniform(0, whole_seconds * (0.6 + life / 20))
    try:
      process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      process.kill()
    process.communicate()
    lives.append(len(metrics.read(str(tmp_path / "cut"))))
    if process.returncode == 0:
      break
  assert sum(b > a for a, b in zip([0, *lives], lives)) >= 2, lives
  for path in ("cut", "whole"):
    words[4] = f"--workdir={tmp_path / path}"
    process = start(words)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told[-2000:]
  config = addition.get_config("tiny")
  for text in words[3:]:
    path, _, value = text.removeprefix("--config.").partition("=")
    if text.startswith("--config."):
      overrides.apply(config, path, value)
  for path in ("cut", "whole"):
    assert prompts_of(tmp_path / path) == stream_of(config, steps)
    assert [r["step"] for r in rows_of(tmp_path / path)] == list(
        range(1, steps + 1))
  if mode == "lag":
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    parts = build.build(config, devices=jax.devices()[:1])
    params = []
    for path in ("cut", "whole"):
      checkpoints = Checkpoints(str(tmp_path / path))
      params.append(checkpoints.restore(
          steps, build.abstract_state(config, parts)).state)
      checkpoints.close()
    equal(*params)
