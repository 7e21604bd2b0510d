"""Advantages: from the rewards of a batch to one number a sequence. Floor 1.

Computed once per batch, on global arrays, before any split. `group` gives each
row's prompt as an integer in [0, B); groups may have any size and order. A NaN
reward means unscorable (the verifier abstained): that row gets advantage 0 and
keep = False, and the group's statistics are over the others. A group whose
rewards are all equal gives exactly 0: rewards are measured from the group's
smallest one, so equal rewards are exact zeros before anything is averaged.
One number a token: `token_advantages` and, with a value, `values`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Advantages, Array

STDS = ("unbiased", "biased", "leave_one_out", "batch")
LONE = ("zero", "reward")  # what a group of one scorable reward gets


def centre(fn: str, reward: Array, group: Array):
  """(reward - group mean, count of the group, keep), all [B]."""
  checks.vector(fn, reward=reward, group=group)
  reward = masked.wide(reward)
  size = reward.shape[0]
  checks.group_ids(fn, group, size)
  keep = ~jnp.isnan(reward)
  in_range = (group >= 0) & (group < size)
  smallest = jax.ops.segment_min(
      jnp.where(keep, reward, jnp.inf), group, size)[group]
  above = jnp.where(keep, reward - smallest, 0)
  count = group_sum(keep.astype(reward.dtype), group)
  mean = group_sum(above, group) / jnp.maximum(count, 1)
  # Traced ids cannot be refused: NaN, which is seen, not 0, which is not.
  centred = jnp.where(in_range, above - mean, jnp.nan)
  return jnp.where(keep, centred, 0), count, keep


def lone_row(fn: str, lone: str, adv: Array, reward: Array, count: Array,
             keep: Array) -> Array:
  """The same, but for rows that are alone in their group: 0 as it is, or R."""
  checks.choice(f"{fn}: lone", lone, LONE)
  if lone == "zero":
    return adv
  return jnp.where(keep & (count == 1), masked.wide(reward), adv)


def group_sum(x: Array, group: Array) -> Array:
  return jax.ops.segment_sum(x, group, x.shape[0])[group]


def _group_std(centred: Array, group: Array, n: Array) -> Array:
  unit = masked.power_of_two(centred)
  square = group_sum(jnp.square(centred / unit), group)
  return unit * jnp.sqrt(square / jnp.maximum(n, 1))


def _over_std(x: Array, std: Array, std_eps) -> Array:
  """x / (std + eps); 0 where the standard deviation is 0."""
  positive = std > 0
  std = jnp.where(positive, std, 1)
  return jnp.where(positive, x / (std + std_eps), 0 * x)  # 0 * NaN is seen


def _leave_one_out(reward: Array, group: Array, keep: Array):
  """(reward - mean of the group's others, deviation of those with n - 1).

  Two passes over the others of each row, not one over sums of squares: where
  the others are equal the deviation is exactly 0, however odd the row itself.
  """
  group, rows = jnp.asarray(group), jnp.arange(keep.shape[0])

  def one(row):
    i, own_group, own, kept = row
    others = keep & (group == own_group) & (rows != i)
    n = jnp.sum(others, dtype=reward.dtype)
    smallest = jnp.min(jnp.where(others, reward, jnp.inf), initial=jnp.inf)
    above = jnp.where(others, reward - smallest, 0)
    mean = jnp.sum(above) / jnp.maximum(n, 1)
    spread = jnp.where(others, above - mean, 0)
    unit = masked.power_of_two(spread)
    adv = jnp.where(kept & (n > 0), own - smallest - mean, 0)
    square = jnp.sum(jnp.square(spread / unit))
    return adv, unit * jnp.sqrt(square / jnp.maximum(n - 1, 1))

  return lax.map(one, (rows, group, reward, keep), batch_size=256)


@checks.ranged()
def grpo(reward: Array, group: Array, *, std_eps: Array | float = 1e-6,
         std: str = "unbiased", lone: str = "zero") -> Advantages:
  """Reward minus group mean, over a standard deviation.

    A_i = (R_i - mean_G R) / (std + std_eps)

  std: "unbiased" (n - 1) or "biased" (n) of the group; "batch" (n - 1, of all
  rewards); "leave_one_out": mean and std (n - 1) of the group's other rewards.

  **Source**: Shao et al., "DeepSeekMath" (GRPO), 2024,
    https://arxiv.org/abs/2402.03300, section 4.1.2.
  **Departs**: the paper does not say n or n - 1; n - 1 and 1e-6 as verl, Tunix,
    SkyRL (TRL adds 1e-4; NeMo-RL: leave_one_out, and where that std is 0 it
    does not divide). Two-pass variance. A group of one gives 0, or with `lone`
    "reward" its R (verl).

  Args:
    reward: [B] float; NaN = unscorable. group: [B] int in [0, B).
    std_eps: >= 0; 0 is safe.
    std: one of `STDS`. lone: one of `LONE`.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths, a float `group`, an unknown `std`.

  Limits: rare successes get large advantages; equal rewards exactly 0. With
    "leave_one_out" nearly equal others give a row a very large one.
  """
  checks.choice("grpo: std", std, STDS)
  centred, count, keep = centre("grpo", reward, group)
  if std == "leave_one_out":
    adv, std = _leave_one_out(masked.wide(reward), group, keep)
    adv = jnp.where(std > 0, _over_std(adv, std, std_eps), adv)
    return Advantages(lone_row("grpo", lone, adv, reward, count, keep), keep)
  if std == "batch":
    every, n, _ = centre("grpo", reward, jnp.zeros_like(group))
    std = _group_std(every, jnp.zeros_like(group), n - 1)
  else:
    std = _group_std(centred, group, count - (std == "unbiased"))
  adv = _over_std(centred, std, std_eps)
  return Advantages(lone_row("grpo", lone, adv, reward, count, keep), keep)


def dr_grpo(reward: Array, group: Array, *, lone: str = "zero") -> Advantages:
  """Reward minus group mean, not divided.

    A_i = R_i - mean_G R

  **Source**: Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025,
    https://arxiv.org/abs/2503.20783, eq. 3.
  **Departs**: (G - 1) / G times `rloo`; `lone` as there.

  Args:
    reward: [B] float; NaN = unscorable. group: [B] int in [0, B).
    lone: one of `LONE`.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: the sample's own reward is in its baseline: biased by (G - 1) / G.
  """
  centred, count, keep = centre("dr_grpo", reward, group)
  return Advantages(
      lone_row("dr_grpo", lone, centred, reward, count, keep), keep)


def rloo(reward: Array, group: Array, *, lone: str = "zero") -> Advantages:
  """Reward minus the mean of the group's other rewards.

    A_i = R_i - (1/(G-1)) sum_{j != i} R_j = G/(G-1) (R_i - mean_G R)

  **Source**: Ahmadian et al., "Back to Basics", 2024,
    https://arxiv.org/abs/2402.14740, eq. 8 (RLOO).
  **Departs**: a group of one scorable reward gives 0, or with `lone` "reward"
    its R (one of verl's two implementations).

  Args:
    reward: [B] float; NaN = unscorable. group: [B] int in [0, B).
    lone: one of `LONE`.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: unbiased on-policy.
  """
  centred, count, keep = centre("rloo", reward, group)
  centred = lone_row("rloo", lone, centred, reward, count, keep)
  return Advantages(centred * count / jnp.maximum(count - 1, 1), keep)


def reward(reward: Array, group: Array) -> Advantages:
  """The reward itself, without a baseline.

    A_i = R_i

  **Source**: Williams, 1992, https://doi.org/10.1007/BF00992696. With reward 1
    on demonstrations, `pg` on it is maximum likelihood: the warm start.
  **Departs**: nothing.

  Args:
    reward: [B] float; NaN = unscorable.
    group: [B] int in [0, B); not used.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths.

  Limits: high variance when rewards share an offset.
  """
  checks.vector("reward", reward=reward, group=group)
  keep = ~jnp.isnan(reward)
  return Advantages(jnp.where(keep, masked.wide(reward), 0), keep)


def remax(reward: Array, group: Array, baseline: Array) -> Advantages:
  """Reward minus the reward of the greedy answer to the same prompt.

    A_i = R_i - R(greedy)

  **Source**: Li et al., "ReMax", 2023, https://arxiv.org/abs/2310.10505, eq. 4
    (number unverified).
  **Departs**: nothing.

  Args:
    reward: [B] float; NaN = unscorable.
    group: [B] int in [0, B); not used.
    baseline: [B] float, the greedy reward; NaN makes the row unscorable.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths.

  Limits: one more answer a prompt must be sampled.
  """
  checks.vector("remax", reward=reward, group=group, baseline=baseline)
  keep = ~(jnp.isnan(reward) | jnp.isnan(baseline))
  adv = masked.wide(reward) - masked.wide(baseline)
  return Advantages(jnp.where(keep, adv, 0), keep)


def _over_largest(x: Array, group: Array, keep: Array) -> Array:
  """x over the group's largest: no product or sum of it can overflow."""
  x = jnp.where(keep, x, 0)
  largest = jax.ops.segment_max(x, group, x.shape[0])[group]
  return x / jnp.where(largest > 0, largest, 1)


def _weighted_centre(fn, reward, group, *factors) -> Advantages:
  """Reward minus the group's mean under the product of factors >= 0."""
  centred, count, keep = centre(fn, reward, group)
  weight = 1
  for factor in factors:
    weight *= _over_largest(jnp.asarray(factor, centred.dtype), group, keep)
  total = group_sum(weight, group)
  share = jnp.where(total == 0, 1 / jnp.maximum(count, 1),
                    weight / jnp.where(total == 0, 1, total))
  shift = group_sum(share * centred, group)
  return Advantages(jnp.where(keep, centred - shift, 0), keep)


def opo(reward: Array, group: Array, length: Array, *, lone: str = "zero"
        ) -> Advantages:
  """Reward minus the group's mean weighted by the length of the answers.

    A_i = R_i - sum_j |y_j| R_j / sum_j |y_j|

  **Source**: Hao et al., "On-Policy RL with Optimal Reward Baseline", 2025,
    https://arxiv.org/abs/2505.23585, eq. 7 (number unverified).
  **Departs**: a group of one gives 0, or with `lone` "reward" its R (verl);
    lengths all 0: the plain mean.

  Args:
    reward: [B] float; NaN = unscorable. group: [B] int in [0, B).
    length: [B] float or int >= 0, tokens. lone: one of `LONE`.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: optimal if the squared gradient of a row grows with its length.
  """
  checks.vector("opo", reward=reward, group=group, length=length)
  adv = _weighted_centre("opo", reward, group, length).adv
  _, count, keep = centre("opo", reward, group)
  return Advantages(lone_row("opo", lone, adv, reward, count, keep), keep)


def optimal_baseline(reward: Array, group: Array, weight: Array, grad_sq: Array
                     ) -> Advantages:
  """Reward minus the baseline of least variance for weighted samples.

    A_i = R_i - b,  b = sum_j w_j^2 |g_j|^2 R_j / sum_j w_j^2 |g_j|^2

  **Source**: "Stable Asynchrony" (VCPO), 2026, https://arxiv.org/abs/2602.17616
    (eq. number unverified); on-policy Weaver and Tao, 2001.
  **Departs**: over the group; a group of one gives 0; all zero: the plain mean.

  Args:
    reward: [B] float; NaN = unscorable. group: [B] int in [0, B).
    weight: [B] float >= 0, the importance weight of the sequence.
    grad_sq: [B] float >= 0, squared norm of the sequence's score.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: the row is in its own baseline: a bias of order 1 / G. With w = 1 and
    |g|^2 = |y| it is `opo`.
  """
  checks.vector("optimal_baseline", reward=reward, group=group, weight=weight,
                grad_sq=grad_sq)
  return _weighted_centre("optimal_baseline", reward, group, weight, weight,
                          grad_sq)


def gpg(reward: Array, group: Array, *, lone: str = "zero") -> Advantages:
  """Reward minus group mean, scaled up by the share of rewards that are zero.

    A_i = (B / #{j: R_j != 0}) (R_i - mean_G R)

  **Source**: Chu et al., "GPG", 2025, https://arxiv.org/abs/2504.02546; the
    factor as verl's code (the paper's leaves out groups without signal).
  **Departs**: B counts scorable rows; a group of one gives 0, or with `lone`
    "reward" its R without a baseline (verl).

  Args:
    reward: [B] float; NaN = unscorable. group: [B] int in [0, B).
    lone: one of `LONE`.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: an offset of all rewards changes the factor; meant for rewards >= 0.
  """
  centred, count, keep = centre("gpg", reward, group)
  centred = lone_row("gpg", lone, centred, reward, count, keep)
  nonzero = jnp.sum(keep & (jnp.asarray(reward) != 0), dtype=centred.dtype)
  alpha = jnp.sum(keep, dtype=centred.dtype) / jnp.maximum(nonzero, 1)
  return Advantages(alpha * centred, keep)


@checks.ranged()
def pass_at_k(reward: Array, group: Array, *, std: str = "none",
              std_eps: Array | float = 1e-6) -> Advantages:
  """The best of a group gets its lead over the second best, the others 0.

    A_i = max(R_i - max_{j != i} R_j, 0) [/ (std_G R + std_eps)]

  **Source**: verl's `grpo_passk`; an estimate of the gradient of E[max_G R],
    after Chen et al., "Pass@k Training", 2025, https://arxiv.org/abs/2508.10751
    (unverified).
  **Departs**: a group of one gives 0 (verl refuses it).

  Args:
    reward: [B] float; NaN = unscorable. group: [B] int in [0, B).
    std: "none", or "unbiased" (n - 1; verl's default).
    std_eps: >= 0; 0 is safe.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths, a float `group`, an unknown `std`.

  Limits: a tie for the best gives no signal; nothing is ever pushed down.
  """
  checks.choice("pass_at_k: std", std, ("none", "unbiased"))
  centred, count, keep = centre("pass_at_k", reward, group)
  biggest = lambda x: jax.ops.segment_max(x, group, keep.shape[0])[group]
  top = biggest(jnp.where(keep, centred, -jnp.inf))
  is_top = keep & (centred == top)
  alone = (group_sum(is_top.astype(centred.dtype), group) == 1) & (count > 1)
  second = biggest(jnp.where(keep & ~is_top, centred, -jnp.inf))
  lead = jnp.where(is_top & alone, top - jnp.where(alone, second, 0), 0)
  adv = lead + 0 * centred  # where that is no number, it is seen
  if std == "unbiased":
    adv = _over_std(adv, _group_std(centred, group, count - 1), std_eps)
  return Advantages(adv, keep)


@checks.ranged()
def max_rl(reward: Array, group: Array, *, mean_eps: Array | float = 1e-6,
           lone: str = "zero") -> Advantages:
  """Reward minus group mean, over the group's mean.

    A_i = (R_i - mean_G R) / (mean_G R + mean_eps)

  **Source**: Tajwar et al., "Maximum Likelihood Reinforcement Learning", 2026,
    https://arxiv.org/abs/2602.02710 (eq. number unverified); eps as SkyRL.
  **Departs**: a group of one gives 0, or with `lone` "reward" its R (SkyRL).

  Args:
    reward: [B] float, >= 0; NaN = unscorable.
    group: [B] int in [0, B).
    mean_eps: >= 0; 0 is safe for rewards >= 0.
    lone: one of `LONE`.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: for 0/1 rewards a success weighs 1/p; a negative mean turns the sign.
  """
  centred, count, keep = centre("max_rl", reward, group)
  safe = jnp.where(keep, masked.wide(reward), 0)
  mean = group_sum(safe, group) / jnp.maximum(count, 1)
  live = (centred != 0) & (mean + mean_eps != 0)
  adv = jnp.where(live, centred / jnp.where(live, mean + mean_eps, 1), 0)
  return Advantages(lone_row("max_rl", lone, adv, reward, count, keep), keep)
