"""Pictures of any sweep: its ends against its constants, and its curves. Floor 5.

`summary` and `results` are the rows of run_sweep's tables, as lists of dicts.
"""

import csv
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from experiments import stats
from rl_is import plots

Rows = Sequence[Mapping]
_LAG = "rollout.lag"


def read_csv(path: str) -> list[dict]:
  """Numbers as numbers, nothing as None, other text and names of points as text."""
  with open(path, newline="") as file:
    return [{k: x if k == "point" else _value(x) for k, x in row.items()}
            for row in csv.DictReader(file)]


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


# ---- What was varied, and where it goes in a picture.


class Layout(NamedTuple):
  """Which key is which direction; None: nothing was varied that could be."""

  panel: str | None  # the lag, beside another number
  x: str | None
  y: str | None  # a second number: then ends are a heat map
  names: tuple[str, ...]  # all else: presets, levels, further numbers

  def name(self, row: Mapping) -> str:
    words = [_word(row.get(k)) if isinstance(row.get(k), str) else
             f"{_short(k)}={_word(row.get(k))}" for k in self.names
             if row.get(k) is not None]
    return ", ".join(words) or "all"


def layout(summary: Rows, keys: Sequence[str]) -> Layout:
  """Of the overrides that differ; one that follows another is left out."""
  column = lambda k: [row.get(k) for row in summary]
  numbers, others, seen = [], [], []
  for key in keys:
    values = column(key)
    if len(set(values)) < 2 or any(_follow(values, other) for other in seen):
      continue
    seen.append(values)
    given = [v for v in values if v is not None]
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool)
                  for v in given)
    (numbers if numeric and len(set(given)) > 1 else others).append(key)
  panel = _LAG if _LAG in numbers and len(numbers) > 1 else None
  numbers = [k for k in numbers if k != panel]
  # The finest axis lies along x; of equal ones the first in the file.
  numbers.sort(key=lambda k: -len({v for v in column(k) if v is not None}))
  x, y, *more = [*numbers, None, None]
  # Of two methods each with a constant of its own, none has a place in a plane.
  if y and not any(None not in (row.get(x), row.get(y)) for row in summary):
    y, more = None, [y, *more]
  return Layout(panel, x, y, (*others, *(k for k in more if k)))


def _follow(a: Sequence, b: Sequence) -> bool:
  """Whether a and b are one choice: each value of a stands with one of b."""
  pairs = set(zip(a, b))
  return len(pairs) == len(set(a)) == len(set(b))


def _short(key: str) -> str:
  return key.rpartition(".")[2]


def _word(value) -> str:
  return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _ends(rows: Rows) -> stats.Estimate:
  return stats.mean([row["final"] for row in rows])


def _broke(row: Mapping) -> bool:
  return row["collapse_step"] is not None or row["failed"] is not None


def finding(summary: Rows, where: Layout) -> str:
  """The best and the worst point, and how many fell, in a sentence."""
  points = list(by(summary, "point").values())
  points = sorted((p for p in points if math.isfinite(_ends(p).value)),
                  key=lambda p: _ends(p).value)
  if not points:
    return "no point has an end"
  def told(rows):
    words = [f"{_short(k)}={_word(rows[0].get(k))}" for k in where[:3] if k
             and rows[0].get(k) is not None]
    name = where.name(rows[0])
    return " ".join([*([name] if name != "all" else []), *words]) or "it"
  best, worst = points[-1], points[0]
  end = _ends(best)
  fell = sum(map(_broke, summary))
  if len(points) > 1 and end.value == _ends(worst).value:
    text = f"All {len(points)} points end at {end.value:.3f}"
  else:
    band = "" if end.low is None else f" [{end.low:.3f}, {end.high:.3f}]"
    text = f"Best: {told(best)} ends at {end.value:.3f}{band}, n = {end.n}"
    if worst is not best:
      text += f"; worst: {told(worst)} at {_ends(worst).value:.3f}"
      text += _apart(worst, best)
  return text + (f"; {fell} of {len(summary)} runs collapsed" if fell else "")


def _apart(worst: Rows, best: Rows) -> str:
  """The difference on the seeds that both have, where there are two or more."""
  less = stats.paired(_by_seed(worst), _by_seed(best)).difference
  if less.low is None:
    return ""
  text = (f", on the same seeds {less.value:+.3f} [{less.low:+.3f}, "
          f"{less.high:+.3f}]")
  return text + (", not told apart" if less.high >= 0 else "")


def _by_seed(rows: Rows) -> dict[int, float]:
  return {row["seed"]: row["final"] for row in rows}


