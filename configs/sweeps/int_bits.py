"""The bits of the sampler's weights against the correction.

Command:  python -m experiments.run_sweep --config=configs/sweeps/int_bits.py \
            --workdir=runs/int_bits
Hardware: two CPU cores; `--dry_run` says for how long.

int {8, 6, 4, 3} x {none, TIS, MIS, IcePop} x 3 seeds.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  for bits in (8, 6, 4, 3):
    for preset in ("pg", "tis", "mis", "icepop"):
      add({"mismatch.weights": "int", "mismatch.bits": bits,
           "objective.preset": preset}, seeds=range(3))
