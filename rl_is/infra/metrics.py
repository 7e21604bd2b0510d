"""Metrics on disk: one JSON object a step, and TensorBoard if asked. Floor 2."""

import json
import math
import os

from etils import epath

from rl_is.infra import hosts
from rl_is.infra import workdir as workdir_lib


class MetricsWriter:
  """Appends to `metrics.jsonl`; on resume drops the rows that will come again.

  NaN means "nothing was counted" and becomes null: never 0, never left to a
  reader that does not know NaN.
  """

  def __init__(self, workdir: str, *, after_step: int = 0,
               tensorboard: bool = False):
    self._path = epath.Path(workdir) / "metrics.jsonl"
    kept = [row for row in read(workdir) if row["step"] <= after_step]
    if [row["step"] for row in kept] != list(range(1, after_step + 1)):
      raise ValueError(
          f"{self._path}: expected a row for each of steps 1 to {after_step}, "
          f"which the checkpoint is of, got {len(kept)}")
    self.last = kept[-1] if kept else {}
    self._text = "".join(json.dumps(row) + "\n" for row in kept)
    self._file = self._board = None
    if not hosts.is_first():  # of several processes the first writes
      return
    workdir_lib.write_text(self._path, self._text)
    if "://" not in str(workdir):
      self._file = self._path.open("a")
    self._board = _board(workdir, after_step) if tensorboard else None

  def write(self, step: int, values: dict[str, float]) -> None:
    if not hosts.is_first():
      return
    row = {name: _finite(value) for name, value in values.items()}
    line = json.dumps({"step": step, **row}) + "\n"
    if self._file:
      with workdir_lib.writing(self._path):
        self._file.write(line)
        self._file.flush()
    else:  # nothing is added to what lies in an object store
      self._text += line
      workdir_lib.write_text(self._path, self._text)
    if self._board:
      for name, value in row.items():
        if isinstance(value, (int, float)):
          self._board.add_scalar(name, value, step)

  def close(self) -> None:
    if self._file:
      with workdir_lib.writing(self._path):  # what a full disk did not take
        self._file.close()
    if self._board:
      self._board.close()


def read(workdir: str) -> list[dict]:
  """The whole rows of `metrics.jsonl`; a last line that a kill cut is left out."""
  path = epath.Path(workdir) / "metrics.jsonl"
  if not path.exists():
    return []
  lines = path.read_text().split("\n")
  rows = []
  for number, line in enumerate(lines[:-1], 1):  # only whole lines
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}, line {number}: not a row of metrics: {error}"
                       ) from None
  return rows


def _finite(value):
  if isinstance(value, str) or value is None:
    return value
  return value if math.isfinite(value) else None


def _board(workdir: str, after_step: int):
  try:
    from tensorboardX import SummaryWriter
  except ImportError as error:
    raise ImportError("config.track.tensorboard needs tensorboardX: "
                      "pip install -e '.[track]'") from error
  # purge_step hides the points of steps that will be written again.
  return SummaryWriter(os.path.join(workdir, "tensorboard"),
                       purge_step=after_step + 1)
