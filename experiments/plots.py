"""Figures: one look for all of them, SVG and PNG beside each other. Floor 5."""

import os
from collections.abc import Mapping, Sequence

import matplotlib

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


def band(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
  """Mean over seeds and the standard error, None for one seed: no band."""
  stacked = np.stack(curves)
  error = None
  if len(curves) > 1:
    error = stacked.std(axis=0, ddof=1) / np.sqrt(len(curves))
  return stacked.mean(axis=0), error


def lines(ax, series: Mapping[str, Sequence[np.ndarray]], colors: Mapping[str, str],
          faint: Mapping[str, np.ndarray] | None = None) -> None:
  """A line a name over steps 1, 2, ..., with a band where there are seeds."""
  for name, curves in series.items():
    mean, error = band(curves)
    steps = np.arange(1, len(mean) + 1)
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
