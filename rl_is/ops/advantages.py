"""Advantages: from the rewards of a batch to one number a sequence. Floor 1.

Computed once per batch, on global arrays, before any split. `group` gives each
row's prompt as an integer in [0, B); groups may have any size and order. A NaN
reward means unscorable (the verifier abstained): that row gets advantage 0 and
keep = False, and the group's statistics are over the others. A group whose
rewards are all equal gives exactly 0: rewards are measured from the group's
smallest one, so equal rewards are exact zeros before anything is averaged.
"""

import jax
import jax.numpy as jnp

from rl_is.core import checks, masked
from rl_is.core.types import Advantages, Array


def _centre(fn: str, reward: Array, group: Array):
  """(reward - group mean, count of the group, keep), all [B]."""
  checks.vector(fn, reward=reward, group=group)
  if not jnp.issubdtype(jnp.result_type(group), jnp.integer):
    raise ValueError(f"{fn}: group: expected an integer dtype, got "
                     f"{jnp.result_type(group)}")
  reward = masked.wide(reward)
  keep = ~jnp.isnan(reward)
  size = reward.shape[0]
  smallest = jax.ops.segment_min(
      jnp.where(keep, reward, jnp.inf), group, size)[group]
  above = jnp.where(keep, reward - smallest, 0)
  count = _group_sum(keep.astype(reward.dtype), group)
  mean = _group_sum(above, group) / jnp.maximum(count, 1)
  return jnp.where(keep, above - mean, 0), count, keep


def _group_sum(x: Array, group: Array) -> Array:
  return jax.ops.segment_sum(x, group, x.shape[0])[group]


def grpo(reward: Array, group: Array, *, std_eps: Array | float = 1e-6
         ) -> Advantages:
  """Reward minus group mean, over the group's standard deviation.

    A_i = (R_i - mean_G R) / (std_G R + std_eps),  std with n - 1

  **Source**: Shao et al., "DeepSeekMath" (GRPO), 2024,
    https://arxiv.org/abs/2402.03300, section 4.1.2.
  **Departs**: the paper does not say n or n - 1; n - 1 and 1e-6 as verl, Tunix,
    SkyRL (TRL adds 1e-4). Two-pass variance. A group of one gives 0 (verl: R).

  Args:
    reward: [B] float; NaN = unscorable.
    group: [B] int in [0, B).
    std_eps: >= 0; 0 is safe.

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: rare successes get large advantages; equal rewards exactly 0.
  """
  centred, count, keep = _centre("grpo", reward, group)
  var = _group_sum(jnp.square(centred), group) / jnp.maximum(count - 1, 1)
  positive = var > 0
  std = jnp.sqrt(jnp.where(positive, var, 1))
  return Advantages(jnp.where(positive, centred / (std + std_eps), 0), keep)


def dr_grpo(reward: Array, group: Array) -> Advantages:
  """Reward minus group mean, not divided.

    A_i = R_i - mean_G R

  **Source**: Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025,
    https://arxiv.org/abs/2503.20783, eq. 3.
  **Departs**: nothing; (G - 1) / G times `rloo`.

  Args:
    reward: [B] float; NaN = unscorable.
    group: [B] int in [0, B).

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: the sample's own reward is in its baseline: biased by (G - 1) / G.
  """
  centred, _, keep = _centre("dr_grpo", reward, group)
  return Advantages(centred, keep)


def rloo(reward: Array, group: Array) -> Advantages:
  """Reward minus the mean of the group's other rewards.

    A_i = R_i - (1/(G-1)) sum_{j != i} R_j = G/(G-1) (R_i - mean_G R)

  **Source**: Ahmadian et al., "Back to Basics", 2024,
    https://arxiv.org/abs/2402.14740, eq. 8 (RLOO).
  **Departs**: a group of one scorable reward gives 0 (one of verl's two
    implementations gives R).

  Args:
    reward: [B] float; NaN = unscorable.
    group: [B] int in [0, B).

  Returns:
    Advantages: adv [B] float32 or wider, keep [B] bool.

  Raises:
    ValueError: on unequal lengths or a float `group`.

  Limits: unbiased on-policy.
  """
  centred, count, keep = _centre("rloo", reward, group)
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
