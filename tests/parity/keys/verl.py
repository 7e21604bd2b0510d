"""verl."""

import jax.numpy as jnp
import numpy as np

from parity import cases
from parity.cases import Case, Helper, Peer, Rule, ignored
from rl_is.objective import dialects
from rl_is.objective.dialects import base
from rl_is.objective.dialects.verl import BLOCKS
from rl_is.ops import aggregate, token_advantages, values

ESTIMATORS = {f"compute_{name}_advantage{end}": key for name, end, key in (
    ("grpo_outcome", "", "grpo"),
    ("grpo_vectorized_outcome", "", "grpo_vectorized"),
    ("grpo_passk_outcome", "", "grpo_passk"), ("rloo_outcome", "", "rloo"),
    ("rloo_vectorized_outcome", "", "rloo_vectorized"),
    ("reinforce_plus_plus_outcome", "", "reinforce_plus_plus"),
    ("reinforce_plus_plus_baseline_outcome", "",
     "reinforce_plus_plus_baseline"),
    ("remax_outcome", "", "remax"), ("opo_outcome", "", "opo"),
    ("gpg_outcome", "", "gpg"), ("gae", "_return", "gae"),
    ("optimal_token_baseline", "", "optimal_token_baseline"))}


def _flat(config):
  """The blocks' keys beside the others."""
  return base.flat(config, BLOCKS)


def _mode(config) -> str:
  """The loss mode; a loss alone with old := behaviour is the bypass."""
  c = _flat(config)
  if c.get("bypass_mode") or ("old" in c and "loss_mode" not in c):
    return "bypass_mode"
  return c.get("loss_mode", "vanilla")


def _aggregation(config) -> str:
  c = _flat(config)
  return ("seq-mean-token-mean" if _mode(c) in ("gspo", "sapo") else
          c.get("loss_agg_mode", "token-mean"))


def _padded_width(case: Case) -> None:
  """What stands for loss_scale_factor where it is not given."""
  if _aggregation(case.config) == "seq-mean-token-sum-norm":
    case.config.setdefault("loss_scale_factor", case.mask.shape[1])


def _stands_for_old(case: Case, name: str) -> None:
  if _mode(dict(case.config, old=name)) == "bypass_mode":
    case.config["bypass_mode"] = True
  case.x["old"] = case.x[name]


def _global_counts(case: Case, info: dict) -> None:
  """Counts over all ranks in place of this batch's: sums, times a number."""
  if _mode(case.config) == "geo_mean":
    return  # it does not ask
  mode, ranks = _aggregation(case.config), info.get("dp_size") or 1
  if mode == "token-sum":
    case.scale *= ranks
    return
  rows, tokens = info.get("global_batch_size"), info.get("batch_num_tokens")
  count = tokens if mode == "token-mean" else rows
  if info.get("loss_scale_factor"):
    case.config["loss_scale_factor"] = info["loss_scale_factor"]
  if count is None:
    return
  case.scale *= ranks / count
  if mode == "seq-mean-token-mean":
    case.replace["options"] = (("empty", "count"),)
    case.scale *= len(case.mask)
  else:
    case.replace["aggregation"] = "token_sum"
  if mode == "seq-mean-token-sum-norm":
    case.scale /= case.config["loss_scale_factor"]


def _rollout(case: Case, without=(), old="old"):
  """The batch after its rollout correction alone."""
  config = {key: value for key, value in _flat(case.config).items()
            if key.startswith("rollout_") and key not in without}
  return cases.prepared("verl", config,
                        cases.batch_of(case).replace(logp_prox=case[old]))


def _weights(case: Case, prepared=None):
  """Rejection does not touch the stored weights."""
  return _rollout(case, without=("rollout_rs", "rollout_rs_threshold")).weight


def _correction(case: Case):
  return {"modified_mask": _rollout(case).keep,
          "rollout_is_weights": _weights(case)}


def _rejects(config) -> bool:
  return bool(_flat(config).get("rollout_rs"))


def _kept_now(case: Case) -> np.ndarray:
  """What the bypass keeps: it asks the current policy against `behav`."""
  return np.asarray(_rollout(case, old="logp").keep)


def _bypass_with_rejection(case: Case):
  """Without global counts its denominators are of what is kept."""
  kept, mask = _kept_now(case), case.mask
  mode = _aggregation(case.config)
  if mode == "token-mean" and "aggregation" not in case.replace:
    case.scale *= mask.sum() / max(kept.sum(), 1)
  elif mode.startswith("seq") and not case.replace:
    rows = lambda m: m.any(axis=1).sum()
    case.scale *= rows(mask) / max(rows(kept), 1)
  return cases.loss_of(PEER, case)


def _rows_partly_rejected(case: Case) -> bool:
  if not (_mode(case.config) == "bypass_mode" and _rejects(case.config)
          and _aggregation(case.config) == "seq-mean-token-mean"):
    return False
  kept = _kept_now(case)
  return bool((kept.any(axis=1) & (kept != case.mask).any(axis=1)).any())


