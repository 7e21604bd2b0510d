"""The command line, as a user meets it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from rl_is import command
from rl_is.objective import presets

ROOT = pathlib.Path(__file__).parents[1]


def run(*args):
  return subprocess.run([sys.executable, "-m", "rl_is.main", *args], cwd=ROOT,
                        env=dict(os.environ, XLA_FLAGS=""), text=True,
                        capture_output=True)


def test_overrides_are_told_from_flags():
  rest, found = command.split_overrides(
      ["main", "--config=configs/x.py:lag=8", "--config.a.b=1", "--workdir=w",
       "-config.c", "none", "--config.d="])
  assert rest == ["main", "--config=configs/x.py:lag=8", "--workdir=w"]
  assert found == [("a.b", "1"), ("c", "none"), ("d", "")]
  with pytest.raises(ValueError, match="--config.a"):
    command.split_overrides(["main", "--config.a"])


def test_presets_are_listed_whole():
  out = run("--list_presets")
  assert out.returncode == 0
  for name in presets.PRESETS:
    assert f" {name} " in out.stdout


def test_a_run_writes_what_it_should(tmp_path):
  workdir = tmp_path / "run"
  out = run("--config=configs/addition.py:lag=1,tiny", f"--workdir={workdir}",
            "--config.objective.preset=gspo",
            "--config.objective.constants.eps_high=0.03",
            "--config.train.steps", "3", "--config.track.tensorboard=true")
  assert out.returncode == 0, out.stderr
  # The header: resolved config and constants, mesh, commit, versions.
  for word in ('"eps_high": 0.03', '"eps_low": 0.0003', '"mesh": "', '"git": "',
               '"jax": "', '"surrogate": "ppo_clip"', '"aggregation"'):
    assert word in out.stderr
  assert "step 3/3" in out.stderr and "ETA" in out.stderr
  config = json.loads((workdir / "config.json").read_text())
  assert config["objective"]["constants"]["eps_high"] == 0.03
  assert config["rollout"]["lag"] == 1 and config["train"]["steps"] == 3
  rows = [json.loads(l) for l in (workdir / "metrics.jsonl").open()]
  assert [r["step"] for r in rows] == [1, 2, 3]
  assert 0 <= rows[-1]["eval/accuracy"] <= 1 and "eval/pass@2" in rows[-1]
  for name in ("is/ess", "is/sequence_ess", "is/kl_k1", "clip/frac_high",
               "reward/mean", "rollout/staleness_mean", "policy/entropy",
               "grad/norm", "time/generator_s", "time/learner_s"):
    assert name in rows[-1], name
  assert list((workdir / "tensorboard").iterdir())


@pytest.mark.parametrize("args,words", [
    (["--config=configs/addition.py", "--workdir=x",
      "--config.optimizer.learning_rat=1"], ["optimizer.learning_rate"]),
    (["--config=configs/addition.py"], ["--workdir is needed"]),
    (["--config=configs/addition.py", "--workdir=x",
      "--config.objective.preset=gpso"], ["gspo"]),
])
def test_errors_are_one_line_and_exit_non_zero(args, words, tmp_path):
  out = run(*[a.replace("=x", f"={tmp_path / 'run'}") if a == "--workdir=x" else a
              for a in args])
  assert out.returncode != 0
  last = out.stderr.strip().splitlines()
  assert len(last) == 1 and last[0].startswith("error: "), out.stderr
  assert all(word in last[0] for word in words)
  assert not (tmp_path / "run").exists()  # nothing was begun
