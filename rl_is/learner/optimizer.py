"""AdamW or SGD whose numbers are data: a sweep over them compiles once. Floor 3.

`learning_rate`, `weight_decay` and `grad_clip` come with each update, from the
constants; the moments' decays are structure.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl_is.core import checks
from rl_is.core.types import Array, Params


@functools.lru_cache(maxsize=None)  # equal optimizers are one static argument
def make(name: str, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8
         ) -> optax.GradientTransformation:
  """The direction of a step; `step` scales it."""
  table = dict(adamw=lambda: optax.scale_by_adam(b1, b2, eps),
               sgd=optax.identity)
  checks.choice("optimizer.name", name, table)
  return table[name]()


def clip_scale(norm: Array, max_norm: Array | float) -> Array:
  """min(1, max_norm / norm): 1 for a zero gradient, also with max_norm 0.

  optax.clip_by_global_norm gives NaN for 0 / 0, and turns one inf into zeros
  everywhere else; non-finite norms are the step's business, not ours.
  """
  over = norm > max_norm
  return jnp.where(over, max_norm / jnp.where(over, norm, 1), 1.0)


def step(tx: optax.GradientTransformation, grads: Params, opt_state: Any,
         params: Params, constants: dict[str, Array]) -> tuple[Params, Any]:
  """One update with decoupled weight decay (Loshchilov and Hutter, 2019)."""
  updates, opt_state = tx.update(grads, opt_state, params)
  lr, decay = constants["learning_rate"], constants["weight_decay"]
  moved = jax.tree.map(
      lambda p, u: (p - lr * (u + decay * p)).astype(p.dtype), params, updates)
  return moved, opt_state


def warm_up(learning_rate: float, update: Array, updates: int) -> Array:
  """Linear from 1/updates of the rate at update 0 to all of it; then constant."""
  return learning_rate * jnp.minimum(1.0, (update + 1) / max(updates, 1))
