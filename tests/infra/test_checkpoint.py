"""What is saved is what comes back, on any number of devices, or it is said."""

import dataclasses
import random
import resource
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath
from test_train import equal, tiny

from rl_is import build, train, warm_start
from rl_is.core.types import Batch
from rl_is.infra import checkpoint, metrics
from rl_is.infra.checkpoint import Checkpoints, Saved


def state_of(seed, size=200):
  return {"w": jax.random.normal(jax.random.key(seed), (size, size)),
          "n": jnp.int32(seed)}


def abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=x.sharding), state)


def save(path, *steps, keep=3):
  checkpoints = Checkpoints(str(path), keep=keep)
  for step in steps:
    checkpoints.save(Saved(state_of(step), [], dict(step=step)))
  checkpoints.close()


def newest(path):
  checkpoints = Checkpoints(str(path))
  try:
    return checkpoints.restore_newest(abstract(state_of(0)))
  finally:
    checkpoints.close()


def test_E11_what_is_saved_is_the_state_before_the_next_donated_step(tmp_path):
  """Large, so that it is still being written while the buffers are reused."""
  state = state_of(1, 2000)
  want = jax.tree.map(lambda x: np.array(x, copy=True), state)
  shapes = abstract(state)
  move = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 7, s),
                 donate_argnums=0)
  checkpoints = Checkpoints(str(tmp_path), keep=1)
  checkpoints.save(Saved(state, [], dict(step=1)))
  for _ in range(5):
    state = move(state)
  jax.block_until_ready(state)
  checkpoints.close()
  checkpoints = Checkpoints(str(tmp_path))
  equal(checkpoints.restore_newest(shapes).state, want)
  checkpoints.close()


def test_E11_a_full_disk_stops_the_run_and_leaves_what_was_saved(tmp_path):
  """A file limit stands for the disk: the write fails in the background."""
  save(tmp_path, 1)
  old = resource.getrlimit(resource.RLIMIT_FSIZE)
  checkpoints = Checkpoints(str(tmp_path), keep=1)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
  try:
    with pytest.raises(OSError) as error:
      checkpoints.save(Saved(state_of(2), [], dict(step=2)))
      checkpoints.save(Saved(state_of(3), [], dict(step=3)))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
  with pytest.raises(OSError, match="cannot save checkpoint 2"):
    raise error.value
  assert "\n" not in str(error.value)
  try:
    checkpoints.close()
  except OSError:
    pass
  assert newest(tmp_path).position["step"] == 1


@pytest.mark.parametrize("failing", ["at once", "in the background"])
def test_a_run_that_cannot_save_ends_in_one_line(warm, tmp_path, one_device,
                                                 monkeypatch, failing):
  """At step 4; the checkpoint of step 2 is whole, and the run goes on from it."""
  config = tiny(warm, evaluate__prompts=0)
  directory = tmp_path / "checkpoints"
  with pytest.MonkeyPatch.context() as patch:
    if failing == "at once":
      real = checkpoint.Checkpoints.save
      def denied(self, saved):
        if saved.position["step"] == 4:
          patch.setattr(self._manager, "save", no_room)
        real(self, saved)
      def no_room(*args, **kwargs):
        raise PermissionError()  # without a word: it has a name at the least
      patch.setattr(checkpoint.Checkpoints, "save", denied)
    else:
      finalize = AtomicRenameTemporaryPath.finalize
      async def full(self):
        if self.get_final().name == "4":
          raise OSError(28, "No space left on device")
        await finalize(self)
      patch.setattr(AtomicRenameTemporaryPath, "finalize", full)
    with pytest.raises(OSError, match="cannot save checkpoint 4: .") as error:
      train.run(config, str(tmp_path), devices=one_device)
  assert "\n" not in str(error.value)
  assert (directory / "2").is_dir() and not (directory / "4").exists()
  again = train.run(config, str(tmp_path), devices=one_device)
  assert again.last["step"] == 6


def test_a_file_where_the_checkpoints_should_be(warm, tmp_path, one_device):
  (tmp_path / "run").mkdir()
  config = tiny(warm)
  train._claim(str(tmp_path / "run"), config, {})
  (tmp_path / "run" / "checkpoints").write_text("")
  with pytest.raises(OSError, match="checkpoints"):
    train.run(config, str(tmp_path / "run"), devices=one_device)


