"""AReaL's PPOActorConfig. Floor 2."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rl_is.core import checks
from rl_is.objective.dialects import base
from rl_is.objective.dialects.base import (
    Corrections, Dialect, Surrogate, maybe, read)
from rl_is.objective.spec import Correction, Spec

_DEFAULTS = dict(
    eps_clip=0.2, eps_clip_higher=maybe(float), c_clip=maybe(float),
    use_sapo_loss=False,
    sapo_tau_pos=1.0, sapo_tau_neg=1.05, use_cispo_loss=False,
    importance_sampling_level="token", recompute_logprob=False,
    use_decoupled_loss=False, prox_logp_method="recompute",
    rejection_sampling=maybe(dict), m2_threshold=maybe(float))
_ONLY = dict(kl_ctl=0.0)  # a penalty in the reward
_REJECTION = dict(level="token", action="mask", metric="ratio", agg="mean",
                  upper=5.0, lower=maybe(float))
_LEVELS = {"token": "token", "sequence": "sequence_mean"}
_PROXIMALS = {"recompute": "start", "metrics": "start",
              "loglinear": "log_linear"}
_METRICS = {"ratio": "k1", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}


def areal(config: Mapping[str, Any]) -> Dialect:
  """AReaL's PPOActorConfig, at commit 4aef98d8 (2026-08-22)."""
  c = read("areal", config, _DEFAULTS, _ONLY)
  checks.choice("areal: importance_sampling_level",
                c["importance_sampling_level"], _LEVELS)
  checks.choice("areal: prox_logp_method", c["prox_logp_method"], _PROXIMALS)
  surrogate, constants = _surrogate(c)
  corrections, more = _corrections(c)
  recomputed = c["use_decoupled_loss"] or c["recompute_logprob"]
  by_sequence = c["importance_sampling_level"] == "sequence"
  spec = Spec(
      surrogate, "proximal" if recomputed else "behaviour",
      _LEVELS[c["importance_sampling_level"]], advantage="given",
      corrections=corrections, denominator=(
          "all" if not corrections else
          "removed" if c["m2_threshold"] is not None else "unseen"),
      options=(("over", "sequence"),) if by_sequence else ())
  if c["use_decoupled_loss"]:
    spec = dataclasses.replace(
        spec, proximal=_PROXIMALS[c["prox_logp_method"]])
    if spec.proximal != "start":  # its masks are not known before the update
      spec = dataclasses.replace(spec, denominator="all")
      if by_sequence and corrections or c["m2_threshold"] is not None:
        raise ValueError("areal: prox_logp_method='loglinear' moves during the "
                         "update: no m2_threshold, and no rejection_sampling "
                         "with importance_sampling_level='sequence'")
  return Dialect(spec, dict(constants, max_log_ratio=math.inf, **more), (
      "no clamp of log ratios; a non-finite one counts as 0",
      "GSPO and SAPO by sequence average A over the row, and the loss over "
      "tokens",
      "rejected tokens stay in the denominator, those of M2PO do not",
      "a test of the sequence's ratio also makes its geometric mean the weight",
      "the decoupled loss has no weight without rejection_sampling",
      "M2PO keeps one token where it should drop all",
      "loglinear: where nothing is stale its anchor is the behaviour"))


def _surrogate(c: Mapping[str, Any]) -> Surrogate:
  low, high = c["eps_clip"], c["eps_clip_higher"]
  if c["use_sapo_loss"]:
    if c["use_cispo_loss"] or c["use_decoupled_loss"]:
      raise ValueError("areal: use_sapo_loss excludes use_cispo_loss and "
                       "use_decoupled_loss")
    return "sapo", dict(tau_pos=c["sapo_tau_pos"], tau_neg=c["sapo_tau_neg"])
  if c["use_cispo_loss"]:
    if not high or c["importance_sampling_level"] != "token":
      raise ValueError("areal: use_cispo_loss needs eps_clip_higher > 0 and "
                       "importance_sampling_level='token'")
    return base.cispo(low, high)
  return base.clip(low, base.unless_none(high, low), c["c_clip"])


def _corrections(c: Mapping[str, Any]) -> Corrections:
  rejection, tau = c["rejection_sampling"], c["m2_threshold"]
  if rejection is None and tau is None:
    return (), {}
  if not c["use_decoupled_loss"]:
    raise ValueError("areal: rejection_sampling and m2_threshold need "
                     "use_decoupled_loss=True: else the proximal policy is the "
                     "behaviour, and there is nothing to reject")
  if rejection is None:
    return (Correction("m2po"),), dict(m2po_tau=tau)
  if tau is not None:
    raise ValueError("areal: m2_threshold together with rejection_sampling is "
                     "not supported: the tokens of one leave the denominator, "
                     "those of the other do not")
  r = read("areal: rejection_sampling", rejection, _REJECTION)
  for key, allowed in dict(level=_LEVELS, action=("mask", "clamp"),
                           metric=_METRICS, agg=("sum", "mean", "max")).items():
    checks.choice(f"areal: rejection_sampling: {key}", r[key], allowed)
  if r["metric"] == "ratio":
    return _by_ratio(r)
  if r["action"] == "clamp":
    raise ValueError("areal: rejection_sampling: action='clamp' only supports "
                     f"metric='ratio', got {r['metric']!r}")
  test, bounds = _test(r, r["lower"], r["upper"])
  return (test, Correction("tis")), dict(bounds, tis_cap=math.inf)


def _by_ratio(r: Mapping[str, Any]) -> Corrections:
  """The ratio is what is tested, and the weight."""
  low, high, level = r["lower"], r["upper"], _LEVELS[r["level"]]
  agg = "mean" if r["level"] == "token" else r["agg"]
  if r["action"] == "clamp":
    binds = () if agg == "mean" else (("binds", agg),)
    return base.truncated(low, high, level=level, options=binds)
  if agg != "mean":
    log = lambda side: None if r[side] is None else base.log(
        f"areal: rejection_sampling: {side}", r[side])
    test, bounds = _test(r, log("lower"), log("upper"))
    return (test, Correction("tis", level=level)), dict(
        bounds, tis_cap=math.inf)
  return base.masked(low, high, level=level)


def _test(r: Mapping[str, Any], low: float | None, high: float
          ) -> tuple[Correction, dict[str, float]]:
  return Correction("k_rejection", options=(
      ("estimator", _METRICS[r["metric"]]),
      ("statistic", "token" if r["level"] == "token" else r["agg"]),
      ("direction", "num_to_behaviour"))), dict(
          upper=high, lower=base.unless_none(low, -math.inf))
