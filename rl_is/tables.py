"""Rows of plain values as files and on the screen. Floor 4."""

import csv
import math
import numbers
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

Rows = Sequence[Mapping]


def write_csv(rows: Rows, path: str) -> None:
  """A column a name that any row has; empty where a row has not."""
  names = dict.fromkeys(name for row in rows for name in row)
  with open(path, "w", newline="") as file:
    writer = csv.DictWriter(file, list(names), restval="")
    writer.writeheader()
    writer.writerows(rows)


def show(rows: Rows, title: str, hidden: Sequence[str] = ()) -> None:
  """On standard output; `x_se` stands in brackets behind `x`."""
  names = [name for name in dict.fromkeys(n for row in rows for n in row)
           if not name.endswith("_se") and name not in hidden]
  table = Table(title=title)
  for name in names:
    text = any(isinstance(row.get(name), str) for row in rows)
    table.add_column(name, justify="left" if text else "right", no_wrap=True)
  for row in rows:
    table.add_row(*(_cell(row.get(n), row.get(f"{n}_se")) for n in names))
  Console(width=10_000).print(table)  # as wide as it is: nothing is cut


def _cell(x, error) -> str:
  if x is None or (isinstance(x, numbers.Real) and math.isnan(x)):
    return "-"
  if isinstance(x, (str, bool, int)):
    return str(x)
  return f"{x:.3g}" if error is None else f"{x:.3g} ({error:.1g})"