def comparable(summary: Rows) -> list[Mapping]:
  """The runs of those seeds that all points have; all runs where there is none.

  A seed is a warm start and a stream of problems: what it adds to a run can be
  more than any constant does.
  """
  seeds = [{row["seed"] for row in rows} for rows in by(summary, "point").values()]
  common = set.intersection(*seeds) or set.union(*seeds)
  return [row for row in summary if row["seed"] in common]


# ---- The two pictures.


def draw(workdir: str, summary: Rows, results: Rows, keys: Sequence[str],
         made_by: str) -> list[str]:
  """outcomes.svg, curves.svg and their PNGs; nothing where no run has an end.

  Of the seeds that all points have, if there are: others are told and left out.
  """
  summary = [row for row in summary if row["final"] is not None]
  if not summary:
    return []
  kept = comparable(summary)
  seeds = {row["seed"] for row in kept}
  if len(kept) < len(summary):
    logging.warning(
        "the pictures show the seeds that all points have (%s): %d of %d runs",
        ", ".join(f"{s:g}" for s in sorted(seeds)), len(kept), len(summary))
  summary, results = kept, [row for row in results if row["seed"] in seeds]
  keys, summary, results = _joined(keys, summary, results)
  where = layout(summary, keys)
  title = finding(summary, where)
  summary, apart = _within(summary, "final"), summary
  bands = "95 %" + (", without\nwhat a seed adds to all" if any(
      abs(a["final"] - b["final"]) > 0 for a, b in zip(summary, apart)) else (
          " over seeds"))
  results = [row for (_,), rows in by(results, "step").items()
             for row in _within(rows, "reward/mean")]
  return [
      *outcomes(summary, where, title, bands, os.path.join(workdir, "outcomes"),
                made_by),
      *(curves(results, where, title, os.path.join(workdir, "curves"), made_by)
        if results else ())]


def _joined(keys: Sequence[str], summary: Rows, results: Rows
            ) -> tuple[list[str], list[dict], list[dict]]:
  """Keys that are one number in every run are one key, as `eps_low=eps_high`."""
  columns: dict[tuple, list[str]] = {}
  for key in keys:
    values = tuple(row.get(key) for row in summary)
    varied = len(set(values)) > 1
    columns.setdefault(values if varied else (key,), []).append(key)
  names = {"=".join([same[0], *map(_short, same[1:])]): same[0]
           for same in columns.values()}
  add = lambda rows: [{**row, **{name: row.get(key) for name, key in names.items()}}
                      for row in rows]
  return list(names), add(summary), add(results)


def _within(rows: Rows, key: str) -> list[Mapping]:
  values = stats.within_seeds({(r["point"], r["seed"]): r[key] for r in rows})
  return [{**r, key: values[r["point"], r["seed"]]} for r in rows]


def outcomes(summary: Rows, where: Layout, title: str, bands: str, stem: str,
             made_by: str) -> list[str]:
  """The mean reward of the last steps: lines over one constant, or heat maps."""
  if where.y:
    return _heat_maps(summary, where, title, stem, made_by)
  panels = _panels(summary, where)
  names = list(dict.fromkeys(where.name(r) for r in summary))
  colors = _colors(names)
  with plots.style():
    figure, axes = _grid(len(panels), 5, 2.6, 2.7, sharey=True)
    for ax, (panel, rows) in zip(axes.flat, panels.items()):
      ax.set_title(panel)
      if where.x:
        _over(ax, rows, where, colors)
      else:
        _dots(ax, rows, where, colors)
    axes[0, 0].set_ylabel(f"reward, mean of the last {stats.WINDOW} steps\n"
                          f"(bands {bands}; n: {_seeds(summary)})")
    if where.x and len(names) > 1:
      handles, labels = axes[0, 0].get_legend_handles_labels()
      figure.legend(handles, labels, loc="outside right center")
    _title(figure, title)
    return plots.save(figure, stem, made_by)


def _over(ax, rows: Rows, where: Layout, colors: Mapping[str, str]) -> None:
  series = {}
  for name, own in _named(rows, where).items():
    points = {x: _ends(r) for (x,), r in by(own, where.x).items()}
    none = points.pop(None, None)
    if none is not None:  # it has no such constant
      ax.axhline(none.value, color=colors[name], linestyle=":",
                 label=None if points else name)
    if points:
      series[name] = points
  finite = [x for points in series.values() for x in points if math.isfinite(x)]
  if finite:
    against(ax, series, colors, log=min(finite) > 0 and max(finite) > 4 * min(finite))
  ax.set_xlabel(_short(where.x))


