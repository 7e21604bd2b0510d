"""Figures: one look for all of them, SVG and PNG beside each other. Floor 4."""

import os
from collections.abc import Mapping, Sequence

import matplotlib

if "MPLBACKEND" not in os.environ:  # as a notebook sets it, or the user
  matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

# Okabe and Ito's colours: told apart by colour-blind readers, and in print.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00",
          "#56B4E9")

_STYLE = {
    "figure.dpi": 150, "font.size": 9, "axes.titlesize": 9.5,
    "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "grid.linewidth": 0.6, "lines.linewidth": 1.6, "legend.frameon": False,
    "svg.fonttype": "none",
}


def moving_mean(y: Sequence[float], window: int) -> np.ndarray:
  """Mean of the last `window` values up to each; fewer at the start.

  Missing values (None, NaN) are left out; where all are, NaN.
  """
  y = np.array([np.nan if v is None else v for v in y], float)
  out = np.full(len(y), np.nan)
  for i in range(len(y)):
    seen = y[max(0, i + 1 - window):i + 1]
    seen = seen[~np.isnan(seen)]
    if len(seen):
      out[i] = seen.mean()
  return out


def align(steps: Sequence[Sequence[int]], curves: Sequence[Sequence[float]]
          ) -> tuple[np.ndarray, list[np.ndarray]]:
  """All steps that some seed has, and each seed's values there, else NaN.

  By the step and never by the place in the log: seeds may be of different
  length, or logged at different steps.
  """
  every = np.unique(np.concatenate([np.asarray(s, int) for s in steps]))
  out = []
  for at, y in zip(steps, curves, strict=True):
    row = np.full(len(every), np.nan)
    row[np.searchsorted(every, at)] = [np.nan if v is None else v for v in y]
    out.append(row)
  return every, out


def counts(curves: Sequence[np.ndarray]) -> np.ndarray:
  """How many seeds have a value at each step."""
  return (~np.isnan(np.stack(curves))).sum(axis=0)


def band(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
  """Mean over the seeds that have a value there, and the standard error.

  The error is NaN where only one seed has a value and None where that is so
  everywhere: no band, not one of width 0.
  """
  stacked, n = np.stack(curves), counts(curves)
  few = np.maximum(n, 1)
  mean = np.where(n > 0, np.nansum(stacked, axis=0) / few, np.nan)
  if (n < 2).all():
    return mean, None
  var = np.nansum((stacked - mean) ** 2, axis=0) / np.maximum(n - 1, 1)
  return mean, np.where(n > 1, np.sqrt(var / few), np.nan)


def lines(ax, steps: np.ndarray, series: Mapping[str, Sequence[np.ndarray]],
          colors: Mapping[str, str],
          faint: Mapping[str, np.ndarray] | None = None) -> None:
  """A line a name, with a band where there are seeds; curves from `align`."""
  for name, curves in series.items():
    mean, error = band(curves)
    if faint and name in faint:
      ax.plot(steps, faint[name], color=colors[name], alpha=0.18, linewidth=0.7)
    ax.plot(steps, mean, color=colors[name])
    if error is not None:
      ax.fill_between(steps, mean - error, mean + error, color=colors[name],
                      alpha=0.2, linewidth=0)


def label_ends(ax, ends: Mapping[str, float], colors: Mapping[str, str],
               x: float, gap: float) -> None:
  """Names at the right end of their lines, moved apart by at least `gap`."""
  y = -np.inf
  for name, end in sorted(ends.items(), key=lambda item: item[1]):
    y = max(end, y + gap)
    ax.annotate(name, (x, end), (x * 1.035, y), color=colors[name], va="center",
                fontsize=8.5, annotation_clip=False, arrowprops=dict(
                    arrowstyle="-", color=colors[name], linewidth=0.6))


def style():
  return plt.rc_context(_STYLE)


def save(figure, stem: str, command: str) -> list[str]:
  """stem.svg and stem.png; the command that made them is in their metadata."""
  paths = [stem + ".svg", stem + ".png"]
  os.makedirs(os.path.dirname(stem) or ".", exist_ok=True)
  figure.savefig(paths[0], bbox_inches="tight",
                 metadata={"Description": command, "Date": None})
  figure.savefig(paths[1], bbox_inches="tight",
                 metadata={"Description": command})
  plt.close(figure)
  return paths
