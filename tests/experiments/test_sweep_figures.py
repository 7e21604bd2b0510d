"""Pictures of a sweep: which axis is which direction, and what they say."""

import math
import pathlib
import runpy

import numpy as np
import pytest

from experiments import sweep_figures
from rl_is import plots

ROOT = pathlib.Path(__file__).parents[2]
CAP, LAG, PRESET = "objective.constants.cap", "rollout.lag", "objective.preset"
LOW, HIGH = "objective.constants.eps_low", "objective.constants.eps_high"


def row(seed=0, final=0.5, fell=None, failed=None, **overrides):
  keys = dict(cap=CAP, lag=LAG, preset=PRESET, low=LOW, high=HIGH)
  own = {keys[k]: v for k, v in overrides.items()}
  return {"point": str(sorted(own.items())), **own, "seed": seed, "final": final,
          "collapse_step": fell, "failed": failed}


def steps_of(summary, n=3):
  return [dict(r, step=i + 1, **{"reward/mean": r["final"]})
          for r in summary for i in range(n)]


def test_the_sweeps_of_the_repository_have_the_axes_one_expects():
  """By hand, from what each file says it varies."""
  want = dict(
      tis_cap=(LAG, CAP, None, (PRESET,)),
      cispo_cap=(LAG, "objective.constants.cispo_cap", None, ()),
      ppo_eps_plane=(None, LOW, HIGH, ()),
      # Low and high are one number there, and say so once.
      ppo_eps=(None, LOW, None, ()),
      gspo_bounds=(None, LOW, None, ("objective.level",)),
      batch_cap=(None, CAP, "rollout.batch_size", ()),
      int_bits=(None, "mismatch.bits", None, (PRESET,)),
      lag_rate=(LAG, "optimizer.learning_rate", None, (PRESET,)),
      icepop_band=(None, "objective.constants.icepop_low",
                   "objective.constants.icepop_high", ()))
  files = {p.stem: p for p in (ROOT / "configs" / "sweeps").glob("*.py")
           if p.stem != "toy"}
  assert files.keys() == want.keys()
  for name, file in files.items():
    points = []
    runpy.run_path(str(file))["sweep"](
        lambda overrides, seeds=(0,): points.append(dict(overrides)))
    keys = list(dict.fromkeys(k for p in points for k in p))
    assert sweep_figures.layout(points, keys) == want[name], name


def test_a_point_by_itself_has_no_axes():
  where = sweep_figures.layout([row(cap=1.0)], [CAP])
  assert where == (None, None, None, ()) and where.name(row(cap=1.0)) == "all"


def test_the_finding_names_best_worst_and_what_fell():
  """Ends: none .1, C=1 (.4 + .6) / 2, C=inf .9; two of five fell."""
  summary = [row(preset="pg", final=0.1, fell=30),
             row(preset="tis", cap=1.0, final=0.4),
             row(preset="tis", cap=1.0, final=0.6, seed=1),
             row(preset="tis", cap=math.inf, final=0.9),
             row(preset="tis", cap=math.inf, final=math.nan, seed=1,
                 failed="step 3: broke")]
  where = sweep_figures.layout(summary, [PRESET, CAP])
  assert sweep_figures.finding(summary, where) == (
      "Best: tis cap=inf ends at 0.900, n = 1; worst: pg at 0.100; 2 of 5 runs "
      "collapsed")
  only = [row(final=math.nan, failed="step 1: broke")]
  assert sweep_figures.finding(
      only, sweep_figures.layout(only, [])) == "no point has an end"


def test_the_finding_compares_on_the_same_seeds():
  """The seeds add 0 and 0.4, the cap 0.1 and 0.12: worst - best -0.1, -0.12."""
  summary = [row(cap=c, seed=s, final=f) for c, s, f in (
      (1.0, 0, 0.2), (1.0, 1, 0.6), (2.0, 0, 0.3), (2.0, 1, 0.72))]
  text = sweep_figures.finding(summary, sweep_figures.layout(summary, [CAP]))
  assert "worst: cap=1 at 0.400, on the same seeds -0.110 [-0.120, -0.100]" in text
  assert "not told apart" not in text
  # One up, one down; and no difference at all.
  for finals, said in (((0.2, 0.6, 0.3, 0.55), "[-0.100, +0.050], not told apart"),
                       ((0.2, 0.6, 0.2, 0.6), "All 2 points end at 0.400")):
    them = [dict(r, final=f) for r, f in zip(summary, finals)]
    assert said in sweep_figures.finding(them, sweep_figures.layout(them, [CAP]))


def test_points_are_compared_on_the_seeds_that_all_have(figures, caplog):
  """Seed 1 is a bad one: C = 1 has it, C = 2 has not, and is no better for it."""
  summary = [row(cap=1.0, final=0.7), row(cap=1.0, final=0.1, seed=1),
             row(cap=2.0, final=0.6)]
  assert [r["seed"] for r in sweep_figures.comparable(summary)] == [0, 0]
  sweep_figures.draw("", summary, steps_of(summary), [CAP], "x")
  line, = [x for x in figures["outcomes"].axes[0].lines if len(x.get_xdata()) == 2]
  np.testing.assert_allclose(line.get_ydata(), [0.7, 0.6])
  assert "that all points have (0): 2 of 3 runs" in caplog.text
  apart = [row(cap=1.0, final=0.7), row(cap=2.0, final=0.6, seed=1)]
  assert sweep_figures.comparable(apart) == apart


