"""Objectives by name, and the points of their constants. Floor 2.

For what compares many objectives on the same data: `exact`, the lab, the replay.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp

from rl_is import ops
from rl_is.core import checks
from rl_is.core.types import Array
from rl_is.objective import constants as constants_lib
from rl_is.objective import presets
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Extra, Spec

# A user's own: a function (logp_num, logp_behaviour, mask, *, level) -> Weights,
# or a whole row of the table.
Corrections = Mapping[str, ops.Row | Callable]
Point = dict[str, float]


def own(corrections: Corrections) -> dict[str, ops.Row]:
  """A user's own corrections as rows of the table."""
  return {name: piece if isinstance(piece, ops.Row) else
          ops.Row(piece, "the user's own", has_factor=True)
          for name, piece in corrections.items()}


def _weighed(level: str | None = None, row: str = "tis", **constants: float
             ) -> tuple[Spec, Point]:
  """The score under a weight of the whole ratio current/behaviour; sums over
  tokens, A = R less its group's mean."""
  chosen = () if level is None else (Correction(row, num="current", level=level),)
  return Spec(advantage="dr_grpo", aggregation="sequence_mean_token_sum",
              corrections=chosen), constants


_INF = math.inf
# Textbook estimators: what the published ones stand between.
PLAIN = {
    "none": _weighed(),
    "token_is": _weighed("token", cap=_INF),
    "prefix_is": _weighed("prefix", cap=_INF),
    "seq_is": _weighed("sequence_sum", cap=_INF),
    "geometric_is": _weighed("sequence_mean", cap=_INF),
    "token_tis": _weighed("token", cap=2.0),
    "sequence_tis": _weighed("sequence_sum", cap=2.0),
    "token_mis": _weighed("token", "mis", cap=2.0),
    "sequence_mis": _weighed("sequence_sum", "mis", cap=2.0),
    "icepop_is": _weighed("token", "icepop", low=0.5, high=5.0),
}


def named(name: str, corrections: Corrections = {}
          ) -> tuple[Spec, Point, Extra]:
  """(spec, its constants' defaults, its extra rows) of a name.

  One of `PLAIN`, a preset's, or that of one of the user's own corrections, which
  then weighs the score by the whole ratio current/behaviour.
  """
  if name in corrections:
    extra = own({name: corrections[name]})
    return _weighed("token", name)[0], {}, extra
  if name in PLAIN:
    return *PLAIN[name], {}
  checks.choice("objective", name, [*PLAIN, *presets.PRESETS, *corrections])
  preset = presets.PRESETS[name]
  return preset.spec, dict(preset.constants), {}


def parse_sweep(text: str) -> dict[str, list[float]]:
  """"cap=1,2,inf;eps_high=0.2" -> the values of each constant."""
  out = {}
  for part in filter(None, (p.strip() for p in text.split(";"))):
    name, equals, values = (x.strip() for x in part.partition("="))
    try:
      out[name] = [float(v) for v in values.split(",")]
    except ValueError:
      equals = ""
    if not (name and equals):
      raise ValueError(f"sweep: expected name=number,number;name=..., got {part!r}")
  return out


def points(spec: Spec, defaults: Mapping[str, float],
           sweep: Mapping[str, Sequence[float]], extra: Extra = {}
           ) -> list[Point]:
  """Every combination of the swept constants that the structure takes.

  Each point has all constants, in range; a structure that takes none of the
  swept ones is one point.
  """
  takes = constants_lib.taken(spec, extra)
  swept = {name: values for name, values in sweep.items() if name in takes}
  return [constants_lib.resolve(
      spec, defaults, dict(zip(swept, values)), extra)
          for values in itertools.product(*swept.values())]


def check_swept(sweep: Mapping[str, Sequence[float]],
                objectives: Iterable[Objective]) -> None:
  """Every swept constant is of some objective; else one line."""
  taken = {name for objective in objectives
           for name in constants_lib.taken(objective.spec, dict(objective.extra))}
  for name in sweep:
    checks.choice("sweep: none of the objectives takes it", name, sorted(taken))


def stacked(points_: Sequence[Point]) -> dict[str, Array]:
  """Points of one structure -> [M] arrays: one program for all of them."""
  return {name: jnp.asarray([p[name] for p in points_])
          for name in points_[0]}
