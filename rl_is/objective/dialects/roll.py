"""ROLL's PPO configuration. Floor 2."""

import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import Dialect, maybe, read
from rl_is.objective.spec import Correction, Spec

_DEFAULTS = dict(
    pg_variant="ppo", pg_clip=0.2, use_pg_clip_range=False, pg_clip_low=0.2,
    pg_clip_high=0.2, dual_clip_loss=False, importance_sampling="token",
    loss_agg_mode="seq-mean-token-mean", use_kl_loss=False, kl_loss_coef=0.0,
    entropy_loss_coef=maybe(float, default=0.0),
    train_infer_correction=maybe(dict), adv_estimator="gae",
    gamma=1.0)
_ONLY = dict(
    rl_loss_coef=1.0, postive_loss_coef=0, use_topr_neg_loss_coef=0.0,
    use_topr_loss=False, use_policy_loss_type="PPO",
    difficulty_loss_weight=False, length_loss_weight=False,
    whiten_advantages=False, whiten_rewards=False, advantage_clip=None,
    reward_clip=None, add_token_level_kl=False)

_AGGREGATIONS = {"token-mean": "token_mean",
                 "seq-mean-token-sum": "sequence_mean_token_sum",
                 "seq-mean-token-mean": "sequence_mean_token_mean"}
_RATIO_LEVELS = {"token": "token", "seq": "sequence_mean"}
_LEVELS = {"token": "token", "segment": "segment",
           "geometric": "sequence_mean", "sequence": "sequence_sum"}
_ESTIMATORS = ("gae", "reinforce", "grpo", "gigpo", "step_reinforce",
               "agentic_reinforce")


def roll(config: Mapping[str, Any]) -> Dialect:
  """ROLL's actor loss, at commit 8eb27cc2 (2026-08-19)."""
  c = read("roll", config, _DEFAULTS, _ONLY)
  checks.choice("roll: pg_variant", c["pg_variant"], _SURROGATES)
  checks.choice("roll: importance_sampling", c["importance_sampling"],
                _RATIO_LEVELS)
  surrogate, constants = _SURROGATES[c["pg_variant"]](c)
  block = c["train_infer_correction"] or {}
  corrections, has_filter, more = _corrections(block)
  aggregation, options = _aggregation(c["loss_agg_mode"])
  if c["entropy_loss_coef"]:
    constants["entropy_coef"] = c["entropy_loss_coef"]
  if c["use_kl_loss"]:
    constants |= dict(kl_coef=c["kl_loss_coef"], kl_clamp=math.inf, max_kl=10.0)
  spec = Spec(
      surrogate, "proximal", _RATIO_LEVELS[c["importance_sampling"]],
      corrections=corrections, advantage=_advantage(c), aggregation=aggregation,
      denominator="removed" if has_filter else "all",
      regularizer="k3" if c["use_kl_loss"] else "none", options=options)
  return Dialect(spec, constants | more, (
      "no clamp of log ratios, nor of a sequence's product",
      "the dual clip's bound is 1 + 2 pg_clip: 1.4 where papers have 3",
      "means over sequences count rows without a token",
      "token-mean does not mask: the advantages must be 0 off the mask",
      "seq-mean-token-sum-norm divides by the padded width and by no number of "
      "rows: it is refused",
      "filtered tokens leave the batch: denominators, sequence ratios, KL",
      "only its reductions and KL were run; of the rest its code was read"))


def _ppo(c):
  low, high = ((c["pg_clip_low"], c["pg_clip_high"]) if c["use_pg_clip_range"]
               else (c["pg_clip"], c["pg_clip"]))
  surrogate, constants = base.clip(
      low, high, 1 + 2 * c["pg_clip"] if c["dual_clip_loss"] else None)
  return surrogate, dict(constants, max_log_ratio=math.inf)


def _weighted(floor, cap):
  return lambda c: ("cispo", dict(cispo_floor=floor, cispo_cap=cap,
                                  max_log_ratio=math.inf))


# Its default bounds; topr and kimi15 have no counterpart here.
_SURROGATES = dict(ppo=_ppo, vanilla=lambda c: ("pg", {}),
                   tis=_weighted(0.0, 1.0), cispo=_weighted(0.9, 1.1))


def _aggregation(mode: str) -> tuple[str, tuple]:
  if mode == "seq-mean-token-sum-norm":
    raise ValueError(
        "roll: loss_agg_mode='seq-mean-token-sum-norm' is not supported: its "
        "divisor is the padded width of a microbatch, not the number of rows")
  checks.choice("roll: loss_agg_mode", mode, _AGGREGATIONS)
  name = _AGGREGATIONS[mode]
  return name, () if name == "token_mean" else (("empty", "count"),)


def _advantage(c: Mapping[str, Any]) -> str:
  """Only grpo is one number from a group's rewards."""
  checks.choice("roll: adv_estimator", c["adv_estimator"], _ESTIMATORS)
  is_group = c["adv_estimator"] == "grpo" and c["gamma"] == 1
  return "grpo" if is_group else "given"


def _corrections(block: Mapping[str, Any]
                 ) -> tuple[tuple[Correction, ...], bool, dict[str, float]]:
  name = "roll: train_infer_correction"
  block = read(name, block, dict(
      is_weight=maybe(dict), filters=maybe(list, default=())))
  filters = [f for f in (read(f"{name}.filters", f, dict(
      enabled=False, agg_type="token", ratio_enabled=True, ratio_low=0.8,
      ratio_high=1.2, diff_low=-0.2, diff_high=0.2), dict(diff_enabled=False))
                         for f in block["filters"] or ())
             if f["enabled"] and f["ratio_enabled"]]
  weight = read(f"{name}.is_weight", block["is_weight"] or {}, dict(
      enabled=False, weight_type="token",
      upper_bound=maybe(float, default=1.2)), dict(detach=True))
  kinds = [f["agg_type"] for f in filters]
  if weight["enabled"]:
    kinds.append(weight["weight_type"])
  for kind in kinds:
    checks.choice(name, kind, _LEVELS)
  if filters and len(kinds) > 1 and set(kinds) != {"token"}:
    raise ValueError(
        f"{name}: several steps of which one is not by token "
        f"({', '.join(kinds)}) are not supported: each there sees what the one "
        "before left")
  chain, constants = (), {}
  for i, f in enumerate(filters):
    step = Correction(f"ratio_mask@{i}", level=_LEVELS[f["agg_type"]])
    chain += (step,)
    constants |= {f"{step.name}_low": f["ratio_low"],
                  f"{step.name}_high": f["ratio_high"]}
  if weight["enabled"]:
    chain += (Correction("tis", level=_LEVELS[weight["weight_type"]]),)
    constants |= dict(tis_cap=base.unless_none(weight["upper_bound"]),
                      max_log_ratio=math.inf)
  return chain, bool(filters), constants
