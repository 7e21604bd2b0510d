"""OpenRLHF's PolicyLoss. Floor 2."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import Dialect, maybe, read
from rl_is.objective.spec import Spec


def openrlhf(config: Mapping[str, Any]) -> Dialect:
  """OpenRLHF's PolicyLoss, at commit 3c3be623 (2026-08-13)."""
  c = read("openrlhf", config, dict(
      policy_loss_type="ppo", clip_eps_low=0.2, clip_eps_high=0.2,
      dual_clip=maybe(float),
      token_level_loss=True, enable_vllm_is_correction=False,
      vllm_is_truncated_threshold=(0.5, 5.0),
      vllm_is_correction_type="tis"))
  checks.choice("openrlhf: policy_loss_type", c["policy_loss_type"],
                ("ppo", "gspo"))
  corrected, is_gspo = c["enable_vllm_is_correction"], (
      c["policy_loss_type"] == "gspo")
  surrogate, constants = base.clip(c["clip_eps_low"], c["clip_eps_high"],
                                   c["dual_clip"])
  constants["max_log_ratio"] = math.inf if is_gspo else 20.0
  spec = Spec(
      surrogate, "behaviour" if is_gspo and corrected else "proximal",
      "sequence_mean" if is_gspo else "token", advantage="given",
      aggregation=("token_mean" if c["token_level_loss"] and not is_gspo else
                   "sequence_mean_token_mean"))
  if corrected and not is_gspo:
    low, high = base.band("openrlhf: vllm_is_truncated_threshold",
                          c["vllm_is_truncated_threshold"])
    chain, more = base.named_weight("openrlhf: vllm_is_correction_type",
                                    c["vllm_is_correction_type"], low, high)
    spec, constants = dataclasses.replace(spec, corrections=chain), {
        **constants, **more}
  return Dialect(spec, constants, (
      "with correction on, GSPO is anchored on the sampler and has no weight",
      "the weight has no clamp: icepop is NaN where it overflows",
      "seq-mask-tis keeps raw, uncapped weights"))
