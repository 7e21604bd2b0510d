"""The device mesh and the two placements that everything uses. Floor 2.

Axes `data`, `fsdp`, `tensor`, always all three; `data` also goes over the slices
of a pod. Batches are split by rows over `data` and `fsdp`; where parameters lie,
`sharding.py` says.
"""

import contextlib
import math

import jax
import numpy as np
from absl import logging
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rl_is.core import checks

AXES = ("data", "fsdp", "tensor")


def make(sizes: dict[str, int], devices=None) -> Mesh:
  """A mesh over `devices` (all by default); one size may be -1: what is left."""
  devices = list(jax.devices() if devices is None else devices)
  shape = _fill([sizes[axis] for axis in AXES], len(devices))
  # Auto, not the default Explicit: under Explicit plain indexing of a sharded
  # embedding is refused.
  return Mesh(_arranged(shape, devices), AXES,
              axis_types=(AxisType.Auto,) * len(AXES))


def _arranged(shape: list[int], devices: list) -> np.ndarray:
  """The devices as neighbours in the mesh that are neighbours in the machine.

  Slices of a pod, between which the network is slow, lie along `data`, whose
  only collective is the sum of gradients.
  """
  data, *others = shape
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  if slices > 1:
    checks.divisible("mesh data", data, "slices", slices)
    return mesh_utils.create_hybrid_device_mesh(
        (data // slices, *others), (slices, 1, 1), devices,
        allow_split_physical_axes=True)
  if devices[0].platform == "tpu":
    try:
      return mesh_utils.create_device_mesh(
          shape, devices, allow_split_physical_axes=True)
    except AssertionError as error:  # no box of whole chips
      logging.warning("mesh: devices are taken in their own order: %s",
                      str(error).splitlines()[0][:200])
  return np.asarray(devices).reshape(shape)


def _fill(shape: list[int], count: int) -> list[int]:
  named = ", ".join(f"{a}={s}" for a, s in zip(AXES, shape))
  if shape.count(-1) > 1 or any(s != -1 and s < 1 for s in shape):
    raise ValueError(f"mesh: expected sizes >= 1 and at most one -1, got {named}")
  known = math.prod(s for s in shape if s != -1)
  if count % known or (-1 not in shape and known != count):
    raise ValueError(f"mesh: {named} multiplies to {known}, but there are "
                     f"{count} devices; set one size to -1")
  return [count // known if s == -1 else s for s in shape]


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
  """The mesh that programs called inside constrain their arrays on."""
  return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def rows(mesh: Mesh) -> NamedSharding:
  """Rows of a batch over the data axes."""
  return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def data_size(mesh: Mesh) -> int:
  """Into how many parts the rows of a batch are split."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def check_rows(mesh: Mesh, what: str, count: int) -> None:
  """The rows divide over the data axes, else both numbers and valid ones."""
  checks.divisible(what, count, "mesh data x fsdp", data_size(mesh))


def describe(mesh: Mesh) -> str:
  kind = mesh.devices.flat[0].device_kind
  sizes = " x ".join(f"{a}={mesh.shape[a]}" for a in AXES)
  return f"{mesh.devices.size} x {kind} ({sizes})"
