"""SkyRL's AlgorithmConfig. Floor 2."""

import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import Dialect, maybe, read
from rl_is.objective.spec import Correction, Options, Spec

# Their keys may stand in a block of that name, or flat.
_BLOCKS = ("off_policy_correction", "sapo", "cispo", "dppo")
_DEFAULTS = dict(
    policy_loss_type="regular", loss_reduction="token_mean", eps_clip_low=0.2,
    eps_clip_high=0.2, clip_ratio_c=3.0, max_seq_len=maybe(float),
    tau_pos=1.0, tau_neg=1.05,
    cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0, cispo_anchor="old",
    dppo_type="binary_tv", delta_low=0.2, delta_high=0.2,
    tis_ratio_type=maybe(str), token_tis_ratio_clip_high=2.0,
    sequence_tis_ratio_clip_high=5.0, sequence_mask_metric=maybe(str),
    geo_mask_high=1.01, geo_mask_low=0.99, product_mask_high=2.0,
    product_mask_low=0.5, outlier_token_is_threshold_low=maybe(float),
    outlier_token_is_threshold_high=maybe(float),
    token_mask_is_threshold_low=maybe(float),
    token_mask_is_threshold_high=maybe(float), use_tis=False,
    tis_imp_ratio_cap=-1.0,
    use_kl_loss=True, kl_loss_coef=maybe(float, default=0.001),
    kl_estimator_type="k3",
    use_entropy_loss=False, entropy_loss_coef=0.01,
    advantage_estimator="grpo", grpo_norm_by_std=True, gamma=1.0, lambd=1.0)
_ONLY = dict(use_kl_in_reward=False, advantage_batch_normalize=False,
             zero_variance_filter=False)

_AGGREGATIONS = {"token_mean": "token_mean",
                 "sequence_mean": "sequence_mean_token_mean",
                 "seq_mean_token_sum_norm": "constant_length",
                 "prompt_mean": "prompt_mean"}
_KL = {"k1": ("k1", math.inf, math.inf), "k2": ("k2", math.inf, math.inf),
       "abs": ("abs_kl", math.inf, math.inf), "k3": ("k3", 20.0, 10.0)}
_BOUND = 20.0  # nats: its clamp of every log ratio
# They do not look at the sampler's log-probs as a correction.
_UNCORRECTED = ("importance_sampling",)
_REFUSED = {
    "clip_cov": "its bounds are on advantages that loss_reduction has divided",
    "kl_cov": "its penalty is a sum that loss_reduction does not divide",
    "cross_entropy": "it is supervised: it reads no advantage"}


def skyrl(config: Mapping[str, Any]) -> Dialect:
  """SkyRL's AlgorithmConfig, at commit a9564572 (2026-08-21)."""
  c = read("skyrl", base.flat(config, _BLOCKS), _DEFAULTS, _ONLY)
  kind = c["policy_loss_type"]
  if kind in _REFUSED:
    raise ValueError(f"skyrl: policy_loss_type={kind!r} is not supported: "
                     f"{_REFUSED[kind]}")
  checks.choice("skyrl: policy_loss_type", kind, _SURROGATES)
  surrogate, anchor, own, constants, form = _SURROGATES[kind](c)
  corrections, more = ((), {}) if kind in _UNCORRECTED else _corrections(c)
  constants = {"max_log_ratio": _BOUND, **constants, **more}
  aggregation, options, more = _aggregation(c)
  constants |= more
  regularizer, kl_mean, more = _regularizer(c)
  constants |= more
  advantage, adv_options, more = _advantage(c)
  spec = Spec(
      surrogate, anchor, "sequence_mean_token" if kind == "gspo" else "token",
      corrections=own + corrections, advantage=advantage,
      aggregation=aggregation, regularizer=regularizer,
      options=form + options + kl_mean + adv_options,
      # dppo and rollout_is are on the sampler, and take its weights again.
      allow_double_counting=(anchor == "behaviour" or bool(own)))
  return Dialect(spec, constants | more, (
      "sequence means count rows without a token",
      "dropped tokens stay in the denominator, but later tests of a row and "
      "its weight do not see them",
      "one bound alone of token_mask_is_threshold_low, _high does nothing",
      "dppo and rollout_is are multiplied by the TIS weight again",
      "rollout_is has strict bounds",
      "the KL term is averaged by row, whatever loss_reduction is",
      "GSPO has the gradient of each token alone",
      "a group of one has no baseline, but in rloo"))


# Each: (surrogate, anchor, corrections of its own, constants, options).


def _clipped(make):
  """Of the two bounds alone."""
  def surrogate(c):
    name, constants = make(c["eps_clip_low"], c["eps_clip_high"])
    return name, "proximal", (), constants, ()
  return surrogate


def _dual_clip(c):
  name, constants = base.clip(c["eps_clip_low"], c["eps_clip_high"],
                              c["clip_ratio_c"])
  return name, "proximal", (), constants, ()


def _sapo(c):
  return "sapo", "proximal", (), dict(tau_pos=c["tau_pos"],
                                      tau_neg=c["tau_neg"]), ()


def _cispo(c):
  anchors = {"old": "proximal", "rollout": "behaviour"}
  checks.choice("skyrl: cispo_anchor", c["cispo_anchor"], anchors)
  if c["cispo_anchor"] == "rollout" and (c["tis_ratio_type"] or c["use_tis"]):
    raise ValueError("skyrl: cispo_anchor='rollout' excludes tis_ratio_type: "
                     "the ratio is to the sampler already")
  name, constants = base.cispo(c["cispo_eps_clip_low"],
                               c["cispo_eps_clip_high"])
  return name, anchors[c["cispo_anchor"]], (), constants, ()


