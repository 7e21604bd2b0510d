"""ROLL: its reductions and KL alone; the loss that is reduced is the harness's."""

from parity.cases import Case, Helper, Peer, Rule, ignored, summed
from rl_is.ops import regularizers

KL = {"kl": "k1", "abs": "abs_kl", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}


def _mode(case: Case, mode: str) -> None:
  """"-norm" is the sum over the padded width: the dialect has no such mode."""
  case.config["loss_agg_mode"] = mode
  if mode == "seq-mean-token-sum-norm":
    case.config["loss_agg_mode"] = "token-mean"
    case.replace["aggregation"] = "token_sum"
    case.scale /= case.mask.shape[1]


def _global_tokens(case: Case, count: float | None) -> None:
  """A count over all ranks in place of this batch's."""
  if count is not None and case.config.get("loss_agg_mode") == "token-mean":
    case.scale *= case.mask.sum() / count


def _global_rows(case: Case, count: float | None) -> None:
  if count is not None and case.config.get("loss_agg_mode") in (
      "seq-mean-token-sum", "seq-mean-token-mean"):
    case.scale *= len(case.mask) / count


def _sums_what_is_masked(case: Case) -> bool:
  adv = case.x["adv"] if case.adv == "tok" else case.x["adv_seq"][:, None]
  return (case.config.get("mode") == "token-mean"
          and not case.config.get("premasked", True)
          and bool(((adv != 0) & ~case.mask).any()))


def _kl(case: Case):
  name = KL[case.config["kl"]]
  limits = dict(max_log_ratio=float("inf"), max_kl=10.0) if name == "k3" else {}
  fn = getattr(regularizers, name)
  return summed(case, lambda logp: fn(
      logp, case["ref"], case["mask"] != 0, **limits))


PEER = Peer(
    "roll",
    harness={"mode": _mode, "premasked": ignored, "loss_mat": ignored,
             "batch_num_tokens": _global_tokens,
             "global_valid_samples": _global_rows},
    helpers=(Helper(lambda case: "kl" in case.config, _kl),),
    rules=(Rule("token-mean adds up what stands off the mask",
                _sums_what_is_masked),))
