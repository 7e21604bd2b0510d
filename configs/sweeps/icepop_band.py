"""IcePop's band on a sampler of int3 weights, 8 updates old.

Command:  python -m experiments.run_sweep --config=configs/sweeps/icepop_band.py \
            --workdir=runs/icepop_band
Hardware: two CPU cores; `--dry_run` says for how long.

4 lower x 4 upper bounds x 2 seeds.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  for low in (0.05, 0.2, 0.5, 0.8):
    for high in (1.25, 2.0, 5.0, 20.0):
      add({"rollout.lag": 8, "mismatch.weights": "int", "mismatch.bits": 3,
           "objective.preset": "icepop",
           "objective.constants.icepop_low": low,
           "objective.constants.icepop_high": high}, seeds=range(2))
