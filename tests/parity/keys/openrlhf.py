"""OpenRLHF."""

from parity import cases
from parity.cases import Case, Helper, Peer
from rl_is.ops import aggregate


def _global_tokens(case: Case, count: float) -> None:
  """A count over all ranks in place of this batch's."""
  case.scale *= case.mask.sum() / count


def _ranks(case: Case, count: int) -> None:
  case.scale *= count


def _kl(case: Case):
  return cases.kl(case, case.config["kl"], max_kl=10.0)


def _value_loss(case: Case):
  """ValueLoss: the mean over tokens, or over rows of those."""
  mean = (aggregate.token_mean if case.config.get("token_level_loss", True) else
          aggregate.sequence_mean_token_mean)
  return cases.value_loss(case, case.config.get("clip_eps"),
                          lambda token, mask: mean(token, mask).value())


PEER = Peer(
    "openrlhf",
    harness={"batch_num_tokens": _global_tokens, "dp_size": _ranks},
    helpers=(Helper(lambda case: "kl" in case.config, _kl),
             Helper(lambda case: "grad_vpred" in case.arrays, _value_loss)))
