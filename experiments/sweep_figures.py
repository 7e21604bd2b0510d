"""Pictures of a sweep's summary: outcome against a constant. Floor 5.

`summary` is what `run_sweep` writes to summary.csv, as a list of dicts.
"""

import csv
import math
from collections.abc import Mapping, Sequence

from experiments import stats

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
