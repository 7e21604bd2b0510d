"""AReaL."""

import jax.numpy as jnp
import numpy as np

from parity import cases
from parity.cases import Case, Helper, Peer, Rule
from rl_is.ops import ratios, rejection, surrogates_soft


def _calls_the_loss(case: Case) -> None:
  """The loss alone is given `old` as the proximal policy."""
  is_sapo = "tau_pos" in case.config or "tau_neg" in case.config
  if is_sapo or case.config.get("use_sapo_loss"):
    case.config.setdefault("use_sapo_loss", True)
    case.config.setdefault("recompute_logprob", True)
  else:
    case.config.setdefault("use_decoupled_loss", True)


def _becomes(name: str):
  def rename(case: Case, value) -> None:
    case.config[name] = value
  return rename


def _m2po(case: Case):
  w = rejection.m2po(case["old"], case["behav"], case["mask"] != 0,
                     tau=case.config["m2_threshold"])
  return {"m2po_mask": w.keep}


def _drops_all(case: Case) -> bool:
  """No set of tokens qualifies: it keeps the smallest one, we none."""
  if case.arrays != ["m2po_mask"]:
    return False
  square = np.square(case.x["behav"] - case.x["old"])[case.mask]
  return square.min() >= case.config["m2_threshold"]


def _kl(case: Case):
  limit = 10.0 if case.config.get("apply_clamp", True) else np.inf
  return cases.kl(case, case.config["kl"], max_log_ratio=np.inf, max_kl=limit)


def _level(case: Case) -> str:
  return {"token": "token", "sequence": "sequence_mean"}[
      case.config.get("importance_sampling_level", "token")]


def _ratio(case: Case, prepared):
  """Of what is kept; 0 elsewhere."""
  kept = prepared.keep
  log_ratio = ratios.log_ratio(case["logp"], case["old"], kept,
                               level=_level(case))
  return jnp.where(kept, jnp.exp(log_ratio), 0)


def _gate(case: Case, prepared):
  """The loss of an advantage of 1, or -1, of the same sign."""
  tau = {f"tau_{sign}": case.config.get(f"sapo_tau_{sign}", default)
         for sign, default in (("pos", 1.0), ("neg", 1.05))}
  sign = jnp.where(prepared.adv > 0, 1.0, -1.0)
  loss = surrogates_soft.sapo(
      case["logp"], case["old"], sign, prepared.mask, level=_level(case),
      max_log_ratio=np.inf, **tau).loss
  return -sign * loss


PEER = Peer(
    "areal",
    always=_calls_the_loss,
    harness={"tau_pos": _becomes("sapo_tau_pos"),
             "tau_neg": _becomes("sapo_tau_neg"),
             "level": _becomes("importance_sampling_level")},
    helpers=(Helper(lambda case: "kl" in case.config, _kl),
             Helper(lambda case: "loss" not in case.arrays, _m2po)),
    arrays={
        "importance_weight": _ratio, "soft_gate": _gate,
        "behave_imp_weight": lambda case, prepared: (
            prepared.weight * prepared.keep),
        "behave_mask": lambda case, prepared: (
            prepared.keep & (prepared.weight > 0))},
    rules=(Rule("it keeps one token that M2PO drops", _drops_all),))
