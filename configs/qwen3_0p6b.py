"""Qwen3 0.6B on a v5e-16: reasoning-gym, lag 4, GRPO with TIS and a clip.

Command:  python -m rl_is.main --config=configs/qwen3_0p6b.py:weights=MODELS/qwen3-0.6b \
            --workdir=runs/qwen3_0p6b     (on all hosts; see "On a TPU pod")
Check:    python -m rl_is.aot --config=configs/qwen3_0p6b.py --topology=v5e:4x4
Hardware: v5e:4x4, 16 chips of 16 GiB.
Expect:   by `aot` 7.7 GiB a chip at its peak and at least 0.6 s for the learner's
          part of a step; not yet run on a TPU.

Argument: weights=DIR (a directory of Hugging Face's with weights and tokenizer;
without it the weights are random and text is bytes: to see it compile),
dataset=..., lag=4.
"""

from configs import common, models


def get_config(arg=None):
  arg = common.parse_arg(arg, weights="", dataset="basic_arithmetic", lag=4)
  config = common.base()
  config.task = dict(name=f"gym:{arg.dataset}", kwargs=dict(size=20_000, seed=0))
  if arg.weights:
    config.task.kwargs.tokenizer = arg.weights
    config.task.kwargs.template = (
        "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
  config.model.update(models.qwen3_0p6b())
  config.mesh.update(dict(data=1, fsdp=-1, tensor=1))
  config.rollout.update(dict(lag=arg.lag, batch_size=256, group_size=8,
                             max_new_tokens=1024))
  config.objective.preset = "ppo_tis"
  config.optimizer.update(dict(learning_rate=1e-6, warmup_updates=20))
  config.train.update(dict(steps=500, updates_per_batch=2, microbatches=2,
                           full_diagnostics=False))
  config.warm_start.update(dict(steps=0, weights=arg.weights))
  config.evaluate.update(dict(every=50, prompts=256, samples=1))
  return config.lock()
