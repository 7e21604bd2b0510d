"""NeMo-RL."""

import math

import numpy as np

from parity import cases
from parity.cases import Case, Helper, Peer, Rule, ignored
from rl_is.core.types import Advantages
from rl_is.ops import advantages, regularizers, token_advantages, values


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


def _kl_penalty(case: Case, logp):
  """calculate_kl, with its default clamps."""
  c, off = case.config, lambda x: math.inf if x is None else x
  return getattr(regularizers, c.get("kl_type", "k3"))(
      logp, case["ref"], case["mask"] != 0,
      max_log_ratio=off(c.get("input_clamp", 20.0)),
      max_kl=off(c.get("output_clamp", 10.0)))


def _kl(case: Case):
  return cases.summed(case, lambda logp: _kl_penalty(case, logp))


def _grpo(case: Case):
  """The baseline: what an undivided advantage leaves of the reward."""
  mean = advantages.rloo if case.config.get(
      "use_leave_one_out_baseline", True) else advantages.dr_grpo
  undivided = mean(case["rewards"], cases.first_rows(case.x["group"])).adv
  return {"advantages": cases.advantages_of(PEER, case),
          "baseline": case["rewards"] - undivided}


def _reinforce_pp(case: Case):
  c = dict(case.config)
  if not c.pop("use_kl_in_reward", False):
    case.config = dict(adv_estimator="reinforce_plus_plus",
                       minus_baseline=c.get("minus_baseline", True))
    return {"advantages": cases.advantages_of(PEER, case)}
  centre = (advantages.dr_grpo if c.get("minus_baseline", True) else
            advantages.reward)
  row = centre(case["rewards"], cases.first_rows(case.x["group"]))
  token = row.adv[:, None] - c["kl_coef"] * _kl_penalty(case, case["old"])
  return {"advantages": token_advantages.batch_norm(
      Advantages(token, row.keep), case["mask"], ddof=0.0, var_eps=0.0).adv}


def _gae(case: Case):
  c, mask = case.config, case["mask"] != 0
  got = values.gae(values.at_last(case["rewards"], mask), case["values"], mask,
                   gamma=c["gamma"], lam=c["lam"])
  adv = values.whiten(got.adv, mask) if c.get("normalize", True) else got.adv
  return {"advantages": adv, "returns": got.target}


PEER = Peer(
    "nemo_rl",
    harness={"sample_mask": _valid_rows_only, "adv_const": _constant_advantage,
             "rewards": ignored},
    helpers=(
        Helper(lambda case: "kl" in case.arrays, _kl),
        Helper(lambda case: "returns" in case.arrays, _gae),
        Helper(lambda case: "baseline" in case.arrays, _grpo),
        Helper(lambda case: "advantages" in case.arrays, _reinforce_pp)),
    rules=(
        Rule("a supervised term on good answers is no off-policy objective",
             lambda case: case.config.get("positive_example_nll_weight")),
        Rule("a weight that overflows is turned into 0 by nan_to_num",
             _overflowed_sequence_weight)),
    skipped={"is_weight": "the gradient of the same case is this weight",
             "std": "the advantages of the same case are divided by it"})
