"""Reward of token TIS against its cap and the lag, from a sweep. Floor 5."""

import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import sweep_figures
from experiments.fig_tis_cap import claims as claims_lib
from rl_is import plots

KIND = "training"
_SWEEP = "configs/sweeps/tis_cap.py"
EVERY = 5  # a step in so many of the committed curves, each a mean of 20
# The machinery alone: it learns nothing.
_TINY = (f"train.steps={EVERY}", "warm_start.steps=1", "warm_start.batch=8",
         "rollout.batch_size=8", "rollout.group_size=2", "model.layers=1",
         "model.embed=16", "model.mlp=16", "evaluate.prompts=4")
_KEYS = (claims_lib.LAG, claims_lib.CAP, "seed", "step")


def run(workdir: str, tiny: bool) -> dict[str, list[dict]]:
  """The sweep itself, in a process of its own: 80 runs."""
  subprocess.run(
      [sys.executable, "-m", "experiments.run_sweep", f"--config={_SWEEP}",
       f"--workdir={workdir}", *(f"--config.{c}" for c in _TINY if tiny)],
      check=True)
  return tables_of(pathlib.Path(workdir))


def tables_of(workdir: pathlib.Path) -> dict[str, list[dict]]:
  """What the figure is drawn from, of a sweep's results."""
  return dict(summary=sweep_figures.read_csv(workdir / "summary.csv"),
              curves=condensed(sweep_figures.read_csv(workdir / "results.csv")))


def condensed(results: Sequence[Mapping]) -> list[dict]:
  """The curves of results.csv, small enough to commit."""
  out = []
  for _, rows in sweep_figures.by(results, claims_lib.LAG, claims_lib.CAP,
                                  "seed").items():
    rows = sorted(rows, key=lambda r: r["step"])
    smooth = plots.moving_mean([r["reward/mean"] for r in rows], 20)
    out += [{**{k: row[k] for k in _KEYS}, "reward": round(float(y), 4)}
            for row, y in zip(rows, smooth) if row["step"] % EVERY == 0]
  return out


def draw(tables: Mapping[str, Sequence[Mapping]], stem: str, made_by: str
         ) -> list[str]:
  """Left: the end against the cap, a line a lag. Right: curves, a panel a lag."""
  summary, curves = tables["summary"], tables["curves"]
  lags = sorted({row[claims_lib.LAG] for row in summary})
  names = {lag: f"lag {lag:.0f}" for lag in lags}
  colors = dict(zip(names.values(), plots.COLORS))
  seeds = len({row["seed"] for row in summary})
  with plots.style():
    figure, axes = plots.plt.subplot_mosaic(
        [["ends", *lags[:2]], ["ends", *lags[2:4]]], figsize=(11, 5),
        width_ratios=[1.5, 1, 1], layout="constrained")
    ax = axes["ends"]
    series = {names[lag]: claims_lib.outcomes(summary, lag, True)
              for lag in lags}
    sweep_figures.against(ax, series, colors)
    ax.set_xlim(right=ax.get_xlim()[1] * 1.5)
    plots.label_ends(ax, {name: points[max(points)].value
                          for name, points in series.items()}, colors,
                     x=12.5, gap=0.03)
    for lag in lags:
      none, = claims_lib.outcomes(summary, lag, False).values()
      ax.axhline(none.value, color=colors[names[lag]], linestyle=":",
                 linewidth=1)
    ax.set_xlabel("cap C of token TIS (dotted: no correction, by lag)")
    ax.set_ylabel(f"reward less on-policy's of the same seed (95 %, n = {seeds})")
    ax.set_title("Last 20 steps against on-policy")
    shades = {None: "#999999", **dict(zip(
        sorted({r[claims_lib.CAP] for r in summary} - {None}),
        plots.plt.get_cmap("viridis")(np.linspace(0, 0.85, 4))))}
    for lag in lags:
      panel, ends = axes[lag], {}
      for (cap,), rows in sweep_figures.by(
          [r for r in curves if r[claims_lib.LAG] == lag], claims_lib.CAP).items():
        per_seed = list(sweep_figures.by(rows, "seed").values())
        steps, aligned = plots.align(
            [[r["step"] for r in one] for one in per_seed],
            [[r["reward"] for r in one] for one in per_seed])
        mean, _ = plots.band(aligned)
        label = "none" if cap is None else f"C = {cap:g}"
        panel.plot(steps, mean, color=shades[cap])
        ends[label] = mean[-1]
      if lag == lags[-1]:
        plots.label_ends(panel, ends, {
            "none" if cap is None else f"C = {cap:g}": color
            for cap, color in shades.items()}, x=steps[-1], gap=0.09)
      panel.set_title(f"lag {lag:.0f}")
      panel.set_ylim(0, 0.85)
      panel.set_xlabel("step")
    figure.suptitle(
        "Without a correction staleness costs nearly all; any cap gets most of "
        "it back, and here a looser cap more", fontweight="bold", fontsize=11,
        x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
