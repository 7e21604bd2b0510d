"""The page of a sweep: whole, of itself, and safe to open."""

import json
import re

import pytest

from experiments import report

SUMMARY = """point,objective.constants.cap,seed,steps,failed,final,note
aa,1,0,6,,0.5,<b>x</b>
aa,inf,1,6,step 3: broke,0.25,
"""


@pytest.fixture
def workdir(tmp_path):
  (tmp_path / "summary.csv").write_text(SUMMARY)
  (tmp_path / "claims.json").write_text(json.dumps(
      [[True, "a < b"], [False, "c > d"]]))
  (tmp_path / "figure.svg").write_text(
      '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg viewBox="0 0 1 1"></svg>')
  done = tmp_path / "points" / "aa-seed0"
  done.mkdir(parents=True)
  (done / "done.json").write_text(json.dumps(dict(
      git="0123456789" * 4 + "+changes", config=dict(seed=0))))
  return tmp_path


def test_the_page_has_all_and_asks_nobody(workdir, capsys):
  report.main([str(workdir)])
  text = (workdir / "report.html").read_text()
  assert capsys.readouterr().out.strip().endswith("report.html")
  assert not re.search(r'(src|href)\s*=|url\(|@import|fetch\(', text)
  assert "2 runs, 1 points, 2 seeds; code 012345678901+changes." in text
  assert '<span class="pass">PASS</span> a &lt; b' in text
  assert '<span class="fail">FAIL</span> c &gt; d' in text
  assert '<figure><svg viewBox="0 0 1 1"></svg></figure>' in text
  assert text.count("<tr>") == 3
  assert "&lt;b&gt;x&lt;/b&gt;" in text and "<b>x</b>" not in text
  assert "<td>inf</td>" in text and "<button>cap</button>" in text


def test_nothing_there_is_said(tmp_path):
  with pytest.raises(SystemExit, match="no summary.csv; experiments.run_sweep"):
    report.main([str(tmp_path)])
  with pytest.raises(SystemExit, match="usage"):
    report.main([])
