"""The command and its table."""

import math
import subprocess
import sys

import pytest

from rl_is import lab
from rl_is.core.types import Weights


@pytest.fixture(scope="module")
def at():
  return lab.setting(vocab=2, length=3, steps=2)


def test_a_row_a_point_and_behaviour(at):
  rows = lab.table(["token_tis", "seq_is", "none"], at=at, sweep=dict(cap=[1.0, 3.0]),
                   behaviours=["noise:0.3", "stale:2", "round:1", "temperature:2"])
  # seq_is takes a cap too: its weights are then truncated.
  assert len(rows) == 4 * (2 + 2 + 1)
  none = [r for r in rows if r["estimator"] == "none"]
  assert all(r["cap"] is None and r["method"] == "exact" for r in none)
  for r in rows:
    assert math.isclose(r["mse_64"], r["bias"]**2 + r["variance"] / 64)


def test_a_batch_s_objective_is_sampled_with_errors(at):
  row, = lab.table(["m2po"], at=at, batches=[8], draws=20)
  assert row["method"] == "sampled" and row["bias_se"] > 0
  assert row["mse_8"] > 0


def test_one_s_own(at):
  same = lambda num, den, mask, *, level="token": Weights(
      mask * 1.0, mask, num - den)
  mine, none = lab.table(["mine", "none"], at=at, corrections=dict(mine=same))
  assert mine["bias"] == pytest.approx(none["bias"], rel=1e-12)


@pytest.mark.parametrize("text,says", [
    ("nois:1", "did you mean noise"), ("noise:x", "expected noise:NUMBER"),
    ("stale:3", "expected 0 to 2"), ("stale:0.5", "expected 0 to 2"),
    ("top_p:1.5", "expected a value in"), ("noise:-1", "expected a value in"),
    ("top_p:0.6", "importance sampling is undefined")])
def test_bad_behaviours(at, text, says):
  with pytest.raises(ValueError, match=says):
    lab.table(["token_is"], at=at, behaviours=[text])


@pytest.mark.parametrize("kwargs,says", [
    (dict(names=["tokn_is"]), "did you mean token_is"),
    (dict(sweep=dict(capp=[1.0])), "did you mean cap"),
    (dict(sweep=dict(cap=[-1.0])), "expected less than cap = -1.0")])
def test_bad_names(at, kwargs, says):
  with pytest.raises(ValueError, match=says):
    lab.table(**dict(dict(names=["token_tis"], at=at), **kwargs))


def test_the_command(tmp_path):
  import pandas as pd
  path = tmp_path / "lab.csv"
  out = subprocess.run(
      [sys.executable, "-m", "rl_is.lab", "--vocab=2", "--length=3", "--steps=1",
       "--behaviours=noise:0.5", "--estimators=none,token_tis", "--sweep=cap=1,inf",
       f"--csv={path}"], text=True, capture_output=True)
  assert out.returncode == 0 and "token_tis" in out.stdout, out.stderr
  table = pd.read_csv(path)
  assert list(table.estimator) == ["none", "token_tis", "token_tis"]
  assert table.cap[2] == math.inf and table.bias.notna().all()
  out = subprocess.run([sys.executable, "-m", "rl_is.lab", "--vocab=11"],
                       text=True, capture_output=True)
  assert out.returncode == 1 and "1,771,561" in out.stderr
  assert "Traceback" not in out.stderr


@pytest.mark.parametrize("changes,says", [
    (dict(names=[]), "names: expected at least 1"),
    (dict(behaviours=[]), "behaviours: expected at least 1"),
    (dict(batches=[4, 0]), "at least 1, got 0"),
    (dict(behaviours=["round:inf"]), "expected round:NUMBER"),
    (dict(behaviours=["temperature:1e-300"]), "not finite numbers")])
def test_what_has_no_numbers_is_refused(changes, says):
  at = lab.setting(vocab=2, length=2, steps=1)
  with pytest.raises(ValueError, match=says):
    lab.table(**{"names": ["none"], "at": at} | changes)


def test_a_learner_that_broke_is_refused():
  with pytest.raises(ValueError, match="not finite after 1 steps"):
    lab.setting(vocab=2, length=2, steps=1, learning_rate=float("nan"))
