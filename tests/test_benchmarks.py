"""The benchmarks run, print one JSON object, and compile once."""

import json
import math
import subprocess
import sys

import pytest

import conftest
from benchmarks import loss


def test_loss_compiles_once_for_any_constants():
  got = loss.measure(rows=4, length=16, repeats=3)
  assert got["compilations"] == 1
  assert [got["loss"][side] for side in loss.OURS] == pytest.approx(
      3 * [got["loss"]["no_diagnostics"]], rel=1e-6)
  assert all(got[f"{side}_s"] > 0 for side in got["loss"])


def test_loss_prints_one_object():
  run = subprocess.run(
      [sys.executable, "-m", "benchmarks.loss", "--rows=2", "--length=8",
       "--repeats=2"], cwd=conftest.ROOT, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr
  got = json.loads(run.stdout)
  assert got["rows"] == 2 and math.isfinite(got["no_diagnostics_s"])
