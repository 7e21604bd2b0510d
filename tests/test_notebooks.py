"""The notebooks run as written, small; what is committed shows its figures."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# In place of the notebook's own display.
HEAD = "import matplotlib; matplotlib.use('Agg'); Image = print\n"


def cells(path, kind="code"):
  return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def source(cell):
  return "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path):
  code = HEAD + "\n".join(source(c) for c in cells(path)).replace(
      "from IPython.display import Image", "")
  out = subprocess.run(
      [sys.executable, "-c", code], cwd=path.parent, text=True, capture_output=True,
      env=dict(os.environ, RL_IS_TINY="1", XLA_FLAGS=""))
  assert out.returncode == 0, out.stderr[-3000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_its_figures_and_tables_are_in_it(path):
  outputs = [o for c in cells(path) for o in c["outputs"]]
  images = [o for o in outputs if "image/png" in o.get("data", {})]
  tables = [o for o in outputs if "text/html" in o.get("data", {})]
  assert len(images) >= 4 and len(tables) >= 3
  assert not [o for o in outputs if o["output_type"] == "error"]
  # No path of the machine that it was run on.
  shown = json.dumps([{k: v for k, v in o.get("data", o).items() if k != "image/png"}
                      for o in outputs])
  code = "".join(source(c) for c in cells(path))
  assert not re.findall(r"(?<![\w.:<~])/\w[\w.-]*/\w", shown + code)
  # Run from the first cell to the last, in one go.
  counts = [c["execution_count"] for c in cells(path)]
  assert counts == list(range(1, len(counts) + 1))


def test_links_exist():
  for path in NOTEBOOKS:
    for cell in cells(path, "markdown"):
      for link in re.findall(r"\]\((?!http)([^)]+)\)", source(cell)):
        assert (path.parent / link).exists(), link
