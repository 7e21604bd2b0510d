"""OpenRLHF."""

import math

import jax
import jax.numpy as jnp

from parity.cases import Case, Helper, Peer, summed
from rl_is.ops import aggregate, regularizers, values


def _global_tokens(case: Case, count: float) -> None:
  """A count over all ranks in place of this batch's."""
  case.scale *= case.mask.sum() / count


def _ranks(case: Case, count: int) -> None:
  case.scale *= count


def _kl(case: Case):
  fn = getattr(regularizers, case.config["kl"])
  return summed(case, lambda logp: fn(
      logp, case["ref"], case["mask"] != 0, max_kl=10.0))


def _value_loss(case: Case):
  """ValueLoss: the mean over tokens, or over rows of those."""
  clip, mask = case.config.get("clip_eps"), case["mask"] != 0
  mean = (aggregate.token_mean if case.config.get("token_level_loss", True) else
          aggregate.sequence_mean_token_mean)

  def total(value):
    token = values.value_loss(value, case["values"], case["returns"], mask,
                              clip=math.inf if clip is None else clip).loss
    return mean(token, mask).value()

  loss, grad = jax.value_and_grad(total)(case["vpred"])
  return {"loss": loss, "grad_vpred": grad, "grad": jnp.zeros_like(grad)}


PEER = Peer(
    "openrlhf",
    harness={"batch_num_tokens": _global_tokens, "dp_size": _ranks},
    helpers=(Helper(lambda case: "kl" in case.config, _kl),
             Helper(lambda case: "grad_vpred" in case.arrays, _value_loss)))