def _rollout_is(c):
  # Its bounds are strict, ours are not: the next float32 inside.
  step = 2.0 ** -24
  low, high = 1 - c["eps_clip_low"], 1 + c["eps_clip_high"]
  return "pg", "behaviour", (Correction("icepop@rollout", "current"),), {
      "icepop@rollout_low": max(low * (1 + step), 1e-30),
      "icepop@rollout_high": high * (1 - step)}, ()


def _dppo(c):
  rows = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}
  checks.choice("skyrl: dppo_type", c["dppo_type"], rows)
  name = rows[c["dppo_type"]]
  return name, "behaviour", (), {
      "delta_low": c["delta_low"], "delta_high": c["delta_high"],
      f"{name}_cap": math.inf}, (("form", "ratio"),)


def _importance_sampling(c):
  return "ppo_clip", "proximal", (), dict(
      eps_low=math.inf, eps_high=math.inf, max_log_ratio=math.inf), ()


_SURROGATES = dict(
    regular=_clipped(base.clip), dual_clip=_dual_clip,
    gspo=_clipped(base.bounded_gspo), sapo=_sapo,
    cispo=_cispo, rollout_is=_rollout_is, dppo=_dppo,
    importance_sampling=_importance_sampling)


def _corrections(c: Mapping[str, Any]
                 ) -> tuple[tuple[Correction, ...], dict[str, float]]:
  """In its order: each sees the tokens that those before it have kept."""
  chain, constants = [], {}
  seen = (("over", "kept"),)

  def add(name, level="token", **bounds):
    chain.append(Correction(name, level=level, options=seen))
    constants.update({f"{name}_{k}": v for k, v in bounds.items()})

  low, high = (c[f"outlier_token_is_threshold_{side}"] for side in
               ("low", "high"))
  if low is not None or high is not None:
    add("token_veto", low=low or 0.0, high=math.inf if high is None else high)
  low, high = (c[f"token_mask_is_threshold_{side}"] for side in ("low", "high"))
  if low is not None and high is not None:
    add("ratio_mask@token", low=low, high=high)
  kind, cap = c["tis_ratio_type"], c["token_tis_ratio_clip_high"]
  if c["use_tis"]:
    kind, cap = "token", c["tis_imp_ratio_cap"]
  if kind is not None:
    weights = {"token": ("token", cap),
               "sequence": ("sequence_sum", c["sequence_tis_ratio_clip_high"])}
    checks.choice("skyrl: tis_ratio_type", kind, weights)
    level, cap = weights[kind]
    add("tis", level, cap=min(cap, math.exp(_BOUND)), floor=math.exp(-_BOUND))
  metric = c["sequence_mask_metric"]
  if metric is not None:
    levels = {"geometric": ("sequence_mean", "geo"),
              "product": ("sequence_sum", "product")}
    checks.choice("skyrl: sequence_mask_metric", metric, levels)
    level, key = levels[metric]
    add("ratio_mask@row", level, low=c[f"{key}_mask_low"],
        high=c[f"{key}_mask_high"])
  return tuple(chain), constants


def _aggregation(c: Mapping[str, Any]
                 ) -> tuple[str, Options, dict[str, float]]:
  name = c["loss_reduction"]
  checks.choice("skyrl: loss_reduction", name, _AGGREGATIONS)
  if name == "token_mean":
    return "token_mean", (), {}
  count = (("empty", "count"),)
  if name != "seq_mean_token_sum_norm":
    return _AGGREGATIONS[name], count, {}
  if c["max_seq_len"] is None:
    raise ValueError("skyrl: max_seq_len is needed by loss_reduction="
                     "'seq_mean_token_sum_norm'")
  return "constant_length", count, dict(length=c["max_seq_len"])


def _regularizer(c: Mapping[str, Any]
                 ) -> tuple[str, Options, dict[str, float]]:
  constants = {}
  with_kl = c["use_kl_loss"] and c["kl_loss_coef"]
  if c["use_entropy_loss"]:
    if with_kl or c["loss_reduction"] != "token_mean":
      raise ValueError("skyrl: use_entropy_loss is only supported with "
                       "loss_reduction='token_mean' and without a KL loss: it "
                       "is a mean over tokens, and the KL loss one over rows")
    constants["entropy_coef"] = c["entropy_loss_coef"]
  if not with_kl:
    return "none", (), constants
  checks.choice("skyrl: kl_estimator_type", c["kl_estimator_type"], _KL)
  name, clamp, limit = _KL[c["kl_estimator_type"]]
  return name, (("kl_mean", "rows"),), dict(
      kl_coef=c["kl_loss_coef"], kl_clamp=clamp, max_kl=limit)


def _advantage(c: Mapping[str, Any]) -> tuple[str, Options, dict[str, float]]:
  """Those of a value are the caller's."""
  lone = (("lone", "reward"),)
  table = {"grpo": ("grpo" if c["grpo_norm_by_std"] else "dr_grpo", lone),
           "rloo": ("rloo", ()), "maxrl": ("max_rl", lone),
           "gae": ("given", ()),
           "reinforce++": ("reinforce_pp", (("holes", "restart"),))}
  checks.choice("skyrl: advantage_estimator", c["advantage_estimator"], table)
  name, options = table[c["advantage_estimator"]]
  return name, options, dict(gamma=c["gamma"]) if name == "reinforce_pp" else {}
