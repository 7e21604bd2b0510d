"""TRL."""

import jax.numpy as jnp
import numpy as np

from parity import cases
from parity.cases import Case, Helper, Peer, Rule, ignored


def _always(case: Case) -> None:
  """The harness's own defaults: grpo, and the width as the longest answer."""
  case.config.setdefault("loss_type", "grpo")
  case.config.setdefault("max_completion_length", case.mask.shape[1])


def _num_items(case: Case, count: float) -> None:
  """Tokens of all ranks in place of this batch's."""
  if case.config["loss_type"] in ("dapo", "cispo", "vespo"):
    case.scale *= case.mask.sum() / count


def _sampling(case: Case, given: bool) -> None:
  case.config["use_vllm"] = given


def _advantages(case: Case):
  case.x["mask"] = np.ones_like(case.x["mask"])  # empty rows keep their reward
  return {"advantages": cases.advantages_of(PEER, case)[:, 0]}


def _ratio(case: Case, prepared):
  """[B, T], or [B, 1] for a weight of the whole row: 1 for an empty one."""
  weight = jnp.where(prepared.keep, prepared.weight, 0.0)
  if case.config["vllm_importance_sampling_mode"].startswith("token"):
    return weight
  return jnp.where(prepared.mask.any(axis=1), weight.max(axis=1), 1.0)[:, None]


def _is_weighed_by_a_sequence(case: Case) -> bool:
  return bool(case.config.get("use_bias_correction_kl")
              and case.config.get("beta")
              and case.config.get("importance_sampling_level", "token") != "token")


PEER = Peer(
    "trl", always=_always,
    harness={"num_items": _num_items, "opsm_sampling": _sampling,
             "gspo_token_trainer": ignored},
    helpers=(Helper(lambda case: "advantages" in case.arrays, _advantages),),
    rules=(
        Rule("which tokens count depends on the current entropy: refused",
             lambda case: case.config.get("top_entropy_quantile", 1.0) != 1.0),
        Rule("the correction moves VESPO's anchor: refused",
             lambda case: case.config.get("loss_type") == "vespo"
             and case.config.get("vllm_importance_sampling_correction")),
        Rule("the KL term weighed by a sequence's ratio: refused",
             _is_weighed_by_a_sequence)),
    arrays={"importance_sampling_ratio": _ratio})
