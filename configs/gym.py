"""Any data set of the reasoning-gym library (extra `tasks`), by name.

Command:  python -m rl_is.main --config=configs/gym.py:dataset=basic_arithmetic \
            --workdir=runs/gym
Hardware: depends on the data set: prompts are bytes, so a hundred tokens each.
Expect:   that it runs; a model this small learns few of them.

Argument: dataset=..., size=... (entries made), lag=8.
"""

from configs import common


def get_config(arg=None):
  arg = common.parse_arg(arg, dataset="basic_arithmetic", size=2000, lag=0)
  config = common.base()
  config.task = dict(name=f"gym:{arg.dataset}",
                     kwargs=dict(size=arg.size, seed=0))
  config.rollout.lag = arg.lag
  return config.lock()
