"""The cap of token TIS against the lag: which C for how stale?

Command:  python -m experiments.run_sweep --config=configs/sweeps/tis_cap.py \
            --workdir=runs/tis_cap
Hardware: two CPU cores; `--dry_run` says for how long.

lag {0, 2, 8, 32} x {none, TIS with C = 1, 2, 5, infinity} x 4 seeds: 80 runs of
two structures, each one program.
"""

from configs.sweeps import toy

get_config = toy.get_config
SEEDS = range(4)
CAPS = (1.0, 2.0, 5.0, float("inf"))
LAGS = (0, 2, 8, 32)


def sweep(add):
  for lag in LAGS:
    add({"rollout.lag": lag, "objective.preset": "pg"}, seeds=SEEDS)
    for cap in CAPS:
      add({"rollout.lag": lag, "objective.preset": "tis",
           "objective.constants.cap": cap}, seeds=SEEDS)
