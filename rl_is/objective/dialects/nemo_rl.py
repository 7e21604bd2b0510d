"""NeMo-RL's ClippedPGLossConfig and adv_estimator. Floor 2."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import (
    Corrections, Dialect, Surrogate, maybe, read)
from rl_is.objective.spec import Options, Spec


def nemo_rl(config: Mapping[str, Any]) -> Dialect:
  """NeMo-RL's loss, and the keys of its adv_estimator beside it or in a block.

  At commit 7ea279ab (2026-08-22).
  """
  c = read("nemo_rl", _flat(config), dict(
      disable_ppo_ratio=False, ratio_clip_min=0.2, ratio_clip_max=0.2,
      ratio_clip_c=maybe(float), sequence_level_importance_ratios=False,
      use_cispo=False,
      force_on_policy_ratio=False, use_importance_sampling_correction=False,
      truncated_importance_sampling_type=maybe(str),
      truncated_importance_sampling_ratio=maybe(float),
      truncated_importance_sampling_ratio_min=maybe(float),
      use_on_policy_kl_approximation=False,
      reference_policy_kl_penalty=maybe(float, default=0.01),
      reference_policy_kl_type="k3", 
      kl_input_clamp_value=maybe(float, default=20.0),
      kl_output_clamp_value=maybe(float, default=10.0), token_level_loss=True,
      adv_estimator="grpo",
      use_leave_one_out_baseline=True, normalize_rewards=True,
      minus_baseline=True),
            dict(positive_example_nll_weight=0.0, use_kl_in_reward=False))
  _refuse(c)
  surrogate, constants = _nemo_surrogate(c)
  corrections, more = _nemo_corrections(c)
  constants |= more
  advantage, options, more = _nemo_advantage(c)
  constants |= more
  if not c["token_level_loss"]:
    options += (("empty", "count"),)
  spec = Spec(
      surrogate, "current" if c["force_on_policy_ratio"] else "proximal",
      "sequence_mean" if c["sequence_level_importance_ratios"] else "token",
      corrections=corrections, advantage=advantage,
      aggregation=("token_mean" if c["token_level_loss"] else
                   "sequence_mean_token_mean"), options=options)
  if c["reference_policy_kl_penalty"]:
    spec = dataclasses.replace(
        spec, regularizer=c["reference_policy_kl_type"], kl_weight=(
            "behaviour" if c["use_on_policy_kl_approximation"] else "score"))
    constants |= dict(kl_coef=c["reference_policy_kl_penalty"],
                      kl_clamp=base.unless_none(c["kl_input_clamp_value"]),
                      max_kl=base.unless_none(c["kl_output_clamp_value"]))
  return Dialect(spec, constants, (
      "no clamp of log ratios; a weight that overflows becomes 0, not the cap",
      "sequence means count rows without a token",
      "dropped tokens stay in the denominator",
      "by default the std of an advantage leaves the sample out, as its mean",
      "the KL term's gradient has the score function's part too"))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
  """The adv_estimator block's keys beside the others."""
  block = config.get("adv_estimator")
  if not isinstance(block, Mapping):
    return dict(config)
  inside = {"adv_estimator" if key == "name" else key: value
            for key, value in block.items()}
  return {**{k: v for k, v in config.items() if k != "adv_estimator"}, **inside}


def _refuse(c: Mapping[str, Any]) -> None:
  """Combinations that it asserts against, and what it would not look at."""
  if c["sequence_level_importance_ratios"] and c["token_level_loss"]:
    raise ValueError("nemo_rl: sequence_level_importance_ratios needs "
                     "token_level_loss=false")
  if c["use_cispo"]:
    for key in ("disable_ppo_ratio", "ratio_clip_c", "force_on_policy_ratio",
                "sequence_level_importance_ratios"):
      if c[key]:
        raise ValueError(f"nemo_rl: use_cispo excludes {key}={c[key]!r}")
  if c["disable_ppo_ratio"] and c["force_on_policy_ratio"]:
    raise ValueError("nemo_rl: disable_ppo_ratio excludes "
                     "force_on_policy_ratio=True")
  if (c["truncated_importance_sampling_type"] == "seq-mask-tis"
      and c["sequence_level_importance_ratios"]):
    raise ValueError("nemo_rl: truncated_importance_sampling_type='seq-mask-tis' "
                     "excludes sequence_level_importance_ratios=True")
  for part in ("type", "ratio", "ratio_min"):
    key = f"truncated_importance_sampling_{part}"
    if c[key] is not None and not c["use_importance_sampling_correction"]:
      raise ValueError(f"nemo_rl: {key}={c[key]!r} needs "
                       "use_importance_sampling_correction=true")
  kind, ratio = (c[f"truncated_importance_sampling_{part}"]
                 for part in ("type", "ratio"))
  if kind is not None and ratio is None:
    raise ValueError("nemo_rl: truncated_importance_sampling_ratio is needed by "
                     f"truncated_importance_sampling_type={kind!r}")
  checks.choice("nemo_rl: reference_policy_kl_type",
                c["reference_policy_kl_type"], ("k1", "k2", "k3"))


def _nemo_advantage(c: Mapping[str, Any]
                    ) -> tuple[str, Options, dict[str, float]]:
  """Those that need a value, a teacher or several rewards are the caller's."""
  name = c["adv_estimator"]
  checks.choice("nemo_rl: adv_estimator", name, (
      "grpo", "reinforce_plus_plus", "gdpo", "gae", "opd"))
  leave_out, norm = c["use_leave_one_out_baseline"], c["normalize_rewards"]
  if name == "grpo" and norm:
    return "grpo", (("std", "leave_one_out" if leave_out else "unbiased"),), {}
  if name == "grpo":
    return "rloo" if leave_out else "dr_grpo", (), {}
  if name == "reinforce_plus_plus":
    whiten = dict(ddof=0.0, var_eps=0.0)
    if c["minus_baseline"]:
      return "reinforce_pp_baseline", (), whiten
    return "reinforce_pp", (), dict(whiten, gamma=1.0)
  return "given", (), {}


def _nemo_surrogate(c: Mapping[str, Any]) -> Surrogate:
  if c["disable_ppo_ratio"]:
    return "pg", {}
  bounds = c["ratio_clip_min"], c["ratio_clip_max"]
  surrogate, constants = (base.cispo(*bounds) if c["use_cispo"] else
                          base.clip(*bounds, c["ratio_clip_c"]))
  return surrogate, dict(constants, max_log_ratio=math.inf)


def _nemo_corrections(c: Mapping[str, Any]) -> Corrections:
  if not c["use_importance_sampling_correction"]:
    return (), {}
  num = "current" if c["force_on_policy_ratio"] else "proximal"
  level = ("sequence_sum" if c["sequence_level_importance_ratios"] else "token")
  kind = c["truncated_importance_sampling_type"]
  if kind is None:
    chain, constants = base.truncated(None, math.inf, num=num, level=level)
  else:
    chain, constants = base.named_weight(
        "nemo_rl: truncated_importance_sampling_type", kind,
        c["truncated_importance_sampling_ratio_min"],
        c["truncated_importance_sampling_ratio"], num, level)
  return chain, dict(constants, max_log_ratio=math.inf)
