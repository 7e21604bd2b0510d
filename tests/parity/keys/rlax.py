"""rlax: no configuration; its functions against ours, called alone."""

import jax
import jax.numpy as jnp
import numpy as np

from parity.cases import Case, Helper, Peer, Rule
from rl_is.ops import aggregate, surrogates, values


def _seen(case: Case):
  """The steps of a trajectory: all, unless it is given a mask."""
  masked = case.config.get("sample_mask", "ones") == "mask"
  return case.mask if masked else np.ones_like(case.mask)


def _inputs(case: Case):
  return (case["old"], case["behav"], case["reward_tok"], case["values"],
          _seen(case))


def _shared(case: Case):
  return dict(gamma=case.config.get("discount", 1.0),
              lam=case.config.get("lambda_", 1.0), max_log_ratio=float("inf"))


def _vtrace(case: Case):
  """Its next value is the next position's, masked or not."""
  c = case.config
  got = values.vtrace(
      *_inputs(case), jnp.pad(case["values"][:, 1:], ((0, 0), (0, 1))),
      rho_bar=c.get("clip_rho", 1.0), pg_bar=c.get("clip_pg_rho", 1.0),
      leak=1 - c.get("alpha", 1.0), **_shared(case))
  return {"errors": got.target - case["values"], "pg_advantage": got.adv,
          "q_estimate": got.q}


def _gae(case: Case):
  got = values.gae(case["reward_tok"], case["values"], _seen(case),
                   gamma=case.config.get("discount", 1.0),
                   lam=case.config.get("lambda_", 1.0))
  return {"advantages": got.adv}


def _corrected_errors(case: Case):
  return {"errors": values.importance_corrected_td_errors(
      *_inputs(case), **_shared(case))}


def _clipped_surrogate(case: Case):
  """Over all positions: it has no mask."""
  every, eps = np.ones_like(case.mask), case.config["epsilon"]
  adv = case.token_adv

  def mean(logp):
    token = surrogates.ppo_clip(logp, case["old"], adv, every, eps_low=eps,
                                eps_high=eps, max_log_ratio=float("inf")).loss
    return aggregate.token_mean(token, every).value()

  loss, grad = jax.value_and_grad(mean)(case["logp"])
  return {"loss": loss, "grad": grad}


def _is_at_a_bound(case: Case) -> bool:
  """There jnp.clip, which wins the tie, passes half of the gradient."""
  if "epsilon" not in case.config:
    return False
  eps = case.config["epsilon"]
  r = jnp.exp(case["logp"] - case["old"])
  tie = (r == jnp.float32(1 - eps)) | (r == jnp.float32(1 + eps))
  return bool((tie & (case.token_adv != 0)).any())


def _calls(name: str):
  return lambda case: (case.function or "").endswith(name)


def _overflows(case: Case) -> bool:
  """Without a clamp ours do where its do: somewhere on the mask."""
  if not case.is_nonfinite:
    return False
  got = next(h for h in PEER.helpers if h.when(case)).call(case)
  return not all(np.isfinite(np.asarray(x)[case.mask]).all()
                 for name, x in got.items() if name in case.arrays)


PEER = Peer(
    None,
    helpers=(
        Helper(_calls("truncated_generalized_advantage_estimation"), _gae),
        Helper(_calls("importance_corrected_td_errors"), _corrected_errors),
        Helper(lambda case: "epsilon" in case.config, _clipped_surrogate),
        Helper(lambda case: True, _vtrace)),
    rules=(
        Rule("products of unclipped ratios overflow: no number to meet",
             _overflows),
        Rule("half a gradient at a bound: a whole one here", _is_at_a_bound)))
