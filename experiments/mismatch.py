"""What each mismatch dial does to the ratio, and what it costs to ignore it.

  python -m experiments.mismatch --workdir=runs/mismatch

One warm start on two-digit addition, and three questions. How far does each
dial, at several strengths, set the sampler from the learner (nothing is
learned)? In an asynchronous run with a sampler of int4 weights, which part of
the KL is the engine's and which is staleness? What does the learner learn from
a sampler of coarse weights, without a correction and with TIS? Prints a table
and five claims (PASS or FAIL; exit code 1 on FAIL) and draws `mismatch.svg` and
`.png`. Each run resumes where it stands; a finished one is not run again.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from configs import addition
from experiments import command
from rl_is import overrides, plots, tables, train
from rl_is.infra import metrics

MAX_LAG = 8
WINDOW = 20  # steps that a curve of the training run is the mean of


@dataclasses.dataclass(frozen=True)
class Dial:
  """One kind of mismatch; `settings` from weak to strong."""

  title: str
  settings: Mapping[str, Mapping[str, float | str]]  # label -> config.mismatch


def _bits(weights: str, unit: str, *bits: int) -> dict:
  return {f"{unit}{n}": dict(weights=weights, bits=n) for n in bits}


DIALS = [
    Dial("none", {"none": {}}),
    Dial("weights, cast", {"f16": dict(weights="f16"),
                           "bf16": dict(weights="bf16")}),
    Dial("weights, mantissa bits", _bits("mantissa", "m", 6, 4, 2)),
    Dial("weights, integers", _bits("int", "int", 8, 4, 3)),
    Dial("logit pattern, sd", {f"sd {x}": dict(logit_sd=x)
                               for x in (0.03, 0.1, 0.3)}),
    Dial("rare-token spikes", {
        f"{x:.1%}": dict(spike_rate=x, spike_nats=6.0)
        for x in (0.001, 0.01, 0.1)}),
    Dial("temperature", {f"x {x}": dict(temperature=x)
                         for x in (0.95, 0.9, 0.7)}),
    Dial("top-p", {f"p {x}": dict(top_p=x) for x in (0.99, 0.95, 0.8)}),
]
INT4, INT3 = (dict(weights="int", bits=bits) for bits in (4, 3))
PARTS = {"both": "is/kl_k1", "engine": "engine/kl_k1", "staleness": "stale/kl_k1"}
# Title -> (config.mismatch, preset); all on-policy but for the dial.
ARMS = {"no mismatch": ({}, "pg"), "int4": (INT4, "pg"),
        "int4, TIS": (INT4, "tis"), "int3": (INT3, "pg"),
        "int3, TIS": (INT3, "tis")}
COLORS = dict(zip((*PARTS, *ARMS), (*plots.COLORS[:3], *plots.COLORS)))


def config_of(workdir: str, tiny: bool, dial: Mapping, **changes):
  """What all runs share, the dial, and what the run has of its own."""
  config = addition.get_config("tiny" if tiny else None)
  changes = {
      "warm_start.path": os.path.join(workdir, "warm_start"),
      "rollout.rescore_share": 1.0,
      **{f"mismatch.{k}": v for k, v in dial.items()}, **changes}
  for path, value in changes.items():
    overrides.apply(config, path, value)
  return config


def _directory(workdir: str, part: str, title: str) -> str:
  return os.path.join(workdir, part, re.sub(r"[^\w.]+", "_", title))


def measure(workdir: str, tiny: bool) -> list[dict]:
  """A row a setting: the learner samples nothing new and learns nothing."""
  rows = []
  for dial in DIALS:
    for label, setting in dial.settings.items():
      directory = _directory(workdir, "dials", f"{dial.title} {label}")
      still = {"optimizer.learning_rate": 0.0, "train.steps": 2}
      if not tiny:
        still["rollout.batch_size"] = 1024
      train.run(config_of(workdir, tiny, setting, **still), directory,
                label=f"{dial.title} {label}")
      run = metrics.read(directory)
      mean = lambda name: float(np.mean([row[name] for row in run]))
      rows.append(dict(
          dial=dial.title, setting=label, kl=mean("engine/kl_k3"),
          ess=mean("engine/ess"), sequence_ess=mean("engine/sequence_ess"),
          weight_mean=mean("engine/weight_mean"),
          log_ratio_max=max(row["engine/log_ratio_max"] for row in run),
          reward=mean("reward/mean")))
  return rows


def split(workdir: str, tiny: bool, steps: int) -> list[dict]:
  """The run whose KL is split: a generator of int4 beside the learner."""
  return _train(workdir, "async", tiny, steps, INT4, **{
      "rollout.mode": "async", "rollout.max_lag": MAX_LAG,
      "objective.preset": "ppo_dual"})


def arms(workdir: str, tiny: bool, steps: int) -> dict[str, list[dict]]:
  """The runs whose learners are compared, on held-out prompts."""
  return {title: _train(workdir, title, tiny, steps, dial, **{
      "objective.preset": preset, "rollout.rescore_share": 0.0,
      "evaluate.every": max(1, steps // 10)})
          for title, (dial, preset) in ARMS.items()}


def _train(workdir: str, title: str, tiny: bool, steps: int, dial: Mapping,
           **changes) -> list[dict]:
  if not tiny:
    changes["train.steps"] = steps
  directory = _directory(workdir, "training", title)
  train.run(config_of(workdir, tiny, dial, **changes), directory, label=title)
  return metrics.read(directory)


def claims(rows: Sequence[dict], run: Sequence[dict],
           learners: Mapping[str, Sequence[dict]]) -> list[tuple[bool, str]]:
  """(holds, sentence with the numbers)."""
  ends = {title: learner[-1]["eval/accuracy"]
          for title, learner in learners.items()}
  whole, raw, tis = (ends[k] for k in ("no mismatch", "int3", "int3, TIS"))
  none = next(r["log_ratio_max"] for r in rows if r["dial"] == "none")
  falls = [title for title in {r["dial"]: 0 for r in rows}
           if (np.diff([r["kl"] for r in rows if r["dial"] == title]) <= 0).any()]
  gap = max(abs(row["is/kl_k1"] - row["engine/kl_k1"] - row["stale/kl_k1"])
            for row in run)
  return [
      (none <= 1e-5,
       f"without a dial every ratio is 1: largest |log ratio| {none:.1e} <= 1e-5"),
      (not falls, "each dial's KL grows with its strength" + (
          f", but for {', '.join(falls)}" if falls else "")),
      (gap <= 1e-5, "engine and staleness add up to the whole KL at every step: "
                    f"largest gap {gap:.1e} <= 1e-5 nats"),
      (raw <= whole - 0.1,
       "uncorrected, an int3 sampler costs the learner 0.1 of its accuracy or "
       f"more: {raw:.3f} <= {whole:.3f} - 0.1"),
      (tis - raw >= 2 / 3 * (whole - raw),
       f"TIS gets back two thirds of that or more: {tis - raw:.3f} >= 2/3 x "
       f"{whole - raw:.3f}"),
  ]


def print_table(rows: Sequence[dict]) -> None:
  table = Table(title="the sampler against the learner, same weights")
  shown = {"dial": "dial", "setting": "setting", "kl": "KL, nats a token",
           "log_ratio_max": "max |log ratio|", "weight_mean": "mean w",
           "ess": "ESS", "sequence_ess": "ESS, answers", "reward": "reward"}
  for key, title in shown.items():
    table.add_column(title, justify="left" if key in ("dial", "setting")
                     else "right")
  for row in rows:
    table.add_row(*(f"{row[k]:.1e}" if k in ("kl", "log_ratio_max") else
                    f"{row[k]:.3f}" if isinstance(row[k], float) else row[k]
                    for k in shown))
  Console(width=120).print(table)


def draw(rows: Sequence[dict], run: Sequence[dict],
         learners: Mapping[str, Sequence[dict]], stem: str, made_by: str
         ) -> list[str]:
  """Dials on the left; on the right the KL by its cause, and the learners."""
  with plots.style():
    figure, axes = plots.plt.subplot_mosaic(
        [["kl", "ess", "parts"], ["kl", "ess", "learners"]], figsize=(11, 5.8),
        width_ratios=[1, 0.5, 1.15], layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    _draw_dials(axes["kl"], axes["ess"], [r for r in rows if r["dial"] != "none"])
    steps = np.array([row["step"] for row in run])
    _draw_curves(axes["parts"], steps, {
        part: plots.moving_mean([row[name] for row in run], WINDOW)
        for part, name in PARTS.items()})
    axes["parts"].set_title(f"async, int4 sampler, up to {MAX_LAG} updates old: "
                            "KL by its cause (nats)")
    seen = {title: [r for r in learner if "eval/accuracy" in r]
            for title, learner in learners.items()}
    first = next(iter(seen.values()))
    _draw_curves(axes["learners"], np.array([row["step"] for row in first]), {
        title: np.array([row["eval/accuracy"] for row in learner])
        for title, learner in seen.items()})
    axes["learners"].set_title("the learner's held-out accuracy, by the "
                               "sampler's weights")
    axes["learners"].set_xlabel("step (one optimizer update)")
    figure.suptitle("How far each dial sets the sampler from the learner, and "
                    "what that does to learning", fontweight="bold",
                    fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)


def _draw_dials(kl, ess, rows: Sequence[dict]) -> None:
  titles = list({row["dial"]: 0 for row in rows})
  # A line a setting from the top, a gap between two dials.
  y = [-(i + titles.index(row["dial"])) for i, row in enumerate(rows)]
  colors = [plots.COLORS[1 + titles.index(row["dial"]) % 6] for row in rows]
  for ax, key, title in ((kl, "kl", "KL(sampler || learner), nats a token"),
                         (ess, "sequence_ess", "ESS / n of answers")):
    ax.scatter([row[key] for row in rows], y, color=colors, s=26, zorder=3)
    ax.set_title(title)
    ax.grid(axis="y", visible=False)
    ax.set_yticks(y, [row["setting"] for row in rows])
  ess.tick_params(left=False, labelleft=False)
  kl.set_xscale("log")
  ess.set_xlim(0, 1.05)
  for title in titles:
    first = next(i for i, row in enumerate(rows) if row["dial"] == title)
    kl.annotate(title, (0.01, y[first] + 1), color=colors[first], va="center",
                xycoords=("axes fraction", "data"), fontsize=8)


def _draw_curves(ax, steps: np.ndarray, curves: Mapping[str, np.ndarray]) -> None:
  plots.lines(ax, steps, {name: [curve] for name, curve in curves.items()},
              COLORS)
  low, high = ax.get_ylim()
  ax.set_ylim(low, high + 0.12 * (high - low))  # for names that are moved up
  plots.label_ends(ax, {name: curve[-1] for name, curve in curves.items()},
                   COLORS, steps[-1], 0.09 * (high - low))


def main():
  # Defined here, not on import: other scripts have flags of the same names.
  flags.DEFINE_string("workdir", "runs/mismatch", "Where it all goes.")
  flags.DEFINE_integer("steps", 300, "Of a training run.", lower_bound=1)
  flags.DEFINE_bool(
      "tiny", False, "A few steps of a tiny model: tests the machinery; the "
      "claims about strength and learning may FAIL.")
  app.run(_main)


def _main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  logging.set_verbosity(logging.WARNING)
  given = flags.FLAGS
  with command.runs():
    rows = measure(given.workdir, given.tiny)
    run = split(given.workdir, given.tiny, given.steps)
    learners = arms(given.workdir, given.tiny, given.steps)
  tables.write_csv(rows, os.path.join(given.workdir, "results.csv"))
  figure = draw(rows, run, learners, os.path.join(given.workdir, "mismatch"),
                "python -m experiments.mismatch " + " ".join(sys.argv[1:]))
  print_table(rows)
  command.judge(claims(rows, run, learners), figure)


if __name__ == "__main__":
  main()
