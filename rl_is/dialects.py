"""Another system's config, as our objective. Floor 4.

  python -m rl_is.dialects nemo_rl use_importance_sampling_correction=true \
      truncated_importance_sampling_type=tis truncated_importance_sampling_ratio=2

prints the choices and constants that give the same loss and gradient here, the
formula of each piece, and where that system departs from the papers.
"""

import dataclasses
import inspect
import json
import sys

from rl_is.objective import constants as constants_lib
from rl_is.objective import dialects
from rl_is.objective import spec as spec_lib
from rl_is.ops import aggregate


def parse(words: list[str]) -> dict:
  """["a=true", "b=2.0", "c=[0.5, 5]", "d=icepop"] -> values, as JSON reads them."""
  out = {}
  for word in words:
    key, equals, text = word.partition("=")
    if not (key and equals):
      raise ValueError(f"expected key=value, got {word!r}")
    try:
      out[key] = json.loads(text)
    except json.JSONDecodeError:
      out[key] = {"None": None, "True": True, "False": False}.get(text, text)
  return out


def formulas(spec: spec_lib.Spec) -> list[str]:
  """The equations of the chosen pieces, as their docstrings have them."""
  lines = []
  for name, row in spec_lib.rows(spec).items():
    # An aggregation's row holds its parts; the equation is of the whole.
    fn = getattr(aggregate, name, row.fn)
    text = inspect.getdoc(fn).partition("**Source**")[0] if fn else ""
    equation = [line for line in text.splitlines()[1:] if line.startswith("  ")]
    lines += [f"{name}:", *equation] if equation else []
  return lines


def describe(system: str, config: dict) -> str:
  dialect = dialects.translate(system, config)
  values = constants_lib.resolve(dialect.spec, {}, dialect.constants)
  choices = dataclasses.asdict(dialect.spec) | dict(
      corrections=",".join(map(str, dialect.spec.corrections)) or "none",
      options=",".join(f"{k}={v}" for k, v in dialect.spec.options))
  lines = [f"objective.{k} = {v}" for k, v in choices.items()]
  lines += [f"objective.constants.{k} = {v:g}" for k, v in values.items()]
  lines += formulas(dialect.spec)
  return "\n".join(lines + [f"{system} departs: {d}" for d in dialect.departs])


def main() -> None:
  words = sys.argv[1:]
  try:
    if not words:
      raise ValueError("expected a system and key=value words; systems: "
                       + ", ".join(dialects.SYSTEMS))
    print(describe(words[0], parse(words[1:])))
  except ValueError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  main()
