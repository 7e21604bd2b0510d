"""Hands versioned weights from the learner to the sampler. Floor 3."""

import jax
import jax.numpy as jnp

from rl_is.core.types import Params

# A real copy: the learner donates its state, and a buffer that the sampler
# still reads must not go with it. (`astype` to the same dtype would alias.)
_copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))


class Publisher:
  """Holds the newest weights; `version` counts optimizer updates."""

  def __init__(self):
    self._version, self._params = -1, None

  def publish(self, version: int, params: Params) -> None:
    """Takes a copy. A version is published once, and they only grow."""
    if version <= self._version:
      raise ValueError(f"publish: version: expected > {self._version}, got "
                       f"{version}")
    self._version, self._params = version, _copy(params)

  def latest(self) -> tuple[int, Params]:
    if self._params is None:
      raise RuntimeError("publisher: no weights were published yet")
    return self._version, self._params
