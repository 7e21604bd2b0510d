"""verl's actor, policy_loss, rollout_correction and algorithm keys. Floor 2."""

import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import Dialect, maybe, read
from rl_is.objective.spec import Correction, Options, Spec

BLOCKS = ("policy_loss", "rollout_correction")  # their keys may stand flat
_DEFAULTS = dict(
    # actor
    clip_ratio=0.2, clip_ratio_low=maybe(float, default=0.2),
    clip_ratio_high=maybe(float, default=0.2), clip_ratio_c=3.0,
    tau_pos=1.0, tau_neg=1.05, loss_agg_mode="token-mean",
    loss_scale_factor=maybe(float), use_kl_loss=False, kl_loss_coef=0.001,
    kl_loss_type="low_var_kl", entropy_coeff=maybe(float, default=0.0),
    # actor.policy_loss
    loss_mode="vanilla", clip_cov_ratio=0.0002, clip_cov_lb=1.0,
    clip_cov_ub=5.0, kl_cov_ratio=0.0002, ppo_kl_coef=0.1,
    dro_beta=maybe(float),
    # algorithm.rollout_correction
    rollout_is=maybe(str),
    rollout_is_threshold=maybe(float, str, default=2.0),
    rollout_is_batch_normalize=False,
    rollout_rs=maybe(str),
    rollout_rs_threshold=maybe(float, str), bypass_mode=False,
    loss_type="ppo_clip",
    # algorithm
    adv_estimator="gae", norm_adv_by_std_in_grpo=True, gamma=1.0, lam=1.0)
_ONLY = dict(use_kl_in_reward=False)

_AGGREGATIONS = {
    "token-mean": "token_mean", "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "constant_length",
    "seq-mean-token-mean": "sequence_mean_token_mean"}
# Loss modes that do not ask loss_agg_mode.
_SEQUENCE_MODES = ("gspo", "sapo", "geo_mean")
_KL = {"kl": "k1", "k1": "k1", "abs": "abs_kl", "mse": "k2", "k2": "k2",
       "low_var_kl": "k3", "k3": "k3", "kl+": "k1_straight",
       "k1+": "k1_straight", "mse+": "k2", "k2+": "k2",
       "low_var_kl+": "k3_straight", "k3+": "k3_straight"}
_RS_STATISTICS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean",
                  "seq_max": "max"}
_RS = [f"{level}_k{k}" for level in _RS_STATISTICS for k in (1, 2, 3)
       if (level, k) != ("seq_max", 1)]
_BOUND = 20.0  # nats: its clamp of every log ratio that becomes a weight

_LONE = (("lone", "reward"),)


def verl(config: Mapping[str, Any]) -> Dialect:
  """verl's configuration, at commit 1dda039b (2026-08-22)."""
  c = read("verl", base.flat(config, BLOCKS), _DEFAULTS, _ONLY)
  bypass = c["bypass_mode"] or c["loss_mode"] == "bypass_mode"
  mode = _bypass_mode(c) if bypass else c["loss_mode"]
  checks.choice("verl: loss_mode", mode, _SURROGATES)
  surrogate, constants = _SURROGATES[mode](c, *_clip(c))
  corrections, more = _corrections(c, mode, bypass)
  constants |= more
  advantage, options, more = _advantage(c)
  constants |= more
  aggregation, more = _aggregation(c, mode)
  constants |= more
  regularizer, more = _regularizer(c)
  constants |= more
  spec = Spec(
      surrogate, "behaviour" if bypass else "proximal",
      "sequence_mean_token" if mode == "gspo" else "token",
      corrections=corrections, advantage=advantage, aggregation=aggregation,
      # In bypass mode the counts come from the whole batch, before rejection.
      denominator="removed" if c["rollout_rs"] and not bypass else "all",
      regularizer=regularizer,
      options=options + ((("empty", "count"),) if mode == "geo_mean" else ()))
  return Dialect(spec, constants, (
      "rejected tokens leave the batch: denominators, sequence ratios, KL",
      "clip_ratio counts only where clip_ratio_low or _high is null",
      "the *_k1 bounds of rollout_rs are of behaviour / proximal",
      "batch-normalised weights may exceed their bound again",
      "GSPO has the gradient of each token alone; vanilla a dual clip",
      "geo_mean counts rows without a token, and no loss_agg_mode",
      "a group of one has no baseline"))


def _bypass_mode(c: Mapping[str, Any]) -> str:
  """Which loss stands behind the bypass, by the name of its loss_mode."""
  losses = {"ppo_clip": "vanilla", "reinforce": "gpg"}
  checks.choice("verl: loss_type", c["loss_type"], losses)
  return losses[c["loss_type"]]


