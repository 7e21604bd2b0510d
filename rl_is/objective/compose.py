"""The only place where the pieces are put together. Floor 2.

`prepare` runs once per batch, on global arrays, before any split: advantages,
the corrections that do not read `logp`, the assignment of rows to minibatches,
and one weight a token that is already divided by its minibatch's denominator.
`loss` only adds: split the rows as you like, losses and gradients sum up.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from rl_is import ops
from rl_is.core import masked
from rl_is.core.types import Array, Batch, Max, Mean, PolicyOutputs, Weights
from rl_is.objective import spec as spec_lib
from rl_is.objective.spec import Correction, Spec
from rl_is.ops import aggregate, diagnostics


@dataclasses.dataclass(frozen=True)
class Objective:
  """A checked structure; hashable, so it may be a static argument."""

  spec: Spec
  updates_per_batch: int = 1  # U: minibatches, one optimizer update each
  extra: tuple[tuple[str, ops.Row], ...] = ()  # a user's own corrections

  def __post_init__(self):
    spec_lib.check(self.spec, dict(self.extra))

  # What the loop has to record or score for it.

  @property
  def needs_behaviour(self) -> bool:
    anchored = ops.SURROGATES[self.spec.surrogate].has_factor
    return bool(self.spec.corrections) or (
        anchored and self.spec.anchor == "behaviour")

  @property
  def needs_prox(self) -> bool:
    anchored = ops.SURROGATES[self.spec.surrogate].has_factor
    return (anchored and self.spec.anchor == "proximal") or any(
        c.num == "proximal" for c in self.spec.corrections)

  @property
  def needs_ref(self) -> bool:
    return self.spec.regularizer != "none"

  @property
  def is_grouped(self) -> bool:
    return ops.ADVANTAGES[self.spec.advantage].grouped

  def prepare(self, batch: Batch, constants: Mapping[str, Array],
              key: Array | None = None) -> Batch:
    """Adds `adv`, `weight`, `keep`, `token_weight`; once per batch.

    key: for pieces that draw; none of the present ones does.
    """
    del key
    self._check_recorded(batch)
    advantages = ops.ADVANTAGES[self.spec.advantage].fn(
        batch.reward, batch.group,
        **self._constants(f"advantage {self.spec.advantage}", constants))
    mask = batch.mask & advantages.keep[:, None]
    weight, keep = jnp.ones(mask.shape, jnp.float32), mask
    for c in self.spec.corrections:
      if c.num == "proximal":
        w = self._correct(c, batch.logp_prox, batch, mask, constants)
        weight, keep = weight * w.weight, keep & w.keep
    parts = lambda mask, counted: ops.AGGREGATIONS[self.spec.aggregation].fn(
        mask, counted, **self._constants(self.spec.aggregation, constants))
    counted = keep if self.spec.denominator == "kept" else mask
    token_weight = {"policy": self._divide(parts(keep, counted)),
                    "regularizer": self._divide(parts(mask, mask))}
    adv = jnp.broadcast_to(advantages.adv[:, None], mask.shape)
    return batch.replace(adv=masked.fill(adv, mask), mask=mask, weight=weight,
                         keep=keep, token_weight=token_weight)

  def minibatches(self, batch: Batch) -> list[Batch]:
    """The U minibatches of a prepared batch: contiguous blocks of rows."""
    rows = batch.tokens.shape[0] // self.updates_per_batch
    return [jax.tree.map(lambda x: x[u * rows:(u + 1) * rows], batch)
            for u in range(self.updates_per_batch)]

  def loss(self, outputs: PolicyOutputs, batch: Batch,
           constants: Mapping[str, Array]
           ) -> tuple[Array, dict[str, Mean | Max]]:
    """The objective on rows of a prepared batch, and its metrics; additive."""
    logp, mask = outputs.logp, batch.mask
    token = self._surrogate(logp, batch, constants)
    metrics = _clip_metrics(token.aux, mask)
    weight, keep = batch.weight, batch.keep
    for c in self.spec.corrections:
      num = batch.logp_prox if c.num == "proximal" else logp
      w = self._correct(c, num, batch, mask, constants)
      metrics |= diagnostics.correction(c.name, w, mask)
      if c.num == "current":
        weight, keep = weight * w.weight, keep & w.keep
    policy = masked.fill(lax.stop_gradient(weight) * token.loss, keep)
    total = jnp.sum(batch.token_weight["policy"] * policy)
    regularizer, more = self._regularizer(outputs, batch, constants)
    if batch.logp_behaviour is not None:
      metrics |= diagnostics.mismatch(logp, batch.logp_behaviour, mask)
    metrics["policy/logp"] = masked.mean(lax.stop_gradient(logp), mask)
    return total + regularizer, metrics | more

  def has_signal(self, batch: Batch, constants: Mapping[str, Array]) -> Array:
    """Whether an update on these rows can move anything: scalar bool."""
    live = (batch.adv != 0) & (batch.token_weight["policy"] != 0) & batch.keep
    regularized = constants["entropy_coef"] != 0
    if self.needs_ref:
      regularized |= constants["kl_coef"] != 0
    return live.any() | (regularized & batch.mask.any())

  def inputs(self, batch: Batch) -> list[Array]:
    """The arrays that must be finite wherever the mask is True."""
    recorded = (batch.logp_behaviour, batch.logp_prox, batch.logp_ref, batch.adv)
    return [x for x in recorded if x is not None]

  def _check_recorded(self, batch: Batch) -> None:
    for needed, name in ((self.needs_behaviour, "logp_behaviour"),
                         (self.needs_prox, "logp_prox"),
                         (self.needs_ref, "logp_ref")):
      if needed and getattr(batch, name) is None:
        raise ValueError(
            f"objective: needs {name}, which the batch does not have (anchor "
            f"{self.spec.anchor!r}, corrections "
            f"{[str(c) for c in self.spec.corrections]})")

  def _constants(self, piece: str, constants) -> dict[str, Array]:
    names = spec_lib.names(self.spec, dict(self.extra))
    return {kw: constants[name] for (p, kw), name in names.items() if p == piece}

  def _surrogate(self, logp, batch, constants):
    name = self.spec.surrogate
    row, kwargs = ops.SURROGATES[name], self._constants(name, constants)
    if not row.has_factor:
      return row.fn(logp, batch.adv, batch.mask, **kwargs)
    anchor = {"behaviour": batch.logp_behaviour, "proximal": batch.logp_prox,
              "current": lax.stop_gradient(logp)}[self.spec.anchor]
    return row.fn(logp, anchor, batch.adv, batch.mask, level=self.spec.level,
                  **kwargs)

  def _correct(self, c: Correction, num, batch, mask, constants) -> Weights:
    row = spec_lib.corrections_table(dict(self.extra))[c.name]
    return row.fn(num, batch.logp_behaviour, mask, level=c.level,
                  **self._constants(c.name, constants))

  def _divide(self, parts: aggregate.Parts) -> Array:
    """A token's weight over the denominator of its own minibatch."""
    U = self.updates_per_batch
    per_minibatch = parts.count.reshape(U, -1).sum(axis=1)
    safe = jnp.where(per_minibatch > 0, per_minibatch, 1)
    rows = jnp.repeat(safe, parts.count.shape[0] // U)
    return parts.weight / rows[:, None]

  def _regularizer(self, outputs, batch, constants):
    """KL to the reference and entropy bonus, each over all of the mask."""
    weight, mask = batch.token_weight["regularizer"], batch.mask
    total, metrics = jnp.zeros(()), {}
    if self.needs_ref:
      kwargs = self._constants(self.spec.regularizer, constants)
      coef = kwargs.pop("kl_coef")
      kl = ops.REGULARIZERS[self.spec.regularizer].fn(
          outputs.logp, batch.logp_ref, mask, **kwargs)
      total += coef * jnp.sum(weight * kl)
      metrics["kl_ref/" + self.spec.regularizer] = masked.mean(
          lax.stop_gradient(kl), mask)
    if outputs.entropy is not None:
      entropy = masked.fill(outputs.entropy, mask)
      total -= constants["entropy_coef"] * jnp.sum(weight * entropy)
      metrics["policy/entropy"] = masked.mean(lax.stop_gradient(entropy), mask)
    return total, metrics


def _clip_metrics(aux: Mapping[str, Array], mask: Array) -> dict[str, Mean]:
  """Shares of tokens on which a bound binds; none for an unclipped surrogate."""
  hits = {name: hit for name, hit in aux.items() if name.startswith("clip_")}
  metrics = {name.replace("clip_", "clip/frac_"): masked.mean(hit, mask)
             for name, hit in hits.items()}
  if hits:
    metrics["clip/frac"] = masked.mean(sum(hits.values()) > 0, mask)
  return metrics