def test_E10_the_old_one_is_kept_until_the_new_one_is_committed(tmp_path,
                                                                monkeypatch):
  go_on = threading.Event()
  save(tmp_path, 1, keep=1)
  real = AtomicRenameTemporaryPath.finalize

  async def slow(self):
    if self.get_final().name == "2":
      go_on.wait(20)
    await real(self)

  monkeypatch.setattr(AtomicRenameTemporaryPath, "finalize", slow)
  checkpoints = Checkpoints(str(tmp_path), keep=1)
  checkpoints.save(Saved(state_of(2), [], dict(step=2)))
  assert newest(tmp_path).position["step"] == 1
  go_on.set()
  checkpoints.close()
  assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["2"]
  assert newest(tmp_path).position["step"] == 2


def test_E10_what_a_kill_left_half_written_is_said_and_removed(tmp_path, caplog):
  save(tmp_path, 1)
  partial = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
  (partial / "state").mkdir(parents=True)
  assert newest(tmp_path).position["step"] == 1  # a reader leaves it alone:
  assert partial.exists()                        # it may be being written
  save(tmp_path, 2)
  assert "2.orbax-checkpoint-tmp is half written" in caplog.text
  assert not partial.exists() and newest(tmp_path).position["step"] == 2


def test_E10_no_damage_goes_unnoticed(tmp_path):
  """A bit, or a tail, of any file: what comes back is whole, or the one before."""
  save(tmp_path, 1, 2)
  draw, seen = random.Random(0), set()
  files = [p for p in (tmp_path / "checkpoints" / "2").rglob("*") if p.is_file()]
  for file in files:
    raw = file.read_bytes()
    flipped = bytearray(raw)
    flipped[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    for damaged in (bytes(flipped), raw[:len(raw) // 2], b""):
      file.write_bytes(damaged)
      saved = newest(tmp_path)
      step = saved.position["step"]
      equal(saved.state, state_of(step))
      seen.add((file.stat().st_size > 1000, step))
    file.write_bytes(raw)
  assert (True, 1) in seen and (True, 2) not in seen  # the weights themselves
  assert newest(tmp_path).position["step"] == 2


def test_an_error_without_a_word_is_passed_over_too(tmp_path, monkeypatch, caplog):
  save(tmp_path, 1, 2)
  real = Checkpoints.restore

  def restore(self, step, shapes):
    if step == 2:
      raise AssertionError
    return real(self, step, shapes)

  monkeypatch.setattr(Checkpoints, "restore", restore)
  assert newest(tmp_path).position["step"] == 1
  assert "AssertionError" in caplog.text


def test_queue_and_position_come_back_bit_for_bit(tmp_path):
  draw = np.random.default_rng(0)
  batch = lambda: Batch(
      tokens=draw.integers(0, 9, (4, 3), np.int32),
      valid=draw.random((4, 3)) < 0.5, mask=draw.random((4, 3)) < 0.5,
      reward=np.array([0, 1, np.nan, -0.0], np.float32),
      group=np.arange(4, dtype=np.int32),
      version=draw.integers(0, 9, (4, 3), np.int32),
      logp_behaviour=draw.standard_normal((4, 3)).astype(np.float32))
  queue = [batch() for _ in range(11)]  # "10" comes before "2" in a dict
  position = dict(step=3, row={"a": float("nan"), "b": 1 / 3}, reference=None)
  begun = dict(cursors=[4, 7], restart=[9])
  checkpoints = Checkpoints(str(tmp_path), keep=1)
  checkpoints.save(Saved(state_of(0), queue, position, begun))
  checkpoints.close()
  saved = newest(tmp_path)
  assert saved.begun == begun and saved.position["row"]["b"] == 1 / 3
  assert np.isnan(saved.position["row"]["a"])
  for got, want in zip(saved.queue, queue, strict=True):
    equal(checkpoint._fields(got), checkpoint._fields(want))


class Stop(Exception):
  pass


def run_until(step, config, path, devices):
  """Cut after `step`, as a kill would; None: to the end."""
  real = metrics.MetricsWriter.write

  def write(self, at, row):
    if at == (step or 0) + 1 and step:
      raise Stop
    real(self, at, row)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(metrics.MetricsWriter, "write", write)
    try:
      return train.run(config, str(path), devices=devices)
    except Stop:
      return None


def test_F01_from_8_devices_to_4_to_1_to_8(warm, tmp_path, monkeypatch):
  """Learner, queue and KL reference; equal where saved, close at the end."""
  changes = dict(objective__preset="ppo_ewma", objective__regularizer="k3",
                 objective__constants__kl_coef=0.1, checkpoint__every=1,
                 evaluate__prompts=0, optimizer__name="sgd")
  config = lambda: tiny(warm, "lag=2", **changes)
  sums = {}  # step -> of the state saved, then of each state restored
  save_, restore = Checkpoints.save, Checkpoints.restore

  def seen(saved):
    sums.setdefault(saved.position["step"], []).append(
        checkpoint.digest((saved.state, [checkpoint._fields(b) for b in
                                         saved.queue])))

  def watched_save(self, saved):
    seen(saved)
    save_(self, saved)

  def watched_restore(self, step, shapes):
    saved = restore(self, step, shapes)
    seen(saved)
    count = {len(x.sharding.device_set) for x in jax.tree.leaves(saved.state)}
    assert count == {devices}
    return saved

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Checkpoints, "save", watched_save)
    patch.setattr(Checkpoints, "restore", watched_restore)
    for devices, until in ((8, 1), (4, 3), (1, 4), (8, None)):
      result = run_until(until, config(), tmp_path / "run",
                         jax.devices()[:devices])
  # The states of steps 1, 3 and 4 crossed from one count to another.
  assert all(len(set(s)) == 1 for s in sums.values())
  assert [step for step, s in sums.items() if len(s) > 1] == [1, 3, 4]
  whole = train.run(config(), str(tmp_path / "whole"), devices=jax.devices()[:1])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=1e-4 * np.abs(b).max()), result.params, whole.params)


