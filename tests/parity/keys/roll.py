"""ROLL: its reductions and KL alone; what is reduced is the harness's."""

from parity import cases
from parity.cases import Case, Helper, Peer, Rule, ignored

KL = {"kl": "k1", "abs": "abs_kl", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}


def _reduction(case: Case) -> None:
  """`mode` is loss_agg_mode; counts over all ranks stand for this batch's.

  "-norm" is a sum over the padded width, which the dialect does not know.
  """
  c, mask = case.config, case.mask
  if "mode" in c:
    c["loss_agg_mode"] = c.pop("mode")
  mode = c.get("loss_agg_mode", "seq-mean-token-mean")
  tokens = c.pop("batch_num_tokens", None)
  rows = c.pop("global_valid_samples", None)
  if mode == "seq-mean-token-sum-norm":
    c["loss_agg_mode"] = "token-mean"
    case.replace["aggregation"] = "token_sum"
    case.scale /= mask.shape[1]
  elif mode == "token-mean" and tokens is not None:
    case.scale *= mask.sum() / tokens
  elif mode != "token-mean" and rows is not None:
    case.scale *= len(mask) / rows


def _sums_what_is_masked(case: Case) -> bool:
  return (case.config.get("mode") == "token-mean"
          and not case.config.get("premasked", True)
          and bool(((case.token_adv != 0) & ~case.mask).any()))


def _kl(case: Case):
  name = KL[case.config["kl"]]
  limits = dict(max_log_ratio=float("inf"), max_kl=10.0) if name == "k3" else {}
  return cases.kl(case, name, **limits)


PEER = Peer(
    "roll",
    always=_reduction,
    harness={"premasked": ignored, "loss_mat": ignored},
    helpers=(Helper(lambda case: "kl" in case.config, _kl),),
    rules=(Rule("token-mean adds up what stands off the mask",
                _sums_what_is_masked),))
