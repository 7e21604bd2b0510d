"""prime-rl's loss configuration. Floor 2."""

import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects.base import Dialect, read
from rl_is.objective.spec import Spec

# Its loss for distillation reads no key: these numbers are in the code.
_REF_KL = dict(delta_low=0.2, delta_high=math.inf, kl_tau=1e-3)


def prime_rl(config: Mapping[str, Any]) -> Dialect:
  """prime-rl's DefaultLossConfig and IPOLossConfig, at 559b4477 (2026-08-21).

  `kind` may be written `type`; `ref_kl` is its third loss, for distillation.
  `adv_tau` stands outside of an objective: multiply the advantages by it.
  """
  if {"kind", "type"} <= set(config):
    raise ValueError("prime_rl: kind: type is the same key; give one of them")
  config = {"kind" if key == "type" else key: x for key, x in config.items()}
  c = read("prime_rl", config, dict(
      kind="default", dppo_mask_low=0.2, dppo_mask_high=0.2, ipo_threshold=0.1,
      kl_tau=1e-3, ref_kl=False), dict(adv_tau=1.0))
  checks.choice("prime_rl: kind", c["kind"], ("default", "ipo"))
  sides = "advantage"
  constants = dict(delta_low=c["dppo_mask_low"], delta_high=c["dppo_mask_high"],
                   kl_tau=c["kl_tau"])
  if c["kind"] == "ipo":
    sides = "both"
    constants |= dict(delta_low=c["ipo_threshold"],
                      delta_high=c["ipo_threshold"])
  if c["ref_kl"]:
    sides, constants = "both", _REF_KL
  spec = Spec(
      "dppo_tv", "behaviour", advantage="given", aggregation="token_mean",
      options=(("form", "ratio"), ("sides", sides)))
  return Dialect(spec, dict(constants, dppo_tv_cap=math.inf,
                            max_log_ratio=math.inf), (
      "no clamp and no cap of the ratio, through which the gradient flows",
      "no proximal policy: everything is against the sampler",
      "the pull kl_tau (log r)^2 is on every token, dropped or not",
      "a dropped token whose ratio overflows is 0 * inf = NaN there",
      "ref_kl: the advantage log ref - log p is the current policy's at each "
      "update; here it is the caller's, the same with one update a batch"))
