"""Rollouts on disk as they are trained on: a parquet file a step. Floor 3.

A row is an answer, a column a field of `Batch` (`[T, K]` laid flat): pandas
reads it without us. Beside the fields stand the texts, and what the learner
scored them with. Needs the extra `data`.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from rl_is.core.types import Batch
from rl_is.infra import checkpoint as checkpoint_lib
from rl_is.infra import hosts
from rl_is.infra import workdir as workdir_lib
from rl_is.tasks.tokenizer import Tokenizer

_FORMAT = 2
_META, _CHECKSUM = b"rl_is", b"rl_is_checksum"
# What `objective.prepare` adds and a reader would have to score again.
PREPARED = ("logp_prox", "logp_ref", "version_now", "adv")
# It follows from the others, and is a tree.
_LEFT_OUT = ("weight", "keep", "token_weight")


@dataclasses.dataclass(frozen=True)
class Record:
  """One step's batch, numpy, every bit as it was, and what it was made with."""

  step: int
  batch: Batch
  prompt: list[str]
  answer: list[str]
  meta: dict[str, Any]  # config, constants


class Store:
  """Writes `workdir/rollouts/<step>.parquet`, oldest out when it is full."""

  def __init__(self, workdir: str, *, every: int, max_gb: float,
               tokenizer: Tokenizer, meta: Mapping[str, Any],
               after_step: int = 0):
    """every: steps between two files, 0: none. after_step: a resumed run's
    last; later files go, as their steps come again."""
    self._folder = epath.Path(workdir) / "rollouts"
    self._every, self._max_bytes = every, max_gb * 1e9
    self._tokenizer, self._meta = tokenizer, dict(meta)
    if not hosts.is_first():  # of several processes
      return
    if every:
      _arrow()
      self._folder.mkdir(parents=True, exist_ok=True)
    for path in self._folder.glob(".*.tmp"):
      path.unlink()
    for path in _files(self._folder):
      if int(path.stem) > after_step:
        path.unlink()

  def write(self, step: int, batch: Batch, prepared: Sequence[Batch]) -> None:
    """The batch of this step, if it is due; `prepared`: its minibatches."""
    if not self._every or step % self._every:
      return
    added = {name: np.concatenate(hosts.fetch([getattr(m, name)
                                               for m in prepared]))
             for name in PREPARED if getattr(prepared[0], name) is not None}
    if not hosts.is_first():
      return
    arrow, parquet = _arrow()
    table = _table(arrow, batch.replace(**added), self._tokenizer,
                   dict(self._meta, step=step, format=_FORMAT))
    path = self._folder / f"{step:08d}.parquet"
    with workdir_lib.replacing(path, "rollouts") as temporary:
      with temporary.open("wb") as file:
        parquet.write_table(table, file, compression="zstd")
    self._rotate()

  def _rotate(self) -> None:
    files = _files(self._folder)
    sizes = [path.stat().length for path in files]
    while len(files) > 1 and sum(sizes) > self._max_bytes:
      files.pop(0).unlink()
      sizes.pop(0)


def read(path: str) -> Iterator[Record]:
  """The records of a file, of a folder of them, or of a run's workdir, by step.

  The run may go on meanwhile: a file that it has rotated away is passed over
  with a word.

  Raises:
    ValueError: nothing is there, or a file is no such record, whole and
      undamaged.
  """
  path = epath.Path(path)
  if path.is_file():
    yield _record(path)
    return
  folder = path / "rollouts" if (path / "rollouts").exists() else path
  files = _files(folder)
  if not files:
    raise ValueError(f"{path}: no rollouts; a run writes them with "
                     "config.store.every=1")
  for file in files:
    try:
      yield _record(file)
    except FileNotFoundError:
      logging.warning("%s is gone: the run has rotated it away", file)


def _files(folder: epath.Path) -> list[epath.Path]:
  """By step. What else lies there is not ours to read, or to remove."""
  return sorted(path for path in folder.glob("*.parquet")
                if path.stem.isdecimal())


def _arrow():
  try:
    import pyarrow  # an extra: who asks for it pays
    from pyarrow import parquet
  except ImportError as error:
    raise ImportError("config.store needs pyarrow: pip install 'rl_is[data]'"
                      ) from error
  return pyarrow, parquet


def _table(arrow, batch: Batch, tokenizer: Tokenizer, meta: dict):
  columns, shapes = {}, {}
  for field in dataclasses.fields(batch):
    x = getattr(batch, field.name)
    if x is None or field.name in _LEFT_OUT:
      continue
    x = np.ascontiguousarray(x)
    shapes[field.name] = x.shape
    # From an array, NaN stays NaN: it is a value of its own, not a null.
    flat = arrow.array(x.reshape(-1))
    columns[field.name] = flat if x.ndim == 1 else (
        arrow.FixedSizeListArray.from_arrays(flat, math.prod(x.shape[1:])))
  columns |= _texts(batch, tokenizer)
  text = json.dumps(dict(meta, shapes=shapes), default=str)
  table = arrow.table(columns)
  return table.replace_schema_metadata(
      {_META: text, _CHECKSUM: _checksum(text, table, shapes)})


def _texts(batch: Batch, tokenizer: Tokenizer) -> dict[str, list[str]]:
  """Of each row. A prompt goes on after an EOS, as chat formats have them."""
  asked = batch.valid & ~batch.mask & ~np.isin(batch.tokens, tokenizer.eos_ids)
  return {name: [tokenizer.decode(ids[on])
                 for ids, on in zip(batch.tokens, which)]
          for name, which in (("prompt", asked), ("answer", batch.mask))}


def _fields(table, shapes: Mapping[str, Sequence[int]]
            ) -> dict[str, np.ndarray]:
  def field(name: str, shape: Sequence[int]) -> np.ndarray:
    column = table.column(name).combine_chunks()
    flat = column if len(shape) == 1 else column.flatten()
    return flat.to_numpy(zero_copy_only=False).reshape(shape)

  return {name: field(name, shape) for name, shape in shapes.items()}


def _checksum(text: str, table, shapes: Mapping[str, Sequence[int]]) -> str:
  """Of all that a file holds: parquet itself reads a flipped bit as data."""
  texts = table.select(["prompt", "answer"]).to_pydict()
  return checkpoint_lib.digest([text, texts, _fields(table, shapes)])


def _record(path: epath.Path) -> Record:
  _, parquet = _arrow()
  try:
    with path.open("rb") as file:
      # With threads the process may abort as it ends, or hang:
      # https://github.com/apache/arrow/issues/34314, 33975
      table = parquet.read_table(file, use_threads=False)
    found = table.schema.metadata or {}
    meta = json.loads(found.get(_META, b"{}"))
    if meta.get("format") != _FORMAT:
      raise ValueError(f"format: expected {_FORMAT}, got {meta.get('format')}")
    shapes = meta.pop("shapes")
    checksum = _checksum(found[_META].decode(), table, shapes)
    if checksum != found[_CHECKSUM].decode():
      raise ValueError("it is not what was written: its checksum is another")
    return Record(meta["step"], Batch(**_fields(table, shapes)),
                  table.column("prompt").to_pylist(),
                  table.column("answer").to_pylist(), meta)
  except FileNotFoundError:
    raise
  except Exception as error:  # whatever arrow meets in a damaged file
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(f"{path}: cannot read rollouts: {reason}") from error
