"""Qwen3 8B on a "v5p-128", 64 chips: reasoning-gym, lag 4, GRPO with TIS.

Command:  python -m rl_is.main --config=configs/qwen3_8b.py:weights=/data/qwen3-8b \
            --workdir=runs/qwen3_8b       (on all hosts; see "On a TPU pod")
Check:    python -m rl_is.aot --config=configs/qwen3_8b.py --topology=v5p:4x4x4
Hardware: v5p:4x4x4, 64 chips of 95 GiB.
Expect:   by `aot` 20 GiB a chip at its peak and at least 6 s for the learner's
          part of a step; not yet run on a TPU.

Argument: as configs/qwen3_0p6b.py.
"""

from configs import models, qwen3_0p6b


def get_config(arg=None):
  config = qwen3_0p6b.get_config(arg)
  with config.unlocked():
    config.model.update(models.qwen3_8b())
    config.mesh.update(dict(data=1, fsdp=-1, tensor=4))
    config.rollout.update(dict(batch_size=512, max_new_tokens=4096))
    config.train.microbatches = 4
  return config
