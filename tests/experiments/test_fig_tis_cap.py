"""The figure of caps: its claims can fail, and hold for what is committed."""

import math

import pytest

from experiments import reproduce
from experiments.fig_tis_cap import claims as claims_lib
from experiments.fig_tis_cap import figure


def summary(**changes):
  """Ends by (lag, cap), a hundredth more for each seed."""
  ends = {(0.0, c): 0.6 for c in (None, 1.0, 2.0, math.inf)} | {
      (8.0, None): 0.2, (8.0, 1.0): 0.5, (8.0, 2.0): 0.55, (8.0, math.inf): 0.56}
  ends |= changes.get("ends", {})
  return [{claims_lib.LAG: lag, claims_lib.CAP: cap, "seed": s,
           "final": end + s / 100} for (lag, cap), end in ends.items()
          for s in range(3)]


@pytest.mark.parametrize("ends,fails", [
    ({}, None), ({(0.0, 2.0): 0.62}, 0), ({(8.0, None): 0.31}, 1),
    ({(8.0, 2.0): 0.5, (8.0, math.inf): 0.505, (8.0, 1.0): 0.4}, 2),
    ({(8.0, 1.0): 0.57}, 3), ({(8.0, 2.0): 0.6}, 4)])
def test_each_claim_can_fail(ends, fails):
  verdicts = [holds for holds, _ in claims_lib.claims(summary(ends=ends))]
  assert [i for i, holds in enumerate(verdicts) if not holds] == (
      [] if fails is None else [fails])


def test_the_committed_numbers_are_those_of_the_text():
  rows = reproduce.committed("fig_tis_cap")["summary"]
  assert len(rows) == 80 and all(row["steps"] == 200 for row in rows)
  text = (reproduce.HERE / "fig_tis_cap/README.md").read_text()
  for (lag, cap), seeds in claims_lib.finals(rows).items():
    if cap != 1.0 or lag != 0:
      assert f"{sum(seeds.values()) / len(seeds):.3f}" in text, (lag, cap)


def test_curves_are_condensed_by_step():
  rows = [{claims_lib.LAG: 0.0, claims_lib.CAP: None, "seed": 0.0,
           "step": float(s), "reward/mean": float(s > 20)} for s in range(1, 41)]
  got = figure.condensed(rows[::-1])
  assert [r["step"] for r in got] == [5, 10, 15, 20, 25, 30, 35, 40]
  assert [r["reward"] for r in got] == [0, 0, 0, 0, 0.25, 0.5, 0.75, 1]
