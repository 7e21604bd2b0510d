"""A sweep file: its points, each once, as populations; done ones are skipped."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pandas as pd
import pytest

from configs import addition
from experiments import run_sweep
from rl_is import sweep as sweep_lib
from rl_is import overrides

ROOT = pathlib.Path(__file__).parents[2]
FILE = """
from configs import addition
def get_config(arg=None):
  config = addition.get_config("tiny").unlock()
  config.warm_start.steps = 0
  config.evaluate.prompts = 4
  return config.lock()
def sweep(add):
  for cap in (1.0, 4.0):
    add({"objective.preset": "tis", "objective.constants.cap": cap}, seeds=(0, 1))
  add({"objective.constants.cap": 4.0, "objective.preset": "tis"}, seeds=[1])
  add({"objective.preset": "pg", "rollout.mode": "async"})
"""

# Two structures, two runs each: long enough to be met in their middle.
TWO = """
from configs import addition
def get_config(arg=None):
  config = addition.get_config("tiny").unlock()
  config.warm_start.steps = 0
  config.evaluate.prompts = 0
  config.train.steps = 40
  config.checkpoint.every = 10
  return config.lock()
def sweep(add):
  for preset in ("pg", "tis"):
    add({"objective.preset": preset}, seeds=(0, 1))