def _drawn_at_random(case: Case) -> bool:
  """clip_cov silences some of its candidates; its generator knows which."""
  if _mode(case.config) != "clip_cov":
    return False
  c, x = _flat(case.config), case.x
  mask = np.asarray(_rollout(case).keep)
  if not mask.any():
    return False
  low, high = (c.get(f"clip_ratio_{side}", 0.2) for side in ("low", "high"))
  r, logp, adv = np.exp(x["logp"] - x["old"]), x["logp"], case.token_adv
  clipped = -adv * np.clip(r, 1 - low, 1 + high) > -adv * r
  cov = (adv - adv[mask].mean()) * (logp - logp[mask].mean())
  candidates = (mask & ~clipped & (cov > c.get("clip_cov_lb", 1.0))
                & (cov < c.get("clip_cov_ub", 5.0))).sum()
  return candidates > max(int(c.get("clip_cov_ratio", 2e-4) * mask.sum()), 1)


def _refuse_a_draw(case: Case):
  raise ValueError("clip_cov: a random draw has no stored number to meet")


def _advantages(case: Case):
  estimator = ESTIMATORS[case.function]
  gamma, mask = case.config.get("gamma", 1.0), case["mask"] != 0
  if estimator == "gae":
    got = values.gae(case["reward_tok"], case["values"], mask, gamma=gamma,
                     lam=case.config.get("lam", 1.0))
    return {"advantages": values.whiten(got.adv, mask), "returns": got.target}
  # A row without a token has no reward, and counts in its group with 0.
  case.x["rewards"] = case.x["reward_tok"].sum(axis=1)
  returns = values.returns(case["reward_tok"], mask, gamma=gamma)
  if estimator == "optimal_token_baseline":
    adv = token_advantages.optimal_token_baseline(
        case["rewards"], cases.first_rows(case.x["group"]), mask, case["old"],
        0.5 * jnp.exp(0.5 * case["old"]), lone="reward").adv
    return {"advantages": adv, "returns": returns}
  case.config["adv_estimator"] = estimator
  adv = cases.advantages_of(PEER, case)
  has_returns = estimator in ("reinforce_plus_plus", "remax")
  return {"advantages": adv, "returns": returns if has_returns else adv}


def _odd_tail(case: Case) -> bool:
  """Its tail is told by token counts, which with holes are no positions."""
  if ESTIMATORS.get(case.function) != "optimal_token_baseline":
    return False
  mask, group = case.mask, case.x["group"]
  reward = (case.x["reward_tok"] * mask).sum(axis=1)
  theirs = np.zeros_like(mask)
  ours = np.zeros_like(mask)
  for g in np.unique(group):
    rows = np.flatnonzero(group == g)
    ours[rows] = mask[rows] & (mask[rows].sum(axis=0) == 1)
    second, first = np.sort(np.append(mask[rows].sum(axis=1), 0))[-2:]
    longest = rows[mask[rows].sum(axis=1) == first]
    if len(rows) == 1:
      theirs[rows] = True
    elif len(longest) == 1:
      theirs[longest, second:] = True
  # Where only we take the reward, theirs is 0; where only they do, ours is it
  # less a mean of the rewards there.
  own = mask & ours & ~theirs & (reward != 0)[:, None]
  there = [mask & (group == g)[:, None] & (reward != 0)[:, None]
           for g in group]
  mean = np.stack([t.any(axis=0) for t in there])
  return bool((own | (mask & theirs & ~ours & mean)).any())


def _kl(case: Case):
  """Its mean over tokens."""
  dialect = dialects.translate("verl", dict(
      use_kl_loss=True, kl_loss_type=case.config["kl_penalty"]))
  limits = {row: dialect.constants[name] for row, name in (
      ("max_log_ratio", "kl_clamp"), ("max_kl", "max_kl"))
            if name in dialect.constants}
  got = cases.kl(case, dialect.spec.regularizer, **limits)
  n = case.mask.sum()
  return dict(got, loss=got["loss"] / n, grad=got["grad"] / n)


def _value_loss(case: Case):
  config = dict(case.config)
  clip = config.pop("cliprange_value")
  dialect = dialects.translate("verl", config)
  name = case.replace.get("aggregation", dialect.spec.aggregation)
  more = dict(case.replace.get("options", ()))
  if name == "constant_length":
    more["length"] = dialect.constants["length"]
  return cases.value_loss(case, clip, lambda token, mask: case.scale * getattr(
      aggregate, name)(token, mask, **more).value())


PEER = Peer(
    "verl",
    always=_padded_width,
    harness={"old": _stands_for_old, "global_batch_info": _global_counts,
             "sum_pi_squared": ignored, "adv_estimator": ignored},
    helpers=(
        Helper(lambda case: case.function in ESTIMATORS, _advantages),
        Helper(lambda case: "kl_penalty" in case.config, _kl),
        Helper(lambda case: "cliprange_value" in case.config, _value_loss),
        Helper(lambda case: "loss" not in case.arrays, _correction),
        Helper(_drawn_at_random, _refuse_a_draw),
        Helper(lambda case: (_mode(case.config) == "bypass_mode"
                             and _rejects(case.config)),
               _bypass_with_rejection)),
    arrays={"rollout_is_weights": _weights,
            "modified_mask": lambda case, prepared: prepared.keep},
    rules=(
        Rule("all is rejected: 0/0 there, a loss of 0 here",
             lambda case: case.is_nonfinite and _rejects(case.config)),
        Rule("in bypass mode a row's length is of what the current policy "
             "keeps: it is not known before the update", _rows_partly_rejected),
        Rule("a random draw", _drawn_at_random),
        Rule("the longest tail: token counts are taken for positions",
             _odd_tail),
        Rule("no KL estimate has the value of abs and the gradient of k2",
             lambda case: case.config.get("kl_penalty") == "abs+")))
