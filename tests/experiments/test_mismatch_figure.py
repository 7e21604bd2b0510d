"""The figure of the dials: its claims can fail, and its machinery runs."""

import csv
import pathlib
import subprocess
import sys

import pytest

from experiments import mismatch

ROOT = pathlib.Path(__file__).parents[2]


def rows_of(none=3e-6, int4=0.05):
  """KL of int8, int4, int3; everything else as it should be."""
  row = lambda dial, setting, kl, largest=1.0: dict(
      dial=dial, setting=setting, kl=kl, ess=0.9, sequence_ess=0.7,
      weight_mean=1.0, log_ratio_max=largest, reward=0.4)
  return [row("none", "none", 0.0, none), row("integers", "int8", 1e-4),
          row("integers", "int4", int4), row("integers", "int3", 0.2)]


def run_of(stale=0.02):
  """Two steps; .01 of the engine and `stale` should be .03."""
  return [{"step": step, "is/kl_k1": 0.03, "engine/kl_k1": 0.01,
           "stale/kl_k1": stale} for step in (1, 2)]


def learners_of(int3=0.3, tis=0.7):
  """Held-out accuracy, 0.75 without mismatch: so int3 at most .65, TIS at least .6."""
  ends = {"no mismatch": 0.75, "int4": 0.6, "int4, TIS": 0.7, "int3": int3,
          "int3, TIS": tis}
  return {title: [{"step": 1, "eval/accuracy": 0.4}, {"step": 2},
                  {"step": 3, "eval/accuracy": end}]
          for title, end in ends.items()}


@pytest.mark.parametrize("rows,run,learners,failing", [
    (rows_of(), run_of(), learners_of(), None),
    (rows_of(none=1e-4), run_of(), learners_of(), 0),
    (rows_of(int4=0.3), run_of(), learners_of(), 1),
    (rows_of(), run_of(stale=0.021), learners_of(), 2),
    (rows_of(), run_of(), learners_of(int3=0.651, tis=0.72), 3),
    (rows_of(), run_of(), learners_of(tis=0.599), 4)])
def test_claims_can_fail(rows, run, learners, failing):
  verdicts = mismatch.claims(rows, run, learners)
  assert [i for i, (holds, _) in enumerate(verdicts) if not holds] == (
      [] if failing is None else [failing])
  assert ("integers" in verdicts[1][1]) == (failing == 1)


def test_the_figure_names_every_dial_part_and_arm(tmp_path):
  paths = mismatch.draw(rows_of(), run_of(), learners_of(), str(tmp_path / "f"),
                        "made by")
  svg = (tmp_path / "f.svg").read_text()
  for word in ("integers", "int3", "engine", "staleness", "TIS", "made by"):
    assert word in svg
  assert ">none<" not in svg
  assert [pathlib.Path(p).suffix for p in paths] == [".svg", ".png"]


@pytest.mark.slow
def test_tiny_mismatch_runs_and_resumes(tmp_path):
  """All dials and the run with a model that learns nothing."""
  command = [sys.executable, "-m", "experiments.mismatch", "--tiny",
             f"--workdir={tmp_path}"]
  first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  verdicts = [l for l in first.stdout.splitlines()
              if l.startswith(("PASS ", "FAIL "))]
  assert len(verdicts) == 5, first.stderr[-2000:]
  assert verdicts[0].startswith("PASS") and verdicts[2].startswith("PASS")
  with open(tmp_path / "results.csv") as file:
    settings = [(r["dial"], r["setting"]) for r in csv.DictReader(file)]
  assert settings == [(d.title, s) for d in mismatch.DIALS for s in d.settings]
  second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert second.stderr.count("already complete") == (len(settings) + 1
                                                   + len(mismatch.ARMS))
  assert second.stdout.splitlines()[-6:-1] == verdicts
