"""What every dialect is made of. Floor 2."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.spec import Spec


@dataclasses.dataclass(frozen=True)
class Dialect:
  """Our objective, its constants, and where that system departs from papers."""

  spec: Spec
  constants: dict[str, float]
  departs: tuple[str, ...]


def read(system: str, config: Mapping[str, Any], defaults: Mapping[str, Any],
         only: Mapping[str, Any] = {}) -> dict[str, Any]:
  """The config over its defaults; `only`: keys that we follow at one value."""
  for key, value in config.items():
    checks.choice(f"{system}: key", key, {**defaults, **only})
    if key in only and value != only[key]:
      raise ValueError(f"{system}: {key}={value!r} is not supported (only "
                       f"{only[key]!r})")
  return {**only, **defaults, **config}
