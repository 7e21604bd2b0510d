"""The structure of an objective, checked before anything is traced. Floor 2.

A `Spec` names one value of each axis; numbers are not in it. The constants that
it takes follow from the rows of the tables in `ops`.
"""

import collections
import dataclasses
from collections.abc import Mapping

from rl_is import ops
from rl_is.core import checks

DENOMINATORS = ("all", "kept")
# One clamp for the whole objective: two would make two different ratios.
SHARED = ("max_log_ratio",)
ENTROPY_COEF = ops.Constant(0.0, closed=True, help="weight of the entropy bonus")


@dataclasses.dataclass(frozen=True)
class Correction:
  """A row of `ops.CORRECTIONS` (or the user's own), and what it is given."""

  name: str
  num: str = "proximal"  # numerator of its ratio; the denominator is behaviour
  level: str = "token"

  def __str__(self) -> str:
    return f"{self.name}:{self.num}:{self.level}"


@dataclasses.dataclass(frozen=True)
class Spec:
  """One value of each axis. Static: a change of it compiles another program."""

  surrogate: str = "pg"
  anchor: str = "behaviour"
  level: str = "token"
  corrections: tuple[Correction, ...] = ()
  advantage: str = "grpo"
  aggregation: str = "token_mean"
  denominator: str = "all"
  regularizer: str = "none"
  # Says that a ratio counted twice is meant (some peers do count it twice).
  allow_double_counting: bool = False


Extra = Mapping[str, ops.Row]  # a user's own corrections, by name


def corrections_table(extra: Extra) -> dict[str, ops.Row]:
  clash = sorted(set(extra) & set(ops.CORRECTIONS))
  if clash:
    raise ValueError(f"corrections: {clash[0]!r} is already one of ours; "
                     "give yours another name")
  return {**ops.CORRECTIONS, **extra}


def parse_corrections(text: str) -> tuple[Correction, ...]:
  """"tis:current:token,icepop" -> Corrections; "none" or "" -> none."""
  if text.strip() in ("", "none"):
    return ()
  parts = [item.strip().split(":") for item in text.split(",")]
  for item in parts:
    if len(item) > 3 or not all(item):
      raise ValueError("objective.corrections: expected name[:num[:level]], "
                       f"comma-separated, got {text!r}")
  return tuple(Correction(*item) for item in parts)


def check(spec: Spec, extra: Extra = {}) -> None:
  """Names exist and the factors telescope; else one line that says what not."""
  checks.choice("objective.surrogate", spec.surrogate, ops.SURROGATES)
  checks.choice("objective.anchor", spec.anchor, ops.ANCHORS)
  checks.choice("objective.level", spec.level, ops.LEVELS)
  checks.choice("objective.advantage", spec.advantage, ops.ADVANTAGES)
  checks.choice("objective.aggregation", spec.aggregation, ops.AGGREGATIONS)
  checks.choice("objective.denominator", spec.denominator, DENOMINATORS)
  checks.choice("objective.regularizer", spec.regularizer,
                ("none", *ops.REGULARIZERS))
  table = corrections_table(extra)
  for c in spec.corrections:
    checks.choice("objective.corrections", c.name, table)
    checks.choice(f"objective.corrections: {c.name}: numerator", c.num,
                  ("proximal", "current"))
    checks.choice(f"objective.corrections: {c.name}: level", c.level,
                  ops.LEVELS)
    if spec.denominator == "kept" and c.num == "current":
      raise ValueError(
          f"objective.denominator='kept' needs masks that are known before the "
          f"update, but {c} reads the current log-probs; use {c.name}:proximal "
          "or denominator='all'")
  repeated = [n for n, k in collections.Counter(
      c.name for c in spec.corrections).items() if k > 1]
  if repeated:
    raise ValueError(f"objective.corrections: {repeated[0]!r} stands twice")
  if not spec.allow_double_counting:
    _check_factors(spec, table)


def factors(spec: Spec, table: Extra) -> list[tuple[str, str, str]]:
  """(piece, numerator, denominator) of everything that multiplies the loss."""
  out = []
  if ops.SURROGATES[spec.surrogate].has_factor:
    out.append((spec.surrogate, "current", spec.anchor))
  out += [(c.name, c.num, "behaviour") for c in spec.corrections
          if table[c.name].has_factor]
  return out


