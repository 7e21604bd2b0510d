"""OpenRLHF's PolicyLoss. Floor 2."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects.base import Dialect, read
from rl_is.objective.spec import Correction, Spec


def openrlhf(config: Mapping[str, Any]) -> Dialect:
  """OpenRLHF's PolicyLoss, at commit 3c3be623 (2026-08-13)."""
  c = read("openrlhf", config, dict(
      policy_loss_type="ppo", clip_eps_low=0.2, clip_eps_high=0.2,
      dual_clip=None,
      token_level_loss=True, enable_vllm_is_correction=False,
      vllm_is_truncated_threshold=(0.5, 5.0),
      vllm_is_correction_type="tis"))
  checks.choice("openrlhf: policy_loss_type", c["policy_loss_type"],
                ("ppo", "gspo"))
  corrected, is_gspo = c["enable_vllm_is_correction"], (
      c["policy_loss_type"] == "gspo")
  constants = dict(eps_low=c["clip_eps_low"], eps_high=c["clip_eps_high"],
                   max_log_ratio=math.inf if is_gspo else 20.0)
  surrogate = "ppo_clip"
  if c["dual_clip"] is not None:
    surrogate, constants["clip_c"] = "dual_clip", c["dual_clip"]
  spec = Spec(
      surrogate, "behaviour" if is_gspo and corrected else "proximal",
      "sequence_mean" if is_gspo else "token", advantage="given",
      aggregation=("token_mean" if c["token_level_loss"] and not is_gspo else
                   "sequence_mean_token_mean"))
  if corrected and not is_gspo:
    low, high = c["vllm_is_truncated_threshold"]
    chain, more = _correction(c["vllm_is_correction_type"], low, high)
    spec, constants = dataclasses.replace(spec, corrections=chain), {
        **constants, **more}
  return Dialect(spec, constants, (
      "with correction on, GSPO is anchored on the sampler and has no weight",
      "the weight has no clamp: icepop is NaN where it overflows",
      "seq-mask-tis keeps raw, uncapped weights"))


def _correction(kind: str, low: float, high: float
                         ) -> tuple[tuple[Correction, ...], dict[str, float]]:
  if kind == "tis":
    return (Correction("tis"),), dict(tis_cap=high, tis_floor=low)
  if kind == "icepop":
    return (Correction("icepop"),), dict(icepop_low=low, icepop_high=high)
  if kind == "seq-mask-tis":
    return (Correction("geometric_mask"), Correction("tis")), dict(
        geometric_mask_low=low, geometric_mask_high=high, tis_cap=math.inf)
  raise ValueError(checks.unknown("openrlhf: vllm_is_correction_type", kind,
                                  ("tis", "icepop", "seq-mask-tis")))
