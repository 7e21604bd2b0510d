"""Several processes that are one run: who is first, what all of them agree on.

Every process runs the same program on the same data; only the first writes what
is not an array. Where a generator runs beside the learner it works on its own
process's devices alone, and asks the others nothing. With one process nothing
here does anything. Floor 2.
"""

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

_FAILED = "rl_is/failed/"
_LOOK = 0.5  # seconds between two looks whether another process has failed


def start(coordinator: str, processes: int, process: int, timeout: float
          ) -> None:
  """Joins the others; before anything else of jax.

  coordinator: host:port of process 0; "auto": all three as the environment of a
  TPU pod or a cluster says.

  Raises:
    ValueError: some are missing after `timeout` seconds.
  """
  # SIGTERM is ours: all processes stop after the same step (`preemption`).
  jax.config.update("jax_enable_preemption_service", False)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  if coordinator == "auto":
    jax.distributed.initialize()
  else:
    if not 0 <= process < processes:
      raise ValueError(f"--process: expected 0 to {processes - 1}, got {process}")
    _meet(coordinator, processes, process, timeout)
    jax.distributed.initialize(coordinator, processes, process,
                               initialization_timeout=max(1, int(timeout)),
                               heartbeat_timeout_seconds=_heartbeat(timeout))
  threading.Thread(target=_watch, args=(_client(),), daemon=True).start()


def _heartbeat(timeout: float) -> int:
  """After so many seconds of silence a process is taken for dead."""
  return int(min(max(timeout, 10), 100))


def _meet(coordinator: str, processes: int, process: int, timeout: float
          ) -> None:
  """All are there, or each says how many were: jax would abort instead."""
  host, _, port = coordinator.rpartition(":")
  if not host or not port.isdigit():
    raise ValueError(f"--coordinator: expected host:port, got {coordinator!r}")
  deadline = time.monotonic() + timeout
  place = (host, int(port) + 1)  # beside jax's own
  seen = _gather(place, processes, deadline) if process == 0 else (
      _report(place, deadline))
  if seen != processes:
    raise ValueError(f"expected {processes} processes, saw {seen} within "
                     f"{timeout:g} s at {coordinator}")


def _gather(place: tuple[str, int], processes: int, deadline: float) -> int:
  """Process 0: waits for the others, and tells them how many there are."""
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(socket.create_server(
        ("", place[1]), backlog=processes))
    others = []
    while len(others) < processes - 1 and time.monotonic() < deadline:
      server.settimeout(max(0.01, deadline - time.monotonic()))
      with contextlib.suppress(TimeoutError):
        others.append(stack.enter_context(server.accept()[0]))
    for other in others:
      other.sendall(str(len(others) + 1).encode() + b"\n")
    return len(others) + 1


def _report(place: tuple[str, int], deadline: float) -> int:
  """The number that process 0 saw; 1 if that is not there itself."""
  while time.monotonic() < deadline:
    try:
      with socket.create_connection(place, timeout=1) as connection:
        connection.settimeout(max(0.01, deadline + 5 - time.monotonic()))
        with connection.makefile() as file:
          return int(file.readline() or 1)
    except OSError:
      time.sleep(0.1)
  return 1


def _client():
  from jax._src import distributed  # the key-value store has no public name
  return distributed.global_state.client


def _watch(client) -> None:
  """Ends this process when another one has failed, and says which."""
  while True:
    time.sleep(_LOOK)
    try:
      failed = client.key_value_dir_get(_FAILED)
    except Exception as error:  # the service went with the process that had it
      _end(f"process {jax.process_index()}: the coordinator is gone: "
           f"{str(error).splitlines()[0][:100]}")
    for name, reason in failed:
      if name != f"{_FAILED}{jax.process_index()}":
        _end(f"process {jax.process_index()}: process {name.rpartition('/')[2]} "
             f"failed: {reason}")


def _end(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
  os._exit(1)  # not `exit`: jax would wait for the others, who cannot come


@contextlib.contextmanager
def together() -> Iterator[None]:
  """What fails inside ends all processes; each says which one failed."""
  try:
    yield
  except Exception as error:
    if is_alone():
      raise
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    mine = jax.process_index()
    logging.exception("process %d failed", mine)
    print(f"process {mine}: error: {reason}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
      _client().key_value_set(f"{_FAILED}{mine}", reason)
    if is_first():
      time.sleep(4 * _LOOK)  # it has the store: let the others read it
    os._exit(1)


def is_alone(mesh: Mesh | None = None) -> bool:
  """One process; or a mesh of this one's own devices, beside those of others."""
  return jax.process_count() == 1 or (
      mesh is not None and len({d.process_index for d in mesh.devices.flat}) == 1)


def is_first() -> bool:
  return jax.process_index() == 0


def first(fn: Callable[[], Any]) -> None:
  """The first process does it, then all go on."""
  if is_first():
    fn()
  if not is_alone():
    multihost_utils.sync_global_devices(f"first:{fn.__qualname__}")


def place(tree: Any, where: Sharding) -> Any:
  """Host arrays, the same everywhere, on the mesh; each process feeds its own."""
  if is_alone():
    return jax.device_put(tree, where)
  return jax.tree.map(lambda x: jax.make_array_from_callback(
      np.shape(x), where, lambda index, x=np.asarray(x): x[index]), tree)


def fetch(tree: Any) -> Any:
  """Numpy, whole, on every process."""
  if is_alone():
    return jax.device_get(tree)

  def one(x):
    if not isinstance(x, jax.Array):
      return x
    if not x.is_fully_addressable and not x.is_fully_replicated:
      x = _whole(x)
    return np.asarray(x)

  return jax.tree.map(one, tree)


def _whole(x: jax.Array) -> jax.Array:
  everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
  return jax.jit(lambda x: x, out_shardings=everywhere)(x)


def move(tree: Any, where: Any, mesh: Mesh) -> Any:
  """Device to device. What lies on all processes, onto a mesh of this one's own
  devices, is gathered first: then all of them call this at once."""
  if not is_alone() and is_alone(mesh):
    tree = jax.tree.map(lambda x: (
        x if x.is_fully_replicated else _whole(x)).addressable_data(0), tree)
  return jax.device_put(tree, where)


def share(rows: int, mesh: Mesh | None = None) -> range:
  """The rows of what was made on `mesh` that are this process's to work on."""
  n, i = (1, 0) if is_alone(mesh) else (jax.process_count(), jax.process_index())
  return range(rows * i // n, rows * (i + 1) // n)


def union(part: np.ndarray, rows: int, mesh: Mesh | None = None) -> np.ndarray:
  """What each process has of its `share`, put together, on all of them."""
  if is_alone(mesh):
    return part
  longest = -(-rows // jax.process_count())
  padded = np.zeros((longest, *part.shape[1:]), part.dtype)
  padded[:len(part)] = part
  every = multihost_utils.process_allgather(padded)
  n = jax.process_count()
  return np.concatenate([every[i][:rows * (i + 1) // n - rows * i // n]
                         for i in range(n)])


def everyones(value: Any) -> list:
  """What each process has, by process, on all of them: anything that pickles."""
  if is_alone():
    return [value]
  mine = np.frombuffer(pickle.dumps(value), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(len(mine)))
  padded = np.zeros(max(lengths), np.uint8)
  padded[:len(mine)] = mine
  every = multihost_utils.process_allgather(padded)
  return [pickle.loads(x[:n].tobytes()) for x, n in zip(every, lengths)]


def largest(value: int) -> int:
  """Over all processes: what one of them knows, all do."""
  if is_alone():
    return value
  return int(np.max(multihost_utils.process_allgather(np.int32(value))))
