"""slime."""

import jax.numpy as jnp

from parity.cases import Case, Helper, Peer
from rl_is.ops import values

FUNCTIONS = {"tis": "vanilla_tis_function", "icepop": "icepop_function"}


def _outer_code(case: Case) -> None:
  """The loss is a sum: what divides it by samples or tokens is not called."""
  case.scale *= (case.mask.sum() if case.config.get("calculate_per_token_loss")
                 else len(case.mask))
  if case.config.get("use_kl_loss"):
    case.config.setdefault("kl_loss_coef", 0.1)
    case.config.setdefault("kl_loss_type", "low_var_kl")


def _tis(case: Case, name: str) -> None:
  case.config["use_tis"] = True
  case.config["custom_tis_function_path"] = FUNCTIONS[name]


def _gae(case: Case):
  """Over all positions: it knows no mask."""
  got = values.gae(
      case["reward_tok"], case["values"], jnp.ones_like(case["mask"]),
      gamma=case.config.get("gamma", 1.0),
      lam=case.config.get("lam", case.config.get("lambd", 1.0)))
  return {"advantages": got.adv, "returns": got.target,
          "advantages_chunked": got.adv}


PEER = Peer(
    "slime",
    always=_outer_code,
    harness={"tis": _tis},
    helpers=(Helper(lambda case: "advantages" in case.arrays, _gae),))
