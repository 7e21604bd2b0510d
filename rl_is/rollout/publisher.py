"""Hands versioned weights from the learner to the sampler. Floor 3."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rl_is.core.types import Params
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import hosts, sharding

# A real copy: the learner donates its state, and a buffer that the sampler
# still reads must not go with it. (`astype` to the same dtype would alias.)
_copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))


class Weights(NamedTuple):
  """Of one version, where the sampler is."""

  version: int
  params: Params  # what the sampler samples with
  learner: Params  # the learner's own; the same arrays where no dial is on


class Publisher:
  """Holds the newest weights; `version` counts optimizer updates.

  What was handed out before stays whole for as long as somebody reads it: a
  generator goes on under its weights while newer ones arrive.
  """

  def __init__(self, mesh: Mesh | None = None, rules: sharding.Rules = (),
               transform: Callable[[Params], Params] | None = None):
    """What the sampler is handed.

    mesh: where it wants them, device to device, as `rules` say but gathered over
      fsdp: a decode reads all of them for each token. None: as is.
    transform: makes its parameters of the learner's; None: the same.
    """
    self._mesh, self._rules, self._transform = mesh, rules, transform
    self._latest: Weights | None = None  # one name: read at once

  def publish(self, version: int, params: Params) -> None:
    """Takes a copy. A version is published once, and they only grow."""
    newest = self._latest.version if self._latest else -1
    if version <= newest:
      raise ValueError(f"publish: version: expected > {newest}, got {version}")
    copy = _copy(params)
    if self._mesh is not None:
      copy = hosts.move(copy, sharding.place(
          copy, self._rules, self._mesh, without=("fsdp",)), self._mesh)
    changed = copy
    if self._transform is not None:  # of the copy: what it leaves, it may alias
      with mesh_lib.use(self._mesh):
        changed = self._transform(copy)
    self._latest = Weights(version, changed, copy)

  def latest(self) -> Weights:
    if self._latest is None:
      raise RuntimeError("publisher: no weights were published yet")
    return self._latest
