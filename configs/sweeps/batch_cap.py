"""Does a larger batch want a larger cap? Batch size x C at lag 8.

Command:  python -m experiments.run_sweep --config=configs/sweeps/batch_cap.py \
            --workdir=runs/batch_cap
Hardware: two CPU cores; `--dry_run` says for how long.

The size is structure: 3 programs. 3 sizes x 5 caps x 3 seeds.
"""

from configs.sweeps import toy

get_config = toy.get_config


def sweep(add):
  for rows in (64, 128, 256):
    for cap in (1.0, 1.5, 2.0, 5.0, float("inf")):
      add({"rollout.lag": 8, "rollout.batch_size": rows,
           "objective.preset": "tis", "objective.constants.cap": cap},
          seeds=range(3))
