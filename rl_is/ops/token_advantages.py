"""Advantages of one number a token, from the rewards of a batch. Floor 1.

As `advantages`: once per batch, on global arrays, before any split; a row whose
reward is NaN has keep = False and counts nowhere. Off the mask everything is 0.
Those that need a value function are in `values`.
"""

import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Advantages, Array
from rl_is.ops import advantages as _advantages
from rl_is.ops import values


@checks.ranged()
def batch_norm(advantages: Advantages, mask: Array | None = None, *,
               ddof: Array | float = 1.0, var_eps: Array | float = 1e-8
               ) -> Advantages:
  """Given advantages with mean 0 and variance 1 over the scorable batch.

    A <- (A - mean A) / sqrt(var A + var_eps)

  **Source**: Andrychowicz et al., 2020, https://arxiv.org/abs/2006.05990; in
    ScaleRL 2025, https://arxiv.org/abs/2510.13786 (batch level).
  **Departs**: see `values.whiten`.

  Args:
    advantages: adv [B] or [B, T].
    mask: [B, T]; with it every token counts once, without it every row.
    ddof, var_eps: see `values.whiten`.

  Returns:
    Advantages: adv [B], or [B, T] where a mask is given; the same keep.

  Raises:
    ValueError: on another shape.

  Limits: not scale-free across batches of different difficulty.
  """
  adv, keep = advantages.adv, advantages.keep
  if mask is None:
    adv = values.whiten(adv[:, None], keep[:, None], ddof=ddof, var_eps=var_eps)
    return Advantages(adv[:, 0], keep)
  mask = values.rows_mask("batch_norm", keep, mask) & keep[:, None]
  if jnp.ndim(adv) == 1:
    adv = jnp.broadcast_to(adv[:, None], mask.shape)
  return Advantages(values.whiten(adv, mask, ddof=ddof, var_eps=var_eps), keep)


@checks.ranged()
def reinforce_pp(reward: Array, group: Array, mask: Array,
                 penalty: Array | None = None, *, gamma: Array | float = 1.0,
                 ddof: Array | float = 1.0, var_eps: Array | float = 1e-8,
                 holes: str = "carry") -> Advantages:
  """Return from each token on, whitened over the tokens of the batch.

    A_t = whiten(G_t),  G_t = r_t + gamma G_{t+1},  r_t = 1[last] R - penalty_t

  **Source**: Hu et al., "REINFORCE++", 2025, https://arxiv.org/abs/2501.03262,
    eq. 7 and 8 (numbers unverified).
  **Departs**: passes over masked tokens, as verl, or with `holes` "restart"
    starts anew there (SkyRL): a turn before the last one has no return then.

  Args:
    reward: [B] float; NaN = unscorable.
    group: [B] int in [0, B); not used.
    mask: [B, T] bool or 0/1.
    penalty: [B, T] float or None: a KL term times its coefficient.
    gamma: in [0, 1].
    ddof, var_eps: see `values.whiten`.
    holes: "carry" or "restart".

  Returns:
    Advantages: adv [B, T] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or another shape.

  Limits: easy and hard prompts share one baseline.
  """
  checks.vector("reinforce_pp", reward=reward, group=group)
  mask = values.rows_mask("reinforce_pp", reward, mask)
  keep = ~jnp.isnan(reward)
  mask &= keep[:, None]
  reward_tok = values.at_last(jnp.where(keep, reward, 0), mask)
  if penalty is not None:
    checks.like("reinforce_pp", {"mask": reward_tok}, penalty=penalty)
    reward_tok -= masked.fill(masked.wide(penalty), mask)
  adv = values.returns(reward_tok, mask, gamma=gamma, holes=holes)
  return Advantages(values.whiten(adv, mask, ddof=ddof, var_eps=var_eps), keep)


