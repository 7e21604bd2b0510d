"""PPO's clip at lag 8, the same bound on both sides.

Command:  python -m experiments.run_sweep --config=configs/sweeps/ppo_eps.py \
            --workdir=runs/ppo_eps
Hardware: two CPU cores, 5 minutes.

9 values x 3 seeds; `ppo_eps_plane` has the two sides apart.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  for eps in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1.0):
    add({"rollout.lag": 8, "objective.preset": "ppo",
         "objective.constants.eps_low": eps,
         "objective.constants.eps_high": eps}, seeds=range(3))
