"""What one optimizer update reads and writes. Floor 3."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl_is.core.types import Array, Params, pytree
from rl_is.models.transformer import Model


@pytree
class State:
  params: Params
  opt_state: Any
  version: Array  # int32: optimizer updates done; skipped ones count too
  # Average of the parameters, where the objective's proximal policy is one.
  ewma: Params | None = None


def create(params: Params, tx: optax.GradientTransformation,
           with_ewma: bool = False) -> State:
  # A copy: the state is donated, and a buffer can be given away once.
  ewma = jax.tree.map(jnp.copy, params) if with_ewma else None
  return State(params, tx.init(params), jnp.zeros((), jnp.int32), ewma)


def init(key: Array, model: Model, tx: optax.GradientTransformation,
         with_ewma: bool = False) -> State:
  """A fresh state; under jit with out_shardings it is born where it lives."""
  return create(model.init(key), tx, with_ewma)