def _dots(ax, rows: Rows, where: Layout, colors: Mapping[str, str]) -> None:
  for i, (name, own) in enumerate(_named(rows, where).items()):
    end = _ends(own)
    ax.plot([i] * len(own), [r["final"] for r in own], ".", color=colors[name],
            alpha=0.4)
    ax.plot(i, end.value, "o", color=colors[name])
    if end.low is not None:
      ax.vlines(i, end.low, end.high, color=colors[name])
  names = list(_named(rows, where))
  ax.set_xticks(range(len(names)), names, rotation=30, ha="right")


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
            markersize=3.5, label=name)
    low, high = ([getattr(points[x], side) for x in xs] for side in (
        "low", "high"))
    if None not in low:
      ax.fill_between(at, low, high, color=colors[name], alpha=0.15, linewidth=0)
  if log:
    ax.set_xscale("log")
  ticks = finite + ([last] if any(not math.isfinite(x) for points in
                                  series.values() for x in points) else [])
  ax.set_xticks(ticks, [f"{x:g}" for x in finite] + ["inf"] * (
      len(ticks) - len(finite)), rotation=45 if len(ticks) > 6 else 0)
  ax.minorticks_off()


def _heat_maps(summary: Rows, where: Layout, title: str, stem: str, made_by: str
               ) -> list[str]:
  """A cell a point; around those where half of the seeds collapsed, a line."""
  panels = {(panel, name): own for panel, rows in _panels(summary, where).items()
            for name, own in _named(rows, where).items()
            if any(r.get(where.x) is not None and r.get(where.y) is not None
                   for r in own)}
  value = lambda rows: _ends(rows).value
  every = [value(r) for r in by(summary, "point").values()]
  low, high = min(every), max(every)
  wide, high_ = (len({r[k] for r in summary if r.get(k) is not None})
                 for k in (where.x, where.y))
  with plots.style():
    figure, axes = _grid(len(panels), 4, 1 + 0.4 * max(wide, 5),
                         0.8 + 0.3 * max(high_, 5))
    for ax, ((panel, name), rows) in zip(axes.flat, panels.items()):
      ax.set_title(", ".join(t for t in (panel, name if name != "all" else "") if t))
      xs, ys = (sorted({r[k] for r in rows if r[k] is not None})
                for k in (where.x, where.y))
      cells, fell = (np.full((len(ys), len(xs)), np.nan) for _ in range(2))
      for (x, y), own in by(rows, where.x, where.y).items():
        if x is not None and y is not None:
          at = ys.index(y), xs.index(x)
          cells[at], fell[at] = value(own), np.mean([_broke(r) for r in own])
      shown = ax.imshow(cells, origin="lower", aspect="auto", cmap="cividis",
                        vmin=low, vmax=high)
      for (i, j), v in np.ndenumerate(cells):
        if np.isfinite(v):
          bright = v > low + 0.6 * (high - low)
          ax.text(j, i, f"{v:.2f}".replace("0.", ".", 1), ha="center",
                  va="center", fontsize=7, color="black" if bright else "white")
      _outline(ax, fell >= 0.5)
      ax.set_xticks(range(len(xs)), [_word(x) for x in xs])
      ax.set_yticks(range(len(ys)), [_word(y) for y in ys])
      ax.grid(False)
      ax.set_xlabel(_short(where.x))
      ax.set_ylabel(_short(where.y))
    bar = figure.colorbar(shown, ax=list(axes.flat))
    bar.set_label(f"reward, last {stats.WINDOW} steps (n: {_seeds(summary)} a cell);"
                  "\nred: half of the seeds or more collapsed", fontsize=7.5)
    _title(figure, title)
    return plots.save(figure, stem, made_by)


def _outline(ax, inside: np.ndarray) -> None:
  """The border between cells that are inside and those that are not."""
  padded = np.pad(inside, 1)
  style = dict(colors=plots.COLORS[1], linewidth=2.5, clip_on=False)
  for i, j in np.argwhere(padded[1:] != padded[:-1]):  # below row i
    ax.hlines(i - 0.5, j - 1.5, j - 0.5, **style)
  for i, j in np.argwhere(padded[:, 1:] != padded[:, :-1]):  # left of column j
    ax.vlines(j - 0.5, i - 1.5, i - 0.5, **style)


