"""Score centring: an additive term that takes the drift out. Floor 1.

At a prefix the sampler's expected (weighted) score is not zero when the sampler
q is not the policy p: a baseline then moves the policy even where nothing was
learned. The term here subtracts that expectation. It is neither a surrogate
nor a weight: it is added to the loss and telescopes with nothing.

`[B, T, K]`: the last axis runs over the ids whose log-probs the sampler wrote
down at each token, its head; the rest of the vocabulary is the tail.
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, TokenLoss

WEIGHTS = ("none", "tis", "icepop")


def _log_weight(weight, l, low, high, max_log_ratio):
  """log f(e^l); -inf where dropped."""
  if weight == "none":
    return jnp.zeros_like(l)
  clamped = masked.clamp(l, -max_log_ratio, max_log_ratio)
  if weight == "tis":
    return jnp.minimum(jnp.maximum(clamped, jnp.log(low)), jnp.log(high))
  outside = (l < jnp.log(low)) | (l > jnp.log(high))
  return jnp.where(outside, -jnp.inf, clamped)


def _check(fn, logp_ids, ids_logp_behaviour, ids_mask, adv, mask, weight):
  checks.choice(f"{fn}: weight", weight, WEIGHTS)
  checks.like(fn, dict(adv=adv))
  shape = jnp.shape(logp_ids)
  if len(shape) != 3 or shape[:2] != jnp.shape(adv):
    raise ValueError(f"{fn}: logp_ids: expected shape {jnp.shape(adv)} + (K,), "
                     f"got {shape}")
  for name, x in dict(ids_logp_behaviour=ids_logp_behaviour,
                      ids_mask=ids_mask).items():
    if jnp.shape(x) != shape:
      raise ValueError(f"{fn}: {name}: expected shape {shape} like logp_ids, "
                       f"got {jnp.shape(x)}")
  for name, x in dict(logp_ids=logp_ids,
                      ids_logp_behaviour=ids_logp_behaviour).items():
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
      raise ValueError(f"{fn}: {name}: expected a floating dtype, got "
                       f"{jnp.result_type(x)}")
  return checks.as_mask(fn, mask, jnp.shape(adv))


@checks.ranged(low=checks.NOT_NEGATIVE, high=checks.POSITIVE,
               max_log_ratio=checks.POSITIVE, tail_eps=checks.POSITIVE)
def score_centering(logp_ids: Array, ids_logp_behaviour: Array,
                    ids_mask: Array, adv: Array, mask: Array, *,
                    weight: str = "none", low: Array | float = 0.0,
                    high: Array | float = jnp.inf,
                    max_log_ratio: Array | float = 20.0,
                    tail_eps: Array | float = 1e-6) -> TokenLoss:
  """Takes the sampler's expected weighted score out of the gradient, per token.

    L_t = A_t sum_v sg(c_v) log p_v, beside -A_t sg(f(p_a / q_a)) log p_a
    c_v = q_v f(p_v / q_v) - a f(1 / a) p_v,  a = (1 - Q) / (1 - P)

  over the head v, with P and Q its mass under p and q. In the tail, which is
  not recorded, q is taken to be a p; sum_v p_v grad log p_v = 0 then turns the
  tail's part into the head's second term.

  **Source**: Marek and Ryabinin, "Score Centering Stabilizes Off-policy
    Reinforcement Learning", 2026, https://arxiv.org/abs/2609.20807 (eq. numbers
    unverified).
  **Departs**: a tail lighter than `tail_eps` under p or q is left out, as its a
    would be rounding noise.

  Args:
    logp_ids: [B, T, K] float, nats: log p of the head, of the whole softmax.
    ids_logp_behaviour: [B, T, K] float, nats: log q of the same ids; detached.
    ids_mask: [B, T, K] bool or 0/1: the slots in use; each id once.
    adv: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    weight: f: "none" is 1, "tis" clamps to [low, high], "icepop" is 0 outside.
      It must be the correction of the sampled token, with num "current".
    low, high: >= 0, absolute, inclusive; 0 and inf are off.
    max_log_ratio: nats, > 0.
    tail_eps: probability, > 0.

  Returns:
    TokenLoss: loss [B, T] float32 or wider, whose value means nothing; aux
    `head_mass` and `head_mass_behaviour`, [B, T], detached.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown weight.

  Limits: exact when the head is the vocabulary or the tail is a p, else as good
    as that guess. With "tis" and no bounds it is 0. For the surrogate `pg`: a
    clipped one has another score. logp_ids = -inf with A != 0 gives inf or NaN.
  """
  fn = "score_centering"
  mask = _check(fn, logp_ids, ids_logp_behaviour, ids_mask, adv, mask, weight)
  ids = (jnp.asarray(ids_mask) != 0) & mask[..., None]
  adv = lax.stop_gradient(masked.fill(masked.wide(adv), mask))
  logp = masked.fill(masked.wide(logp_ids), ids)
  logq = lax.stop_gradient(masked.fill(masked.wide(ids_logp_behaviour), ids))
  p = masked.fill(jnp.exp(lax.stop_gradient(logp)), ids)
  q = masked.fill(jnp.exp(logq), ids)
  P, Q = p.sum(axis=-1, keepdims=True), q.sum(axis=-1, keepdims=True)
  bounds = (low, high, max_log_ratio)
  l = lax.stop_gradient(logp) - logq
  head = jnp.exp(logq + _log_weight(weight, l, *bounds))
  # So written, a NaN is seen: only a tail known to be light is left out.
  light = (1 - P < tail_eps) | (1 - Q < tail_eps)
  log_a = jnp.log(jnp.where(light, 1, 1 - Q) / jnp.where(light, 1, 1 - P))
  tail = jnp.exp(log_a + _log_weight(weight, -log_a, *bounds))
  c = masked.fill(head - masked.fill(tail, ~light) * p, ids)
  # A token with A = 0 adds exactly 0; a NaN log-prob is seen even there.
  live = (adv != 0)[..., None] | jnp.isnan(logp)
  score = jnp.sum(masked.fill(c, live) * masked.fill(logp, live), axis=-1)
  return TokenLoss(masked.fill(adv * score, mask), {
      "head_mass": P[..., 0], "head_mass_behaviour": Q[..., 0]})
