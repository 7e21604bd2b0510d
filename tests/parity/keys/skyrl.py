"""SkyRL."""

from parity import cases
from parity.cases import Case, Helper, Peer, Rule
from rl_is.objective import dialects
from rl_is.ops import aggregate, values

LOSSES = {"ppo_policy_loss": None, "gspo_policy_loss": "gspo",
          "sapo_policy_loss": "sapo", "compute_policy_loss_cispo": "cispo",
          "rollout_is_policy_loss": "rollout_is", "dppo_policy_loss": "dppo",
          "compute_policy_loss_clip_cov": "clip_cov",
          "compute_policy_loss_kl_cov": "kl_cov",
          "importance_sampling_loss": "importance_sampling",
          "cross_entropy_loss": "cross_entropy"}
ESTIMATORS = {"compute_grpo_outcome_advantage": "grpo",
              "compute_rloo_outcome_advantage": "rloo",
              "compute_gae_advantage_return": "gae",
              "compute_reinforce_plus_plus_outcome_advantage": "reinforce++",
              "compute_maxrl_advantage": "maxrl"}


def _calls_the_loss(case: Case) -> None:
  """The policy loss alone, with the harness's own bounds for CISPO."""
  config = case.config
  config.setdefault("use_kl_loss", False)
  if not {"kl", "value_clip"} & set(config) and case.function not in ESTIMATORS:
    config.setdefault("max_seq_len", case.mask.shape[1])
  if _kind(config) == "cispo" and "cispo" not in config:
    for side, eps in (("low", 0.2), ("high", 0.28)):
      if f"cispo.cispo_eps_clip_{side}" not in config:
        config.setdefault(f"cispo_eps_clip_{side}", eps)


def _kind(config) -> str:
  return LOSSES.get(config.get("fn")) or config.get("policy_loss_type",
                                                    "regular")


def _function(case: Case, name: str) -> None:
  if LOSSES[name]:
    case.config["policy_loss_type"] = LOSSES[name]


def _advantages(case: Case):
  estimator, mask = ESTIMATORS[case.function], case["mask"] != 0
  if estimator == "gae":
    got = values.gae(case["reward_tok"], case["values"], mask,
                     gamma=case.config.get("gamma", 1.0),
                     lam=case.config.get("lam", case.config.get("lambd", 1.0)),
                     mask_rule="ignore")
    return {"advantages": values.whiten(got.adv, mask), "returns": got.target}
  # A row without a token has no reward, and counts in its group with 0.
  case.x["rewards"] = case.x["reward_tok"].sum(axis=1)
  case.config["advantage_estimator"] = estimator
  adv = cases.advantages_of(PEER, case)
  if estimator != "reinforce++":
    return {"advantages": adv, "returns": adv}
  returns = values.returns(case["reward_tok"], mask, holes="restart",
                           gamma=case.config.get("gamma", 1.0))
  return {"advantages": adv, "returns": returns}


def _kl(case: Case):
  dialect = dialects.translate("skyrl", dict(
      use_kl_loss=True, kl_estimator_type=case.config["kl"]))
  return cases.kl(case, dialect.spec.regularizer,
                  max_log_ratio=dialect.constants["kl_clamp"],
                  max_kl=dialect.constants["max_kl"])


def _value_loss(case: Case):
  """By row, and rows without a token count."""
  return cases.value_loss(
      case, case.config["value_clip"],
      lambda token, mask: aggregate.sequence_mean_token_mean(
          token, mask, empty="count").value())


PEER = Peer(
    "skyrl",
    always=_calls_the_loss,
    harness={"fn": _function},
    helpers=(Helper(lambda case: case.function in ESTIMATORS, _advantages),
             Helper(lambda case: "kl" in case.config, _kl),
             Helper(lambda case: "value_clip" in case.config, _value_loss)),
    rules=(Rule("what it tests, or adds, is in units that loss_reduction has "
                "changed: no number of ours", lambda case: (
                    _kind(case.config) in ("clip_cov", "kl_cov"))),
           Rule("supervised", lambda case: (
               _kind(case.config) == "cross_entropy"))))
