"""CISPO's cap against the lag.

Command:  python -m experiments.run_sweep --config=configs/sweeps/cispo_cap.py \
            --workdir=runs/cispo_cap
Hardware: two CPU cores; `--dry_run` says for how long.

8 caps x lag {2, 8, 32} x 3 seeds.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  for lag in (2, 8, 32):
    for cap in (1.0, 1.28, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0):
      add({"rollout.lag": lag, "objective.preset": "cispo",
           "objective.constants.cispo_cap": cap}, seeds=range(3))
