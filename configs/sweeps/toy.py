"""What the sweeps of this folder vary from: the toy of the ablation, shorter."""

from configs import addition


def get_config(arg=None):
  config = addition.get_config(arg).unlock()
  if not arg:
    config.rollout.batch_size = 128
    config.train.steps = 200
    config.evaluate.update(dict(prompts=128, samples=2))
  config.train.full_diagnostics = False
  return config.lock()
