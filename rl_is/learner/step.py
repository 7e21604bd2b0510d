"""Preparing a batch and one optimizer update, as pure functions. Floor 3."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from rl_is.core import masked
from rl_is.core.types import Array, Batch, Max, Mean, Params
from rl_is.infra import sharding
from rl_is.learner import optimizer
from rl_is.learner.state import State
from rl_is.models import scoring
from rl_is.models.transformer import Model
from rl_is.objective.compose import Objective
from rl_is.ops import ratios


def prepare_batch(params: Params, ref_params: Params | None, batch: Batch,
                  constants: dict[str, Array], key: Array | None = None, *,
                  objective: Objective, model: Model, microbatches: int = 1
                  ) -> list[Batch]:
  """A batch as it was sampled -> its minibatches, ready for `train_step`.

  Scores what the objective needs under the parameters at the start of the
  update (`logp_prox`) and under the KL reference (`logp_ref`), in as many parts
  as all microbatches of all updates are.
  """
  def score(p):
    logp = lambda part: scoring.score(
        p, part, model=model, temperature=constants["temperature"]).logp
    if microbatches == 1:
      return logp(batch)
    return _rows(lax.map(logp, _parts(
        batch, microbatches * objective.updates_per_batch)))

  scored = batch
  if objective.needs_prox and objective.spec.proximal == "start":
    scored = scored.replace(logp_prox=score(params))
  if objective.needs_ref:
    scored = scored.replace(logp_ref=score(ref_params))
  return objective.minibatches(objective.prepare(scored, constants, key))


def train_step(state: State, minibatch: Batch, constants: dict[str, Array],
               key: Array | None = None, *, objective: Objective, model: Model,
               tx: optax.GradientTransformation, warmup_updates: int = 0,
               microbatches: int = 1) -> tuple[State, dict[str, Mean | Max]]:
  """Scores, differentiates, moves.

  Over `microbatches` parts of the rows, one after another, gradients and metrics
  only add: the denominators are of the whole minibatch.

  Three cases leave the state's weights alone:

  a non-finite input (`first_bad` >= 0), gradient or result: the host stops the
  run; and an update without signal, whose gradient is exactly zero (no advantage
  that differs, nothing kept, no regularizer): weight decay and momentum alone
  move nothing. It is counted, and still counts as a version.
  """
  score = functools.partial(scoring.score, model=model,
                            temperature=constants["temperature"])

  def loss_fn(params, part):
    if objective.spec.proximal == "ewma":  # it moves: scored at every update
      part = part.replace(logp_prox=score(state.ewma, part).logp)
    outputs = score(params, part, return_entropy=True,
                    return_head=objective.needs_head)
    loss, metrics = objective.loss(outputs, part, constants, key)
    return loss, (metrics, outputs.logp)

  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
  if microbatches == 1:
    (loss, (metrics, logp)), grads = grad_fn(state.params, minibatch)
  else:
    (loss, (metrics, logp)), grads = _accumulated(
        grad_fn, state.params, minibatch, microbatches)
  grads = sharding.constrain(grads, model.rules)
  norm = optax.tree.norm(grads)
  bad = masked.first_bad(minibatch.mask, logp, *objective.inputs(minibatch))
  signal = norm != 0
  scale = optimizer.clip_scale(norm, constants["grad_clip"])
  rate = optimizer.warm_up(constants["learning_rate"], state.version,
                           warmup_updates)
  params, opt_state = optimizer.step(
      tx, jax.tree.map(lambda g: g * scale.astype(g.dtype), grads),
      state.opt_state, state.params, dict(constants, learning_rate=rate))
  finite = (jnp.isfinite(norm) & jnp.isfinite(loss)
            & jnp.isfinite(optax.tree.norm(params)))
  move = signal & finite & (bad < 0)
  keep = functools.partial(jax.tree.map, functools.partial(jnp.where, move))
  one = lambda x: Mean(jnp.asarray(x, jnp.float32), jnp.float32(1))
  metrics |= {
      "loss": one(loss), "grad/norm": one(norm),
      "grad/clipped": one(norm > constants["grad_clip"]),
      "update/without_signal": one(~signal), "update/learning_rate": one(rate),
      "update/nonfinite": Max((~finite).astype(jnp.int32)),
      "update/first_bad": Max(bad),
  }
  params = keep(params, state.params)
  last_grad = state.last_grad
  if last_grad is not None:
    metrics["grad/cosine_previous"] = _cosine(grads, norm, last_grad)
    last_grad = keep(grads, last_grad)
  ewma = state.ewma
  if ewma is not None:
    ewma = keep(ratios.ewma(ewma, params, constants["ewma_decay"]), ewma)
  state = State(params, keep(opt_state, state.opt_state), state.version + 1,
                ewma, last_grad)
  return sharding.constrain(state, model.rules), metrics


def _accumulated(grad_fn, params: Params, minibatch: Batch, count: int):
  """`grad_fn` over parts of the rows, added up; what it returns for all."""
  def add(grads, part):
    out, more = grad_fn(params, part)
    return jax.tree.map(jnp.add, grads, more), out

  zeros = jax.tree.map(lambda x: jnp.zeros(
      x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
  grads, (loss, (metrics, logp)) = lax.scan(
      add, zeros, _parts(minibatch, count))
  grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
  metrics = {name: metric.unstacked() for name, metric in metrics.items()}
  return (loss.sum(), (metrics, _rows(logp))), grads


def _parts(batch: Batch, count: int) -> Batch:
  """[B, ...] -> [count, B / count, ...]: part i has every count-th row from i.

  So the rows of a part lie on all devices, as those of the batch do.
  """
  split = lambda x: jnp.swapaxes(
      x.reshape(-1, count, *x.shape[1:]), 0, 1)
  return jax.tree.map(split, batch)


def _rows(parts: Array) -> Array:
  """The inverse of `_parts`."""
  return jnp.swapaxes(parts, 0, 1).reshape(-1, *parts.shape[2:])


def _cosine(grads: Params, norm: Array, before: Params) -> Mean:
  """Cosine with the gradient before; counted where neither is 0.

  It stays near 0 on fresh data and rises with staleness: GAC 2026,
  https://arxiv.org/abs/2603.01501 (abstract).
  """
  norms = norm * optax.tree.norm(before)
  known = (norms > 0) & jnp.isfinite(norms)
  cosine = optax.tree.vdot(grads, before) / jnp.where(known, norms, 1)
  return masked.mean(cosine, known)


# Shared by every run of the process: a second run of the same structure with
# other constants compiles nothing.
jit_prepare_batch = jax.jit(prepare_batch,
                            static_argnames=("objective", "model", "microbatches"))
jit_train_step = jax.jit(
    train_step, donate_argnums=0, static_argnames=(
        "objective", "model", "tx", "warmup_updates", "microbatches"))
