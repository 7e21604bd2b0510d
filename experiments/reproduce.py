"""A figure of ours again, from the start: its numbers, its claims, its picture.

  python -m experiments.reproduce --list           # name, kind, verdict, picture
  python -m experiments.reproduce fig_best_cap     # into runs/reproduce/fig_best_cap
  python -m experiments.reproduce fig_best_cap --tiny   # into .../fig_best_cap-tiny

A figure is a folder `experiments/fig_NAME`: `figure.py` has `KIND`, `draw` and
`numbers` (analytic) or `run` (training); `claims.py` says what the numbers are
held to; the CSV files, from which the picture is drawn, are committed. The exit
code is 1 if a claim fails. Floor 5.
"""

import importlib
import pathlib
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags, logging

from experiments import command, sweep_figures
from rl_is.core import checks
from rl_is.tables import write_csv

HERE = pathlib.Path(__file__).parent
Tables = Mapping[str, Sequence[Mapping]]


def names() -> list[str]:
  return sorted(path.parent.name for path in HERE.glob("fig_*/figure.py"))


def figure_of(name: str):
  return importlib.import_module(f"experiments.{name}.figure")


def committed(name: str) -> dict[str, list[dict]]:
  """The tables that are in the repository, by the file's stem."""
  return {path.stem: sweep_figures.read_csv(path)
          for path in sorted((HERE / name).glob("*.csv"))}


def claims_of(name: str, tables: Tables) -> list[tuple[bool, str]]:
  claims = importlib.import_module(f"experiments.{name}.claims").claims
  return [(bool(holds), sentence) for holds, sentence in claims(**tables)]


def reproduce(name: str, workdir: pathlib.Path, tiny: bool):
  """Everything again, in workdir -> (claims, paths of the picture)."""
  figure = figure_of(name)
  workdir.mkdir(parents=True, exist_ok=True)
  if figure.KIND == "analytic":
    tables = {stem: [_shortened(row) for row in rows]
              for stem, rows in figure.numbers(tiny).items()}
  else:
    tables = figure.run(str(workdir), tiny)
  for stem, rows in tables.items():
    path = workdir / f"{stem}.csv"
    write_csv(rows, str(path))
    tables[stem] = sweep_figures.read_csv(path)  # as a reader has it
  made_by = f"python -m experiments.reproduce {name}" + " --tiny" * tiny
  return claims_of(name, tables), figure.draw(
      tables, str(workdir / "figure"), made_by)


def _shortened(row: Mapping) -> dict:
  """Ten digits: more than any claim needs, and half of the file."""
  return {k: float(f"{x:.10g}") if isinstance(x, float) else x
          for k, x in row.items()}


def listing() -> list[str]:
  """A line a figure, tab-separated, by its committed numbers."""
  lines = []
  for name in names():
    held = all(holds for holds, _ in claims_of(name, committed(name)))
    lines.append("\t".join([name, figure_of(name).KIND, "PASS" if held else "FAIL",
                            f"experiments/{name}/figure.svg"]))
  return lines


def _main(argv: list[str]) -> None:
  f = flags.FLAGS
  logging.set_verbosity(logging.WARNING)
  if f.list:
    print("\n".join(listing()))
    return
  if len(argv) != 2:
    raise app.UsageError("expected the name of one figure, or --list")
  name = argv[1]
  checks.choice("figure", name, names())
  workdir = pathlib.Path(  # a tiny run is not what the whole one goes on from
      f.workdir or f"runs/reproduce/{name}{'-tiny' * f.tiny}")
  command.judge(*reproduce(name, workdir, f.tiny))


def main() -> None:
  flags.DEFINE_bool("list", False, "All figures, and whether their claims hold.")
  flags.DEFINE_bool("tiny", False, "Small: tests the machinery; claims may FAIL.")
  flags.DEFINE_string("workdir", None, "Unset: runs/reproduce/NAME, or NAME-tiny.")
  try:
    app.run(_main)
  except ValueError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  main()