def curves(results: Rows, where: Layout, title: str, stem: str, made_by: str
           ) -> list[str]:
  """Reward by step: a column a panel, a row a name, a shade a value of x.

  Seeds are one line with a band of one standard error, without what a seed adds to
  all; what has no x is drawn in every row, dotted, to compare with.
  """
  if not where.panel:  # a heat map's second number
    where = where._replace(panel=where.y)
  elif where.y:
    where = where._replace(names=(*where.names, where.y))
  panels = _panels(results, where)
  has_x = lambda row: where.x is None or row.get(where.x) is not None
  names = list(dict.fromkeys(where.name(r) for r in results if has_x(r)))
  values = sorted({r[where.x] for r in results if r.get(where.x) is not None}
                  ) if where.x else []
  shades = dict(zip(values, plots.plt.get_cmap("viridis")(
      np.linspace(0, 0.9, len(values)))))
  lines = names if where.x else [None]  # else names are the lines themselves
  cells = [(panel, rows, name) for name in lines for panel, rows in panels.items()]
  colors = _colors(names)
  with plots.style():
    figure, axes = _grid(len(cells), min(len(panels), 5), 2.5, 2.3, sharex=True,
                         sharey=True)
    for ax, (panel, rows, name) in zip(axes.flat, cells):
      ax.set_title(", ".join(t for t in (
          panel, name if len(lines) > 1 else "") if t))
      for label, own in _named(rows, where).items():
        for (x,), one in by(own, where.x or "").items():
          if not where.x:
            _curve(ax, one, colors[label], "-", label)
          elif x is None:
            _curve(ax, one, "#000000", ":", label)
          elif label == name:
            _curve(ax, one, shades[x], "-", f"{_short(where.x)}={_word(x)}")
      ax.set_xlabel("step")
    axes[0, 0].set_ylabel(f"reward, mean of {stats.WINDOW}")
    handles = {h.get_label(): h for ax in axes.flat
               for h in ax.get_legend_handles_labels()[0]}
    order = [f"{_short(where.x)}={_word(x)}" for x in values] if where.x else names
    order += [label for label in handles if label not in order]
    figure.legend([handles[label] for label in order], order,
                  loc="outside right center", fontsize=7.5)
    _title(figure, title)
    return plots.save(figure, stem, made_by)


def _grid(n: int, columns: int, width: float, height: float, **shared):
  """n panels, at most so many in a line; the rest of the last line is empty."""
  columns = min(n, columns)
  lines = -(-n // columns)
  figure, axes = plots.plt.subplots(
      lines, columns, figsize=(width * columns + 2, height * lines + 0.8),
      layout="constrained", squeeze=False, **shared)
  for ax in axes.flat[n:]:
    ax.set_axis_off()
  return figure, axes


def _curve(ax, rows: Rows, color, style: str, label: str) -> None:
  per_seed = [sorted(own, key=lambda r: r["step"])
              for own in by(rows, "point", "seed").values()]
  steps, aligned = plots.align(
      [[r["step"] for r in one] for one in per_seed],
      [plots.moving_mean([r["reward/mean"] for r in one], stats.WINDOW)
       for one in per_seed])
  mean, error = plots.band(aligned)
  ax.plot(steps, mean, color=color, linestyle=style, linewidth=1.2, label=label)
  if error is not None:
    ax.fill_between(steps, mean - error, mean + error, color=color, alpha=0.15,
                    linewidth=0)


def _panels(rows: Rows, where: Layout) -> dict[str, list[Mapping]]:
  """Title -> rows, in the order of the panel's number."""
  if not where.panel:
    return {"": list(rows)}
  found = by([r for r in rows if r.get(where.panel) is not None], where.panel)
  return {f"{_short(where.panel)} {_word(v)}": own
          for (v,), own in sorted(found.items(), key=lambda item: item[0])}


def _named(rows: Rows, where: Layout) -> dict[str, list[Mapping]]:
  out: dict[str, list[Mapping]] = {}
  for row in rows:
    out.setdefault(where.name(row), []).append(row)
  return out


def _colors(names: Sequence[str]) -> dict[str, str]:
  return {n: plots.COLORS[(i + 1) % len(plots.COLORS)] for i, n in enumerate(names)}


def _seeds(summary: Rows) -> str:
  n = {len(rows) for rows in by(summary, "point").values()}
  return f"{min(n)}" if len(n) == 1 else f"{min(n)} to {max(n)}"


def _title(figure, text: str) -> None:
  """In as many lines as the width asks for."""
  text = textwrap.fill(text, int(12 * figure.get_figwidth()))
  figure.suptitle(text, fontweight="bold", fontsize=10, x=0.01, ha="left")
