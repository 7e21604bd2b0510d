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


def printed(name, *flags):
  """The one JSON object that the command prints."""
  run = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *flags],
                       cwd=conftest.ROOT, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr
  return json.loads(run.stdout)


def test_loss_prints_one_object():
  got = printed("loss", "--rows=2", "--length=8", "--repeats=2")
  assert got["rows"] == 2 and math.isfinite(got["no_diagnostics_s"])


def test_logprob_prints_one_object():
  got = printed("logprob", "--tokens=96", "--embed=16", "--vocabs=4096",
                "--repeats=1")
  sides = got["cpu"]["4096"]
  for side in ("reference", "chunked", "pallas"):
    assert sides[side]["seconds"] > 0
    assert got["bf16_nats"][f"sums_{side}"] < 1e-4
  assert got["bf16_nats"]["inputs"] < 0.1
  # All the logits of 96 tokens, and several times so, or two slices of them.
  assert sides["reference"]["temp"] >= 4 * 96 * 4096
  assert sides["chunked_over_reference_temp"] < 1


@pytest.mark.slow
def test_async_loop_prints_one_object():
  got = printed("async_loop", "--steps=3")
  assert got["devices"] == 2 and 0 < got["overlap_efficiency"] < 2
  assert 0 <= got["learner_wait_share"] <= 1


@pytest.mark.slow
def test_sweep_prints_one_object():
  got = printed("sweep", "--tiny", "--variants=2", "--steps=3")
  assert got["same_rewards"] and got["variants"] == 2
  assert got["speedup_vs_processes"] > 0 and got["speedup_vs_loop"] > 0
  assert got["bytes_a_member_carried"] > 0
