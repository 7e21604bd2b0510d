"""The numbers that a structure takes: names, defaults, ranges. Floor 2.

A constant's name is its keyword in the table; where two chosen pieces share one
it is `<piece>_<keyword>`, which always works. `max_log_ratio` is one number for
the whole objective: two clamps would make two different ratios.
"""

import collections
from collections.abc import Mapping

from rl_is import ops
from rl_is.core import checks
from rl_is.objective import spec as spec_lib
from rl_is.objective.spec import Extra, Spec

SHARED = ("max_log_ratio",)
ENTROPY_COEF = ops.Constant(0.0, closed=True, help="weight of the entropy bonus")
# What the choices of `Spec.proximal` take.
PROXIMAL = {
    "start": {},
    "ewma": dict(ewma_decay=ops.Constant(0.9, closed=True, high=0.999999,
                                         help="of the proximal parameters")),
    "log_linear": {},
}


def _pieces(spec: Spec, extra: Extra) -> dict[str, Mapping[str, ops.Constant]]:
  """Piece name -> name -> Constant, in the order of the axes."""
  out = {name: row.constants for name, row in spec_lib.rows(spec, extra).items()}
  return {**out, "proximal": PROXIMAL[spec.proximal],
          "entropy": {"entropy_coef": ENTROPY_COEF}}


def names(spec: Spec, extra: Extra = {}) -> dict[tuple[str, str], str]:
  """(piece, table's name) -> the name in this structure."""
  pieces = _pieces(spec, extra)
  users = collections.Counter(
      kw for row in pieces.values() for kw in row if kw not in SHARED)
  return {(piece, kw): f"{piece}_{kw}" if users[kw] > 1 else kw
          for piece, row in pieces.items() for kw in row}


def taken(spec: Spec, extra: Extra = {}) -> dict[str, ops.Constant]:
  """Every constant that this structure takes, by name."""
  pieces = _pieces(spec, extra)
  return {name: pieces[piece][kw]
          for (piece, kw), name in names(spec, extra).items()}


def resolve(spec: Spec, defaults: Mapping[str, float],
            given: Mapping[str, float], extra: Extra = {}) -> dict[str, float]:
  """The value of each constant: given, else the preset's, else the row's.

  Raises:
    ValueError: one that the pieces do not take (with those they do), one that
      they take and nobody set, one outside its range.
  """
  takes = taken(spec, extra)
  alias = {f"{piece}_{kw}": name
           for (piece, kw), name in names(spec, extra).items()}
  values = {name: row.default for name, row in takes.items()}
  for source, is_given in ((defaults, False), (given, True)):
    for name, value in source.items():
      canonical = name if name in takes else alias.get(name)
      if canonical is None and not is_given:
        continue  # a preset's constant of a piece that the config replaced
      if canonical is None:
        raise ValueError(
            f"objective.constants.{name}: not a constant of the chosen pieces; "
            f"they take {', '.join(sorted(takes))}")
      values[canonical] = value
  missing = [name for name, value in values.items() if value is None]
  if missing:
    shared = [kw for (_, kw), name in names(spec, extra).items()
              if name == missing[0] and kw != name]
    hint = (f" ({shared[0]!r} is a constant of several pieces here, so it has "
            "their names in front)" if shared else "")
    raise ValueError(f"objective.constants.{missing[0]}: needed by the chosen "
                     f"pieces and not set{hint}")
  _check_bands(spec, extra, values)
  return {name: checks.in_range(
      f"objective.constants.{name}", value, takes[name].low, takes[name].high,
      takes[name].closed) for name, value in values.items()}


def _check_bands(spec: Spec, extra: Extra, values: Mapping[str, float]) -> None:
  """A lower edge above its upper edge would drop or cap everything."""
  of = {(piece, kw): name for (piece, kw), name in names(spec, extra).items()}
  for low, high in checks.BANDS:
    for (piece, kw), name in of.items():
      other = of.get((piece, high)) if kw == low else None
      if other and values[name] >= values[other]:
        raise ValueError(
            f"objective.constants.{name} = {values[name]}: expected less than "
            f"{other} = {values[other]}")


def inert(spec: Spec, updates_per_batch: int, extra: Extra = {}
          ) -> dict[str, str]:
  """Constants that cannot act in this structure -> why.

  With one update a batch the proximal policy is the current one: the ratio is
  exactly 1 when the gradient is taken, so no bound on it ever binds.
  """
  surrogate = ops.SURROGATES[spec.surrogate]
  ratio_is_one = spec.anchor == "current" or (
      spec.anchor == "proximal" and spec.proximal == "start"
      and updates_per_batch == 1)
  if not (surrogate.has_factor and ratio_is_one):
    return {}
  why = (f"{spec.surrogate} is anchored on {spec.anchor!r} with "
         f"{updates_per_batch} update(s) a batch, so its ratio is always 1")
  return {name: why for (piece, kw), name in names(spec, extra).items()
          if piece == spec.surrogate and kw not in SHARED
          and not kw.startswith("cov_")}  # a covariance is no ratio


def all_names() -> list[str]:
  """Every name that some structure of the tables uses: the config lists them."""
  one_at_a_time = (ops.SURROGATES, ops.ADVANTAGES, ops.AGGREGATIONS,
                   ops.REGULARIZERS)
  users = collections.defaultdict(set)  # keyword -> (axis or correction)
  pieces = collections.defaultdict(set)  # keyword -> piece names
  for axis, table in enumerate(one_at_a_time):
    for name, row in table.items():
      for kw in row.constants:
        users[kw].add(axis)
        pieces[kw].add(f"adv_{name}" if table is ops.ADVANTAGES else name)
  for name, row in ops.CORRECTIONS.items():
    for kw in row.constants:
      users[kw].add(name)
      pieces[kw].add(name)
  out = set(users) | {"entropy_coef"}
  out |= {kw for row in PROXIMAL.values() for kw in row}
  out |= {f"{piece}_{kw}" for kw, who in users.items()
          if len(who) > 1 and kw not in SHARED for piece in pieces[kw]}
  return sorted(out)
