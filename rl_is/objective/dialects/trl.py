"""TRL's GRPOConfig. Floor 2."""

import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import (
    Corrections, Dialect, Surrogate, maybe, read)
from rl_is.objective.spec import Correction, Options, Spec

_DEFAULTS = dict(
    loss_type="dapo", importance_sampling_level="token", epsilon=0.2,
    epsilon_high=maybe(float), delta=maybe(float),
    beta=maybe(float, default=0.0), use_bias_correction_kl=False,
    max_completion_length=maybe(float, default=256),
    scale_rewards=maybe(str, bool, default="group"),
    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
    vespo_k_pos=2.0, vespo_lambda_pos=3.0,
    vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    # False and True there, and both must hold; one that is named here implies
    # the other.
    use_vllm=maybe(bool), vllm_importance_sampling_correction=maybe(bool),
    vllm_importance_sampling_mode="sequence_mask",
    vllm_importance_sampling_clip_max=maybe(float, default=3.0),
    vllm_importance_sampling_clip_min=maybe(float),
    off_policy_mask_threshold=maybe(float))
_ONLY = dict(top_entropy_quantile=1.0)
_LEVELS = {"token": "token", "sequence": "sequence_mean",
           "sequence_token": "sequence_mean_token"}
_COUNT = (("empty", "count"),)
_AGGREGATIONS = {
    "grpo": ("sequence_mean_token_mean", _COUNT),
    "sapo": ("sequence_mean_token_mean", _COUNT),
    "dr_grpo": ("constant_length", _COUNT),
    "luspo": ("sequence_mean_token_sum", _COUNT),
    "bnpo": ("token_mean", ()), "dapo": ("token_mean", ()),
    "cispo": ("token_mean", ()), "vespo": ("token_mean", ())}
_SCALES = {"group": ("grpo", ()), True: ("grpo", ()),
           "batch": ("grpo", (("std", "batch"),)),
           "none": ("dr_grpo", ()), False: ("dr_grpo", ())}
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_VESPO_BOUND = -math.log(1e-8)  # nats: its least W; its largest has phi = 0


def trl(config: Mapping[str, Any]) -> Dialect:
  """TRL's configuration, at commit f2cd5771."""
  c = read("trl", config, _DEFAULTS, _ONLY)
  for key, allowed in dict(loss_type=_AGGREGATIONS, scale_rewards=_SCALES,
                           importance_sampling_level=_LEVELS,
                           vllm_importance_sampling_mode=_MODES).items():
    checks.choice(f"trl: {key}", c[key], allowed)
  _refuse(c)
  kind = c["loss_type"]
  surrogate, constants = _surrogate(c, kind)
  corrections, more = _corrections(c)
  constants |= more
  aggregation, options = _AGGREGATIONS[kind]
  if aggregation == "constant_length":
    constants["length"] = c["max_completion_length"]
  advantage, more_options = _SCALES[c["scale_rewards"]]
  if advantage == "grpo":
    constants["std_eps"] = 1e-4
  regularizer, kl_weight, kl_options, more = _regularizer(c)
  constants |= more
  return Dialect(Spec(
      surrogate, "proximal",
      "sequence_sum" if kind == "vespo" else
      _LEVELS[c["importance_sampling_level"]],
      corrections=corrections, advantage=advantage, aggregation=aggregation,
      regularizer=regularizer, kl_weight=kl_weight,
      options=options + more_options + kl_options), constants, (
          "no clamp of log ratios, nor of the KL term",
          "sequence means count rows without a token",
          "for cispo epsilon_high is the cap itself, not a distance from 1",
          "delta bounds the ratio on both signs, before the minimum",
          "dropped tokens and sequences stay in the denominator",
          "vespo: a token's log ratio is clamped to +-20 before the sum; here "
          "the sum is clamped alone"))


def _samples_elsewhere(c: Mapping[str, Any]) -> bool:
  """The sampler's own log-probs are known."""
  return bool(c["vllm_importance_sampling_correction"]
              if c["use_vllm"] is None else c["use_vllm"])


def _is_corrected(c: Mapping[str, Any]) -> bool:
  return (_samples_elsewhere(c)
          and c["vllm_importance_sampling_correction"] in (None, True))


def _refuse(c: Mapping[str, Any]) -> None:
  """Combinations that have no equal here."""
  corrected, kind = _is_corrected(c), c["loss_type"]
  per_token = (c["importance_sampling_level"] != "sequence" or c["beta"]
               or corrected and c["vllm_importance_sampling_mode"].startswith(
                   "token"))
  if kind == "luspo" and per_token:
    raise ValueError("trl: loss_type='luspo' is supported only with "
                     "importance_sampling_level='sequence', beta=0 and a "
                     "sequence's vllm_importance_sampling_mode: else its sum "
                     "is over the padding too")
  if kind == "vespo" and corrected:
    raise ValueError("trl: vllm_importance_sampling_correction is not "
                     "supported with loss_type='vespo': it moves the anchor")
  if kind == "vespo" and c["beta"] and c["use_bias_correction_kl"]:
    raise ValueError("trl: use_bias_correction_kl is not supported with "
                     "loss_type='vespo': the two have ratios of two levels")


def _surrogate(c: Mapping[str, Any], kind: str) -> Surrogate:
  low = c["epsilon"]
  high = base.unless_none(c["epsilon_high"], low)
  free = dict(max_log_ratio=math.inf)
  if kind == "cispo":
    return "cispo", dict(free, cispo_cap=high, cispo_floor=0.0)
  if kind == "sapo":
    return "sapo", dict(free, tau_pos=c["sapo_temperature_pos"],
                        tau_neg=c["sapo_temperature_neg"])
  if kind == "vespo":
    return "vespo", dict({name: c[f"vespo_{name}"] for name in (
        "k_pos", "lambda_pos", "k_neg", "lambda_neg")},
                         max_log_ratio=_VESPO_BOUND)
  surrogate, clip = base.clip(low, high)
  if c["delta"] is None:
    return surrogate, free | clip
  return "two_sided", dict(free, **clip, two_sided_delta=c["delta"])


def _corrections(c: Mapping[str, Any]) -> Corrections:
  chain, constants = (), {}
  if _is_corrected(c):
    unit, action = c["vllm_importance_sampling_mode"].split("_")
    level = "token" if unit == "token" else "sequence_sum"
    limited = base.truncated if action == "truncate" else base.masked
    chain, constants = limited(
        c["vllm_importance_sampling_clip_min"] or None,
        base.unless_none(c["vllm_importance_sampling_clip_max"]), level=level)
  if c["off_policy_mask_threshold"] is not None:
    den = "behaviour" if _samples_elsewhere(c) else "proximal"
    chain += (Correction("opsm", "current", den=den),)
    constants["opsm_delta"] = c["off_policy_mask_threshold"]
  return chain, constants


def _regularizer(c: Mapping[str, Any]
                 ) -> tuple[str, str, Options, dict[str, float]]:
  """(regularizer, kl_weight, options, constants)."""
  if not c["beta"]:
    return "none", "none", (), {}
  constants = dict(kl_coef=c["beta"], kl_clamp=math.inf)
  if not c["use_bias_correction_kl"]:
    return "k3", "none", (), constants
  options = () if c["importance_sampling_level"] == "token" else (
      ("kl_level", "policy"),)
  return "k3", "proximal", options, constants
