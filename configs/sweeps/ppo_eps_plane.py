"""PPO's clip at lag 8, a bound for each side.

Command:  python -m experiments.run_sweep --config=configs/sweeps/ppo_eps_plane.py \
            --workdir=runs/ppo_eps_plane
Hardware: two CPU cores, 12 minutes.

A plane of 5 x 5, 3 seeds each.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  for low in (0.05, 0.1, 0.2, 0.4, 0.8):
    for high in (0.05, 0.1, 0.2, 0.4, 0.8):
      add({"rollout.lag": 8, "objective.preset": "ppo",
           "objective.constants.eps_low": low,
           "objective.constants.eps_high": high}, seeds=range(3))
