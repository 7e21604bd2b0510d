"""What an objective would have done with batches that are there. Floor 3.

Nothing is sampled and nothing is trained: per batch the loss, and minus its
derivative by each token's log-prob, c. Divided by the token's advantage and its
share of the denominator it is the token's **factor**: 1 where the objective is
the plain policy gradient, 0 where it drops the token, else how it weighs it.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core.types import Array, Batch, PolicyOutputs, pytree
from rl_is.objective.compose import Objective

LAGS = 9  # the last: 8 updates or older
_SAME = 1e-5  # relative: float32 sums of log-probs


@pytree
class Replayed:
  """One setting on one batch. Fractions are of tokens with an advantage."""

  loss: Array
  weight_left: Array  # mean factor, each token by its share of the denominator
  tokens_effective: Array  # (sum a)^2 / sum a^2, a the factor times that share
  totals: dict[str, Array]  # part -> [5]: tokens, changed, dropped, sum f, sum f^2
  # [4] counts: tokens, bound from below, from above, whose weight a correction
  # has cut (of several, the one that cuts most).
  clipped: Array
  gradient: Array  # [groups, K] projections of the groups' parts; K = 0: none


def parts_of(batch: Batch, lengths: tuple[float, float]) -> dict[str, Array]:
  """Name -> [B, T] bool: signs, lags, thirds of the answers by length."""
  lag = jnp.clip(batch.version_now[:, None] - batch.version, 0, LAGS - 1)
  length = jnp.broadcast_to(jnp.sum(batch.mask, axis=1, keepdims=True),
                            batch.mask.shape)
  low, high = lengths
  return {
      "all": batch.mask, "positive": batch.adv > 0, "negative": batch.adv < 0,
      **{f"lag{k}": lag == k for k in range(LAGS)},
      "short": length <= low, "middle": (length > low) & (length <= high),
      "long": length > high}


@functools.partial(jax.jit, static_argnames=("objective", "groups"))
def replay(batch: Batch, scores: Array, lengths: tuple[float, float],
           constants: Mapping[str, Array], key: Array, *, objective: Objective,
           groups: int) -> Replayed:
  """Many settings on one batch, one after another.

  Args:
    batch: as it was sampled, with `logp_prox` of the learner whose update it
      would be: at its start, so the current log-probs too.
    scores: [B, T, K] of `sketch.token_scores`; K = 0: no gradients.
    lengths: where short answers end, and where long ones begin.
    constants: each [M].
    groups: how many the batch has.

  Returns:
    `Replayed` with a first axis of M everywhere.
  """
  plain = dataclasses.replace(objective, spec=dataclasses.replace(
      objective.spec, regularizer="none", kl_weight="none", options=tuple(
          (k, v) for k, v in objective.spec.options
          if k not in ("kl_mean", "kl_level"))))

  def setting(constants):
    def minus_slope(which):
      prepared = which.prepare(batch, constants, key)
      loss = lambda x: which.loss(PolicyOutputs(x), prepared, constants, key)
      (value, metrics), g = jax.value_and_grad(loss, has_aux=True)(batch.logp_prox)
      return prepared, value, metrics, -g

    prepared, value, metrics, c = minus_slope(objective)
    c_policy = c if plain.spec == objective.spec else minus_slope(plain)[3]
    share = prepared.token_weight["policy"]
    live = prepared.mask & (prepared.adv != 0) & (share > 0)
    safe = jnp.where(live, prepared.adv * share, 1)
    f = jnp.where(live, c_policy / safe, 0)
    a = jnp.where(live, f * share, 0)
    weight = jnp.sum(jnp.where(live, share, 0))
    changed, dropped = live & (jnp.abs(f - 1) > _SAME), live & (f == 0)
    totals = {name: jnp.stack([jnp.sum(jnp.where(part & live, x, 0)) for x in (
        jnp.ones_like(f), changed * 1.0, dropped * 1.0, f, f**2)])
              for name, part in parts_of(prepared, lengths).items()}
    count = lambda name: (metrics[name].total if name in metrics
                          else jnp.zeros((), f.dtype))
    bound = [count("clip/frac_low"), count("clip/frac_high"), functools.reduce(
        jnp.maximum, (count(f"{c.name}/changed_frac")
                      for c in objective.spec.corrections), jnp.zeros((), f.dtype))]
    rows = jnp.einsum("bt,btk->bk", jnp.where(prepared.mask, c, 0), scores)
    second = jnp.sum(a**2)
    return Replayed(
        value, jnp.sum(a) / jnp.where(weight > 0, weight, jnp.nan),
        jnp.sum(a)**2 / jnp.where(second > 0, second, jnp.nan), totals,
        jnp.stack([jnp.sum(prepared.mask, dtype=f.dtype), *bound]),
        jax.ops.segment_sum(rows, batch.group, groups))

  return lax.map(setting, constants)
