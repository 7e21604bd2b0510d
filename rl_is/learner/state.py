"""What one optimizer update reads and writes. Floor 3."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rl_is.core.types import Array, Params, pytree
from rl_is.infra import sharding
from rl_is.models.transformer import Model
from rl_is.objective.compose import Objective


@pytree
class State:
  params: Params
  opt_state: Any
  version: Array  # int32: optimizer updates done; skipped ones count too
  # Average of the parameters, where the objective's proximal policy is one.
  ewma: Params | None = None
  # The gradient of the update before, for its cosine; 0 before the first.
  last_grad: Params | None = None


def create(params: Params, tx: optax.GradientTransformation,
           objective: Objective | None = None) -> State:
  """The state at version 0, with what the objective has the learner keep."""
  ewma = last_grad = None
  # A copy: the state is donated, and a buffer can be given away once.
  if objective is not None and objective.spec.proximal == "ewma":
    ewma = jax.tree.map(jnp.copy, params)
  if objective is not None and objective.full_diagnostics:
    last_grad = jax.tree.map(jnp.zeros_like, params)
  return State(params, tx.init(params), jnp.zeros((), jnp.int32), ewma,
               last_grad)


def init(key: Array, model: Model, tx: optax.GradientTransformation,
         objective: Objective | None = None) -> State:
  """A fresh state."""
  return create(model.init(key), tx, objective)


def born(make: Callable[..., State], model: Model, mesh: Mesh
         ) -> Callable[..., State]:
  """`make` compiled so that the state is never anywhere but where it lives."""
  def make_there(*args):
    places = sharding.place(jax.eval_shape(make, *args), model.rules, mesh)
    return jax.jit(make, out_shardings=places)(*args)

  return make_there
