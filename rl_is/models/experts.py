"""Mixture of experts without capacity: no token is dropped. Floor 2.

Tokens are sorted by expert and multiplied in ragged groups. Shape suffixes: B
batch, T tokens, D embed, E experts, F mlp of one expert, k experts of a token,
N = B T k copies of tokens.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from rl_is.core.types import Array
from rl_is.kernels import logits as logits_lib

_ROWS, _WIDTH = ("data", "fsdp"), "tensor"


def route(x_BTD: Array, router_DE: Array, count: int,
          given_BTk: Array | None = None, precision: str = "highest"
          ) -> tuple[Array, Array]:
  """The experts of each token, most likely first, and their shares.

    p = softmax(x W);  share_e = p_e / sum of the chosen p

  given: experts to take instead (a replay), -1 where there are none. The shares
  are always of this router, so that it is trained.
  """
  # A flip of nearly equal experts is no small error: float32 throughout.
  p_BTE = jax.nn.softmax(
      logits_lib.head_logits(x_BTD, router_DE, precision), axis=-1)
  _, chosen_BTk = lax.top_k(p_BTE, count)
  if given_BTk is not None:
    chosen_BTk = jnp.where(given_BTk >= 0, given_BTk, chosen_BTk)
  p_BTk = jnp.take_along_axis(p_BTE, chosen_BTk, axis=-1)
  return chosen_BTk, p_BTk / p_BTk.sum(axis=-1, keepdims=True)


def mix(x_BTD: Array, routes_BTk: Array, share_BTk: Array, gate_EDF: Array,
        up_EDF: Array, down_EFD: Array, act) -> Array:
  """sum_e share_e down_e(act(gate_e x) * up_e x), over each token's experts.

  On the mesh that is set every device sorts its own rows, with its own part of
  the widths F of all experts.
  """
  def local(x, routes, share, gate, up, down):
    y = _mix(x, routes, share, gate, up, down, act)
    return y if alone else lax.psum(y, _WIDTH)

  alone = jax.sharding.get_abstract_mesh().empty
  if not alone:
    local = jax.shard_map(
        local, in_specs=(P(_ROWS),) * 3 + (P(None, None, _WIDTH),) * 2 + (
            P(None, _WIDTH),), out_specs=P(_ROWS))
  return local(x_BTD, routes_BTk, share_BTk, gate_EDF, up_EDF, down_EFD)


def _mix(x_BTD, routes_BTk, share_BTk, gate_EDF, up_EDF, down_EFD, act):
  k = routes_BTk.shape[-1]
  routes_N = routes_BTk.reshape(-1)
  order_N = jnp.argsort(routes_N)
  sizes_E = jnp.bincount(routes_N, length=gate_EDF.shape[0])
  x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])[order_N // k]
  h_NF = act(lax.ragged_dot(x_ND, gate_EDF, sizes_E)) * lax.ragged_dot(
      x_ND, up_EDF, sizes_E)
  y_ND = lax.ragged_dot(h_NF, down_EFD, sizes_E)
  # Back in the order of the tokens, so the sum over k is no scatter.
  y_BTkD = y_ND[jnp.argsort(order_N)].reshape(*routes_BTk.shape, -1)
  y_BTD = jnp.einsum("BTkD,BTk->BTD", y_BTkD, share_BTk,
                     preferred_element_type=share_BTk.dtype)
  return y_BTD.astype(x_BTD.dtype)
