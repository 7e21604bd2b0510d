"""Supervised training before reinforcement learning, made once. Floor 4.

Rewards that are nearly always 0 teach nothing, so a run begins from a policy
that is right some of the time. Maximum likelihood is `pg` with reward 1 on
demonstrations: the very same train step.
"""

import contextlib
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from etils import epath
from ml_collections import ConfigDict

from rl_is.build import Parts
from rl_is.core import masked
from rl_is.core.types import Array, Batch, Params
from rl_is.infra import checkpoint, hosts, progress, rng, sharding
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import workdir as workdir_lib
from rl_is.learner import optimizer, step
from rl_is.learner import state as state_lib
from rl_is.models import hf, scoring
from rl_is.models.transformer import Model
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Spec
from rl_is.rollout import batching

_OBJECTIVE = Objective(Spec(surrogate="pg", advantage="reward",
                            aggregation="token_mean"))
# Not the run's optimizer: runs that differ in it may share a warm start.
_TX = optimizer.make("adamw")
_PROBE_EVERY, _PROBE_ROWS = 20, 512
_IDENTITY = "warm_start.json"


def params(config: ConfigDict, parts: Parts, workdir: str,
           check_stop: Callable[[], None] = lambda: None) -> Params:
  """The parameters to start from: given, cached, or trained and cached.

  check_stop: called before each step; raises if the run is to stop.
  """
  shapes = jax.eval_shape(parts.model.init, rng.key(config.seed, "init"))
  placed = sharding.shaped(shapes, parts.model.rules, parts.mesh)
  if config.warm_start.weights:
    return hf.load(config.warm_start.weights, parts.model, placed)
  path = epath.Path(config.warm_start.path or f"{workdir}/warm_start")
  ours = identity(config)
  def claim():
    _check_ours(path)
    workdir_lib.claim(path, ours, name=_IDENTITY)

  hosts.first(claim)
  with workdir_lib.lock(path) if hosts.is_first() else contextlib.nullcontext():
    if hosts.largest((path / "done.json").exists()):
      return checkpoint.restore_params(path / "params", placed)
    hosts.first(lambda: _clear(path))
    trained, report = _train(config, parts, check_stop)
    checkpoint.save_params(path / "params", trained)
    hosts.first(lambda: workdir_lib.write_json(path / "done.json", report))
  return trained


def _clear(path: epath.Path) -> None:
  """What a kill left half-made."""
  for leftover in path.glob("params*"):
    leftover.rmtree()


def _check_ours(path: epath.Path) -> None:
  """A directory with anything else in it is left alone."""
  if path.exists() and not (path / _IDENTITY).exists() and any(path.iterdir()):
    raise ValueError(f"config.warm_start.path: {path} is not empty and not a warm "
                     f"start (no {_IDENTITY}); give another directory")


def identity(config: ConfigDict) -> dict:
  """What the parameters follow from: two runs may share them if it is equal."""
  c = config.to_dict()
  del c["warm_start"]["path"]
  return {**{k: c[k] for k in ("seed", "task", "model", "warm_start")},
          "temperature": c["rollout"]["temperature"]}


def _train(config: ConfigDict, parts: Parts, check_stop: Callable[[], None]
           ) -> tuple[Params, dict]:
  w, task, model, mesh = config.warm_start, parts.task, parts.model, parts.mesh
  pool = [p for p in task.train if p.answer]
  encode = functools.partial(
      batching.demonstrations, task.tokenizer,
      prompt_width=task.max_prompt_tokens,
      answer_width=task.max_answer_tokens)
  # The probe is not divided over the mesh: any number of rows will do.
  probe = hosts.place(
      encode([p for p in batching.sample_of(task.heldout, _PROBE_ROWS)
              if p.answer]), mesh_lib.replicated(mesh))
  constants = dict(
      temperature=config.rollout.temperature, entropy_coef=0.0, weight_decay=0.0,
      grad_clip=1.0, learning_rate=w.learning_rate)
  state = state_lib.born(functools.partial(
      state_lib.init, model=model, tx=_TX), model, mesh)(
          rng.key(config.seed, "init"))
  done, chance = 0, 0.0
  with progress.Steps("warm start", w.steps) as bar:
    for n in range(w.steps):
      check_stop()
      cursors = range(n * w.batch, (n + 1) * w.batch)
      batch = hosts.place(
          encode([pool[batching.problem_index(config.seed, c, len(pool))]
                  for c in cursors]), mesh_lib.rows(mesh))
      minibatch, = step.jit_prepare_batch(
          state.params, None, batch, constants, objective=_OBJECTIVE,
          model=model)
      state, _ = step.jit_train_step(
          state, minibatch, constants, objective=_OBJECTIVE, model=model,
          tx=_TX)
      done = n + 1
      if done % _PROBE_EVERY == 0 or done == w.steps:
        chance = float(_chance(state.params, probe, constants["temperature"],
                               model))
        if not math.isfinite(chance):
          raise FloatingPointError(
              f"warm start: non-finite log-probs after step {done}; try a smaller "
              "config.warm_start.learning_rate")
        bar.update(done, f"chance of a right answer {chance:.3f}")
        if chance >= w.target:
          break
  return state.params, dict(steps=done, chance=chance)


@functools.partial(jax.jit, static_argnums=3)
def _chance(params_: Params, demonstrations: Batch, temperature: Array,
            model: Model) -> Array:
  """Mean probability that sampling gives exactly the demonstration."""
  logp = scoring.score(params_, demonstrations, model=model,
                       temperature=temperature).logp
  return jnp.mean(jnp.exp(masked.total(logp, demonstrations.mask, axis=1)))
