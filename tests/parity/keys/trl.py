"""TRL."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from parity import cases
from parity.cases import Case, Helper, Peer, Rule, ignored
from rl_is.objective import dialects


def _always(case: Case) -> None:
  """The harness's own defaults: grpo, and the width as the longest answer."""
  case.config.setdefault("loss_type", "grpo")
  case.config.setdefault("max_completion_length", case.mask.shape[1])
  _sampling(case, case.config.pop("opsm_sampling", False))


def _sampling(case: Case, given: bool) -> None:
  """Whether the sampler's log-probs were given, besides the ratio to them."""
  config = case.config
  corrected = bool(config.get("vllm_importance_sampling_correction"))
  config.update(use_vllm=given or corrected,
                vllm_importance_sampling_correction=corrected)
  if corrected and not given and _supported(case):
    case.replace["corrections"] = tuple(
        dataclasses.replace(c, den="proximal") if c.name == "opsm" else c
        for c in dialects.translate("trl", {
            key: value for key, value in config.items()
            if key not in PEER.harness}).spec.corrections)


def _num_items(case: Case, count: float) -> None:
  """Tokens of all ranks in place of this batch's."""
  if case.config["loss_type"] in ("dapo", "cispo", "vespo"):
    case.scale *= case.mask.sum() / count


def _advantages(case: Case):
  case.x["mask"] = np.ones_like(case.x["mask"])  # empty rows keep their reward
  return {"advantages": cases.advantages_of(PEER, case)[:, 0]}


def _ratio(case: Case, prepared):
  """[B, T], or [B, 1] for a weight of the whole row: 1 for an empty one."""
  weight = jnp.where(prepared.keep, prepared.weight, 0.0)
  if _mode(case).startswith("token"):
    return weight
  return jnp.where(prepared.mask.any(axis=1), weight.max(axis=1), 1.0)[:, None]


def _mode(case: Case) -> str:
  return case.config.get("vllm_importance_sampling_mode", "sequence_mask")


def _is(case: Case, loss_type: str) -> bool:
  return case.config.get("loss_type") == loss_type


def _corrects(case: Case) -> bool:
  return bool(case.config.get("vllm_importance_sampling_correction"))


def _sums_the_padding(case: Case) -> bool:
  return _is(case, "luspo") and bool(
      case.config.get("importance_sampling_level", "token") != "sequence"
      or case.config.get("beta")
      or _corrects(case) and _mode(case).startswith("token"))


def _has_two_levels(case: Case) -> bool:
  return bool(_is(case, "vespo") and case.config.get("beta")
              and case.config.get("use_bias_correction_kl"))


RULES = (
    Rule("which tokens count depends on the current entropy: refused",
         lambda case: case.config.get("top_entropy_quantile", 1.0) != 1.0),
    Rule("the correction moves VESPO's anchor: refused",
         lambda case: _is(case, "vespo") and _corrects(case)),
    Rule("VESPO's ratio and that of the KL term have two levels: refused",
         _has_two_levels),
    Rule("LUSPO by token sums the padding too: refused", _sums_the_padding))


def _supported(case: Case) -> bool:
  return not any(rule.when(case) for rule in RULES)


PEER = Peer(
    "trl", always=_always,
    harness={"num_items": _num_items, "gspo_token_trainer": ignored},
    helpers=(Helper(lambda case: "advantages" in case.arrays, _advantages),),
    rules=RULES, arrays={"importance_sampling_ratio": _ratio})
