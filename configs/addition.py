"""Two-digit addition, least significant digit first; the toy of the ablation.

Command:  python -m rl_is.main --config=configs/addition.py:lag=8 \
            --config.objective.preset=gspo \
            --config.objective.constants.eps_low=0.02 \
            --config.objective.constants.eps_high=0.03 --workdir=runs/gspo
Hardware: two CPU cores, under a minute with compilation.
Expect:   reward of 0.6 to 0.9, by seed (0.9 with seed 0), after 300 steps
          on-policy (lag=0, preset=pg).

Argument: lag=8 (optimizer updates that every batch is old), tiny (a few steps,
for a test that the machinery runs; learns nothing).
"""

from configs import common


def get_config(arg=None):
  arg = common.parse_arg(arg, lag=0, tiny=False)
  config = common.base()
  config.task = dict(name="addition", kwargs=dict(digits=2))
  config.rollout.lag = arg.lag
  if arg.tiny:
    config.model.update(dict(embed=16, layers=1, heads=2, kv_heads=2,
                             head_dim=8, mlp=16))
    config.rollout.update(dict(batch_size=16, group_size=4))
    config.train.steps = 6
    config.warm_start.update(dict(steps=4, batch=16))
    config.evaluate.update(dict(prompts=8, samples=2))
    config.checkpoint.every = 2
    config.task.kwargs.digits = 1
  return config.lock()
