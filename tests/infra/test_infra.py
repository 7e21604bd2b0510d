"""Mesh, randomness, metrics, workdir."""

import json

import jax
import numpy as np
import pytest

from rl_is.infra import mesh as mesh_lib, metrics, rng, workdir


def test_keys_differ_by_seed_purpose_and_counter():
  keys = {tuple(np.asarray(jax.random.key_data(rng.key(*args)))) for args in (
      (0, "init"), (1, "init"), (0, "sample"), (0, "sample", 0),
      (0, "sample", 1), (0, "sample", 0, 1), (0, "learner"))}
  assert len(keys) == 7
  assert len(set(rng.PURPOSES.values())) == len(rng.PURPOSES)
  with pytest.raises(ValueError, match="sample"):
    rng.key(0, "smaple")


@pytest.mark.parametrize("sizes,shape", [
    ((-1, 1, 1), (8, 1, 1)), ((2, -1, 2), (2, 2, 2)), ((2, 2, 2), (2, 2, 2))])
def test_mesh_fills_what_is_left(sizes, shape):
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, sizes)))
  assert mesh.devices.shape == shape


@pytest.mark.parametrize("sizes,words", [
    ((3, 1, 1), ("3", "8 devices")), ((-1, -1, 1), ("at most one -1",)),
    ((0, 1, 1), (">= 1",)), ((-1, 3, 1), ("3", "8")), ((2, 2, 1), ("4", "8"))])
def test_an_impossible_mesh_is_refused_with_the_numbers(sizes, words):
  with pytest.raises(ValueError) as error:
    mesh_lib.make(dict(zip(mesh_lib.AXES, sizes)))
  assert all(word in str(error.value) for word in words)


def test_rows_must_divide_over_the_mesh():
  """Case F02: both numbers and the nearest valid ones."""
  mesh = mesh_lib.make(dict(data=4, fsdp=2, tensor=1))
  mesh_lib.check_rows(mesh, "batch", 16)
  with pytest.raises(ValueError, match="batch = 10 .*= 8; nearest valid: 8 or 16"):
    mesh_lib.check_rows(mesh, "batch", 10)


def test_metrics_rows_and_missing_values(tmp_path):
  """Case J02: NaN is null in the file, never 0."""
  writer = metrics.MetricsWriter(str(tmp_path))
  writer.write(1, {"a": 1.5, "b": float("nan")})
  writer.write(2, {"a": float("inf"), "b": 2.0})
  writer.close()
  assert metrics.read(str(tmp_path)) == [
      {"step": 1, "a": 1.5, "b": None}, {"step": 2, "a": None, "b": 2.0}]


def test_a_resumed_writer_keeps_each_step_once(tmp_path):
  """Case J05, with a last line that a kill cut in the middle."""
  writer = metrics.MetricsWriter(str(tmp_path))
  for step in range(1, 6):
    writer.write(step, {"a": 0.0})
  writer.close()
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 6, "a"')
  assert len(metrics.read(str(tmp_path))) == 5
  writer = metrics.MetricsWriter(str(tmp_path), after_step=3)
  writer.write(4, {"a": 1.0})
  writer.close()
  rows = metrics.read(str(tmp_path))
  assert [(r["step"], r["a"]) for r in rows] == [(1, 0), (2, 0), (3, 0), (4, 1)]


def test_tensorboard_gets_the_same_numbers(tmp_path):
  writer = metrics.MetricsWriter(str(tmp_path), tensorboard=True)
  writer.write(1, {"reward/mean": 0.25, "missing": float("nan")})
  writer.close()
  files = list((tmp_path / "tensorboard").iterdir())
  assert len(files) == 1 and b"reward/mean" in files[0].read_bytes()
  assert b"missing" not in files[0].read_bytes()


def test_a_workdir_belongs_to_one_config(tmp_path):
  """Case G05: the differing keys are named; the same config comes again."""
  path = str(tmp_path / "run")
  workdir.claim(path, {"a": {"b": 1, "c": (1, 2)}, "d": None})
  workdir.claim(path, {"a": {"b": 1, "c": [1, 2]}, "d": None})
  with pytest.raises(ValueError) as error:
    workdir.claim(path, {"a": {"b": 2, "c": [1, 2]}, "e": 0})
  message = str(error.value)
  assert "a.b: 1 there, 2 now" in message and "e" in message
  assert "a.c" not in message
  assert json.loads((tmp_path / "run" / "config.json").read_text())["a"]["b"] == 1


def test_provenance_names_versions_and_commit():
  p = workdir.provenance()
  assert p["jax"] == jax.__version__ and p["git"]


def test_time_left_is_measured_after_the_first_step(monkeypatch, capsys):
  """A first step of 60 s (compilation), then 2 s each: after 6 of 10, 8 s."""
  from rl_is.infra import progress
  clock = iter([0.0] + [60.0 + 2 * i for i in range(6)])
  monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
  monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False,
                      raising=False)
  with progress.Steps("run", 10, every_s=0.0) as bar:
    for done in range(1, 7):
      bar.update(done, "reward 0.5")
  last = capsys.readouterr().err.splitlines()[-1]
  assert last == "run: step 6/10  reward 0.5  ETA 8 s"
