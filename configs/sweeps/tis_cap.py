"""The cap of token TIS against the lag: which C for how stale?

Command:  python -m experiments.run_sweep --config=configs/sweeps/tis_cap.py \
            --workdir=runs/tis_cap
Hardware: two CPU cores; `--dry_run` says for how long.

lag {0, 2, 8, 32} x {none, TIS with C = 1, 2, 5, infinity} x 4 seeds: 80 runs of
two structures, each one program.
"""

from configs import addition

SEEDS = range(4)
CAPS = (1.0, 2.0, 5.0, float("inf"))
LAGS = (0, 2, 8, 32)


def get_config(arg=None):
  config = addition.get_config(arg).unlock()
  if not arg:
    config.rollout.batch_size = 128
    config.train.steps = 200
    config.evaluate.update(dict(prompts=128, samples=2))
  config.train.full_diagnostics = False
  return config.lock()


def sweep(add):
  for lag in LAGS:
    add({"rollout.lag": lag, "objective.preset": "pg"}, seeds=SEEDS)
    for cap in CAPS:
      add({"rollout.lag": lag, "objective.preset": "tis",
           "objective.constants.cap": cap}, seeds=SEEDS)