def _clip(c: Mapping[str, Any]) -> tuple[float, float]:
  return tuple(base.unless_none(c[f"clip_ratio_{side}"], c["clip_ratio"])
               for side in ("low", "high"))


def _bounded(make):
  """A surrogate of the two bounds alone, under its clamp."""
  def surrogate(c, low, high):
    name, constants = make(low, high)
    return name, dict(constants, max_log_ratio=_BOUND)
  return surrogate


def _vanilla(c, low, high):
  name, constants = base.clip(low, high, c["clip_ratio_c"])
  return name, dict(constants, max_log_ratio=_BOUND)


def _sapo(c, low, high):
  return "sapo", dict(tau_pos=c["tau_pos"], tau_neg=c["tau_neg"],
                      max_log_ratio=_BOUND)


def _dppo(surrogate):
  return lambda c, low, high: (surrogate, {
      "delta_low": low, "delta_high": high, "max_log_ratio": _BOUND,
      f"{surrogate}_cap": c["clip_ratio_c"]})


def _gpg(c, low, high):
  return "pg", {}


def _geo_mean(c, low, high):
  return "gmpo", dict(log_low=low, log_high=high, max_log_ratio=math.inf)


def _dro(c, low, high):
  if c["dro_beta"] is None:
    raise ValueError("verl: dro_beta is needed by loss_mode='dro'")
  return "dro", dict(beta=c["dro_beta"], max_log_ratio=math.inf)


def _clip_cov(c, low, high):
  return "clip_cov", dict(
      eps_low=low, eps_high=high, cov_ratio=c["clip_cov_ratio"],
      cov_low=c["clip_cov_lb"], cov_high=c["clip_cov_ub"],
      max_log_ratio=math.inf)


def _kl_cov(c, low, high):
  return "kl_cov", dict(cov_ratio=c["kl_cov_ratio"],
                        cov_penalty=c["ppo_kl_coef"], max_log_ratio=math.inf)


_SURROGATES = dict(
    vanilla=_vanilla, gspo=_bounded(base.bounded_gspo), sapo=_sapo, gpg=_gpg,
    clip_cov=_clip_cov,
    kl_cov=_kl_cov, geo_mean=_geo_mean, dro=_dro,
    cispo=_bounded(base.cispo),
    dppo_tv=_dppo("dppo_tv"), dppo_kl=_dppo("dppo_kl"))


def _corrections(c: Mapping[str, Any], mode: str, bypass: bool
                 ) -> tuple[tuple[Correction, ...], dict[str, float]]:
  num = "current" if bypass else "proximal"
  chain, constants = (), {}
  # The bypass's PPO has the whole ratio already.
  if c["rollout_is"] is not None and not (bypass and mode == "vanilla"):
    chain, constants = _weights(c, num)
  for option, bounds in _rejections(c).items():
    name = f"k_rejection@{option}"
    level, _, estimator = option.rpartition("_")
    chain += (Correction(name, num, options=(
        ("estimator", estimator), ("statistic", _RS_STATISTICS[level]),
        ("direction", "behaviour_to_num"), ("clamped", "all"))),)
    constants |= {f"{name}_{side}": x for side, x in bounds.items()}
  if mode == "geo_mean" and c["rollout_is"] is not None:
    chain += (Correction("geometric_mean"),)
    constants["log_eps"] = 1e-10
  return chain, constants


def _weights(c: Mapping[str, Any], num: str
             ) -> tuple[tuple[Correction, ...], dict[str, float]]:
  levels = {"token": "token", "sequence": "sequence_sum"}
  checks.choice("verl: rollout_is", c["rollout_is"], levels)
  level = levels[c["rollout_is"]]
  low, high = _band("rollout_is_threshold", c["rollout_is_threshold"])
  if low is None:
    # The clamp as floor and cap: a surrogate may have no clamp at all.
    weight = Correction("tis", num, level)
    constants = dict(tis_floor=math.exp(-_BOUND),
                     tis_cap=min(high, math.exp(_BOUND)))
  else:
    weight = Correction("icepop", num, level, options=(("outside", "zero"),))
    constants = dict(icepop_low=low, icepop_high=high)
  if not c["rollout_is_batch_normalize"]:
    return (weight,), constants
  return (weight, Correction("self_normalise", num, options=(
      ("level", c["rollout_is"]),))), constants


