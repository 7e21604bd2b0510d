"""TorchRL."""

import numpy as np

from parity.cases import Case, Helper, Peer, Rule
from rl_is.ops import values

KL = ("kl_to_ref_coeff", "kl_to_inference_coeff")


def _stands_for_the_sampler(case: Case, name: str) -> None:
  case.x["behav"] = case.x[name]


def _two_policies(case: Case) -> None:
  """A loss without `prev` has `old` for the sampler; no entropy bonus."""
  if "loss" not in case.arrays:
    return
  if "prev" not in case.config:
    _stands_for_the_sampler(case, "old")
  case.config.setdefault("entropy_bonus", False)
  for name in KL:  # a mean over all positions
    if case.config.get(name) is not None:
      case.config[name] *= float(case.mask.mean())


def _seen(case: Case):
  """Its recursions have no mask."""
  return np.ones_like(case.mask)


def _gae(case: Case):
  got = values.gae(case["reward_tok"], case["values"], _seen(case),
                   gamma=case.config["gamma"], lam=case.config["lmbda"])
  return {"advantages": got.adv, "value_target": got.target}


def _vtrace(case: Case):
  cap = case.config.get("rho_thresh", 1.0)
  got = values.vtrace(
      case["old"], case["behav"], case["reward_tok"], case["values"],
      _seen(case), gamma=case.config["gamma"], rho_bar=cap, pg_bar=cap,
      c_bar=case.config.get("c_thresh", 1.0), max_log_ratio=float("inf"))
  return {"advantages": got.adv, "vs": got.target}


def _two_kl_terms_or_by_row(case: Case) -> bool:
  c = case.config
  on = [bool(c.get("kl_to_ref_coeff") and c["kl_to_ref_coeff"] > 0),
        bool(c.get("kl_to_inference_coeff"))]
  return all(on) or any(on) and c.get("aggregation") == "prompt_mean"


PEER = Peer(
    "torchrl",
    always=_two_policies,
    harness={"prev": _stands_for_the_sampler},
    helpers=(Helper(lambda case: "vs" in case.arrays, _vtrace),
             Helper(lambda case: "value_target" in case.arrays, _gae)),
    rules=(
        Rule("CISPO without a gradient where it clips: no CISPO",
             lambda case: case.config.get("cls") == "CISPOLoss"),
        Rule("a denominator that the current policy moves",
             lambda case: (case.config.get("kl_mask_threshold") or 0) > 0),
        Rule("a KL term by another aggregation, or two of them",
             _two_kl_terms_or_by_row)))