def _check_factors(spec: Spec, table: Extra) -> None:
  """current/proximal x proximal/behaviour is one ratio; a policy that is twice
  above or twice below the line means that a ratio is counted twice."""
  seen = {}
  for name, num, den in factors(spec, table):
    for side, policy in (("numerator", num), ("denominator", den)):
      if (side, policy) in seen:
        raise ValueError(
            f"objective: {seen[side, policy]} and {name} both have {policy} as "
            f"the {side} of their ratio: it would be counted twice "
            f"({name} is {num}/{den}); objective.allow_double_counting=true if "
            "that is meant")
      seen[side, policy] = name


def inert(spec: Spec, updates_per_batch: int, extra: Extra = {}
          ) -> dict[str, str]:
  """Constants that cannot act in this structure -> why.

  With one update a batch the proximal policy is the current one: the ratio is
  exactly 1 when the gradient is taken, so no bound on it ever binds.
  """
  surrogate = ops.SURROGATES[spec.surrogate]
  ratio_is_one = spec.anchor == "current" or (
      spec.anchor == "proximal" and updates_per_batch == 1)
  if not (surrogate.has_factor and ratio_is_one):
    return {}
  why = (f"{spec.surrogate} is anchored on {spec.anchor!r} with "
         f"{updates_per_batch} update(s) a batch, so its ratio is always 1")
  return {name: why for (piece, kw), name in names(spec, extra).items()
          if piece == spec.surrogate and kw not in SHARED}


def _pieces(spec: Spec, extra: Extra) -> dict[str, Mapping[str, ops.Constant]]:
  """Piece name -> keyword -> Constant, in the order of the axes."""
  table = corrections_table(extra)
  rows = {spec.surrogate: ops.SURROGATES[spec.surrogate]}
  rows |= {c.name: table[c.name] for c in spec.corrections}
  rows |= {f"advantage {spec.advantage}": ops.ADVANTAGES[spec.advantage],
           spec.aggregation: ops.AGGREGATIONS[spec.aggregation]}
  if spec.regularizer != "none":
    rows[spec.regularizer] = ops.REGULARIZERS[spec.regularizer]
  out = {name: row.constants for name, row in rows.items()}
  return {**out, "entropy": {"entropy_coef": ENTROPY_COEF}}


def names(spec: Spec, extra: Extra = {}) -> dict[tuple[str, str], str]:
  """(piece, keyword) -> the constant's name.

  The name is the keyword; where two chosen pieces share one it is
  `<piece>_<keyword>`. `max_log_ratio` is one number for all.
  """
  pieces = _pieces(spec, extra)
  users = collections.Counter(
      kw for row in pieces.values() for kw in row if kw not in SHARED)
  return {(piece, kw): f"{piece}_{kw}" if users[kw] > 1 else kw
          for piece, row in pieces.items() for kw in row}


def constants(spec: Spec, extra: Extra = {}) -> dict[str, ops.Constant]:
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
  takes = constants(spec, extra)
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
    raise ValueError(f"objective.constants.{missing[0]}: needed by the chosen "
                     "pieces and not set")
  return {name: checks.in_range(
      f"objective.constants.{name}", value, takes[name].low, takes[name].high,
      takes[name].closed) for name, value in values.items()}


def all_constant_names() -> list[str]:
  """Every name that some structure of the tables uses: the config lists them."""
  surrogates = [(n, kw) for n, r in ops.SURROGATES.items() for kw in r.constants]
  corrections = [(n, kw) for n, r in ops.CORRECTIONS.items()
                 for kw in r.constants]
  rest = {kw for t in (ops.ADVANTAGES, ops.AGGREGATIONS, ops.REGULARIZERS)
          for r in t.values() for kw in r.constants}
  out = {kw for _, kw in surrogates + corrections} | rest | {"entropy_coef"}
  by_surrogate = {kw for _, kw in surrogates}
  per_correction = collections.Counter(kw for _, kw in corrections)
  can_clash = {kw for kw, n in per_correction.items()
               if (n > 1 or kw in by_surrogate) and kw not in SHARED}
  out |= {f"{n}_{kw}" for n, kw in surrogates + corrections if kw in can_clash}
  return sorted(out)