def _band(key: str, text: Any) -> tuple[float | None, float]:
  """2.0 or "2" -> (None, 2); "0.5_2" -> (0.5, 2)."""
  try:
    edges = [float(part) for part in str(text).split("_")]
  except ValueError:
    edges = []
  if len(edges) not in (1, 2) or not all(x >= 0 for x in edges) or (
      edges != sorted(edges)):
    raise ValueError(f"verl: {key}: expected a number or 'low_high', not "
                     f"negative, got {text!r}")
  return (edges[0] if len(edges) == 2 else None), edges[-1]


def _rejections(c: Mapping[str, Any]) -> dict[str, dict[str, float]]:
  """Each option of rollout_rs -> the bounds of its statistic."""
  if not c["rollout_rs"]:
    return {}
  split = lambda x: [part.strip() for part in str(x).split(",") if part.strip()]
  options = list(dict.fromkeys(split(c["rollout_rs"])))
  texts = split(c["rollout_rs_threshold"])
  if c["rollout_rs_threshold"] is None or len(texts) not in (1, len(options)):
    raise ValueError(
        f"verl: rollout_rs_threshold: expected one for all or one for each of "
        f"{options}, got {c['rollout_rs_threshold']!r}")
  if len(texts) == 1:
    texts *= len(options)
  out = {}
  for option, text in zip(options, texts):
    checks.choice("verl: rollout_rs", option, _RS)
    low, high = _band("rollout_rs_threshold", text)
    if option.endswith("k1"):  # ratios of behaviour / proximal
      upper = base.log("verl: rollout_rs_threshold", high)
      lower = -upper if low is None else base.log(
          "verl: rollout_rs_threshold", low)
      out[option] = dict(lower=lower, upper=upper)
    elif low is None:
      out[option] = dict(upper=high)
    else:
      raise ValueError(f"verl: rollout_rs_threshold: {option} takes one bound, "
                       f"got {text!r}")
  return out


def _aggregation(c: Mapping[str, Any], mode: str
                 ) -> tuple[str, dict[str, float]]:
  name = c["loss_agg_mode"]
  checks.choice("verl: loss_agg_mode", name, _AGGREGATIONS)
  if mode in _SEQUENCE_MODES:
    forced = "seq-mean-token-mean"
    if name != forced and (c["use_kl_loss"] or c["entropy_coeff"]):
      raise ValueError(
          f"verl: loss_mode={mode!r} always aggregates by {forced!r}, its KL "
          f"and entropy terms by loss_agg_mode={name!r}; only {forced!r} for "
          "both is supported")
    name = forced
  if _AGGREGATIONS[name] != "constant_length":
    return _AGGREGATIONS[name], {}
  if c["loss_scale_factor"] is None:
    raise ValueError("verl: loss_scale_factor is needed by 'seq-mean-token-sum-"
                     "norm' (verl's default is the padded width of a response)")
  return "constant_length", dict(length=c["loss_scale_factor"])


def _regularizer(c: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
  constants = {}
  if c["entropy_coeff"]:
    constants["entropy_coef"] = c["entropy_coeff"]
  if not c["use_kl_loss"]:
    return "none", constants
  checks.choice("verl: kl_loss_type", c["kl_loss_type"], _KL)
  name = _KL[c["kl_loss_type"]]
  constants["kl_coef"] = c["kl_loss_coef"]
  if name.startswith("k3"):
    constants |= dict(kl_clamp=_BOUND, max_kl=10.0)
  return name, constants


def _advantage(c: Mapping[str, Any]) -> tuple[str, Options, dict[str, float]]:
  """Those that need a value or a model's own sums are the caller's."""
  norm, given = c["norm_adv_by_std_in_grpo"], ("given", ())
  table = {
      "gae": given, "gdpo": given, "optimal_token_baseline": given,
      "tir_optimal_token_baseline": given,
      "grpo": ("grpo" if norm else "dr_grpo", _LONE),
      "grpo_vectorized": ("grpo" if norm else "dr_grpo", _LONE),
      "grpo_passk": ("pass_at_k", (("std", "unbiased" if norm else "none"),)),
      "rloo": ("rloo", _LONE), "rloo_vectorized": ("rloo", ()),
      "reinforce_plus_plus": ("reinforce_pp", ()),
      "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", _LONE),
      "remax": ("remax", ()), "opo": ("opo", _LONE), "gpg": ("gpg", _LONE)}
  checks.choice("verl: adv_estimator", c["adv_estimator"], table)
  name, options = table[c["adv_estimator"]]
  return name, options, dict(gamma=c["gamma"]) if name == "reinforce_pp" else {}
