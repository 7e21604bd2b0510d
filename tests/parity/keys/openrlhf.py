"""OpenRLHF."""

from parity.cases import Case, Helper, Peer, summed
from rl_is.ops import regularizers


def _global_tokens(case: Case, count: float) -> None:
  """A count over all ranks in place of this batch's."""
  case.scale *= case.mask.sum() / count


def _ranks(case: Case, count: int) -> None:
  case.scale *= count


def _kl(case: Case):
  fn = getattr(regularizers, case.config["kl"])
  return summed(case, lambda logp: fn(
      logp, case["ref"], case["mask"] != 0, max_kl=10.0))


PEER = Peer(
    "openrlhf",
    harness={"batch_num_tokens": _global_tokens, "dp_size": _ranks},
    helpers=(Helper(lambda case: "kl" in case.config, _kl),))
