"""Every figure: its committed numbers hold, its claims can fail, it runs anew."""

import math
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import reproduce, sweep_figures

ANALYTIC = [n for n in reproduce.names()
            if reproduce.figure_of(n).KIND == "analytic"]


def test_what_there_is():
  assert len(ANALYTIC) >= 12 and "fig_tis_cap" in reproduce.names()


@pytest.mark.parametrize("name", reproduce.names())
def test_committed_numbers_hold(name):
  tables = reproduce.committed(name)
  assert tables and all(tables.values())
  for holds, sentence in reproduce.claims_of(name, tables):
    assert holds, sentence
  folder = reproduce.HERE / name
  for file in ("README.md", "figure.svg", "figure.png"):
    assert (folder / file).stat().st_size > 100, file
  assert f"experiments.reproduce {name}" in (folder / "README.md").read_text()


def _disturbed(tables):
  """The tables with one column at a time turned into something else."""
  for stem, rows in tables.items():
    for column in rows[0]:
      if not isinstance(rows[0][column], float):
        continue
      values = [r[column] for r in rows]
      for other in (values[::-1], [-x for x in values], [1.5 * x + 0.1 for x in values],
                    [0.5 * x for x in values],
                    [x * (1 + 0.5 * math.sin(7 * i)) for i, x in enumerate(values)]):
        yield {**tables, stem: [dict(r, **{column: x}) for r, x in zip(rows, other)]}


@pytest.mark.filterwarnings("ignore:invalid value")  # of disturbed numbers
@pytest.mark.parametrize("name", ANALYTIC)
def test_every_claim_can_fail(name):
  tables = reproduce.committed(name)
  failed, count = set(), len(reproduce.claims_of(name, tables))
  for other in _disturbed(tables):
    try:
      found = reproduce.claims_of(name, other)
    except (ValueError, KeyError, TypeError, ArithmeticError, IndexError):
      continue  # no such numbers: an error, not a PASS
    failed |= {i for i, (holds, _) in enumerate(found) if not holds}
    if len(failed) == count:
      break
  assert failed == set(range(count)), set(range(count)) - failed


@pytest.mark.parametrize("name", ANALYTIC)
def test_it_is_made_anew(name, tmp_path):
  """Small; the columns are those that are committed, and it can be drawn."""
  figure = reproduce.figure_of(name)
  tables = figure.numbers(True)
  for stem, rows in reproduce.committed(name).items():
    assert list(tables[stem][0]) == list(rows[0])
  paths = figure.draw(reproduce.committed(name), str(tmp_path / "figure"), "a test")
  assert all(pathlib.Path(p).stat().st_size > 10_000 for p in paths)


def run(*words):
  return subprocess.run([sys.executable, "-m", "experiments.reproduce", *words],
                        text=True, capture_output=True, cwd=reproduce.HERE.parent)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*reproduce.names()} - {*ANALYTIC}))
def test_it_is_trained_anew(name, tmp_path):
  """Small: nothing is learned, so a claim may fail; all are judged and drawn."""
  out = run(name, "--tiny", f"--workdir={tmp_path}")
  judged = re.findall("^(?:PASS|FAIL) ", out.stdout, re.MULTILINE)
  assert len(judged) == len(reproduce.claims_of(name, reproduce.committed(name))), (
      out.stdout + out.stderr)
  for stem in reproduce.committed(name):
    assert sweep_figures.read_csv(tmp_path / f"{stem}.csv"), stem
  assert (tmp_path / "figure.svg").stat().st_size > 10_000


def test_the_command(tmp_path):
  out = run("fig_lognormal", "--tiny", f"--workdir={tmp_path}")
  assert out.returncode == 0, out.stdout + out.stderr
  assert (tmp_path / "data.csv").exists() and (tmp_path / "figure.svg").exists()
  out = run("fig_lognorml")
  assert out.returncode == 1 and "did you mean fig_lognormal" in out.stderr


def test_the_list():
  lines = [line.split("\t") for line in reproduce.listing()]
  assert [line[0] for line in lines] == reproduce.names()
  for name, kind, verdict, path in lines:
    assert kind in ("analytic", "training") and verdict == "PASS", name
    assert (reproduce.HERE.parent / path).exists()
