"""The figure of the sweep of caps against lags, from its committed numbers.

  python -m experiments.fig_tis_cap                       # the committed sweep
  python -m experiments.fig_tis_cap --workdir=runs/tis_cap   # one's own

Prints each claim with PASS or FAIL (exit code 1 on FAIL) and draws `figure.svg`
and `.png`, beside this file or in the workdir (with `claims.json`, for the
report). Floor 5.
"""

import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from absl import app, flags

from experiments import command, plots, sweep_figures
from experiments.fig_tis_cap import claims as claims_lib

HERE = pathlib.Path(__file__).parent
EVERY = 5  # a step in so many of the committed curves, each a mean of 20
_KEYS = (claims_lib.LAG, claims_lib.CAP, "seed", "step")


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


def draw(summary: Sequence[Mapping], curves: Sequence[Mapping], stem: str,
         made_by: str) -> list[str]:
  """Left: the end against the cap, a line a lag. Right: curves, a panel a lag."""
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


def _main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  workdir = flags.FLAGS.workdir
  at = pathlib.Path(workdir or HERE)
  if workdir and not (at / "summary.csv").exists():
    sys.exit(f"error: {workdir}: no summary.csv; experiments.run_sweep writes it")
  summary = sweep_figures.read_csv(at / "summary.csv")
  curves = (condensed(sweep_figures.read_csv(at / "results.csv")) if workdir
            else sweep_figures.read_csv(at / "curves.csv"))
  found = claims_lib.claims(summary)
  if workdir:
    (at / "claims.json").write_text(json.dumps(found))
    command.write_csv(curves, at / "curves.csv")
  figure = draw(summary, curves, os.path.join(at, "figure"),
                "python -m experiments.fig_tis_cap " + " ".join(sys.argv[1:]))
  command.judge(found, figure)


def main() -> None:
  flags.DEFINE_string("workdir", None, "Of run_sweep; unset: the committed one.")
  app.run(_main)


if __name__ == "__main__":
  main()
