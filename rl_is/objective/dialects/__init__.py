"""Another system's configuration, in its own words -> our objective. Floor 2.

A system is a function of its config: its key names, with its defaults. A key
that it does not have, or that we cannot follow, is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects.areal import areal
from rl_is.objective.dialects.base import Dialect
from rl_is.objective.dialects.nemo_rl import nemo_rl
from rl_is.objective.dialects.openrlhf import openrlhf
from rl_is.objective.dialects.prime_rl import prime_rl
from rl_is.objective.dialects.roll import roll
from rl_is.objective.dialects.skyrl import skyrl
from rl_is.objective.dialects.slime import slime
from rl_is.objective.dialects.torchrl import torchrl
from rl_is.objective.dialects.trl import trl
from rl_is.objective.dialects.tunix import tunix
from rl_is.objective.dialects.verl import verl

SYSTEMS = {"areal": areal, "nemo_rl": nemo_rl, "openrlhf": openrlhf,
           "prime_rl": prime_rl, "roll": roll, "skyrl": skyrl, "slime": slime,
           "torchrl": torchrl, "trl": trl, "tunix": tunix, "verl": verl}


def translate(system: str, config: Mapping[str, Any]) -> Dialect:
  checks.choice("dialect", system, SYSTEMS)
  return SYSTEMS[system](config)
