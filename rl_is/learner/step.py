"""Preparing a batch and one optimizer update, as pure functions. Floor 3."""

import functools

import jax
import jax.numpy as jnp
import optax

from rl_is.core import masked
from rl_is.core.types import Array, Batch, Max, Mean, Params
from rl_is.learner import optimizer
from rl_is.learner.state import State
from rl_is.models import scoring
from rl_is.models.transformer import Model
from rl_is.objective.compose import Objective
from rl_is.ops import ratios


def prepare_batch(params: Params, ref_params: Params | None, batch: Batch,
                  constants: dict[str, Array], key: Array | None = None, *,
                  objective: Objective, model: Model) -> list[Batch]:
  """A batch as it was sampled -> its minibatches, ready for `train_step`.

  Scores what the objective needs under the parameters at the start of the
  update (`logp_prox`) and under the KL reference (`logp_ref`).
  """
  score = lambda p: scoring.score(
      p, batch, model=model, temperature=constants["temperature"]).logp
  scored = batch
  if objective.needs_prox and objective.spec.proximal == "start":
    scored = scored.replace(logp_prox=score(params))
  if objective.needs_ref:
    scored = scored.replace(logp_ref=score(ref_params))
  return objective.minibatches(objective.prepare(scored, constants, key))


def train_step(state: State, minibatch: Batch, constants: dict[str, Array],
               key: Array | None = None, *, objective: Objective, model: Model,
               tx: optax.GradientTransformation, warmup_updates: int = 0
               ) -> tuple[State, dict[str, Mean | Max]]:
  """Scores, differentiates, moves. Three cases leave the state's weights alone:

  a non-finite input (`first_bad` >= 0), gradient or result: the host stops the
  run; and an update without signal, whose gradient is exactly zero (no advantage
  that differs, nothing kept, no regularizer): weight decay and momentum alone
  move nothing. It is counted, and still counts as a version.
  """
  score = functools.partial(scoring.score, batch=minibatch, model=model,
                            temperature=constants["temperature"])
  if objective.spec.proximal == "ewma":  # it moves: scored at every update
    minibatch = minibatch.replace(logp_prox=score(state.ewma).logp)

  def loss_fn(params):
    outputs = score(params, return_entropy=True,
                    return_head=objective.needs_head)
    loss, metrics = objective.loss(outputs, minibatch, constants, key)
    return loss, (metrics, outputs.logp)

  (loss, (metrics, logp)), grads = jax.value_and_grad(
      loss_fn, has_aux=True)(state.params)
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
  return State(params, keep(opt_state, state.opt_state), state.version + 1,
               ewma, last_grad), metrics


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
                            static_argnames=("objective", "model"))
jit_train_step = jax.jit(
    train_step, static_argnames=("objective", "model", "tx", "warmup_updates"),
    donate_argnums=0)
