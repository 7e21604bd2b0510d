"""How far a learning rate bears staleness: lag x rate, uncorrected and TIS.

Command:  python -m experiments.run_sweep --config=configs/sweeps/lag_rate.py \
            --workdir=runs/lag_rate
Hardware: two CPU cores; `--dry_run` says for how long.

5 lags x 4 rates x 2 methods x 2 seeds.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  for preset in ("pg", "tis"):
    for lag in (0, 2, 8, 16, 32):
      for rate in (1e-4, 3e-4, 1e-3, 3e-3):
        add({"rollout.lag": lag, "optimizer.learning_rate": rate,
             "objective.preset": preset}, seeds=range(2))
