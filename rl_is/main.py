"""Trains one run: `python -m rl_is.main --config=FILE[:arg] --workdir=DIR`.

Any field is set by `--config.a.b=value`; values are checked before they are
assigned, and an unknown field is answered with the nearest names. Floor 4.
"""

import glob
import os
import runpy
import sys
from collections.abc import Sequence

from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console
from rich.table import Table

from rl_is import overrides, train
from rl_is.core import checks
from rl_is.infra.preemption import Stopped
from rl_is.objective import presets


def split_overrides(argv: Sequence[str]
                    ) -> tuple[list[str], list[tuple[str, str]]]:
  """argv -> (the rest, [(path, text)]) for `--config.path=text` or two words."""
  rest, found, words = [], [], iter(argv)
  for word in words:
    name, equals, text = word.partition("=")
    path = name.lstrip("-").removeprefix("config.")
    if not (name.startswith("-") and name.lstrip("-").startswith("config.")):
      rest.append(word)
      continue
    if not equals:
      text = next(words, None)
      if text is None:
        raise ValueError(f"{name}: expected a value")
    found.append((path, text))
  return rest, found


def check_config_file(argv: Sequence[str]) -> None:
  """Loads the config once by hand: the flag would bury its error in others."""
  for word in argv:
    name, equals, value = word.partition("=")
    if name.lstrip("-") != "config" or not equals:
      continue
    path, colon, argument = value.partition(":")
    if not os.path.isfile(path):
      near = sorted(glob.glob("configs/*.py"))
      raise ValueError(f"--config: {path}: no such file, from {os.getcwd()}; "
                       + (checks.unknown("configs", path, near) if near else
                          "run from the root of the repository"))
    runpy.run_path(path)["get_config"](*([argument] if colon else []))


def print_presets() -> None:
  rows = presets.describe()
  table = Table(*rows[0], title="presets: choices, constants, source")
  for row in rows:
    table.add_row(*row.values())
  # Wide enough on a pipe, where there is no terminal to ask.
  console = Console()
  Console(width=max(console.width, 200)).print(table)


def _main(argv: Sequence[str], changes: Sequence[tuple[str, str]]) -> None:
  given = flags.FLAGS
  if given.list_presets:
    print_presets()
    return
  if len(argv) > 1:
    raise ValueError(f"unexpected argument {argv[1]!r}")
  for name in ("config", "workdir"):
    if given[name].value is None:
      raise ValueError(f"--{name} is needed; see --help")
  logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
  if not given.workdir:
    raise ValueError("--workdir: expected a directory, got ''")
  for path, text in changes:
    overrides.apply(given.config, path, text)
  train.run(given.config, os.path.expanduser(given.workdir))


def main() -> None:
  """One line for what the user can mend; a traceback for what we must."""
  # Defined here, not on import: other scripts have flags of the same names.
  config_flags.DEFINE_config_file(
      "config", None, "configs/NAME.py, or configs/NAME.py:argument.",
      lock_config=True)
  flags.DEFINE_string("workdir", None, "This run's own directory.")
  flags.DEFINE_bool("list_presets", False,
                    "Prints the table of named methods, and exits.")
  try:
    # The config flag searches sys.argv for overrides of its own accord, and
    # would assign them unchecked.
    sys.argv[:], changes = split_overrides(sys.argv)
    check_config_file(sys.argv)
    app.run(lambda argv: _main(argv, changes))
  except (ValueError, OSError, FloatingPointError, ImportError) as error:
    sys.exit(f"error: {error}")
  except Stopped as stopped:  # as asked, and nothing is lost: exit code 0
    print(stopped, file=sys.stderr)
  except KeyboardInterrupt:  # before the run
    sys.exit("stopped; the same command goes on from the last checkpoint")


if __name__ == "__main__":
  main()
