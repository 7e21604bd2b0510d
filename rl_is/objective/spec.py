"""The structure of an objective, checked before anything is traced. Floor 2.

A `Spec` names one value of each axis; numbers are not in it. The constants that
it takes follow from the rows of the tables in `ops`; see `constants.py`.
"""

import collections
import dataclasses
from collections.abc import Mapping

from rl_is import ops
from rl_is.core import checks

# Whether rejected tokens count in a denominator; "removed": no, and a sequence's
# ratio, a covariance and the regularizer do not see them either.
# "unseen": yes, but a sequence's ratio, its mean of A, the regularizer do not.
DENOMINATORS = ("all", "kept", "removed", "unseen")
# What a correction of a row sees: all of its tokens, or those that the chain
# before it has kept. Every correction takes it.
CORRECTION_OPTIONS = {"over": ("all", "kept")}
# How a regularizer is averaged: as the policy's loss, or over rows, those
# without a token too, of a row's mean. Every regularizer takes it. And where
# `kl_weight` is a ratio, its level: a token's, or the policy's (`Spec.level`).
REGULARIZER_OPTIONS = {"kl_mean": ("policy", "rows"),
                       "kl_level": ("token", "policy")}
# How `logp_prox` is made: scored at the start of the update on the batch; by an
# exponential average of the parameters; or between behaviour and current, by
# version. The last two move during the update.
PROXIMALS = ("start", "ewma", "log_linear")
# Whether advantages are whitened over the batch, a row or a token counting once.
ADVANTAGE_NORMS = ("none", "rows", "tokens")
KL_TO = ("reference", "behaviour")
KL_WEIGHTS = ("none", "score", "behaviour", "proximal")
# "score": the sampler's expected weighted score is taken out at each token. It
# adds a term and multiplies nothing, so it telescopes with nothing.
CENTERINGS = ("none", "score")
# The weights whose expectation it can take -> their bounds' constants.
CENTRED = {"tis": ("floor", "cap"), "icepop": ("low", "high")}

Options = tuple[tuple[str, str], ...]  # static choices of a piece: (name, value)
Extra = Mapping[str, ops.Row]  # a user's own corrections, by name


@dataclasses.dataclass(frozen=True)
class Correction:
  """A row of `ops.CORRECTIONS` (or the user's own), and what it is given.

  One that stands twice tells its places apart by `name@label`; constants are
  then named after the whole of it.
  """

  name: str
  num: str = "proximal"  # the numerator of its ratio
  level: str = "token"
  den: str = "behaviour"  # and the denominator
  options: Options = ()

  @property
  def row(self) -> str:
    """The name in the table."""
    return self.name.partition("@")[0]

  def __str__(self) -> str:
    ratio = self.num if self.den == "behaviour" else f"{self.num}/{self.den}"
    return ":".join([self.name, ratio, self.level,
                     *(f"{k}={v}" for k, v in self.options)])


@dataclasses.dataclass(frozen=True)
class Spec:
  """One value of each axis. Static: a change of it compiles another program."""

  surrogate: str = "pg"
  anchor: str = "behaviour"
  level: str = "token"
  proximal: str = "start"
  corrections: tuple[Correction, ...] = ()
  advantage: str = "grpo"
  advantage_norm: str = "none"
  aggregation: str = "token_mean"
  denominator: str = "all"
  regularizer: str = "none"
  kl_to: str = "reference"
  kl_weight: str = "none"
  centering: str = "none"
  # Static choices of surrogate, advantage and aggregation.
  options: Options = ()
  # Says that a ratio counted twice is meant (some peers do count it twice).
  allow_double_counting: bool = False

  @property
  def counts_rejected(self) -> bool:
    return self.denominator in ("all", "unseen")

  @property
  def sees_rejected(self) -> bool:
    return self.denominator in ("all", "kept")


def parse_options(items: list[str], what: str) -> Options:
  """["form=ratio"] -> (("form", "ratio"),)."""
  pairs = [tuple(item.split("=")) for item in items]
  if any(len(pair) != 2 or not all(pair) for pair in pairs):
    raise ValueError(f"{what}: expected name=value, got {', '.join(items)!r}")
  return tuple(pairs)


def parse_corrections(text: str) -> tuple[Correction, ...]:
  """"tis:current:token,icepop" -> Corrections; "none" or "" -> none.

  Each is name[:numerator[/denominator][:level[:option=value]...]].
  """
  what = "objective.corrections"
  if text.strip() in ("", "none"):
    return ()
  out = []
  for item in text.split(","):
    name, *rest = item.strip().split(":")
    ratio, level = (rest + ["proximal", "token"][len(rest):])[:2]
    num, slash, den = ratio.partition("/")
    if not (name and num and level and (den or not slash)):
      raise ValueError(f"{what}: expected name[:num[/den][:level[:option=value]]]"
                       f", comma-separated, got {text!r}")
    out.append(Correction(name, num, level, den or "behaviour",
                          parse_options(rest[2:], what)))
  return tuple(out)


def corrections_table(extra: Extra) -> dict[str, ops.Row]:
  clash = sorted(set(extra) & set(ops.CORRECTIONS))
  if clash:
    raise ValueError(f"corrections: {clash[0]!r} is already one of ours; "
                     "give yours another name")
  return {**ops.CORRECTIONS, **extra}


def rows(spec: Spec, extra: Extra = {}) -> dict[str, ops.Row]:
  """The chosen pieces by name, in the order of the axes."""
  table = corrections_table(extra)
  out = {spec.surrogate: ops.SURROGATES[spec.surrogate]}
  out |= {c.name: table[c.row] for c in spec.corrections}
  out |= {f"adv_{spec.advantage}": ops.ADVANTAGES[spec.advantage],
          spec.aggregation: ops.AGGREGATIONS[spec.aggregation]}
  if spec.regularizer != "none":
    out[spec.regularizer] = ops.REGULARIZERS[spec.regularizer]
  return out


