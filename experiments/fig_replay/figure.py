"""A real lag-8 run's rollouts under other objectives. Floor 5."""

import math
import subprocess
import sys

from rl_is import replay

KIND = "training"
NAMES = ("none", "token_tis", "sequence_tis", "ppo", "gspo", "seq_mis")
SWEEP = dict(cap=[1.0, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf])
NEWEST = 16  # batches


def run(workdir: str, tiny: bool) -> dict[str, list[dict]]:
  """Trains with PPO on data 8 updates old, and replays its newest rollouts."""
  subprocess.run(
      [sys.executable, "-m", "rl_is.main",
       "--config=configs/addition.py:lag=8" + ",tiny" * tiny,
       "--config.objective.preset=ppo", f"--config.train.steps={9 if tiny else 80}",
       "--config.store.every=1", f"--workdir={workdir}/run"], check=True)
  data = replay.load(f"{workdir}/run", f"{workdir}/run", newest=NEWEST)
  return dict(data=replay.table(data, NAMES, sweep=SWEEP),
              apart=[replay.apart(data)])


def draw(tables, stem, made_by):
  far, = tables["apart"]
  return replay.draw(
      tables["data"], SWEEP, f"{far['answers']:.0f} stored answers, "
      f"{far['lag_mean']:.0f} updates old: no weight points elsewhere, any cap from 2 "
      "on along the unbiased gradient, and GSPO's published bounds drop most tokens",
      stem, made_by)
