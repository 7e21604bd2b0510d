"""The figure of a sweep of one's own of caps against lags.

  python -m experiments.fig_tis_cap --workdir=runs/tis_cap

Prints each claim with PASS or FAIL (exit code 1 on FAIL) and draws `figure.svg`
and `.png` in the workdir (with `claims.json`, for the report). Floor 5.
"""

import os
import pathlib
import sys

from absl import app, flags

from experiments import command
from experiments.fig_tis_cap import claims, figure
from rl_is.infra import workdir as workdir_lib
from rl_is.tables import write_csv


def _main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  at = pathlib.Path(flags.FLAGS.workdir)
  if not (at / "summary.csv").exists():
    sys.exit(f"error: {at}: no summary.csv; experiments.run_sweep writes it")
  tables = figure.tables_of(at)
  found = claims.claims(**tables)
  workdir_lib.write_json(at / "claims.json", found)
  write_csv(tables["curves"], str(at / "curves.csv"))
  command.judge(found, figure.draw(
      tables, os.path.join(at, "figure"),
      "python -m experiments.fig_tis_cap " + " ".join(sys.argv[1:])))


def main() -> None:
  flags.DEFINE_string("workdir", None, "Of run_sweep.", required=True)
  app.run(_main)


if __name__ == "__main__":
  main()
