"""What a TPU can do, per JAX device, for an estimate of time and memory. Floor 2.

A device is a chip; of `v4:` and `tpu7x:` topologies, half of one: libtpu lists
two a chip, and each has half of what the table says of the chip.
"""

import dataclasses

from rl_is.core import checks


@dataclasses.dataclass(frozen=True)
class Chip:
  """Of one chip, as its maker states it."""

  flops: float  # bf16, a second
  hbm: float  # bytes
  hbm_rate: float  # bytes a second
  ici_rate: float  # bytes a second out of a chip, over all of its links
  devices: int  # that JAX lists for it
  source: str


# The capacities are GiB: what a runtime keeps for itself is not taken off.
CHIPS = {
    "v4": Chip(275e12, 32 * 2**30, 1.2e12, 300e9, 2,
               "https://cloud.google.com/tpu/docs/v4 (unverified)"),
    "v5e": Chip(197e12, 16 * 2**30, 819e9, 200e9, 1,
                "https://cloud.google.com/tpu/docs/v5e"),
    "v5p": Chip(459e12, 95 * 2**30, 2.765e12, 600e9, 1,
                "https://cloud.google.com/tpu/docs/v5p (unverified)"),
    "v6e": Chip(918e12, 32 * 2**30, 1.6e12, 400e9, 1,
                "https://docs.cloud.google.com/tpu/docs/v6e"),
    "tpu7x": Chip(2307e12, 192 * 2**30, 7.38e12, 1.2e12, 2,
                  "https://docs.cloud.google.com/tpu/docs/tpu7x (unverified)"),
}


def of(topology: str) -> Chip:
  """Of "v5e:4x4"; per device, so that devices times it is the slice's."""
  name = topology.partition(":")[0]
  checks.choice("--topology: chip", name, CHIPS)
  chip = CHIPS[name]
  part = lambda x: x / chip.devices
  return dataclasses.replace(
      chip, flops=part(chip.flops), hbm=part(chip.hbm),
      hbm_rate=part(chip.hbm_rate), ici_rate=part(chip.ici_rate))
