"""Hands versioned weights from the learner to the sampler. Floor 3."""

import jax
import jax.numpy as jnp

from rl_is.core.types import Params

# A real copy: the learner donates its state, and a buffer that the sampler
# still reads must not go with it. (`astype` to the same dtype would alias.)
_copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))


class Publisher:
  """Holds the newest weights; `version` counts optimizer updates.

  What was handed out before stays whole for as long as somebody reads it: a
  generator goes on under its weights while newer ones arrive.
  """

  def __init__(self, placement: jax.sharding.Sharding | None = None):
    """placement: where the sampler wants them, device to device; None: as is."""
    self._placement = placement
    self._latest: tuple[int, Params] | None = None  # one name: read at once

  def publish(self, version: int, params: Params) -> None:
    """Takes a copy. A version is published once, and they only grow."""
    newest = self._latest[0] if self._latest else -1
    if version <= newest:
      raise ValueError(f"publish: version: expected > {newest}, got {version}")
    copy = _copy(params)
    if self._placement is not None:
      copy = jax.device_put(copy, self._placement)
    self._latest = version, copy

  def latest(self) -> tuple[int, Params]:
    if self._latest is None:
      raise RuntimeError("publisher: no weights were published yet")
    return self._latest