"""


def small():
  return addition.get_config("tiny")


def test_points_are_named_by_their_overrides_whatever_the_order(capsys):
  def sweep(add):
    add({"rollout.lag": 2, "objective.preset": "tis"}, seeds=(0, 1))
    add({"objective.preset": "tis", "rollout.lag": 2}, seeds=[1])
    add({"objective.preset": "tis", "rollout.lag": 4})

  points = run_sweep.points_of(sweep, small())
  assert [p.seed for p in points] == [0, 1, 0]
  assert points[0].id == points[1].id != points[2].id
  assert points[0].id == "b6633be5be"  # the same on every machine
  assert "1 runs stand twice" in capsys.readouterr().err
  assert points[2].config.rollout.lag == 4 and small().rollout.lag == 0


def test_a_value_is_what_the_config_took(capsys):
  def sweep(add):
    for lag in (2, 2.0, "2"):
      add({"rollout.lag": lag})
    for cap in ("none", "2", 2.0):
      add({"objective.constants.cap": cap})

  points = run_sweep.points_of(sweep, small())
  assert [p.overrides for p in points] == [
      {"rollout.lag": 2}, {"objective.constants.cap": None},
      {"objective.constants.cap": 2.0}]
  assert "3 runs stand twice" in capsys.readouterr().err


@pytest.mark.parametrize("changes,word", [
    ({"seed": 1}, r"'seed' is not one of the overrides"),
    ([("rollout.lag", 1)], "expected add"),
    ({"objective.constants.capp": 1.0}, "did you mean .*objective.constants.cap"),
    ({"rollout.lag": "x"}, "expected an integer")])
def test_a_wrong_point_is_refused_before_anything_runs(changes, word):
  with pytest.raises(ValueError, match=word):
    run_sweep.points_of(lambda add: add(changes), small())
  with pytest.raises(ValueError, match="at least 1 point"):
    run_sweep.points_of(lambda add: None, small())


def test_structures_are_groups():
  def sweep(add):
    for preset in ("pg", "tis"):
      for lag in (0, 2):
        add({"objective.preset": preset, "rollout.lag": lag}, seeds=(0, 1))
    add({"rollout.mode": "async"})

  groups, alone = run_sweep.grouped(run_sweep.points_of(sweep, small()))
  assert [len(g) for g in groups] == [4, 4]
  assert {p.overrides["objective.preset"] for p in groups[0]} == {"pg"}
  assert [p.overrides for p in alone] == [{"rollout.mode": "async"}]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
  """The file above, by the command: 4 points of a structure, and one alone."""
  path = tmp_path_factory.mktemp("sweep")
  (path / "file.py").write_text(FILE)
  out = command(path)
  assert out.returncode == 0, out.stderr[-3000:]
  return path, out


def words(path, *more):
  return [sys.executable, "-m", "experiments.run_sweep",
          f"--config={path / 'file.py'}", f"--workdir={path / 'out'}", *more]


def command(path, *more):
  return subprocess.run(words(path, *more), **HOW, capture_output=True)


HOW = dict(cwd=ROOT, text=True, env=dict(os.environ, XLA_FLAGS=""))


def test_the_tables_are_read_by_pandas(swept):
  path, out = swept
  assert "1 runs stand twice" in out.stderr
  table = pd.read_parquet(path / "out" / "results.parquet")
  assert len(table) == 5 * 6 and sorted(table.step.unique()) == [1, 2, 3, 4, 5, 6]
  caps = table.groupby("objective.constants.cap").point.nunique()
  assert caps.to_dict() == {1.0: 1, 4.0: 1}
  summary = pd.read_csv(path / "out" / "summary.csv")
  assert len(summary) == 5 and (summary.steps == 6).all()
  rewards = table[table.point == summary.point[0]].groupby("seed")[
      "reward/mean"].mean()
  assert rewards[0] == pytest.approx(summary.auc[0])
  csv = pd.read_csv(path / "out" / "results.csv")
  assert list(csv.columns) == list(table.columns) and len(csv) == len(table)


def test_what_is_done_is_not_done_again(swept, monkeypatch):
  path, _ = swept
  before = pd.read_parquet(path / "out" / "results.parquet")
  out = command(path)
  assert out.returncode == 0 and "5 runs, 5 of them finished" in out.stderr
  assert "step" not in out.stderr
  pd.testing.assert_frame_equal(
      before, pd.read_parquet(path / "out" / "results.parquet"))


def test_other_code_is_said_and_another_config_refused(swept, caplog):
  path, _ = swept
  workdir = str(path / "out")
  namespace = {}
  exec(FILE, namespace)
  points = run_sweep.points_of(namespace["sweep"], namespace["get_config"]())
  file = path / "out" / "points" / points[0].name / "done.json"
  text = file.read_text()
  file.write_text(json.dumps(json.loads(text) | dict(git="0123456789abcdef")))
  run_sweep.Sweep(workdir, points).say()
  assert "made by other code (0123456789ab; now " in caplog.text
  file.write_text(text)
  overrides.apply(points[0].config, "train.steps", 7)
  with pytest.raises(ValueError, match="train.steps: 6 there, 7 now"):
    run_sweep.Sweep(workdir, points)


def test_what_was_cut_goes_on_beside_what_is_new(tmp_path, monkeypatch):
  """A population that was begun keeps its members; a new point is another one."""
  ran = []
  monkeypatch.setattr(sweep_lib, "run", lambda members, directory, **_: (
      ran.append((sorted(members), directory)), {
          name: sweep_lib.Result(6, None, {}) for name in members})[1])

  def points(*lags):
    return run_sweep.points_of(
        lambda add: [add({"rollout.lag": lag}) for lag in lags], small())

  old = points(0, 2)
  begun = run_sweep.Sweep(str(tmp_path), old)
  directory = begun._population(old)
  os.makedirs(directory)
  pathlib.Path(directory, "population.json").write_text(
      json.dumps({p.name: {} for p in old}))
  new = points(0, 2, 4)
  run_sweep.Sweep(str(tmp_path), new).run([new], [])
  assert [names for names, _ in ran] == [
      sorted(p.name for p in old), [new[2].name]]
  assert ran[0][1] == directory
  assert not run_sweep.Sweep(str(tmp_path), new).left


@pytest.mark.slow
def test_a_dry_run_says_what_there_is_and_does_nothing(swept):
  path, _ = swept
  out = command(path, "--dry_run", f"--workdir={path / 'elsewhere'}")
  assert out.returncode == 0, out.stderr
  assert "1 structures, 4 runs: about" in out.stdout and "cap=4.0" in out.stdout
  assert not (path / "elsewhere").exists()


def test_the_sweeps_of_the_repository_are_whole():
  import runpy
  for file in sorted((ROOT / "configs" / "sweeps").glob("*.py")):
    if file.name == "toy.py":
      continue
    found = runpy.run_path(str(file))
    points = [p for p in run_sweep.points_of(
        found["sweep"], found["get_config"]()) if p.seed == 0]
    groups, alone = run_sweep.grouped(points)
    assert not alone and sum(map(len, groups)) == len(points), file
    assert "python -m experiments.run_sweep" in found["__doc__"]


@pytest.mark.slow
def test_a_job_a_structure_through_submitit(tmp_path, monkeypatch):
  """Its own local executor; then the same command makes the tables."""
  pytest.importorskip("submitit")
  (tmp_path / "file.py").write_text(FILE.replace('"rollout.mode": "async"',
                                                 '"rollout.lag": 2'))
  out = command(tmp_path, "--launcher=slurm", "--slurm_cluster=local",
                "--slurm_parameters=timeout_min=5")
  assert out.returncode == 0, out.stderr[-2000:]
  assert out.stdout.count("job ") == 2
  deadline = time.monotonic() + 300
  while len(list((tmp_path / "out" / "points").glob("*/done.json"))) < 5:
    logs = [p.read_text() for p in (tmp_path / "out" / "jobs").glob("*.err")]
    assert time.monotonic() < deadline and not any(
        "Traceback" in text for text in logs), logs
    time.sleep(0.2)
  assert not (tmp_path / "out" / "results.csv").exists()
  out = command(tmp_path)
  assert out.returncode == 0 and "5 runs, 5 of them finished" in out.stderr
  assert len(pd.read_csv(tmp_path / "out" / "summary.csv")) == 5


def test_the_lines_for_gke(tmp_path):
  (tmp_path / "file.py").write_text(FILE)
  out = command(tmp_path, "--launcher=xpk",
                "--xpk=--cluster=c,--tpu-type=v5litepod-16,--docker-image=i")
  assert out.returncode == 0, out.stderr[-2000:]
  lines = [shlex.split(line) for line in out.stdout.splitlines()]
  assert len(lines) == 2 and all(
      line[:3] == ["xpk", "workload", "create"] for line in lines)
  names = []
  for line in lines:
    assert re.fullmatch("--workload=sweep-[0-9a-f]{10}", line[3])
    assert line[4:7] == ["--cluster=c", "--tpu-type=v5litepod-16",
                         "--docker-image=i"]
    inner = shlex.split(line[7].removeprefix("--command="))
    assert inner[:3] == ["python", "-m", "experiments.run_sweep"]
    only, = [w for w in inner if w.startswith("--only=")]
    names += only.removeprefix("--only=").split(",")
    assert not any("xpk" in w or "launcher" in w for w in inner)
  assert len(set(names)) == 5
  if shutil.which("xpk"):
    for line in lines:
      subprocess.run([*line, "--dry-run", "--skip-validation", "--project=p",
                      "--zone=us-west4-a"], check=True, cwd=tmp_path)


def test_only_names_of_points(tmp_path):
  (tmp_path / "file.py").write_text(FILE)
  out = command(tmp_path, "--only=abc")
  assert out.returncode == 1 and "error: --only: unknown name 'abc'" in out.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """TWO, in one go: the bytes of its table, and kB of each population."""
  path = tmp_path_factory.mktemp("undisturbed")
  (path / "file.py").write_text(TWO)
  out = command(path)
  assert out.returncode == 0, out.stderr[-3000:]
  sizes = [int(subprocess.check_output(["du", "-sk", p]).split()[0])
           for p in (path / "out" / "populations").iterdir()]
  assert len(sizes) == 2
  return (path / "out" / "results.csv").read_bytes(), sizes


@pytest.mark.slow
def test_killed_at_any_time_the_same_command_ends_as_if_it_was_not(
    undisturbed, tmp_path):
  """SIGKILL after the first rows, in the second structure, and once at random."""
  (tmp_path / "file.py").write_text(TWO)
  rows = lambda: sum(len(p.read_text().splitlines()) for p in (
      tmp_path / "out").glob("populations/*/*/metrics.jsonl"))
  for least in (1, 81, 100):  # of 160
    life = subprocess.Popen(words(tmp_path), **HOW, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while rows() < least:
      assert life.poll() is None and time.monotonic() < deadline, life.stderr.read()
      time.sleep(0.01)
    life.kill()
    assert life.wait() == -9
  out = command(tmp_path)
  assert out.returncode == 0, out.stderr[-3000:]
  assert (tmp_path / "out" / "results.csv").read_bytes() == undisturbed[0]


@pytest.mark.slow
def test_a_full_disk_stops_it_and_loses_nothing(undisturbed, tmp_path):
  """A disk that holds one population and a half; then one that holds all."""
  table, sizes = undisturbed
  disk = tmp_path / "out"
  disk.mkdir()
  (tmp_path / "file.py").write_text(TWO)
  own = f"mount -t tmpfs -o size={int(1.5 * max(sizes))}k none {disk} && "
  if subprocess.run(["unshare", "-rm", "sh", "-c", own + "true"]).returncode:
    pytest.skip("no small disk can be mounted here")
  kept = tmp_path / "kept"
  out = subprocess.run(
      ["unshare", "-rm", "sh", "-c", own + f"{shlex.join(words(tmp_path))}; "
       f"rc=$?; cp -a {disk} {kept}; exit $rc"], **HOW, capture_output=True)
  assert out.returncode == 1, out.stderr[-3000:]
  # Not always the last line: what orbax left undone may still be heard of.
  said = [line for line in out.stderr.splitlines() if line.startswith("error: ")]
  assert len(said) == 1 and str(disk / "populations") in said[0], said
  assert "No space left on device" in said[0]
  assert len(list(kept.glob("points/*/done.json"))) == 2
  disk.rmdir()
  kept.rename(disk)
  out = command(tmp_path)
  assert out.returncode == 0, out.stderr[-3000:]
  assert "4 runs, 2 of them finished" in out.stderr
  assert (disk / "results.csv").read_bytes() == table
