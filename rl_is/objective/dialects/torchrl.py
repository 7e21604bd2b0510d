"""TorchRL's GRPOLoss and DAPO. Floor 2."""

import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects.base import Dialect, maybe, read
from rl_is.objective.spec import Spec

_CLASSES = ("GRPOLoss", "DAPO")


def torchrl(config: Mapping[str, Any]) -> Dialect:
  """TorchRL's LLM losses, 0.14.1; `cls` is the class."""
  c = read("torchrl", config, dict(
      cls="GRPOLoss", clip_epsilon=maybe(float, list, default=0.2),
      aggregation="token_mean", entropy_bonus=True, entropy_coeff=0.01,
      kl_mask_threshold=maybe(float), kl_to_ref_coeff=maybe(float),
      kl_to_inference_coeff=maybe(float)),
           dict(reduction="mean"))
  if c["cls"] == "CISPOLoss":
    raise ValueError(
        "torchrl: cls='CISPOLoss' is not supported: it is a clipped ratio with "
        "its gradient, without log p, so that a clipped token has none")
  checks.choice("torchrl: cls", c["cls"], _CLASSES)
  if (c["kl_mask_threshold"] or 0) > 0:
    raise ValueError(
        "torchrl: kl_mask_threshold is not supported: its masked tokens leave "
        "the denominator, and the current policy chooses them")
  checks.choice("torchrl: aggregation", c["aggregation"],
                ("token_mean", "prompt_mean"))
  by_row = c["aggregation"] == "prompt_mean"
  low, high = _bounds(c["clip_epsilon"])
  constants = dict(eps_low=low, eps_high=high, max_log_ratio=math.inf)
  if c["entropy_bonus"]:
    constants["entropy_coef"] = c["entropy_coeff"]
  to, coef = _kl(c, by_row)
  if to is not None:
    constants |= dict(kl_coef=coef, kl_clamp=math.inf)
  spec = Spec(
      "ppo_clip", "behaviour", advantage="given",
      aggregation="sequence_mean_token_mean" if by_row else "token_mean",
      regularizer="none" if to is None else "k3", kl_to=to or "reference",
      options=(("empty", "count"),) if by_row else ())
  return Dialect(spec, constants, (
      "no clamp of log ratios",
      "no proximal policy: the clip is around the sampler",
      "prompt_mean is over rows, and counts those without a token",
      "KL terms are means over padding too, whatever the aggregation: our "
      "coefficient is theirs times the share of real tokens",
      "CISPOLoss has no gradient where the ratio is clipped: it is refused",
      "kl_mask_threshold moves the denominator at each update: it is refused"))


def _bounds(eps: Any) -> tuple[float, float]:
  if eps is None:
    raise ValueError("torchrl: clip_epsilon: expected a number or [low, high], "
                     "got None")
  if not isinstance(eps, (list, tuple)):
    return eps, eps
  if len(eps) != 2:
    raise ValueError(f"torchrl: clip_epsilon: expected [low, high], got {eps!r}")
  return tuple(checks.number("torchrl: clip_epsilon", x) for x in eps)


def _kl(c: Mapping[str, Any], by_row: bool) -> tuple[str | None, float]:
  """Which policy the KL term is to, and its weight."""
  terms = {"reference": c["kl_to_ref_coeff"] or 0.0,
           "behaviour": c["kl_to_inference_coeff"] or 0.0}
  terms["reference"] = max(terms["reference"], 0.0)  # there it must be positive
  on = [(to, coef) for to, coef in terms.items() if coef]
  if len(on) > 1:
    raise ValueError("torchrl: kl_to_ref_coeff and kl_to_inference_coeff "
                     "together are not supported: one KL term")
  if on and by_row:
    raise ValueError("torchrl: a KL term with aggregation='prompt_mean' is not "
                     "supported: it stays a mean over tokens there")
  return on[0] if on else (None, 0.0)
