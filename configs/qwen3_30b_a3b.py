"""Qwen3 30B-A3B on a "v5p-128", 64 chips: a mixture of experts, as qwen3_8b.

Command:  python -m rl_is.main --config=configs/qwen3_30b_a3b.py:weights=MODELS/qwen3-30b-a3b \
            --workdir=runs/qwen3_30b_a3b       (on all hosts; see "On a TPU pod")
Check:    python -m rl_is.aot --config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x4
Hardware: v5p:4x4x4, 64 chips of 95 GiB.
Expect:   by `aot` 51 GiB a chip at its peak and at least 2.8 s for the learner's
          part of a step; not yet run on a TPU.

Argument: as configs/qwen3_0p6b.py. The learner sends each token through the experts
that the sampler's took (`rollout.replay_routes`): else a small difference between
the two changes which experts, and the ratio with them.
"""

from configs import models, qwen3_8b


def get_config(arg=None):
  config = qwen3_8b.get_config(arg)
  with config.unlocked():
    config.model.update(models.qwen3_30b_a3b())
    config.rollout.replay_routes = True
  return config