@pytest.fixture
def figures(monkeypatch):
  """stem -> the figure that would be saved."""
  out = {}
  monkeypatch.setattr(plots, "save", lambda figure, stem, made_by: (
      out.__setitem__(pathlib.Path(stem).name, figure), [stem])[1])
  yield out
  plots.plt.close("all")


def test_lines_over_a_constant_with_a_panel_a_lag(figures):
  summary = [row(lag=lag, preset="tis", cap=c, seed=s, final=0.1 * c + 0.01 * s)
             for lag in (0, 8) for c in (1.0, 2.0) for s in (0, 1)]
  summary += [row(lag=lag, preset="pg", seed=s, final=0.05) for lag in (0, 8)
              for s in (0, 1)]
  sweep_figures.draw("", summary, steps_of(summary), [LAG, PRESET, CAP], "x")
  axes = figures["outcomes"].axes
  assert [ax.get_title(loc="left") for ax in axes] == ["lag 0", "lag 8"]
  line, = [x for x in axes[0].lines if len(x.get_xdata()) == 2
           and x.get_linestyle() == "-"]
  np.testing.assert_allclose(line.get_ydata(), [0.105, 0.205])
  dotted, = [x for x in axes[0].lines if x.get_linestyle() == ":"]
  np.testing.assert_allclose(dotted.get_ydata(), 0.05)
  panel = figures["curves"].axes[1]  # C = 1, C = 2, and what has no cap
  assert {x.get_label(): x.get_ydata()[-1] for x in panel.lines} == {
      "cap=1": pytest.approx(0.105), "cap=2": pytest.approx(0.205),
      "pg": pytest.approx(0.05)}


def test_a_heat_map_has_a_line_around_what_collapsed(figures):
  """Of a plane of 2 x 3 without one corner the cell (0.4, 0.1) fell: its 4 sides."""
  summary = [row(low=low, high=high, final=low + high,
                 fell=50 if (low, high) == (0.4, 0.1) else None)
             for low in (0.1, 0.4) for high in (0.1, 0.2, 0.8)][:-1]
  sweep_figures.draw("", summary, steps_of(summary), [LOW, HIGH], "x")
  ax = figures["outcomes"].axes[0]
  assert ax.get_xlabel() == "eps_high" and ax.get_ylabel() == "eps_low"
  np.testing.assert_allclose(ax.images[0].get_array().filled(np.nan), [
      [0.2, 0.3, 0.9], [0.5, 0.6, np.nan]])
  sides = {tuple(map(tuple, path.vertices)) for c in ax.collections
           for path in c.get_paths()}
  assert sides == {((-0.5, 0.5), (0.5, 0.5)), ((-0.5, 1.5), (0.5, 1.5)),
                   ((-0.5, 0.5), (-0.5, 1.5)), ((0.5, 0.5), (0.5, 1.5))}
  assert [x.get_title(loc="left") for x in figures["curves"].axes] == [
      "eps_low 0.1", "eps_low 0.4"]


def test_two_names_of_one_number_are_both_said(figures):
  summary = [row(low=eps, high=eps, final=eps) for eps in (0.1, 0.2)]
  sweep_figures.draw("", summary, steps_of(summary), [LOW, HIGH], "x")
  assert figures["outcomes"].axes[0].get_xlabel() == "eps_low=eps_high"
  assert "Best: eps_low=eps_high=0.2 ends" in figures["outcomes"].get_suptitle()


def test_presets_alone_are_dots(figures):
  summary = [row(preset=p, seed=s, final=v) for p, v in (("pg", 0.1), ("tis", 0.6))
             for s in (0, 1)]
  sweep_figures.draw("", summary, steps_of(summary), [PRESET], "x")
  ax = figures["outcomes"].axes[0]
  assert [t.get_text() for t in ax.get_xticklabels()] == ["pg", "tis"]


def test_nothing_finished_draws_nothing(tmp_path):
  assert sweep_figures.draw(str(tmp_path), [row(final=None)], [], [], "x") == []
  assert not list(tmp_path.iterdir())


def test_methods_with_a_constant_each_have_no_plane(figures):
  """cap of TIS along x; PPO's points, which have none, are lines of their own."""
  summary = [*(row(preset="tis", cap=c, final=c / 10) for c in (1.0, 2.0)),
             *(row(preset="ppo", high=e, final=e) for e in (0.1, 0.2))]
  where = sweep_figures.layout(summary, [PRESET, CAP, HIGH])
  assert where == (None, CAP, None, (PRESET, HIGH))
  sweep_figures.draw("", summary, [], [PRESET, CAP, HIGH], "x")
  ax = figures["outcomes"].axes[0]
  dotted = {x.get_label() for x in ax.lines if x.get_linestyle() == ":"}
  assert dotted == {"ppo, eps_high=0.1", "ppo, eps_high=0.2"}
  assert "curves" not in figures


def test_the_label_says_how_the_bands_are_made(figures):
  both = [row(cap=c, seed=s, final=c + s + 0.1 * c * s) for c in (1.0, 2.0)
          for s in (0, 1)]
  sweep_figures.draw("", both, [], [CAP], "x")
  assert "without" in figures["outcomes"].axes[0].get_ylabel()
  both[0]["final"] = math.nan  # then a seed's own level is not known
  sweep_figures.draw("", both, [], [CAP], "x")
  assert "95 % over seeds" in figures["outcomes"].axes[0].get_ylabel()


def test_a_points_name_is_no_number(tmp_path):
  (tmp_path / "x.csv").write_text("point,seed\n12345e7890,1\n1234567890,2\n")
  assert sweep_figures.read_csv(tmp_path / "x.csv") == [
      dict(point="12345e7890", seed=1.0), dict(point="1234567890", seed=2.0)]
