"""Tunix."""

import jax.numpy as jnp
import numpy as np

from parity import cases
from parity.cases import Case, Helper, Peer, Rule, ignored
from rl_is.ops import regularizers, values

KL = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
ESTIMATORS = {"compute_advantages": "grpo", "compute_rloo_advantages": "rloo",
              "compute_drgrpo_advantages": "drgrpo", "grpo": "grpo",
              "rloo": "rloo", "drgrpo": "drgrpo"}


def _always(case: Case) -> None:
  """Without reference log-probs there is no KL; the widest row is the norm."""
  if "ref" not in case.config:
    case.config["beta"] = case.config["kl_coef"] = 0.0
  if case.config.get("beta", 0.0) is None:
    case.config["beta"] = 0.0
  if case.config.get("loss_agg_mode") == "sequence-mean-token-scale":
    case.config.setdefault("norm", case.mask.shape[1])


def _old(case: Case, name: str | None) -> None:
  """Which log-probs stand for the old ones; None: the current."""
  if name is None:
    case.replace["anchor"] = "current"
  else:
    case.x["old"] = case.x[name]


def _algo(case: Case, name: str) -> None:
  case.config["algo_variant"] = name


def _kl(case: Case):
  fn = getattr(regularizers, KL[case.config["method"]])
  limit = case.config.get("clamp_value")
  return cases.summed(case, lambda logp: fn(
      logp, case["ref"], case.mask, max_log_ratio=jnp.inf,
      max_kl=jnp.inf if limit is None else limit))


def _groups(case: Case):
  """Advantages [B]; the set's own groups, whose size is what was passed."""
  case.config = dict(advantage_estimator=ESTIMATORS[case.function])
  case.x["mask"] = np.ones_like(case.x["mask"])  # empty rows keep their reward
  return {"advantages": cases.advantages_of(PEER, case)[:, 0]}


def _gae(case: Case):
  mask = jnp.asarray(case.mask)
  gae = values.gae(case["reward_tok"], case["values"], mask,
                   gamma=case.config["gamma"], lam=case.config["lam"])
  return {"advantages": values.whiten(gae.adv, mask), "returns": gae.target}


def _weights(case: Case, prepared):
  return jnp.where(prepared.mask, prepared.weight, 0.0)


def _log_ratio(case: Case):
  """float32, as the peer has it."""
  old = case.config.get("old", "old")
  return np.zeros_like(case.x["logp"]) if old is None else (
      case.x["logp"] - case.x[old])


def _adv(case: Case):
  return case.x["adv"] if case.adv == "tok" else np.broadcast_to(
      case.x["adv_seq"][:, None], case.x["adv"].shape)


def _bounds(case: Case):
  low = case.config.get("epsilon", 0.2)
  high = case.config.get("epsilon_high")
  return np.float32(1 - low), np.float32(1 + (low if high is None else high))


def _is_gspo(case: Case) -> bool:
  return case.config.get("loss_algo") == "gspo-token"


def _at_a_bound(case: Case) -> bool:
  """A live token whose ratio is a clip bound exactly: max and clip both tie."""
  if case.adv is None or _is_gspo(case):
    return False
  r = np.asarray(jnp.exp(jnp.asarray(_log_ratio(case))))
  low, high = _bounds(case)
  tie = (r == high) | (r == low)
  return bool((tie & case.mask & (_adv(case) != 0)).any())


def _clamped_before_the_mean(case: Case) -> bool:
  """The clamp of a token changes what its row contributes."""
  if case.adv is None or not _is_gspo(case):
    return False
  mask, lr = case.mask, _log_ratio(case).astype(np.float64)
  mean = lambda x: (x * mask).sum(1) / np.maximum(mask.sum(1), 1)
  s, t = (np.exp(np.minimum(mean(x), 10)) for x in (lr, np.clip(lr, -20, 20)))
  low, high = _bounds(case)
  adv, differs = _adv(case), False
  for i in np.flatnonzero(np.abs(s - t) > 1e-4 * np.abs(s)):
    seen = lambda r, a: np.minimum(r * a, np.clip(r, low, high) * a)
    a = adv[i][mask[i]]
    differs |= bool(np.any(np.abs(seen(s[i], a) - seen(t[i], a)) > 1e-3))
  return differs


PEER = Peer(
    "tunix", always=_always,
    harness={"ref": ignored, "old": _old, "algo": _algo},
    helpers=(
        Helper(lambda case: "method" in case.config, _kl),
        Helper(lambda case: "num_generations" in case.config
               and "advantages" in case.arrays, _groups),
        Helper(lambda case: "lam" in case.config, _gae)),
    rules=(
        Rule("jnp.clip passes half of the gradient at a bound", _at_a_bound),
        Rule("GSPO's mean is of clamped token ratios there",
             _clamped_before_the_mean)),
    arrays={"sampler_is_weights": _weights})