def check(spec: Spec, extra: Extra = {}) -> None:
  """Names exist and the factors telescope; else one line that says what not."""
  for name, allowed in dict(
      surrogate=ops.SURROGATES, anchor=ops.ANCHORS, level=ops.LEVELS,
      proximal=PROXIMALS, advantage=ops.ADVANTAGES,
      advantage_norm=ADVANTAGE_NORMS,
      aggregation=ops.AGGREGATIONS, denominator=DENOMINATORS,
      regularizer=("none", *ops.REGULARIZERS), kl_to=KL_TO,
      kl_weight=KL_WEIGHTS, centering=CENTERINGS).items():
    checks.choice(f"objective.{name}", getattr(spec, name), allowed)
  table = corrections_table(extra)
  for c in spec.corrections:
    _check_correction(spec, c, table)
  repeated = [n for n, k in collections.Counter(
      c.name for c in spec.corrections).items() if k > 1]
  if repeated:
    raise ValueError(f"objective.corrections: {repeated[0]!r} stands twice; "
                     f"write the second as {repeated[0]}@2")
  _check_options(spec, extra)
  if spec.regularizer == "none" and spec.kl_weight != "none":
    raise ValueError(f"objective.kl_weight={spec.kl_weight!r} weighs no "
                     "regularizer: objective.regularizer is 'none'")
  if spec.centering != "none":
    _check_centering(spec, table)
  if not spec.allow_double_counting:
    _check_factors(spec, table)


def reads_logp(spec: Spec, c: Correction) -> bool:
  """It depends on the parameters being updated: it cannot be prepared."""
  moving = spec.proximal != "start"
  return "current" in (c.num, c.den) or (
      moving and "proximal" in (c.num, c.den))


def _check_correction(spec: Spec, c: Correction, table: Extra) -> None:
  what = f"objective.corrections: {c.name}"
  checks.choice("objective.corrections", c.row, table)
  if c.name.endswith("@"):
    raise ValueError(f"{what}: expected a label after the @")
  checks.choice(f"{what}: numerator", c.num, ("proximal", "current"))
  checks.choice(f"{what}: denominator", c.den, ("behaviour", "proximal"))
  checks.choice(f"{what}: level", c.level, ops.LEVELS)
  if c.num == c.den:
    raise ValueError(f"{what}: numerator and denominator are both {c.num}: its "
                     "ratio is always 1")
  if not table[c.row].has_level and c.level != "token":
    raise ValueError(f"{what}: takes no level, got {c.level!r}")
  for name, value in c.options:
    allowed = {**CORRECTION_OPTIONS, **table[c.row].options}
    checks.choice(f"{what}: option", name, allowed)
    checks.choice(f"{what}: {name}", value, allowed[name])
  if spec.denominator != "all" and reads_logp(spec, c):
    raise ValueError(
        f"objective.denominator={spec.denominator!r} needs masks that are known "
        f"before the update, but {c} reads the current log-probs; use "
        f"{c.name}:proximal or denominator='all'")


def _check_options(spec: Spec, extra: Extra) -> None:
  allowed = {} if spec.regularizer == "none" else dict(REGULARIZER_OPTIONS)
  if spec.kl_weight not in ops.ANCHORS:
    allowed.pop("kl_level", None)
  for piece, row in rows(spec, extra).items():
    if piece not in {c.name for c in spec.corrections}:
      allowed |= row.options
  for name, value in spec.options:
    if name not in allowed:
      raise ValueError(f"objective.options: {name!r} is no option of the chosen "
                       f"pieces; they take {', '.join(sorted(allowed)) or 'none'}")
    checks.choice(f"objective.options: {name}", value, allowed[name])


def centred(spec: Spec) -> Correction | None:
  """The correction that weighs the score which centring takes out, if any."""
  return next((c for c in spec.corrections if c.row in CENTRED), None)


def _check_centering(spec: Spec, table: Extra) -> None:
  """The term is the expectation of -A w grad log p, with w a function of the
  sampled token's own current/behaviour. A mask drops a token with its term."""
  what = f"objective.centering={spec.centering!r}"
  if spec.surrogate != "pg":
    raise ValueError(f"{what}: takes out the expected score of surrogate 'pg', "
                     f"got {spec.surrogate!r}")
  weighing = [c for c in spec.corrections
              if table[c.row].has_factor or table[c.row].takes == "weights"]
  if any(c is not centred(spec) or (c.num, c.den, c.level) != (
      "current", "behaviour", "token") or
         dict(c.options).get("binds", "always") != "always" for c in weighing):
    raise ValueError(
        f"{what}: knows no expectation of {', '.join(map(str, weighing))}; it "
        "takes no weight, or one of tis:current:token and icepop:current:token")
  over = [c for c in spec.corrections if dict(c.options).get("over") == "kept"]
  if over:
    raise ValueError(f"{what}: {over[0]} would also see what the weight drops; "
                     "use over=all")


def factors(spec: Spec, table: Extra) -> list[tuple[str, str, str]]:
  """(piece, numerator, denominator) of everything that multiplies the loss."""
  out = []
  surrogate = ops.SURROGATES[spec.surrogate]
  # On `current` it is current/current: 1, with the gradient of the score.
  if surrogate.has_factor and surrogate.multiplies and spec.anchor != "current":
    out.append((spec.surrogate, "current", spec.anchor))
  out += [(c.name, c.num, c.den) for c in spec.corrections
          if table[c.row].has_factor]
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
