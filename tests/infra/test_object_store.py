"""A workdir at gs://: etils' own mock of it, over a directory."""

import contextlib
import json
import os

import pytest
from etils.epath import testing

from rl_is.infra import checkpoint, metrics
from rl_is.infra import workdir as workdir_lib
from rl_is.rollout import store
from rollout.test_store import TOKENIZER, same_bits, some_batch

WORKDIR = "gs://bucket/run"


@pytest.fixture
def bucket(tmp_path):
  """gs://X is tmp_path/X; nothing is added to an object, it is written whole."""
  here = lambda path: str(path).replace("gs:/", str(tmp_path), 1).replace(
      "//", "/")
  there = lambda path: "gs:/" + str(path).removeprefix(str(tmp_path))

  def opened(fn, path, mode):
    if "a" in mode or "+" in mode:
      raise ValueError(f"an object store has no mode {mode!r}")
    return fn(here(path), mode)

  one = lambda fn, path, *args, **kwargs: fn(here(path), *args, **kwargs)
  two = lambda fn, path, to, **kwargs: fn(here(path), here(to), **kwargs)
  listed = lambda fn, path: [there(x) for x in fn(here(path))]
  with testing.mock_epath(
      open=opened, glob=listed, rename=two, replace=two, copy=two,
      **dict.fromkeys(("exists", "isdir", "listdir", "makedirs", "mkdir",
                       "remove", "rmtree", "stat"), one)):
    yield tmp_path / "bucket" / "run"


def test_a_directory_is_claimed_and_another_config_refused(bucket):
  workdir_lib.claim(WORKDIR, dict(seed=1))
  workdir_lib.claim(WORKDIR, dict(seed=1))
  with pytest.raises(ValueError, match="seed: 1 there, 2 now"):
    workdir_lib.claim(WORKDIR, dict(seed=2))
  assert json.loads((bucket / "config.json").read_text()) == {"seed": 1}
  with workdir_lib.lock(WORKDIR):  # there is none: it would be no lock
    assert os.listdir(bucket) == ["config.json"]


def test_metrics_come_row_by_row_and_go_on(bucket):
  workdir_lib.claim(WORKDIR, {})
  with contextlib.closing(metrics.MetricsWriter(WORKDIR)) as writer:
    for step in (1, 2, 3):
      writer.write(step, dict(a=step / 2, b=float("nan")))
      assert len(metrics.read(WORKDIR)) == step
  with contextlib.closing(metrics.MetricsWriter(WORKDIR, after_step=2)) as writer:
    writer.write(3, dict(a=7.0))
  assert metrics.read(WORKDIR) == [
      dict(step=1, a=0.5, b=None), dict(step=2, a=1.0, b=None),
      dict(step=3, a=7.0)]


def test_rollouts_are_stored_rotated_and_read(bucket):
  batch = some_batch(0)
  written = store.Store(WORKDIR, every=1, max_gb=1e-9, tokenizer=TOKENIZER,
                        meta=dict(a=1))
  for step in (1, 2):
    written.write(step, batch, [batch])
  record, = store.read(WORKDIR)  # of the two, one fits
  assert record.step == 2
  same_bits(record.batch, batch)
  assert [p.name for p in (bucket / "rollouts").iterdir()] == ["00000002.parquet"]


def test_orbax_is_given_the_place_as_it_is(monkeypatch):
  """What it does there is tensorstore's, which no mock of epath reaches."""
  asked = []
  monkeypatch.setattr(checkpoint.ocp, "CheckpointManager",
                      lambda path, **kwargs: asked.append(path))
  checkpoint.Checkpoints(WORKDIR)
  assert asked == ["gs://bucket/run/checkpoints"]
