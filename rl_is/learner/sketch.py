"""Gradients of many losses from one pass: random projections of scores. Floor 3.

For K directions u_k ~ N(0, I), S[t, k] = u_k . grad logp_t. A loss whose
derivative by logp_t is -c_t has the gradient -sum_t c_t grad logp_t, so
u_k . gradient = sum_t c_t S[t, k]: norms and cosines of any number of losses
follow from S, with an error that the spread over the K directions tells.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from rl_is.core.types import Array, Batch, Params
from rl_is.models import scoring
from rl_is.models.transformer import Model

DIRECTIONS = 64


@functools.partial(jax.jit, static_argnames=("model", "directions"))
def token_scores(params: Params, batch: Batch, key: Array, *, model: Model,
                 temperature: Array | float, directions: int = DIRECTIONS) -> Array:
  """S [B, T, K] float32, 0 off the mask."""
  def score(params):
    # Not the kernels with a gradient of their own: they have no forward mode.
    return scoring.score(params, batch, model=model, temperature=temperature,
                         impl="reference").logp

  def along(key):
    u = optax.tree.random_like(key, params)  # standard normal
    return jax.jvp(score, (params,), (u,))[1]

  found = lax.map(along, jax.random.split(key, directions))
  return jnp.where(batch.mask[..., None], jnp.moveaxis(found, 0, -1), 0)


class Estimate(NamedTuple):
  value: float
  se: float  # of the sketch alone


def norm(projected: np.ndarray) -> Estimate:
  """Of the gradient with these projections [..., K]; root mean square over
  what stands before."""
  each = np.mean(np.square(projected, dtype=np.float64),
                 axis=tuple(range(projected.ndim - 1)))
  value = float(np.sqrt(each.mean()))
  se = each.std(ddof=1) / len(each)**0.5
  return Estimate(value, float(se / (2 * value)) if value > 0 else 0.0)


def cosine(a: np.ndarray, b: np.ndarray) -> Estimate:
  """Of two gradients by their projections [K]; NaN if one is 0.

  The error is the delta method's: (1 - c^2) / sqrt(K) for normal projections.
  """
  a, b = np.float64(a), np.float64(b)
  size = np.sqrt(a @ a) * np.sqrt(b @ b)
  if not size > 0:
    return Estimate(float("nan"), float("nan"))
  value = float(a @ b / size)
  return Estimate(value, max(1 - value**2, 0) / len(a)**0.5)
