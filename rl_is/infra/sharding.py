"""Placements from rules: (regex, PartitionSpec) pairs beside the parameters. Floor 2.

A rule speaks of the end of a leaf's path, so the moments of an optimizer and the
averages of a state lie as their parameters do. The first one that matches holds;
a leaf that none matches is an error, a scalar needs none.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Sequence[tuple[str, PartitionSpec]]


def place(tree: Any, rules: Rules, mesh: Mesh, without: Sequence[str] = ()
          ) -> Any:
  """The tree with a `NamedSharding` for each leaf (arrays or shapes).

  without: mesh axes that are gathered: ("fsdp",) is the layout for decoding.
  """
  def leaf(path, x):
    spec = _without(_spec(path, x.shape, rules), without)
    _check(path, x.shape, spec, mesh)
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(leaf, tree)


def shaped(tree: Any, rules: Rules, mesh: Mesh) -> Any:
  """Shapes that know their placement: for a restore, or to compile with."""
  return jax.tree.map(
      lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
      tree, place(tree, rules, mesh))


def constrain(tree: Any, rules: Rules) -> Any:
  """Inside jit, on the mesh that is set: the leaves as `place` has them."""
  if jax.sharding.get_abstract_mesh().empty:
    return tree
  return jax.tree_util.tree_map_with_path(
      lambda path, x: lax.with_sharding_constraint(
          x, _spec(path, x.shape, rules)), tree)


def _spec(path, shape: tuple[int, ...], rules: Rules) -> PartitionSpec:
  if not shape:
    return PartitionSpec()
  name = _name(path)
  for pattern, spec in rules:
    if re.search(rf"(^|[/_]){pattern}$", name):
      return spec
  raise ValueError(f"sharding: no rule for {name} of shape {shape}; rules end in "
                   f"{', '.join(pattern for pattern, _ in rules)}")


def _name(path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _without(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
  return PartitionSpec(*(None if part in axes else part for part in spec))


def _check(path, shape, spec: PartitionSpec, mesh: Mesh) -> None:
  for i, (size, part) in enumerate(zip(shape, spec)):
    names = (part,) if isinstance(part, str) else part or ()
    count = math.prod(mesh.shape[name] for name in names)
    if size % count:
      fits = [n for n in range(1, count + 1) if size % n == 0]
      raise ValueError(
          f"mesh: {' x '.join(names)} = {count} does not divide axis {i} of "
          f"{_name(path)} {shape}; the nearest size that does is {fits[-1]}")
