"""Made-up words of 3 to 6 letters, to be spelled backward.

Command:  python -m rl_is.main --config=configs/spell_backward.py:lag=8 \
            --config.objective.preset=tis --workdir=runs/spell
Hardware: two CPU cores, a few minutes.
Expect:   a reward that rises from the warm start's 0.4.

Argument: lag=8 (optimizer updates that every batch is old).
"""

from configs import common


def get_config(arg=None):
  arg = common.parse_arg(arg, lag=0)
  config = common.base()
  config.task = dict(name="spell_backward",
                     kwargs=dict(num_words=4096, min_len=3, max_len=6))
  config.rollout.lag = arg.lag
  return config.lock()
