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


def read(system: str, config: Mapping[str, Any], defaults: Mapping[str, Any],
         only: Mapping[str, Any] = {}) -> dict[str, Any]:
  """The config over its defaults; `only`: keys that we follow at one value."""
  for key, value in config.items():
    checks.choice(f"{system}: key", key, {**defaults, **only})
    if key in only and value != only[key]:
      raise ValueError(f"{system}: {key}={value!r} is not supported (only "
                       f"{only[key]!r})")
  return {**only, **defaults, **config}


def flat(config: Mapping[str, Any], blocks: tuple[str, ...]) -> dict[str, Any]:
  """`block.x`, or x in a block of that name, is x."""
  out = {}
  for key, value in config.items():
    block, dot, name = key.partition(".")
    if dot and block in blocks:
      out |= flat({name: value}, blocks)
    elif key in blocks:
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
