"""Rollouts on disk as they are trained on: a parquet file a step. Floor 3.

A row is an answer, a column a field of `Batch`: pandas reads it without us.
Beside the fields stand the texts, and what the learner scored them with. Needs
the extra `data`.
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
from rl_is.tasks.tokenizer import Tokenizer

_FORMAT = 1
_META = b"rl_is"
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
    if every:
      _arrow()
      self._folder.mkdir(parents=True, exist_ok=True)
    for path in self._folder.glob("*.parquet*") if self._folder.exists() else ():
      if path.suffix == ".tmp" or int(path.stem) > after_step:
        path.unlink()

  def write(self, step: int, batch: Batch, prepared: Sequence[Batch]) -> None:
    """The batch of this step, if it is due; `prepared`: its minibatches."""
    if not self._every or step % self._every:
      return
    arrow, parquet = _arrow()
    added = {name: np.concatenate([np.asarray(getattr(m, name))
                                   for m in prepared])
             for name in PREPARED if getattr(prepared[0], name) is not None}
    table = _table(arrow, batch.replace(**added), self._tokenizer,
                   dict(self._meta, step=step, format=_FORMAT))
    path = self._folder / f"{step:08d}.parquet"
    temporary = self._folder / f"{path.name}.tmp"
    try:
      with temporary.open("wb") as file:
        parquet.write_table(table, file, compression="zstd")
      temporary.replace(path)
    except OSError as error:
      raise OSError(f"{path}: cannot write rollouts: {error}") from None
    self._rotate()

  def _rotate(self) -> None:
    files = sorted(self._folder.glob("*.parquet"))
    sizes = [path.stat().length for path in files]
    while len(files) > 1 and sum(sizes) > self._max_bytes:
      files.pop(0).unlink()
      sizes.pop(0)


def read(path: str) -> Iterator[Record]:
  """The records of a file, of a folder of them, or of a run's workdir, by step.

  The run may go on meanwhile: a file that it has rotated away is passed over
  with a word.

  Raises:
    ValueError: nothing is there, or a file that is no such record.
  """
  path = epath.Path(path)
  if path.is_file():
    yield _record(path)
    return
  folder = path / "rollouts" if (path / "rollouts").exists() else path
  files = sorted(folder.glob("*.parquet"))
  if not files:
    raise ValueError(f"{path}: no rollouts; a run writes them with "
                     "config.store.every=1")
  for file in files:
    try:
      yield _record(file)
    except FileNotFoundError:
      logging.warning("%s is gone: the run has rotated it away", file)


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
  texts = lambda which: [tokenizer.decode(ids[on]) for ids, on in
                         zip(batch.tokens, which)]
  columns["prompt"] = arrow.array(texts(batch.valid & ~batch.mask))
  columns["answer"] = arrow.array(texts(batch.mask))
  text = json.dumps(dict(meta, shapes=shapes), default=str)
  return arrow.table(columns, metadata={_META: text.encode()})


def _record(path: epath.Path) -> Record:
  arrow, parquet = _arrow()
  try:
    with path.open("rb") as file:
      table = parquet.read_table(file)
  except arrow.ArrowInvalid as error:
    raise ValueError(f"{path}: not a whole parquet file: {error}") from None
  meta = json.loads((table.schema.metadata or {}).get(_META, b"{}"))
  if meta.get("format") != _FORMAT:
    raise ValueError(f"{path}: format: expected rollouts of format {_FORMAT}, "
                     f"got {meta.get('format')}")

  def field(name: str, shape: list[int]) -> np.ndarray:
    column = table.column(name).combine_chunks()
    flat = column if len(shape) == 1 else column.flatten()
    return flat.to_numpy(zero_copy_only=False).reshape(shape)

  batch = Batch(**{name: field(name, shape)
                   for name, shape in meta.pop("shapes").items()})
  return Record(meta["step"], batch, table.column("prompt").to_pylist(),
                table.column("answer").to_pylist(), meta)