def test_E07_the_reference_is_still_the_start_after_a_resume(
    warm, tmp_path, one_device, monkeypatch):
  config = tiny(warm, objective__preset="ppo", objective__regularizer="k3",
                objective__constants__kl_coef=0.1, evaluate__prompts=0,
                optimizer__learning_rate=0.01)
  parts = build.build(config, devices=one_device)
  base = checkpoint.digest(warm_start.params(config, parts, str(tmp_path)))
  train.run(config, str(tmp_path / "whole"), devices=one_device)
  references, learn = [], train._learn

  def watched(state, ref, *args):
    references.append((checkpoint.digest(ref), checkpoint.digest(state.params)))
    return learn(state, ref, *args)

  monkeypatch.setattr(train, "_learn", watched)
  run_until(4, config, tmp_path / "cut", one_device)
  before = len(references)
  run_until(None, config, tmp_path / "cut", one_device)
  assert {ref for ref, _ in references} == {base} and len(references) > before
  assert references[before][1] != base  # the learner has moved
  kl = [[row["kl_reference/k3"] for row in metrics.read(str(tmp_path / name))]
        for name in ("whole", "cut")]
  assert kl[0] == kl[1] and kl[0][4] > 0


@pytest.mark.parametrize("mode", ["lag", "async"])
def test_E14_a_small_data_set_neither_shortens_nor_lengthens_a_run(
    warm, tmp_path, one_device, monkeypatch, mode):
  """5 problems, 4 prompts a batch: 6 steps are 24 prompts, 4.8 epochs; resumed.

  There are no epochs to end a run by: `train.steps` alone does. The schedule is
  of the update's number (E09): a resume goes on in it, and only another run,
  which begins at update 0, begins it anew; there is no switch to skip it.
  """
  make_task = build.make_task

  def few(*args, **kwargs):
    task = make_task(*args, **kwargs)
    return dataclasses.replace(task, train=task.train[:5])

  monkeypatch.setattr(build, "make_task", few)
  config = tiny(warm, objective__preset="ppo", rollout__mode=mode,
                optimizer__warmup_updates=5, optimizer__learning_rate=0.1,
                evaluate__prompts=0)
  for until in (3, None, None):
    run_until(until, config, tmp_path, one_device)
  rates = [row["update/learning_rate"] for row in metrics.read(str(tmp_path))]
  np.testing.assert_allclose(rates, [0.02, 0.04, 0.06, 0.08, 0.1, 0.1], rtol=1e-5)
