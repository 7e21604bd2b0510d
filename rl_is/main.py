"""Trains one run: `python -m rl_is.main --config=FILE[:arg] --workdir=DIR`.

Any field is set by `--config.a.b=value`; values are checked before they are
assigned, and an unknown field is answered with the nearest names. Floor 4.
"""

import os
import sys
from collections.abc import Sequence

from absl import flags, logging
from rich.console import Console
from rich.table import Table

from rl_is import command, train
from rl_is.infra import hosts
from rl_is.infra.preemption import Stopped
from rl_is.objective import presets


def print_presets() -> None:
  rows = presets.describe()
  table = Table(*rows[0], title="presets: choices, constants, source")
  for row in rows:
    table.add_row(*row.values())
  # Wide enough on a pipe, where there is no terminal to ask.
  console = Console()
  Console(width=max(console.width, 200)).print(table)


def _main(changes: Sequence[tuple[str, str]]) -> None:
  given = flags.FLAGS
  if given.list_presets:
    print_presets()
    return
  command.need("config", "workdir")
  logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
  if not given.workdir:
    raise ValueError("--workdir: expected a directory, got ''")
  if given.coordinator:
    hosts.start(given.coordinator, given.processes, given.process,
                given.host_timeout)
  with hosts.together():
    train.run(command.changed(given.config, changes), os.path.expanduser(given.workdir))


def main() -> None:
  # Defined here, not on import: other scripts have flags of the same names.
  flags.DEFINE_string("workdir", None, "This run's own directory.")
  flags.DEFINE_string("coordinator", "", "Several processes are one run: host:port "
                      "of process 0, or auto on a TPU pod.")
  flags.DEFINE_integer("processes", 1, "How many, with a --coordinator.")
  flags.DEFINE_integer("process", 0, "Which of them this is.")
  flags.DEFINE_float("host_timeout", 300, "Seconds to wait for the others.")
  flags.DEFINE_bool("list_presets", False,
                    "Prints the table of named methods, and exits.")
  try:
    command.run(_main)
  except Stopped as stopped:  # as asked, and nothing is lost: exit code 0
    print(stopped, file=sys.stderr)
  except KeyboardInterrupt:  # before the run
    sys.exit("stopped; the same command goes on from the last checkpoint")


if __name__ == "__main__":
  main()
