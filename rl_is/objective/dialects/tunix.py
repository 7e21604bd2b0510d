"""Tunix's GRPOConfig and PPOConfig. Floor 2."""

import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import Dialect, Surrogate, maybe, read
from rl_is.objective.spec import Correction, Spec

_DEFAULTS = dict(
    algo_variant="grpo", epsilon=0.2, epsilon_low=maybe(float),
    epsilon_high=maybe(float),
    epsilon_c=maybe(float), kl_clamp_value=maybe(float),
    # GRPO
    loss_algo="grpo", loss_agg_mode="sequence-mean-token-mean",
    beta=maybe(float, default=0.04),
    kl_loss_mode="kl", advantage_estimator=maybe(str), sampler_is=maybe(str),
    sampler_is_threshold=2.0, use_rollout_logps=False, norm=maybe(float),
    # PPO
    kl_coef=maybe(float, default=0.0), entropy_coef=maybe(float))
_KL = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
_ADVANTAGES = {"gae": "given", "grpo": "grpo", "rloo": "rloo",
               "drgrpo": "dr_grpo"}
_PPO_ALONE = ("epsilon_low", "kl_coef", "entropy_coef")
# What its PPO does not read.
_GRPO_ALONE = ("loss_algo", "loss_agg_mode", "beta", "kl_loss_mode",
               "sampler_is", "norm")
_COUNT_EMPTY = (("empty", "count"),)
_BOUND = 20.0  # nats: GRPO's clamp of token log ratios


def tunix(config: Mapping[str, Any]) -> Dialect:
  """Tunix's configuration, at commit c7d8950f."""
  c = read("tunix", config, _DEFAULTS)
  for key, allowed in dict(
      algo_variant=("grpo", "ppo"), loss_algo=("grpo", "gspo-token"),
      kl_loss_mode=_KL, advantage_estimator=(None, *_ADVANTAGES),
      sampler_is=(None, "token")).items():
    checks.choice(f"tunix: {key}", c[key], allowed)
  is_ppo = c["algo_variant"] == "ppo"
  for key in () if is_ppo else _PPO_ALONE:
    if c[key]:
      raise ValueError(f"tunix: {key}={c[key]!r} needs algo_variant='ppo'")
  for key in _GRPO_ALONE if is_ppo else ():
    if config.get(key):
      raise ValueError(f"tunix: {key}={c[key]!r} needs algo_variant='grpo'")
  is_gspo = c["loss_algo"] == "gspo-token" and not is_ppo
  surrogate, constants = _surrogate(c, is_ppo, is_gspo)
  aggregation, options, more = ("token_mean", (), {}) if is_ppo else (
      _aggregation(c))
  constants |= more
  corrections = ()
  if c["sampler_is"] and not is_ppo:
    corrections = (Correction("tis"),)
    constants |= dict(cap=c["sampler_is_threshold"])
  coef = c["kl_coef"] if is_ppo else c["beta"]
  regularizer = "none"
  if coef:
    regularizer = "k1" if is_ppo else _KL[c["kl_loss_mode"]]
    constants |= dict(kl_coef=coef, kl_clamp=math.inf,
                      max_kl=base.unless_none(c["kl_clamp_value"]))
  if is_ppo:
    constants |= dict(entropy_coef=c["entropy_coef"] or 0.0)
  return Dialect(Spec(
      surrogate, "behaviour" if c["use_rollout_logps"] else "proximal",
      "sequence_mean_token" if is_gspo else "token", corrections=corrections,
      advantage=_ADVANTAGES[
          c["advantage_estimator"] or ("gae" if is_ppo else "grpo")],
      aggregation=aggregation, regularizer=regularizer, options=options),
                 constants, (
      "GRPO clamps log ratios to +-20 (GSPO: before their mean), PPO does not",
      "half of the gradient passes where a ratio is exactly at a bound",
      "GSPO has the gradient of each token alone",
      "sequence-mean-token-sum-norm divides by the number of all rows",
      "the KL term has no weight, and no clamp by default"))


def _surrogate(c: Mapping[str, Any], is_ppo: bool, is_gspo: bool) -> Surrogate:
  low, high = (base.unless_none(c[f"epsilon_{side}"], c["epsilon"])
               for side in ("low", "high"))
  make = base.bounded_gspo if is_gspo else base.clip
  surrogate, constants = make(low, high, c["epsilon_c"])
  return surrogate, dict(constants,
                         max_log_ratio=math.inf if is_ppo else _BOUND)


def _aggregation(c: Mapping[str, Any]):
  """(aggregation, options, constants)."""
  mode = c["loss_agg_mode"]
  table = {
      "token-mean": ("token_mean", (), {}),
      "sequence-mean-token-mean": ("sequence_mean_token_mean", (), {}),
      "seq-mean-token-sum": ("sequence_mean_token_sum", (), {}),
      # Over the longest answer, which the config may leave to the batch.
      "sequence-mean-token-scale": (
          "constant_length", (), {} if c["norm"] is None else
          dict(length=c["norm"])),
      "sequence-mean-token-sum-norm": (
          "sequence_mean_token_sum", _COUNT_EMPTY, {})}
  checks.choice("tunix: loss_agg_mode", mode, table)
  if mode == "sequence-mean-token-sum-norm" and c["norm"] is not None:
    raise ValueError("tunix: norm is not supported with "
                     "loss_agg_mode='sequence-mean-token-sum-norm' (a sum over "
                     "a number; here it is a mean over rows)")
  return table[mode]
