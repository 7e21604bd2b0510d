"""A command that takes `--config=FILE[:arg] --config.a.b=value`. Floor 4."""

import glob
import os
import runpy
import sys
from collections.abc import Callable, Sequence

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from rl_is import overrides
from rl_is.core import checks

Changes = Sequence[tuple[str, str]]  # (path, text)


def run(body: Callable[[Changes], None]) -> None:
  """Parses flags, and calls body with the changes of the config.

  One line for what the user can mend; a traceback for what we must.
  """
  config_flags.DEFINE_config_file(
      "config", None, "configs/NAME.py, or configs/NAME.py:argument.",
      lock_config=True)

  def main(argv):
    if len(argv) > 1:
      raise ValueError(f"unexpected argument {argv[1]!r}")
    body(changes)

  try:
    # The config flag searches sys.argv for overrides of its own accord, and
    # would assign them unchecked.
    sys.argv[:], changes = split_overrides(sys.argv)
    check_config_file(sys.argv)
    app.run(main)
  except (ValueError, OSError, FloatingPointError, ImportError) as error:
    sys.exit(f"error: {error}")


def need(*names: str) -> None:
  for name in names:
    if flags.FLAGS[name].value is None:
      raise ValueError(f"--{name} is needed; see --help")


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
  for path, text in changes:
    overrides.apply(config, path, text)
  return config


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
