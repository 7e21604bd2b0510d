"""Checkpoints through orbax: learner state, queue of batches, position. Floor 2.

A checkpoint is complete or it does not exist: orbax writes to a temporary
directory and renames it, so a run killed while saving resumes from the one
before, which is kept until the new one is committed. The files are written in
the background, of arrays that orbax copied or holds: the next step may have
them.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import lax
import orbax.checkpoint as ocp

from rl_is.core.types import Batch
from rl_is.infra import hosts


@dataclasses.dataclass(frozen=True)
class Saved:
  """What a run needs to go on as if it had never stopped."""

  state: Any  # the learner's, as placed by `abstract_state`
  queue: list[Batch]  # sampled, not yet trained on; oldest first, numpy
  # step, seed, metrics_rows, aggregation, reference; row: see train.py.
  position: dict[str, Any]
  # Cursors of the prompts that are begun and not trained on; see `Asynchronous`.
  begun: dict[str, list[int]] = dataclasses.field(default_factory=dict)


class Checkpoints:
  """Saves and restores `Saved` under `workdir/checkpoints/<step>`."""

  def __init__(self, workdir: str, keep: int | None = None):
    """keep: how many. None: only reads, beside a run that may be saving."""
    self._step = None  # of the one saved or restored last: known to be good
    logging.get_absl_logger().addFilter(_is_told)
    reads = keep is None
    self._manager = ocp.CheckpointManager(
        os.path.join(_absolute(workdir), "checkpoints"),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=not reads, read_only=reads,
            save_interval_steps=0 if reads else 1,
            enable_async_checkpointing=True))
    if not reads:
      hosts.first(self._drop_half_written)

  def save(self, saved: Saved) -> None:
    """Begins to; whether it could be written, the next call or `close` says."""
    step = saved.position["step"]
    if step == self._step:
      return
    position = dict(saved.position, queued=len(saved.queue), begun=saved.begun)
    queue = {str(i): _fields(batch) for i, batch in enumerate(saved.queue)}
    checksum = _checksum(saved.state, queue, position)
    items = dict(state=ocp.args.StandardSave(saved.state),
                 position=ocp.args.JsonSave(dict(position, checksum=checksum)))
    if queue:  # orbax refuses an empty tree
      items["queue"] = ocp.args.StandardSave(queue)
    self._wait()
    self._step = step
    with self._named():
      if step in self._manager.all_steps():  # damaged, or it would not be redone
        self._manager.delete(step)
      # force: the caller decides when; a step is never saved twice.
      self._manager.save(step, args=ocp.args.Composite(**items), force=True)

  def restore_newest(self, abstract_state: Any) -> Saved | None:
    """The newest checkpoint that can be read; None if there is none at all.

    A damaged one is said and passed over; if all are, the newest's error stands.
    """
    failures = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        saved = self.restore(step, abstract_state)
        self._step = step
        return saved
      except Exception as error:  # whatever orbax meets in damaged files
        failures.append(error)
        logging.warning("checkpoint %d of %s cannot be read (%s: %s); trying the "
                        "one before", step, self._manager.directory,
                        type(error).__name__, _first_line(error)[:200])
    if failures:
      raise ValueError(f"{self._manager.directory}: no checkpoint can be read"
                       ) from failures[0]
    return None

  def restore(self, step: int, abstract_state: Any) -> Saved:
    position = self._manager.restore(step, args=ocp.args.Composite(
        position=ocp.args.JsonRestore()))["position"]
    state = self._manager.restore(step, args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state)))["state"]
    stored = {}
    if position["queued"]:
      stored = self._manager.restore(step, args=ocp.args.Composite(
          queue=ocp.args.StandardRestore()))["queue"]
    checksum = position.pop("checksum")
    if checksum != _checksum(state, stored, position):
      raise ValueError("it is not what was saved: its checksum is another")
    queue = [Batch(**jax.tree.map(np.asarray, stored[str(i)]))
             for i in range(position["queued"])]
    return Saved(state, queue, position, position.pop("begun", {}))

  def close(self) -> None:
    try:
      self._wait()
    finally:
      with contextlib.suppress(Exception):  # the failure of above, once more
        self._manager.close()

  def _drop_half_written(self) -> None:
    """What a kill left behind; orbax itself would only never look at it."""
    for path in self._manager.directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
      logging.warning("%s is half written, as by a killed run; removed", path)
      path.rmtree()

  def _wait(self) -> None:
    with self._named():
      self._manager.wait_until_finished()

  @contextlib.contextmanager
  def _named(self):
    """What fails while writing, in one line that says of which checkpoint."""
    reason = None
    try:
      yield
    except (OSError, ValueError, RuntimeError) as error:  # tensorstore's: any
      reason = _first_line(error)
    if reason:  # here, so that orbax's tasks do not live on in its traceback
      raise OSError(f"{self._manager.directory}: cannot save checkpoint "
                    f"{self._step}: {reason}")


def _first_line(error: Exception) -> str:
  return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_told(record) -> bool:
  """False for tracebacks of what orbax raises as well, which `_named` says, and
  for its warning that what was to be read is read."""
  return "orbax" not in record.pathname or not (
      record.exc_info or "is read only" in str(record.msg))


def _fields(batch: Batch) -> dict[str, np.ndarray]:
  """The recorded fields; None (not recorded) is left out, and comes back None."""
  fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
  return {k: np.asarray(v) for k, v in fields.items() if v is not None}


def _checksum(state: Any, queue: Any, position: dict[str, Any]) -> str:
  """Of all that is saved: what is stored of an array, nothing else protects."""
  text = json.dumps([position, digest(queue), int(_sum_of_bits(state))],
                    sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@jax.jit
def _sum_of_bits(tree: Any) -> jax.Array:
  """Where the arrays are, however they are sharded: it is exact in any order.

  Weights that are odd, modulo 2^32: one flipped bit always changes it.
  """
  total = jnp.uint32(0)
  for x in jax.tree.leaves(tree):
    bits = x if x.dtype == bool else lax.bitcast_convert_type(
        x, f"uint{8 * x.dtype.itemsize}")
    place = sum((lax.broadcasted_iota(jnp.uint32, x.shape, i)
                 * jnp.uint32(math.prod(x.shape[i + 1:]) % 2**32)
                 for i in range(x.ndim)), jnp.uint32(0))
    total = 3 * total + jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1),
                                dtype=jnp.uint32)
  return total


def fingerprint(params: Any) -> str:
  """As `digest`, of arrays on devices, also of those that lie on several hosts."""
  names = [(jax.tree_util.keystr(path), str(x.dtype), x.shape) for path, x in
           jax.tree_util.tree_leaves_with_path(params)]
  return f"{digest(names)}-{int(_sum_of_bits(params)):08x}"


def digest(params: Any) -> str:
  """Tells parameters apart: equal for equal names, types and values."""
  out = hashlib.blake2b(digest_size=16)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    leaf = np.asarray(leaf)
    out.update(f"{jax.tree_util.keystr(path)}{leaf.dtype}{leaf.shape}".encode())
    out.update(leaf.tobytes())
  return out.hexdigest()


def save_params(path: str, params: Any) -> None:
  """Parameters alone, for a warm start that several runs share."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(_absolute(path), params)


def restore_params(path: str, abstract_params: Any) -> Any:
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(_absolute(path), abstract_params)


def _absolute(path: str) -> str:
  """As orbax wants it; gs://... is."""
  return str(path) if "://" in str(path) else os.path.abspath(path)
