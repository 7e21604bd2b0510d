"""GSPO's bounds at lag 8, on the mean and on the sum of the log ratio.

Command:  python -m experiments.run_sweep --config=configs/sweeps/gspo_bounds.py \
            --workdir=runs/gspo_bounds
Hardware: two CPU cores; `--dry_run` says for how long.

The window of a mean over T tokens is T times as wide on their sum: answers here
have 3 or 4, so the same bounds clip more often on the sum. 7 bounds x 2 levels x
3 seeds.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  for level in ("sequence_mean", "sequence_sum"):
    for eps in (0.003, 0.01, 0.02, 0.05, 0.1, 0.3, 0.9):
      add({"rollout.lag": 8, "objective.preset": "gspo", "objective.level": level,
           "objective.constants.eps_low": eps,
           "objective.constants.eps_high": eps}, seeds=range(3))
