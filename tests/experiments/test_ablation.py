"""The ablation: its claims can fail, and its machinery runs."""

import csv
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import ablation
from rl_is import plots

ROOT = pathlib.Path(__file__).parents[2]


def summary(**ends):
  return [dict(arm=arm, seed=0, reward_end=end) for arm, end in ends.items()]


@pytest.mark.parametrize("uncorrected,ppo,expected", [
    (0.1, 0.9, [True, True]), (0.6, 0.9, [False, True]),
    (0.1, 0.7, [True, False]), (0.5, 0.8, [False, True])])
def test_claims_can_fail(uncorrected, ppo, expected):
  """On-policy 1: the bounds are 0.5 (strict) and 0.8 (inclusive)."""
  verdicts = ablation.claims(summary(
      on_policy=1.0, uncorrected=uncorrected, tis=0.5, ppo=ppo, gspo=0.4))
  assert [holds for holds, _ in verdicts] == expected
  assert "PPO" in verdicts[1][1]


def test_ends_is_the_mean_of_the_last_20():
  rows = {("on_policy", 0): [{"step": i, "reward/mean": float(i > 80),
                              "eval/accuracy": 0.5, "time/generator_s": 1.0,
                              "time/learner_s": 1.0} for i in range(1, 101)]}
  row, = ablation.summarize(rows)
  assert row["reward_end"] == 1.0 and row["reward_lowest"] == 0.0
  assert row["seconds"] == 200 and np.isnan(row["acted_frac_mean"])


def test_moving_mean_and_bands():
  """Cases J02, J08: missing values left out; one seed has no band."""
  np.testing.assert_allclose(
      plots.moving_mean([0.5, None, 0.7, float("nan")], 3), [0.5, 0.5, 0.6, 0.7])
  mean, error = plots.band([np.array([x]) for x in (0.5, 0.6, 0.7)])
  np.testing.assert_allclose((mean[0], error[0]), (0.6, 0.1 / np.sqrt(3)))
  assert plots.band([np.array([0.5])])[1] is None


def test_tiny_ablation_runs_and_resumes(tmp_path):
  """All of it with a model that learns nothing: figure, table, csv, verdicts."""
  command = [sys.executable, "-m", "experiments.ablation", "--tiny",
             f"--workdir={tmp_path}"]
  first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  lines = first.stdout.splitlines()
  verdicts = [l for l in lines if l.startswith(("PASS ", "FAIL "))]
  assert len(verdicts) == 2, first.stderr[-2000:]
  assert first.returncode == (1 if any(
      v.startswith("FAIL") for v in verdicts) else 0)
  with open(tmp_path / "results.csv") as file:
    rows = list(csv.DictReader(file))
  assert [r["arm"] for r in rows] == list(ablation.ARMS)
  for name in ablation.ARMS:
    path = tmp_path / "arms" / name / "seed0" / "metrics.jsonl"
    assert len(path.read_text().splitlines()) == 6
  assert (tmp_path / "ablation.png").stat().st_size > 20_000
  svg = (tmp_path / "ablation.svg").read_text()
  for word in ("on-policy", "token TIS", "ESS", "KL", "clipped", "--tiny"):
    assert word in svg
  # One warm start for all arms; a second call trains nothing.
  assert [p.name for p in (tmp_path / "warm_start").iterdir()] == ["seed0"]
  second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert second.stderr.count("already complete") == len(ablation.ARMS)
  assert [l for l in second.stdout.splitlines()
          if l.startswith(("PASS ", "FAIL "))] == verdicts
