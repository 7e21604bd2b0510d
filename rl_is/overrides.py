"""Setting fields of a config by name, from text or values. Floor 4.

Checked before assignment, because a ConfigDict takes True for an int, and a
placeholder of float takes anything; and because its own error for an unknown
key prints the whole config.
"""

import math
from typing import Any

from ml_collections import ConfigDict

from rl_is.core import checks

# Fields for which "none" means "not given": the preset's, the task's.
_MAY_BE_UNSET = tuple(f"objective.{name}" for name in (
    "constants.", "surrogate", "anchor", "level", "proximal", "advantage",
    "aggregation", "denominator", "kl_to", "options")) + (
        "rollout.max_new_tokens",)
# There "none" is a choice of its own: no corrections, no regularizer.
_NONE_IS_A_VALUE = ("objective.corrections", "objective.regularizer",
                    "objective.kl_weight", "objective.advantage_norm",
                    "objective.centering")


def apply(config: ConfigDict, path: str, value: Any) -> None:
  """config.<path> = value; text is converted to the type of the field."""
  parent, key = _find(config, path)
  if isinstance(parent[key], ConfigDict):
    raise ValueError(f"config.{path}: is a group; set one of its fields: "
                     f"{', '.join(sorted(parent[key]))}")
  may_be_unset = parent[key] is None or path.startswith(_MAY_BE_UNSET)
  if path not in _NONE_IS_A_VALUE and may_be_unset and str(value).lower() == "none":
    parent[key] = None
    return
  parent[key] = _convert(f"config.{path}", value, parent.get_type(key))


def value(config: ConfigDict, path: str) -> Any:
  """What the field holds."""
  parent, key = _find(config, path)
  return parent[key]


def leaves(config: ConfigDict, prefix: str = "") -> list[str]:
  """The path of every field."""
  out = []
  for key in config:
    deeper = isinstance(config[key], ConfigDict) and len(config[key])
    out += leaves(config[key], f"{prefix}{key}.") if deeper else [prefix + key]
  return out


def _find(config: ConfigDict, path: str) -> tuple[ConfigDict, str]:
  node, parts = config, path.split(".")
  for part in parts[:-1]:
    if not isinstance(node, ConfigDict) or part not in node:
      raise ValueError(checks.unknown("config", path, leaves(config)))
    node = node[part]
  if not isinstance(node, ConfigDict) or parts[-1] not in node:
    raise ValueError(checks.unknown("config", path, leaves(config)))
  return node, parts[-1]


def _convert(name: str, value: Any, kind: type) -> Any:
  if kind in (int, float):
    return _number(name, value, kind)
  if kind is bool and isinstance(value, str):
    if value.lower() not in ("true", "false"):
      raise ValueError(f"{name}: expected true or false, got {value!r}")
    return value.lower() == "true"
  if not isinstance(value, kind):
    raise ValueError(f"{name}: expected {kind.__name__}, got {value!r}")
  return value


def _number(name: str, value: Any, kind: type) -> int | float:
  """1e-5 is a number as text too; True, NaN and 8.5 for an int are not."""
  if isinstance(value, str):
    try:
      value = kind(value)
    except ValueError:
      article = "an integer" if kind is int else "a number"
      raise ValueError(f"{name}: expected {article}, got {value!r}") from None
  checks.number(name, value)
  if kind is int and not (math.isfinite(value) and value == int(value)):
    raise ValueError(f"{name}: expected an integer, got {value!r}")
  return kind(value)
