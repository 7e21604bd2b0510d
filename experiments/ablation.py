"""What staleness does to policy-gradient training, and what corrections buy.

  python -m experiments.ablation --workdir=runs/ablation

Five arms on two-digit addition, all from one warm start: on-policy, and four
that train on data 8 optimizer updates old: without correction, and with token
TIS, PPO clipped against the sampler, and GSPO. Prints a table and two claims
(PASS or FAIL; exit code 1 on FAIL, 143 or 130 if stopped) and draws
`ablation.svg` and `.png`. Each arm resumes where it stands; a finished one is
not run again.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from configs import addition
from experiments import command
from rl_is import overrides, plots, tables, train
from rl_is.infra import metrics

LAG = 8
LAST = 20  # 'ends' = mean training reward of the last 20 steps


@dataclasses.dataclass(frozen=True)
class Arm:
  title: str
  lag: int
  preset: str
  constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
  # The metric that says how many tokens its clip or cap acted on.
  acted: str | None = None


ARMS = {
    "on_policy": Arm("on-policy", 0, "pg"),
    "uncorrected": Arm("uncorrected", LAG, "pg"),
    "tis": Arm("token TIS", LAG, "tis", dict(cap=2.0), "tis/changed_frac"),
    "ppo": Arm("PPO dual clip", LAG, "ppo_dual",
               dict(eps_low=0.2, eps_high=0.28, clip_c=3.0), "clip/frac"),
    # Bounds for answers of 3 or 4 tokens; the paper's 3e-4 is for thousands.
    "gspo": Arm("GSPO", LAG, "gspo", dict(eps_low=0.02, eps_high=0.03),
                "clip/frac"),
}
COLORS = dict(zip((arm.title for arm in ARMS.values()), plots.COLORS))


def config_of(arm: Arm, seed: int, workdir: str, steps: int, tiny: bool):
  """The config of one arm; everything that is not named here is shared."""
  config = addition.get_config(f"lag={arm.lag}" + (",tiny" if tiny else ""))
  changes = {"seed": seed, "objective.preset": arm.preset,
             "warm_start.path": os.path.join(workdir, f"warm_start/seed{seed}")}
  changes |= {f"objective.constants.{k}": v for k, v in arm.constants.items()}
  if not tiny:
    changes["train.steps"] = steps
  for path, value in changes.items():
    overrides.apply(config, path, value)
  return config


def run_arms(workdir: str, seeds: int, steps: int, tiny: bool
             ) -> dict[tuple[str, int], list[dict]]:
  """Trains what is missing; (arm, seed) -> its rows of metrics."""
  rows, jobs = {}, [(name, seed) for seed in range(seeds) for name in ARMS]
  began = time.monotonic()
  for done, (name, seed) in enumerate(jobs):
    directory = os.path.join(workdir, "arms", name, f"seed{seed}")
    train.run(config_of(ARMS[name], seed, workdir, steps, tiny), directory,
              label=f"{done + 1}/{len(jobs)} {ARMS[name].title}, seed {seed}")
    rows[name, seed] = metrics.read(directory)
    left = (time.monotonic() - began) / (done + 1) * (len(jobs) - done - 1)
    print(f"{done + 1} of {len(jobs)} runs done, about {left:.0f} s left",
          file=sys.stderr)
  return rows


def _column(rows: Sequence[dict], name: str | None) -> np.ndarray:
  return np.array([np.nan if row.get(name) is None else row[name]
                   for row in rows], float)


def summarize(rows: Mapping[tuple[str, int], list[dict]]) -> list[dict]:
  """One row a run: how it ended and what the ratios looked like on the way."""
  mean = lambda x: float(np.nanmean(x)) if np.isfinite(x).any() else float("nan")
  out = []
  for (name, seed), run in rows.items():
    arm, reward = ARMS[name], _column(run, "reward/mean")
    out.append(dict(
        arm=name, seed=seed, lag=arm.lag, preset=arm.preset, steps=len(run),
        reward_end=mean(reward[-LAST:]),
        reward_lowest=float(np.nanmin(
            plots.moving_mean(reward, LAST)[min(LAST, len(run)) - 1:])),
        heldout_accuracy=_column(run, "eval/accuracy")[-1],
        heldout_pass_at_4=_column(run, "eval/pass@4")[-1] if (
            "eval/pass@4" in run[-1]) else float("nan"),
        ess_mean=mean(_column(run, "is/ess")),
        kl_mean=mean(_column(run, "is/kl_k1")),
        acted_frac_mean=mean(_column(run, arm.acted)),
        seconds=float(np.nansum(_column(run, "time/generator_s"))
                      + np.nansum(_column(run, "time/learner_s")))))
  return out


def end_of(summary: Sequence[dict], arm: str) -> float:
  """Mean over seeds of how an arm ended."""
  return float(np.mean([r["reward_end"] for r in summary if r["arm"] == arm]))


def claims(summary: Sequence[dict]) -> list[tuple[bool, str]]:
  """(holds, sentence with the numbers) for each of the two claims."""
  on = end_of(summary, "on_policy")
  uncorrected = end_of(summary, "uncorrected")
  corrected = {name: end_of(summary, name) for name in ("tis", "ppo", "gspo")}
  best = max(corrected, key=corrected.get)
  return [
      (uncorrected < 0.5 * on,
       f"uncorrected at lag {LAG} ends below half of on-policy: "
       f"{uncorrected:.3f} < 0.5 x {on:.3f} = {0.5 * on:.3f}"),
      (corrected[best] >= 0.8 * on,
       f"the best correction ({ARMS[best].title}) ends at 0.8 of on-policy or "
       f"more: {corrected[best]:.3f} >= 0.8 x {on:.3f} = {0.8 * on:.3f}"),
  ]


def print_table(summary: Sequence[dict]) -> None:
  table = Table(title=f"ends = mean reward of the last {LAST} steps")
  shown = dict(arm="arm", seed="seed", lag="lag", reward_end="ends",
               reward_lowest="lowest", heldout_accuracy="held-out",
               ess_mean="ESS", kl_mean="KL (nats)", acted_frac_mean="clipped",
               seconds="seconds")
  for name in shown.values():
    table.add_column(name, justify="left" if name == "arm" else "right")
  for row in summary:
    cells = [row[key] for key in shown]
    table.add_row(*("-" if isinstance(c, float) and np.isnan(c) else
                    f"{c:.3f}" if isinstance(c, float) else str(c)
                    for c in cells))
  Console(width=100).print(table)


def draw(rows: Mapping[tuple[str, int], list[dict]], summary: Sequence[dict],
         stem: str, made_by: str) -> list[str]:
  """Reward large on the left; ESS, KL, clip fraction small on the right."""
  def curves(metric_of, window=LAST, arms=tuple(ARMS)):
    aligned = dict(zip(rows, plots.align(
        [[row["step"] for row in run] for run in rows.values()],
        [plots.moving_mean(_column(run, metric_of(ARMS[name])), window)
         for (name, _), run in rows.items()])[1]))
    return {ARMS[a].title: [curve for (name, _), curve in aligned.items()
                            if name == a] for a in arms}

  every = np.unique([row["step"] for run in rows.values() for row in run])
  steps = int(every[-1])
  seeds = len({seed for _, seed in rows})
  with plots.style():
    figure, axes = plots.plt.subplot_mosaic(
        [["reward", "ess"], ["reward", "kl"], ["reward", "clip"]],
        figsize=(10, 5.4), width_ratios=[1.9, 1], sharex=True,
        layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.06)

    reward = curves(lambda arm: "reward/mean")
    raw = {name: plots.band(c)[0] for name, c in curves(
        lambda arm: "reward/mean", window=1).items()}
    ax = axes["reward"]
    plots.lines(ax, every, reward, COLORS, faint={
        name: raw[name] for name in ("on-policy", "uncorrected")})
    ends = {name: plots.band(c)[0][-1] for name, c in reward.items()}
    low, high = ax.get_ylim()
    plots.label_ends(ax, ends, COLORS, steps, 0.045 * (high - low))
    ratio = end_of(summary, "uncorrected") / max(end_of(summary, "on_policy"),
                                                 1e-9)
    best = max(end_of(summary, a) for a in ("tis", "ppo", "gspo")) / max(
        end_of(summary, "on_policy"), 1e-9)
    figure.suptitle(
        f"Data {LAG} updates old: uncorrected ends at {ratio:.0%} of on-policy, "
        f"the best correction at {best:.0%} ({seeds} seed{'s' * (seeds > 1)})",
        fontweight="bold", fontsize=11,
        x=0.01, ha="left")
    ax.set_ylabel(f"training reward (mean of {LAST} steps; faint: each step of two)")
    ax.set_xlabel("step (one optimizer update)")
    ax.set_xlim(0, steps)

    stale = tuple(a for a in ARMS if ARMS[a].lag)
    plots.lines(axes["ess"], every, curves(lambda arm: "is/ess", arms=stale),
                COLORS)
    axes["ess"].set_title("ESS / n of the raw token weights")
    axes["ess"].set_ylim(0, 1.05)
    plots.lines(axes["kl"], every, curves(lambda arm: "is/kl_k1", arms=stale),
                COLORS)
    axes["kl"].set_title("KL(sampler || learner), nats a token")
    axes["kl"].set_yscale("log")
    axes["kl"].set_ylim(bottom=3e-3)  # the first steps are not stale yet
    acted = tuple(a for a in ARMS if ARMS[a].acted)
    plots.lines(axes["clip"], every, curves(lambda arm: arm.acted, arms=acted),
                COLORS)
    axes["clip"].set_title("share of tokens clipped (TIS: capped)")
    axes["clip"].set_yscale("log")
    axes["clip"].set_xlabel("step")
    return plots.save(figure, stem, made_by)


def main():
  # Defined here, not on import: other scripts have flags of the same names.
  flags.DEFINE_string("workdir", "runs/ablation", "Where it all goes.")
  flags.DEFINE_integer("seeds", 1, "Seeds an arm: 0, 1, ...", lower_bound=1)
  flags.DEFINE_integer("steps", 300, "Steps an arm.", lower_bound=1)
  flags.DEFINE_bool(
      "tiny", False, "A few steps of a tiny model: tests the machinery; it "
      "learns nothing, so the claims are expected to FAIL.")
  app.run(_main)


def _main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  logging.set_verbosity(logging.WARNING)
  given = flags.FLAGS
  workdir = given.workdir
  with command.runs():
    rows = run_arms(workdir, given.seeds, given.steps, given.tiny)
  summary = summarize(rows)
  tables.write_csv(summary, os.path.join(workdir, "results.csv"))
  figure = draw(rows, summary, os.path.join(workdir, "ablation"),
                "python -m experiments.ablation " + " ".join(sys.argv[1:]))
  print_table(summary)
  command.judge(claims(summary), figure)


if __name__ == "__main__":
  main()
