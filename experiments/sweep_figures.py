"""Pictures of a sweep's summary: outcome against a constant, curves by lag. Floor 5.

`summary` is what `run_sweep` writes to summary.csv, as a list of dicts.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments import plots, stats

Rows = Sequence[Mapping]


def read_csv(path: str) -> list[dict]:
  """Numbers as numbers, nothing as None, other text as text."""
  with open(path, newline="") as file:
    return [{k: _value(x) for k, x in row.items()} for row in csv.DictReader(file)]


def _value(text: str):
  if text == "":
    return None
  try:
    return float(text) if text not in ("true", "false") else text == "true"
  except ValueError:
    return text


def by(rows: Rows, *keys: str) -> dict[tuple, list[Mapping]]:
  out: dict[tuple, list[Mapping]] = {}
  for row in rows:
    out.setdefault(tuple(row.get(k) for k in keys), []).append(row)
  return out


def against(ax, series: Mapping[str, Mapping[float, stats.Estimate]],
            colors: Mapping[str, str], *, log: bool = True) -> None:
  """A line a name over a constant, 95 % intervals; infinity stands at the right."""
  finite = sorted({x for points in series.values() for x in points
                   if math.isfinite(x)})
  last = finite[-1] * 2.5 if log else finite[-1] + 1
  for name, points in series.items():
    xs = sorted(points)
    at = [x if math.isfinite(x) else last for x in xs]
    ax.plot(at, [points[x].value for x in xs], "o-", color=colors[name],
            markersize=3.5)
    low, high = ([getattr(points[x], side) for x in xs] for side in (
        "low", "high"))
    if None not in low:
      ax.fill_between(at, low, high, color=colors[name], alpha=0.15, linewidth=0)
  if log:
    ax.set_xscale("log")
  ticks = finite + ([last] if any(not math.isfinite(x) for points in
                                  series.values() for x in points) else [])
  ax.set_xticks(ticks, [f"{x:g}" for x in finite] + ["inf"] * (
      len(ticks) - len(finite)))
  ax.minorticks_off()


def heat(ax, values: Mapping[tuple[float, float], float], collapsed:
         Mapping[tuple[float, float], bool], *, fmt: Callable = "{:.2f}".format
         ) -> None:
  """(x, y) -> outcome, written into the cells; a frame where runs collapsed."""
  xs, ys = (sorted({k[i] for k in values}) for i in range(2))
  grid = np.array([[values.get((x, y), np.nan) for x in xs] for y in ys])
  ax.imshow(grid, origin="lower", cmap="cividis", aspect="auto")
  ax.grid(False)
  middle = np.nanmean([np.nanmin(grid), np.nanmax(grid)])
  for j, y in enumerate(ys):
    for i, x in enumerate(xs):
      if np.isfinite(grid[j, i]):
        ax.text(i, j, fmt(grid[j, i]), ha="center", va="center", fontsize=8,
                color="white" if grid[j, i] < middle else "black")
      if collapsed.get((x, y)):
        ax.add_patch(plots.plt.Rectangle((i - 0.48, j - 0.48), 0.96, 0.96,
                                         fill=False, edgecolor="#D55E00",
                                         linewidth=1.6))
  ax.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
  ax.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