@checks.ranged()
def reinforce_pp_baseline(reward: Array, group: Array, mask: Array,
                          penalty: Array | None = None, *,
                          ddof: Array | float = 1.0,
                          var_eps: Array | float = 1e-8, lone: str = "zero"
                          ) -> Advantages:
  """Reward minus group mean, whitened over the tokens of the batch.

    A_t = whiten(R - mean_G R - penalty_t)

  **Source**: Hu et al., 2025, https://arxiv.org/abs/2501.03262, section 3
    (number unverified); the penalty as NeMo-RL's `use_kl_in_reward`.
  **Departs**: ddof 1 as verl; NeMo-RL's is 0. Before the whitening a group of
    one has 0, or with `lone` "reward" its R (verl).

  Args:
    reward: [B] float; NaN = unscorable.
    group: [B] int in [0, B).
    mask: [B, T] bool or 0/1.
    penalty: [B, T] float or None, taken from the reward.
    ddof, var_eps: as `values.whiten`.
    lone: "zero" or "reward".

  Returns:
    Advantages: adv [B, T] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths, a float `group`, another shape.

  Limits: long answers weigh more in the batch's mean.
  """
  fn = "reinforce_pp_baseline"
  centred, count, keep = _advantages.centre(fn, reward, group)
  centred = _advantages.lone_row(fn, lone, centred, reward, count, keep)
  mask = values.rows_mask(fn, reward, mask)
  adv = jnp.broadcast_to(centred[:, None], mask.shape)
  if penalty is not None:
    checks.like(fn, {"mask": adv}, penalty=penalty)
    adv = adv - masked.fill(masked.wide(penalty), mask)
  return batch_norm(Advantages(adv, keep), mask, ddof=ddof, var_eps=var_eps)


def optimal_token_baseline(
    reward: Array, group: Array, mask: Array, logp: Array,
    sum_prob_sq: Array, weight: Array | None = None, *, lone: str = "zero"
    ) -> Advantages:
  """Reward minus a baseline of least variance for each position of a group.

    A_it = R_i - B_t,  B_t = sum_j W_jt R_j / sum_j W_jt   (j with a token at t)
    W_jt = sum_{u <= t} w_ju^2 (1 - 2 p_ju + sum_v p_juv^2)

  the running sum of the squared score of a softmax over its logits.

  **Source**: verl's `optimal_token_baseline` (its paper not identified).
  **Departs**: `lone`: a token that no other sample of its group reaches gets 0
    ("zero"), or R ("reward", as verl for a group of one and a longest tail).

  Args:
    reward: [B] float; NaN = unscorable.
    group: [B] int in [0, B).
    mask: [B, T] bool or 0/1.
    logp: [B, T] float, nats; detached.
    sum_prob_sq: [B, T] float: sum over the vocabulary of squared probabilities.
    weight: [B, T] float >= 0 or None: importance weights.
    lone: "zero" or "reward".

  Returns:
    Advantages: adv [B, T] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on another shape, a float `group`, an unknown `lone`.

  Limits: the row is in its own baseline: a bias of order 1 / G.
  """
  fn = "optimal_token_baseline"
  checks.choice(f"{fn}: lone", lone, ("zero", "reward"))
  more = {} if weight is None else dict(weight=weight)
  checks.like(fn, dict(logp=logp), sum_prob_sq=sum_prob_sq, **more)
  centred, _, keep = _advantages.centre(fn, reward, group)
  mask = checks.as_mask(fn, mask, jnp.shape(logp))
  mask = values.rows_mask(fn, reward, mask) & keep[:, None]
  logp, sum_sq, *rest = (masked.fill(masked.wide(x), mask)
                         for x in (logp, sum_prob_sq, *more.values()))
  square = 1 - 2 * jnp.exp(logp) + sum_sq
  for w in rest:
    square = square * jnp.square(w)
  energy = jnp.where(mask, jnp.cumsum(jnp.where(mask, square, 0), axis=1), 0)
  total = _advantages.group_sum(energy, group)
  count = _advantages.group_sum(mask.astype(energy.dtype), group)
  share = jnp.where(total == 0, mask / jnp.maximum(count, 1),
                    energy / jnp.where(total == 0, 1, total))
  base = _advantages.group_sum(share * centred[:, None], group)
  adv = jnp.where(mask & (count > 1), centred[:, None] - base, 0)
  if lone == "reward":
    safe = jnp.where(keep, masked.wide(reward), 0)
    adv = jnp.where(mask & (count == 1), safe[:, None], adv)
  return Advantages(lax.stop_gradient(adv), keep)
