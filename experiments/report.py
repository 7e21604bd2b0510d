"""One HTML page of a sweep, with nothing from elsewhere: to look at, to send.

  python -m experiments.report runs/tis_cap

Claims if there are (`claims.json`, [[holds, sentence], ...]), the SVG figures of
the directory, the table of all points with sort and filter, the configs, and
what code made them. Floor 5.
"""

import glob
import html
import json
import os
import sys
from collections.abc import Mapping, Sequence

from experiments import sweep_figures

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem;
  max-width: 72rem; color: #1a1a1a; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
figure {{ margin: 1rem 0; }} figure svg {{ max-width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums;
  white-space: nowrap; }}
th, td {{ padding: .25rem .6rem; text-align: right;
  border-bottom: 1px solid #ddd; }}
th {{ cursor: pointer; position: sticky; top: 0; background: #f4f4f4; }}
th button {{ all: unset; cursor: pointer; }}
th button:focus-visible {{ outline: 2px solid #0072B2; }}
.pass {{ color: #00694b; font-weight: 700; }}
.fail {{ color: #b03a00; font-weight: 700; }}
input {{ font: inherit; box-sizing: border-box; padding: .3rem .5rem; width: 100%; max-width: 24rem; }}
pre {{ overflow-x: auto; background: #f7f7f7; padding: .6rem; }}
</style></head><body>
<h1>{title}</h1>
<p>{about}</p>
{claims}{figures}
<h2>Points</h2>
<p><label>Filter: <input id="filter" placeholder="text in any column"></label>
<span id="count"></span></p>
<div class="scroll"><table id="points"><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div>
<h2>Config of the first point</h2><details><summary>show</summary>
<pre>{config}</pre></details>
<script>
const table = document.getElementById("points"), body = table.tBodies[0];
const rows = [...body.rows], count = document.getElementById("count");
const value = (row, i) => {{
  const text = row.cells[i].textContent, number = parseFloat(text);
  return text === "" ? -Infinity : text === "inf" ? Infinity
    : isNaN(number) ? text : number; }};
let sorted = [-1, 1];
table.tHead.addEventListener("click", event => {{
  const cell = event.target.closest("th"); if (!cell) return;
  const i = cell.cellIndex;
  sorted = [i, sorted[0] === i ? -sorted[1] : 1];
  rows.sort((a, b) => {{ const x = value(a, i), y = value(b, i);
    return sorted[1] * (x < y ? -1 : x > y ? 1 : 0); }});
  body.append(...rows);
  for (const th of table.tHead.rows[0].cells) th.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", sorted[1] > 0 ? "ascending" : "descending");
}});
function show() {{
  const text = document.getElementById("filter").value.toLowerCase();
  let n = 0;
  for (const row of rows) {{
    row.hidden = !row.textContent.toLowerCase().includes(text);
    n += !row.hidden; }}
  count.textContent = n + " of " + rows.length;
}}
document.getElementById("filter").addEventListener("input", show);
show();
</script></body></html>
"""


def page(workdir: str) -> str:
  """The text of the page.

  Raises:
    ValueError: nothing there has been finished.
  """
  summary = os.path.join(workdir, "summary.csv")
  if not os.path.exists(summary):
    raise ValueError(f"{workdir}: no summary.csv; experiments.run_sweep writes it")
  rows = sweep_figures.read_csv(summary)
  if not rows or not {"point", "seed"} <= rows[0].keys():
    raise ValueError(f"{summary}: expected a row a run with columns point and seed, "
                     "as experiments.run_sweep writes it")
  records = []
  for file in sorted(glob.glob(os.path.join(workdir, "points", "*", "done.json"))):
    with open(file) as text:
      records.append(json.load(text))
  commits = sorted({r["git"][:12] + r["git"][40:] for r in records})
  seeds = len({row["seed"] for row in rows})
  return _PAGE.format(
      title=html.escape(os.path.basename(os.path.normpath(workdir))),
      about=html.escape(
          f"{len(rows)} runs, {len({r['point'] for r in rows})} points, {seeds} "
          f"seeds; code {', '.join(commits) or 'unknown'}."),
      claims=_claims(workdir), figures=_figures(workdir),
      head="".join(f'<th scope="col"><button>{html.escape(_short(name))}'
                   "</button></th>" for name in rows[0]),
      body="".join(_row(row) for row in rows),
      config=html.escape(json.dumps(records[0]["config"], indent=1)
                         if records else ""))


def _short(name: str) -> str:
  return name.rpartition(".")[2] if name.startswith("objective.") else name


def _row(row: Mapping) -> str:
  cell = lambda x: ("" if x is None else f"{x:.0f}" if isinstance(x, float) and x.is_integer()
                    and abs(x) < 1e15 else f"{x:.4g}" if isinstance(x, float)
                    else html.escape(str(x)))
  return "<tr>" + "".join(f"<td>{cell(x)}</td>" for x in row.values()) + "</tr>"


def _claims(workdir: str) -> str:
  file = os.path.join(workdir, "claims.json")
  if not os.path.exists(file):
    return ""
  with open(file) as text:
    claims: Sequence = json.load(text)
  items = "".join(
      f'<li><span class="{"pass" if holds else "fail"}">'
      f'{"PASS" if holds else "FAIL"}</span> {html.escape(sentence)}</li>'
      for holds, sentence in claims)
  return f"<h2>Claims</h2><ul>{items}</ul>"


def _figures(workdir: str) -> str:
  """Inline, without the XML heads: nothing is fetched."""
  out = []
  for file in sorted(glob.glob(os.path.join(workdir, "*.svg"))):
    with open(file) as text:
      svg = text.read()
    out.append(f'<figure>{svg[svg.index("<svg"):]}</figure>')
  return "".join(out)


def main(argv=None) -> None:
  argv = sys.argv[1:] if argv is None else argv
  if len(argv) != 1 or argv[0].startswith("-"):
    sys.exit("usage: python -m experiments.report WORKDIR")
  try:
    text = page(argv[0])
  except ValueError as error:
    sys.exit(f"error: {error}")
  path = os.path.join(argv[0], "report.html")
  with open(path, "w") as file:
    file.write(text)
  print(path)


if __name__ == "__main__":
  main()
