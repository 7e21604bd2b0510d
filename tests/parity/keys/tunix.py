"""Tunix."""

import jax.numpy as jnp
import numpy as np

from parity import cases
from parity.cases import Case, Helper, Peer, Rule, ignored
from rl_is.ops import values

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
  limit = case.config.get("clamp_value")
  return cases.kl(case, KL[case.config["method"]], max_log_ratio=jnp.inf,
                  max_kl=jnp.inf if limit is None else limit)


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


def _bounds(case: Case):
  """Of the clip, and of the dual clip."""
  eps = case.config.get("epsilon", 0.2)
  low, high, dual = (case.config.get(f"epsilon_{name}")
                     for name in ("low", "high", "c"))
  return (np.float32(1 - (eps if low is None else low)),
          np.float32(1 + (eps if high is None else high)),
          np.float32(1e30 if dual is None else dual))


def _is_ppo(case: Case) -> bool:
  return "ppo" in (case.config.get("algo"), case.config.get("algo_variant"))


def _is_gspo(case: Case) -> bool:
  return case.config.get("loss_algo") == "gspo-token" and not _is_ppo(case)


def _row_means(case: Case, x):
  n = np.maximum(case.mask.sum(axis=1, keepdims=True), 1)
  return (x * case.mask).sum(axis=1, keepdims=True) / n


def _at_a_bound(case: Case) -> bool:
  """A live token whose ratio is a bound exactly: max, min and clip tie."""
  if case.adv is None:
    return False
  lr = jnp.asarray(_log_ratio(case))
  if _is_gspo(case):
    lr = jnp.broadcast_to(_row_means(case, jnp.clip(lr, -20, 20)), lr.shape)
  r, adv = np.asarray(jnp.exp(lr)), case.token_adv
  low, high, dual = _bounds(case)
  tie = (r == low) | ((r == high) & ((adv > 0) | (dual >= high)))
  tie |= (r == dual) & (adv < 0)
  return bool((tie & case.mask & (adv != 0)).any())


def _clamped_before_the_mean(case: Case) -> bool:
  """The clamp of a token changes what its row contributes."""
  if case.adv is None or not _is_gspo(case):
    return False
  mask, lr = case.mask, _log_ratio(case).astype(np.float64)
  s, t = (np.exp(np.minimum(_row_means(case, x)[:, 0], 10))
          for x in (lr, np.clip(lr, -20, 20)))
  low, high, dual = _bounds(case)
  adv, differs = case.token_adv, False
  for i in np.flatnonzero(np.abs(s - t) > 1e-4 * np.abs(s)):
    seen = lambda r, a: np.maximum(
        np.minimum(r * a, np.clip(r, low, high) * a),
        np.where(a < 0, dual * a, -np.inf))
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
