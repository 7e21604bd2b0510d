"""What every dialect is made of. Floor 2."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.spec import Correction, Spec

Surrogate = tuple[str, dict[str, float]]  # and its constants
Corrections = tuple[tuple[Correction, ...], dict[str, float]]
GSPO_BOUND = math.exp(10.0)  # verl's, SkyRL's and Tunix's on a sequence's ratio


@dataclasses.dataclass(frozen=True)
class Dialect:
  """Our objective, its constants, and where that system departs from papers."""

  spec: Spec
  constants: dict[str, float]
  departs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Maybe:
  """A key that may be null or of one of several kinds, and its default."""

  default: Any
  kinds: tuple[type, ...]


def maybe(*kinds: type, default: Any = None) -> Maybe:
  return Maybe(default, kinds)


def read(system: str, config: Mapping[str, Any], defaults: Mapping[str, Any],
         only: Mapping[str, Any] = {}) -> dict[str, Any]:
  """The config over its defaults; `only`: keys that we follow at one value.

  A value is of the kind of its default, or one that a `Maybe` allows.
  """
  if not isinstance(config, Mapping):
    raise ValueError(f"{system}: expected keys and values, got {config!r}")
  out = {**only, **{key: x.default if isinstance(x, Maybe) else x
                    for key, x in defaults.items()}}
  for key, value in config.items():
    checks.choice(f"{system}: key", key, {**defaults, **only})
    if key not in only:
      out[key] = _of_kind(f"{system}: {key}", value, defaults[key])
    elif value != only[key]:
      raise ValueError(f"{system}: {key}={value!r} is not supported (only "
                       f"{only[key]!r})")
  return out


def _of_kind(what: str, value: Any, default: Any) -> Any:
  is_maybe = isinstance(default, Maybe)
  if value is None and is_maybe:
    return None
  kinds = default.kinds if is_maybe else (type(default),)
  if isinstance(value, bool):
    fits = bool in kinds
  elif isinstance(value, (int, float)):
    if bool in kinds and value in (0, 1):
      return bool(value)
    if math.isnan(value):
      raise ValueError(f"{what}: expected a number, got NaN")
    fits = bool({int, float} & set(kinds))
  elif isinstance(value, str):
    # Never by truth: the text "no" is true.
    flag = {"true": True, "false": False}.get(value.lower())
    if bool in kinds and flag is not None:
      return flag
    fits = str in kinds
  elif isinstance(value, Mapping):
    fits = dict in kinds
  else:
    fits = isinstance(value, (list, tuple)) and bool({list, tuple} & set(kinds))
  if not fits:
    names = {bool: "true or false", int: "a number", float: "a number",
             str: "a text", tuple: "a list", list: "a list", dict: "a block"}
    wanted = list(dict.fromkeys(names[kind] for kind in kinds))
    raise ValueError(f"{what}: expected {' or '.join(wanted)}"
                     f"{' or null' if is_maybe else ''}, got {value!r}")
  return value


def band(what: str, value: Any) -> tuple[float, float]:
  """(low, high) of a list of two numbers."""
  if len(value) != 2:
    raise ValueError(f"{what}: expected [low, high], got {value!r}")
  low, high = (checks.number(what, x) for x in value)
  if low > high:
    raise ValueError(f"{what}: expected low <= high, got {value!r}")
  return low, high


def log(what: str, x: float) -> float:
  return math.log(checks.in_range(what, x, *checks.POSITIVE))


def flat(config: Mapping[str, Any], blocks: tuple[str, ...]) -> dict[str, Any]:
  """`block.x`, or x in a block of that name, is x."""
  out = {}
  for key, value in config.items():
    block, dot, name = key.partition(".")
    if dot and block in blocks:
      out |= flat({name: value}, blocks)
    elif key in blocks and (value is None or isinstance(value, Mapping)):
      out |= flat(value or {}, blocks)
    else:
      out[key] = value
  return out


def unless_none(x: float | None, otherwise: float = math.inf) -> float:
  """A bound that may be absent."""
  return otherwise if x is None else x


def clip(low: float, high: float, bound: float | None = None) -> Surrogate:
  """PPO's clip, with a dual clip where its bound is given."""
  constants = dict(eps_low=low, eps_high=high)
  if bound is None:
    return "ppo_clip", constants
  return "dual_clip", dict(constants, clip_c=bound)


def bounded_gspo(low: float, high: float, bound: float | None = None
                 ) -> Surrogate:
  """A clip whose log s is clamped from above alone, without a gradient beyond.

  That is the bound of a dual clip on A < 0; on A > 0 the clip is closer.
  """
  return clip(low, min(high, GSPO_BOUND - 1),
              min(bound or math.inf, GSPO_BOUND))


def cispo(low: float, high: float) -> Surrogate:
  """With its bounds as distances from 1."""
  return "cispo", dict(cispo_floor=max(1 - low, 0.0), cispo_cap=1 + high)


def truncated(low: float | None, high: float, **place: Any) -> Corrections:
  """A weight limited to a band. `place`: num, level, options."""
  return (Correction("tis", **place),), dict(tis_cap=high, tis_floor=low or 0.0)


def masked(low: float | None, high: float, **place: Any) -> Corrections:
  """A weight dropped outside of a band, which may have no lower edge."""
  if low is None:
    return (Correction("mis", **place),), dict(mis_cap=high)
  return (Correction("icepop", **place),), dict(icepop_low=low,
                                                icepop_high=high)


def named_weight(what: str, kind: str, low: float | None, high: float,
                 num: str = "proximal", level: str = "token") -> Corrections:
  """NeMo-RL's and OpenRLHF's three, by their names.

  After the test of a sequence the token weights stay as they are, uncapped.
  """
  if kind == "tis":
    return truncated(low, high, num=num, level=level)
  if kind == "icepop":
    return (Correction("icepop", num, level),), dict(icepop_low=low,
                                                     icepop_high=high)
  if kind == "seq-mask-tis":
    return (Correction("geometric_mask", num), Correction("tis", num, level)
            ), dict(geometric_mask_low=low, geometric_mask_high=high,
                    tis_cap=math.inf)
  raise ValueError(checks.unknown(what, kind,
                                  ("tis", "icepop", "seq-mask-tis")))
