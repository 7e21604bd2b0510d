"""NeMo-RL."""

import numpy as np

from parity.cases import Case, Peer, Rule, ignored


def _valid_rows_only(case: Case, value: str) -> None:
  """Rows without a token do not count."""
  case.replace["options"] = ()


def _constant_advantage(case: Case, value: float) -> None:
  case.x["adv"] = np.full_like(case.x["adv"], value)


def _overflowed_sequence_weight(case: Case) -> bool:
  """exp(sum(old - behaviour)) beyond float32 becomes 0 there, stays here."""
  if not (case.config.get("sequence_level_importance_ratios")
          and case.config.get("use_importance_sampling_correction")):
    return False
  x = case.x
  return (((x["old"] - x["behav"]) * x["mask"]).sum(axis=1) > 80).any()


PEER = Peer(
    "nemo_rl",
    harness={"sample_mask": _valid_rows_only, "adv_const": _constant_advantage,
             "rewards": ignored},
    rules=(
        Rule("a supervised term on good answers is no off-policy objective",
             lambda case: case.config.get("positive_example_nll_weight")),
        Rule("a weight that overflows is turned into 0 by nan_to_num",
             _overflowed_sequence_weight)),
    skipped={"is_weight": "the gradient of the same case is this weight"})
