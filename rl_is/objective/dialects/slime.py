"""slime's arguments. Floor 2."""

import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import (
    Corrections, Dialect, Surrogate, maybe, read)
from rl_is.objective.spec import Correction, Options, Spec

_DEFAULTS = dict(
    advantage_estimator="grpo", eps_clip=0.2, eps_clip_high=maybe(float),
    eps_clip_c=maybe(float), use_opsm=False, opsm_delta=1e-4,
    use_rollout_logprobs=False, use_tis=False, tis_clip=2.0,
    tis_clip_low=maybe(float, default=0.0),
    custom_tis_function_path=maybe(str), use_kl_loss=False,
    kl_loss_coef=maybe(float, default=0.0),
    kl_loss_type="k1", use_unbiased_kl=False,
    entropy_coef=maybe(float, default=0.0),
    calculate_per_token_loss=False, gamma=1.0, normalize_advantages=False,
    rewards_normalization=True, grpo_std_normalization=True)
_ONLY = dict(kl_coef=0.0, loss_type="policy_loss")  # a penalty in the reward
_ESTIMATORS = ("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus",
               "reinforce_plus_plus_baseline")
# Its own functions of a weight, by the end of their path.
_WEIGHTS = {"vanilla_tis_function": base.truncated,
            "icepop_function": base.masked}
_KL = {"k1": ("k1", math.inf), "k2": ("k2", math.inf), "k3": ("k3", math.inf),
       "low_var_kl": ("k3", 10.0)}


def slime(config: Mapping[str, Any]) -> Dialect:
  """slime's arguments, at commit 624b824a (2026-08-21)."""
  c = read("slime", config, _DEFAULTS, _ONLY)
  checks.choice("slime: advantage_estimator", c["advantage_estimator"],
                _ESTIMATORS)
  anchor = "behaviour" if c["use_rollout_logprobs"] else "proximal"
  surrogate, constants = _surrogate(c)
  corrections, more = _corrections(c, anchor)
  constants |= more
  regularizer, more = _regularizer(c)
  constants |= more
  advantage, options, norm = _advantage(c)
  if c["entropy_coef"]:
    constants["entropy_coef"] = c["entropy_coef"]
  if not c["calculate_per_token_loss"]:
    options += (("empty", "count"),)
  spec = Spec(
      surrogate, anchor,
      "sequence_mean" if c["advantage_estimator"] == "gspo" else "token",
      corrections=corrections, advantage=advantage, advantage_norm=norm,
      aggregation=("token_mean" if c["calculate_per_token_loss"] else
                   "sequence_mean_token_mean"),
      regularizer=regularizer, kl_weight=(
          anchor if regularizer != "none" and c["use_unbiased_kl"] else "none"),
      options=options)
  return Dialect(spec, dict(constants, max_log_ratio=math.inf), (
      "no clamp of log ratios",
      "sequence means count rows without a token; a mean over tokens counts "
      "such a row as one token",
      "dropped tokens stay in the denominator",
      "cispo has a floor of 1 - eps_clip too",
      "only low_var_kl is bounded, after its ratio"))


def _surrogate(c: Mapping[str, Any]) -> Surrogate:
  low = c["eps_clip"]
  high = base.unless_none(c["eps_clip_high"], low)
  if c["advantage_estimator"] == "cispo":
    return base.cispo(low, high)
  return base.clip(low, high, c["eps_clip_c"])


def _corrections(c: Mapping[str, Any], anchor: str) -> Corrections:
  chain, constants = (), {}
  if c["use_opsm"]:
    chain += (Correction("opsm", "current", den=anchor),)
    constants["opsm_delta"] = c["opsm_delta"]
  if not c["use_tis"]:
    return chain, constants
  if c["use_rollout_logprobs"]:
    raise ValueError("slime: use_rollout_logprobs excludes use_tis: the ratio "
                     "is to the sampler already")
  path = c["custom_tis_function_path"] or "vanilla_tis_function"
  name = path.rpartition(".")[2]
  checks.choice("slime: custom_tis_function_path", name, _WEIGHTS)
  weight, more = _WEIGHTS[name](c["tis_clip_low"] or None,
                                     c["tis_clip"])
  return chain + weight, constants | more


def _regularizer(c: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
  if not (c["use_kl_loss"] and c["kl_loss_coef"]):
    return "none", {}
  checks.choice("slime: kl_loss_type", c["kl_loss_type"], _KL)
  name, limit = _KL[c["kl_loss_type"]]
  return name, dict(kl_coef=c["kl_loss_coef"], kl_clamp=math.inf, max_kl=limit)


def _advantage(c: Mapping[str, Any]) -> tuple[str, Options, str]:
  """(advantage, its options, whitening); a value's are the caller's."""
  name, whitened = c["advantage_estimator"], c["normalize_advantages"]
  norm = "tokens" if whitened else "none"
  if name == "ppo":
    return "given", (), "none"
  if name == "reinforce_plus_plus":  # discounts at the holes of a row too
    return ("reinforce_pp" if whitened and c["gamma"] == 1 else "given"), (), (
        "none")
  if not c["rewards_normalization"]:
    return "reward", (), norm
  if name == "reinforce_plus_plus_baseline" or not c["grpo_std_normalization"]:
    return "dr_grpo", (), norm
  return "grpo", (), norm
