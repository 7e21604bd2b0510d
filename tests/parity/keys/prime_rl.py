"""prime-rl."""

from parity.cases import Case, Peer, Rule


def _scaled_advantages(case: Case, tau: float) -> None:
  """The dialect leaves it to whoever gives the advantages."""
  if not case.config.get("ref_kl"):  # which does not read it
    case.x |= {name: tau * case.x[name] for name in ("adv", "adv_seq")}


def _distilled(case: Case, on: bool) -> None:
  """Its advantage at the one point where the case is evaluated."""
  case.config["ref_kl"] = on
  if on:
    case.x["adv"], case.adv = case.x["ref"] - case.x["logp"], "tok"


_DIAGNOSTICS = (
    "masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked", "is_masked_low",
    "is_masked_high", "masked_advantage_positive", "masked_advantage_negative",
    "ref_kl")

PEER = Peer(
    "prime_rl",
    harness={"ref_kl": _distilled, "adv_tau": _scaled_advantages},
    rules=(Rule("a ratio that overflows: inf, or 0 * inf where it is dropped",
                lambda case: case.is_nonfinite),),
    skipped={prefix + name: "one number a row, for reporting"
             for prefix in ("", "ref_kl_") for name in _DIAGNOSTICS})
