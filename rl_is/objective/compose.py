"""The only place where the pieces are put together. Floor 2.

`prepare` runs once per batch, on global arrays, before any split: advantages,
the corrections that do not read `logp`, the assignment of rows to minibatches,
and one weight a token that is already divided by its minibatch's denominator.
`loss` only adds: split the rows as you like, losses and gradients sum up.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from rl_is import ops
from rl_is.core import checks, masked
from rl_is.core.types import Array, Batch, Max, Mean, PolicyOutputs, Weights
from rl_is.objective import constants as constants_lib
from rl_is.objective import spec as spec_lib
from rl_is.objective.spec import Correction, Spec
from rl_is.ops import aggregate, centering, diagnostics, ratios, regularizers
from rl_is.ops import token_advantages


@dataclasses.dataclass(frozen=True)
class Objective:
  """A checked structure; hashable, so it may be a static argument."""

  spec: Spec
  updates_per_batch: int = 1  # U: minibatches, one optimizer update each
  extra: tuple[tuple[str, ops.Row], ...] = ()  # a user's own corrections
  full_diagnostics: bool = True

  def __post_init__(self):
    if self.updates_per_batch < 1:
      raise ValueError("objective: updates_per_batch: expected at least 1, got "
                       f"{self.updates_per_batch}")
    spec_lib.check(self.spec, dict(self.extra))

  # What the loop has to record or score for it.

  @property
  def _policies(self) -> set[str]:
    """The policies that some ratio of the objective needs."""
    s = self.spec
    table = spec_lib.corrections_table(dict(self.extra))
    needed = {p for c in s.corrections if table[c.row].takes == "ratio"
              for p in (c.num, c.den)}
    if ops.SURROGATES[s.surrogate].has_factor:
      needed.add(s.anchor)
    if s.regularizer != "none":
      needed |= {s.kl_weight} | ({"behaviour"} if s.kl_to == "behaviour" else
                                 set())
    if s.proximal == "log_linear" and "proximal" in needed:
      needed.add("behaviour")
    return needed

  @property
  def needs_behaviour(self) -> bool:
    return "behaviour" in self._policies

  @property
  def needs_prox(self) -> bool:
    return "proximal" in self._policies

  @property
  def needs_ref(self) -> bool:
    return self.spec.regularizer != "none" and self.spec.kl_to == "reference"

  @property
  def needs_head(self) -> bool:
    """The sampler's most likely tokens, scored (`logp_ids`)."""
    return self.spec.centering != "none"

  @property
  def is_grouped(self) -> bool:
    return ops.ADVANTAGES[self.spec.advantage].grouped

  @property
  def coupled(self) -> str | None:
    """A piece of `loss` that needs all rows of an update at once, if any."""
    pieces = [(self.spec.surrogate, ops.SURROGATES)] + [
        (c.name, ops.CORRECTIONS) for c in self.spec.corrections
        if spec_lib.reads_logp(self.spec, c)]
    return next((name for name, table in pieces
                 if name in table and table[name].is_coupled), None)

  @property
  def inputs_needed(self) -> set[str]:
    """Fields of Batch, besides the usual ones, that some piece reads."""
    rows = spec_lib.rows(self.spec, dict(self.extra)).values()
    needed = {name for row in rows for name in row.inputs}
    if self.needs_head:
      needed |= {"head_ids", "head_logp_behaviour"}
    return needed - {"adv", "mask", "key", "length"}

  def prepare(self, batch: Batch, constants: Mapping[str, Array],
              key: Array | None = None) -> Batch:
    """Adds `adv`, `weight`, `keep`, `token_weight`; once per batch."""
    checks.divisible("objective: rows of the batch", batch.mask.shape[0],
                     "updates_per_batch", self.updates_per_batch)
    self._check_recorded(batch)
    self._check_constants(constants)
    batch = batch.replace(mask=checks.as_mask(
        "objective", batch.mask, jnp.shape(batch.tokens)))
    given = batch.adv
    adv, mask = self._advantages(batch, constants, key)
    batch = batch.replace(adv=adv, mask=mask)
    dtype = jnp.result_type(jnp.float32, *self.inputs(batch))
    weight, keep = jnp.ones(mask.shape, dtype), mask
    for c in self.spec.corrections:
      if not spec_lib.reads_logp(self.spec, c):
        weight, keep = self._chain(c, None, batch, weight, keep, constants)[:2]
    parts = lambda m, counted: ops.AGGREGATIONS[self.spec.aggregation].fn(
        m, counted, dtype,
        **self._kwargs(self.spec.aggregation, batch, constants))
    whole, every = self._seen(mask, keep), self.spec.counts_rejected
    kl_parts = parts if dict(self.spec.options).get("kl_mean") != "rows" else (
        functools.partial(ops.AGGREGATIONS["sequence_mean_token_mean"].fn,
                          dtype=dtype, empty="count"))
    token_weight = {
        "policy": self._divide(parts(keep, mask if every else keep)),
        "regularizer": self._divide(kl_parts(whole, mask if every else whole))}
    if self.spec.advantage == "given":  # again: its means now that keep is known
      batch = batch.replace(adv=self._given(given, whole))
    return batch.replace(weight=weight, keep=keep, token_weight=token_weight)

  def minibatches(self, batch: Batch) -> list[Batch]:
    """The U minibatches of a prepared batch: contiguous blocks of rows."""
    rows = batch.tokens.shape[0] // self.updates_per_batch
    return [jax.tree.map(lambda x: x[u * rows:(u + 1) * rows], batch)
            for u in range(self.updates_per_batch)]

  def loss(self, outputs: PolicyOutputs, batch: Batch,
           constants: Mapping[str, Array], key: Array | None = None
           ) -> tuple[Array, dict[str, Mean | Max]]:
    """The objective on rows of a prepared batch, and its metrics; additive."""
    self._check_constants(constants)
    logp, mask = outputs.logp, batch.mask
    if self.needs_prox and self.spec.proximal == "log_linear":
      batch = batch.replace(logp_prox=_log_linear(logp, batch))
    # A mask that is not to be seen was known before the update (`spec.check`).
    seen = batch.replace(mask=self._seen(mask, batch.keep))
    token = self._surrogate(logp, seen, constants, key)
    metrics = _clip_metrics(token.aux, seen.mask)
    weight, keep = batch.weight, batch.keep
    # A correction that was prepared is made again for its metrics alone.
    seen_weight, seen_keep, drawn = jnp.ones_like(weight), mask, mask
    for c in self.spec.corrections:
      seen_weight, seen_keep, w = self._chain(
          c, logp, batch, seen_weight, seen_keep, constants)
      if c is not spec_lib.centred(self.spec):
        drawn &= w.keep
      metrics |= diagnostics.correction(c.name, w, mask)
      if self.full_diagnostics:
        metrics |= diagnostics.effective(c.name, w, mask)
    if any(spec_lib.reads_logp(self.spec, c) for c in self.spec.corrections):
      weight, keep = seen_weight, seen_keep
    else:
      drawn = keep
    policy = masked.fill(lax.stop_gradient(weight) * token.loss, keep)
    total = masked.total(batch.token_weight["policy"] * policy, keep)
    if self.needs_head:
      term, masses = self._centering(outputs, batch, drawn, constants)
      total, metrics = total + term, metrics | masses
    regularizer, more = self._regularizer(outputs, seen, constants)
    if batch.logp_behaviour is not None:
      metrics |= diagnostics.mismatch(logp, batch.logp_behaviour, mask)
      if self.full_diagnostics:
        metrics |= _breakdown(logp, batch, token.aux)
      if batch.logp_version is not None:
        metrics |= diagnostics.decomposed(
            logp, batch.logp_version, batch.logp_behaviour, mask)
    metrics["policy/logp"] = masked.mean(lax.stop_gradient(logp), mask)
    return total + regularizer, metrics | more

  def inputs(self, batch: Batch) -> list[Array]:
    """The arrays that must be finite wherever the mask is True."""
    recorded = (batch.logp_behaviour, batch.logp_prox, batch.logp_ref, batch.adv)
    return [x for x in recorded if x is not None]

  # The pieces, each given its constants, options and inputs.

  def _check_recorded(self, batch: Batch) -> None:
    scored = self.spec.proximal == "start"
    table = spec_lib.corrections_table(dict(self.extra))
    needed = {"logp_behaviour": self.needs_behaviour,
              "logp_prox": self.needs_prox and scored,
              "logp_ref": self.needs_ref,
              "version": self.needs_prox and self.spec.proximal == "log_linear"}
    needed |= {name: True for name in self.inputs_needed}
    takes = {table[c.row].takes for c in self.spec.corrections}
    if "version" in takes or needed["version"]:
      needed |= {"version": True, "version_now": True}
    if self.spec.advantage == "given":
      needed["adv"] = True
    for name, is_needed in needed.items():
      if is_needed and getattr(batch, name) is None:
        raise ValueError(
            f"objective: needs {name}, which the batch does not have (surrogate "
            f"{self.spec.surrogate!r}, anchor {self.spec.anchor!r}, advantage "
            f"{self.spec.advantage!r}, corrections "
            f"{[str(c) for c in self.spec.corrections]}, centering "
            f"{self.spec.centering!r})" + (
                "; set config.rollout.record_top_k" if name.startswith("head_")
                else ""))

    for name in ("adv", "version", "version_now"):
      shape = jnp.shape(batch.mask)[:1 if name == "version_now" else 2]
      if needed.get(name) and jnp.shape(getattr(batch, name)) != shape:
        raise ValueError(f"objective: {name}: expected shape {shape}, got "
                         f"{jnp.shape(getattr(batch, name))}")

  def _check_constants(self, constants: Mapping[str, Array]) -> None:
    for name in constants_lib.taken(self.spec, dict(self.extra)):
      if name not in constants:
        raise ValueError(f"objective: constants: {name} is missing; "
                         "`constants.resolve` gives all of them")

  def _seen(self, mask: Array, keep: Array) -> Array:
    """The tokens that surrogate and regularizer are given."""
    return mask if self.spec.sees_rejected else keep

  def _names(self, piece: str) -> dict[str, str]:
    """The table's name of each of the piece's constants -> its name here."""
    names = constants_lib.names(self.spec, dict(self.extra))
    return {kw: name for (p, kw), name in names.items() if p == piece}

  def _kwargs(self, piece: str, batch: Batch, constants, options=None,
              key=None) -> dict:
    """What a piece is called with by keyword: numbers, choices, arrays."""
    row = spec_lib.rows(self.spec, dict(self.extra))[piece]
    kwargs = {row.constants[kw].keyword or kw: constants[name]
              for kw, name in self._names(piece).items()}
    chosen = dict(self.spec.options if options is None else options)
    kwargs |= {name: chosen[name] for name in row.options if name in chosen}
    for name in row.inputs:
      kwargs[name] = _input(name, batch, key)
    return kwargs

  def _advantages(self, batch: Batch, constants, key) -> tuple[Array, Array]:
    """(adv [B, T], mask without the rows that cannot be scored)."""
    name = self.spec.advantage
    if name == "given":
      return self._given(batch.adv, batch.mask), batch.mask
    result = ops.ADVANTAGES[name].fn(batch.reward, batch.group, **self._kwargs(
        f"adv_{name}", batch, constants, key=key))
    mask = batch.mask & result.keep[:, None]
    if self.spec.advantage_norm != "none":
      result = token_advantages.batch_norm(
          result, mask if self.spec.advantage_norm == "tokens" else None)
    adv = result.adv if result.adv.ndim == 2 else jnp.broadcast_to(
        result.adv[:, None], mask.shape)
    return masked.fill(adv, mask), mask

  def _given(self, adv: Array, seen: Array) -> Array:
    """The caller's advantages, or their mean over what is seen of a row."""
    adv = masked.fill(masked.wide(adv), seen)
    if dict(self.spec.options).get("over") == "sequence":
      adv = jnp.broadcast_to(masked.row_mean(adv, seen), adv.shape)
    return masked.fill(adv, seen)

  def _surrogate(self, logp, batch, constants, key):
    name = self.spec.surrogate
    row = ops.SURROGATES[name]
    kwargs = self._kwargs(name, batch, constants, key=key)
    if not row.has_factor:
      return row.fn(logp, batch.adv, batch.mask, **kwargs)
    return row.fn(logp, _policy(self.spec.anchor, logp, batch), batch.adv,
                  batch.mask, level=self.spec.level, **kwargs)

  def _chain(self, c: Correction, logp, batch: Batch, weight, keep, constants
             ) -> tuple[Array, Array, Weights]:
    """One more correction on the product so far: (weight, keep, its own)."""
    row = spec_lib.corrections_table(dict(self.extra))[c.row]
    kwargs = self._kwargs(c.name, batch, constants, options=c.options)
    if row.has_level:
      kwargs["level"] = c.level
    if row.takes == "weights":  # of everything before it in the chain
      before = Weights(weight, keep, jnp.log(jnp.where(keep, weight, 1)))
      w = row.fn(before, keep, **kwargs)
      return w.weight, w.keep, w
    if row.takes == "version":
      num, den = batch.version, batch.version_now[:, None]
    else:
      num, den = (_policy(p, logp, batch) for p in (c.num, c.den))
    seen = keep if dict(c.options).get("over") == "kept" else batch.mask
    w = row.fn(num, den, seen, **kwargs)
    return weight * w.weight, keep & w.keep, w

  def _divide(self, parts: aggregate.Parts) -> Array:
    """A token's weight over the denominator of its own minibatch."""
    U = self.updates_per_batch
    per_minibatch = parts.count.reshape(U, -1).sum(axis=1)
    safe = jnp.where(per_minibatch > 0, per_minibatch, 1)
    rows = jnp.repeat(safe, parts.count.shape[0] // U)
    return parts.weight / rows[:, None]

  def _centering(self, outputs, batch, drawn, constants):
    """Minus the sampler's expected score, of the weight that the tokens have.

    `drawn`: also the tokens that the weight itself drops, as the expectation is
    over all that could have been drawn. A mask drops a token with its term;
    where that hangs on which token it is, its share of the drift stays.
    """
    if outputs.logp_ids is None:
      raise ValueError("objective.centering: needs the outputs' logp_ids: score "
                       "the batch's head_ids (return_head=True)")
    c = spec_lib.centred(self.spec)
    bounds = {}
    if c is not None:
      low, high = (self._names(c.name)[kw] for kw in spec_lib.CENTRED[c.row])
      bounds = dict(weight=c.row, low=constants[low], high=constants[high],
                    max_log_ratio=constants["max_log_ratio"])
    term = centering.score_centering(
        outputs.logp_ids, batch.head_logp_behaviour, batch.head_ids >= 0,
        batch.adv, drawn, **bounds)
    weight = batch.token_weight["policy"]
    return masked.total(weight * term.loss, drawn), {
        f"centering/{name}": masked.mean(mass, drawn)
        for name, mass in term.aux.items()}

  def _regularizer(self, outputs, batch, constants):
    """KL and entropy bonus, each over all of the mask."""
    weight, mask = batch.token_weight["regularizer"], batch.mask
    total, metrics = jnp.zeros(()), {}
    name = self.spec.regularizer
    if name != "none":
      kwargs = self._kwargs(name, batch, constants)
      coef = kwargs.pop("kl_coef")
      # A weighed estimate is limited as a product, as NeMo-RL and slime do.
      limit = {} if self.spec.kl_weight == "none" else dict(
          max_kl=kwargs.pop("max_kl"))
      to = (batch.logp_ref if self.spec.kl_to == "reference" else
            batch.logp_behaviour)
      kl = ops.REGULARIZERS[name].fn(outputs.logp, to, mask, **kwargs)
      metrics[f"kl_{self.spec.kl_to}/{name}"] = masked.mean(
          lax.stop_gradient(kl), mask)
      kl = self._weigh_kl(kl, outputs.logp, batch, constants, limit)
      total += coef * masked.total(weight * kl, mask)
    if outputs.entropy is not None:
      entropy = masked.fill(outputs.entropy, mask)
      total -= constants["entropy_coef"] * jnp.sum(weight * entropy)
      metrics["policy/entropy"] = masked.mean(lax.stop_gradient(entropy), mask)
    return total, metrics

  def _weigh_kl(self, kl, logp, batch, constants, limit):
    if self.spec.kl_weight == "none":
      return kl
    if self.spec.kl_weight == "score":
      return regularizers.with_score(kl, logp, batch.mask, **limit)
    by_policy = dict(self.spec.options).get("kl_level") == "policy"
    return regularizers.importance_weighted(
        kl, logp, _policy(self.spec.kl_weight, logp, batch), batch.mask,
        level=self.spec.level if by_policy else "token",
        max_log_ratio=constants.get("max_log_ratio", 20.0), **limit)


def _input(name: str, batch: Batch, key: Array | None) -> Array | None:
  """An array that a piece reads besides its usual ones."""
  if name == "key":
    if key is None:
      raise ValueError("objective: key: a piece draws at random and needs one, "
                       "got None")
    return key
  if name == "length":
    return jnp.sum(batch.mask, axis=1, dtype=jnp.float32)
  return getattr(batch, name)


def _policy(name: str, logp: Array | None, batch: Batch) -> Array | None:
  """The log-probs of a policy by its name; detached."""
  if name == "current":
    return None if logp is None else lax.stop_gradient(logp)
  return batch.logp_behaviour if name == "behaviour" else batch.logp_prox


def _log_linear(logp: Array, batch: Batch) -> Array:
  """A proximal policy between behaviour and current, by the token's age."""
  alpha = ratios.behaviour_share(batch.version, batch.version_now[:, None])
  return ratios.log_linear_anchor(
      logp, batch.logp_behaviour, batch.mask, alpha=alpha)


def _breakdown(logp: Array, batch: Batch, aux: Mapping[str, Array]
               ) -> dict[str, Mean | Max]:
  """The same questions by sign of the advantage and by lag, and the rest."""
  hits = [hit for name, hit in aux.items() if name.startswith("clip_")]
  hit = sum(hits) > 0 if hits else None
  parts = diagnostics.by_sign(batch.adv)
  if batch.version is not None and batch.version_now is not None:
    parts |= diagnostics.by_lag(batch.version, batch.version_now[:, None])
  metrics = diagnostics.divergence(logp, batch.logp_behaviour, batch.mask)
  metrics["is/sequence_log_weights"] = diagnostics.sequence_log_weights(
      logp, batch.logp_behaviour, batch.mask)
  metrics |= diagnostics.breakdown(parts, logp, batch.logp_behaviour, batch.mask,
                                   hit)
  if hit is not None:
    metrics |= diagnostics.clipped(logp, hit, batch.mask)
  return metrics


def _clip_metrics(aux: Mapping[str, Array], mask: Array) -> dict[str, Mean]:
  """Shares of tokens on which a bound binds; none for an unclipped surrogate."""
  hits = {name: hit for name, hit in aux.items() if name.startswith("clip_")}
  metrics = {name.replace("clip_", "clip/frac_"): masked.mean(hit, mask)
             for name, hit in hits.items()}
  if hits:
    metrics["clip/frac"] = masked.mean(sum(hits.values()) > 0, mask)
  return metrics
