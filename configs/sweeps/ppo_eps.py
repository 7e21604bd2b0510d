"""PPO's clip at lag 8: one bound for both sides, and the two apart.

Command:  python -m experiments.run_sweep --config=configs/sweeps/ppo_eps.py \
            --workdir=runs/ppo_eps
Hardware: two CPU cores; `--dry_run` says for how long.

9 symmetric values x 3 seeds, and the plane of 5 x 5, one seed each.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  base = {"rollout.lag": 8, "objective.preset": "ppo"}
  for eps in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 4.0):
    add(base | {"objective.constants.eps_low": min(eps, 1.0),
                "objective.constants.eps_high": eps}, seeds=range(3))
  for low in (0.05, 0.1, 0.2, 0.4, 0.8):
    for high in (0.05, 0.1, 0.2, 0.4, 0.8):
      add(base | {"objective.constants.eps_low": low,
                  "objective.constants.eps_high": high})
