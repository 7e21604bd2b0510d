"""From a config to the parts of a run, shared by the commands. Floor 4.

What cannot work is refused here, before anything is compiled: in one line that
names the field, what was expected and what came.
"""

import collections
import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rl_is import fields, ops
from rl_is.core import checks
from rl_is.core.types import Params, Weights
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import rng, sharding
from rl_is.learner import optimizer
from rl_is.learner import state as state_lib
from rl_is.models import hf, sampler
from rl_is.models.config import TransformerConfig
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.objective import constants as constants_lib
from rl_is.objective import presets, settings
from rl_is.objective import spec as spec_lib
from rl_is.objective.compose import Objective
from rl_is.rollout import asynchronous, generator, mismatch
from rl_is.rollout.buffer import LagQueue
from rl_is.rollout.verify import Verifier
from rl_is.tasks import Task, make_task


@dataclasses.dataclass(frozen=True)
class Parts:
  """Everything that the loop is made of."""

  task: Task
  verifier: Verifier
  model: Model
  sampling: Sampling
  objective: Objective
  constants: dict[str, float]  # data: traced, never compiled in
  tx: optax.GradientTransformation
  mesh: Mesh
  sampler_mesh: Mesh  # the learner's own, unless the sampler works beside it
  # How the sampler departs from the learner: its weights, of the learner's, and
  # the dials in use as metrics; what it does to logits is in `sampling`.
  sampler_weights: Callable[[Params], Params] | None
  dials: dict[str, float]


def build(config: ConfigDict, *, corrections: Mapping[str, ops.Row | Callable]
          = {}, devices=None) -> Parts:
  """The parts of a run.

  corrections: a user's own, by name: a function like those of
    `ops.corrections` (its keyword defaults are its constants' values), or a
    whole `ops.Row` for constants that the config may set.
  """
  fields.check(config)
  if config.track.tensorboard and not importlib.util.find_spec("tensorboardX"):
    raise ValueError("config.track.tensorboard needs tensorboardX: "
                     "pip install -e '.[track]'")
  if config.store.every and not importlib.util.find_spec("pyarrow"):
    raise ValueError("config.store.every needs pyarrow: "
                     "pip install 'rl_is[data]'")
  task = make_task(config.task.name, **config.task.kwargs.to_dict())
  model = make_model(config, task)
  sampling = make_sampling(config, task, model)
  objective, constants = make_objective(config, sampling, corrections)
  mesh, sampler_mesh = make_meshes(config, devices)
  _check_rollout(config, objective, mesh)
  _check_mode(config, sampler_mesh)
  _check_mismatch(config)
  _check_weights(config, model)
  o, m = config.optimizer, config.mismatch
  constants |= dict(
      learning_rate=o.learning_rate, weight_decay=o.weight_decay,
      grad_clip=o.grad_clip, temperature=config.rollout.temperature)
  verifier = Verifier(task, config.verify.seconds, config.verify.on_failure)
  return Parts(task, verifier, model, sampling, objective, constants,
               optimizer.make(o.name, o.b1, o.b2, o.eps), mesh, sampler_mesh,
               mismatch.sampler_weights(m.weights, m.bits),
               mismatch.describe(m.to_dict()))


def make_model(config: ConfigDict, task: Task) -> Model:
  structure, size = config.model.to_dict(), task.tokenizer.vocab_size
  if structure["vocab_size"] is None:
    structure["vocab_size"] = size
  if structure["vocab_size"] < size:
    raise ValueError(f"config.model.vocab_size = {structure['vocab_size']}: the "
                     f"tokenizer of {task.name} has {size} ids")
  return Model(TransformerConfig(**structure))


def _check_weights(config: ConfigDict, model: Model) -> None:
  w = config.warm_start
  if not w.weights:
    return
  if w.steps:
    raise ValueError(f"config.warm_start.weights = {w.weights!r}: is the start; "
                     f"set config.warm_start.steps=0, got {w.steps}")
  for name, value in hf.structure(w.weights).items():
    if getattr(model.config, name) != value:
      raise ValueError(f"config.model.{name}: {w.weights} has {value!r}, got "
                       f"{getattr(model.config, name)!r}")


def make_sampling(config: ConfigDict, task: Task, model: Model) -> Sampling:
  r = config.rollout
  if r.replay_routes and not model.config.experts:
    raise ValueError("config.rollout.replay_routes: the model has no experts")
  sampling = Sampling(
      temperature=r.temperature * config.mismatch.temperature,
      top_p=r.top_p, top_k=r.top_k, record_top_k=r.record_top_k,
      record_routes=r.replay_routes,
      disturb=mismatch.disturbance(
          config.mismatch.to_dict(), vocab_size=model.config.vocab_size,
          width=model.config.padded_vocab),
      max_new_tokens=(task.max_answer_tokens if r.max_new_tokens is None
                      else r.max_new_tokens),
      eos_ids=task.tokenizer.eos_ids, pad_id=task.tokenizer.pad_id)
  sampler.check(sampling)
  return sampling


def make_objective(config: ConfigDict, sampling: Sampling, corrections: Mapping
                   ) -> tuple[Objective, dict[str, float]]:
  """The preset with the config's changes, and the value of each constant."""
  c = config.objective
  preset = presets.get(c.preset)
  extra = settings.own(corrections)
  for name, row in extra.items():
    _try_out(name, row)
  changes = {f.name: c[f.name] for f in dataclasses.fields(spec_lib.Spec)
             if c[f.name] is not None}
  _check_surrogate(changes, preset)
  if "corrections" in changes:
    changes["corrections"] = spec_lib.parse_corrections(changes["corrections"])
  if "options" in changes:
    changes["options"] = spec_lib.parse_options(
        [o for o in changes["options"].split(",") if o], "objective.options")
  spec = dataclasses.replace(preset.spec, **changes)
  objective = Objective(spec, config.train.updates_per_batch,
                        tuple(extra.items()), config.train.full_diagnostics)
  if config.train.psis and not (config.train.full_diagnostics
                                and config.rollout.record_logp):
    raise ValueError("config.train.psis: needs train.full_diagnostics=true and "
                     "rollout.record_logp=true")
  inert = constants_lib.inert(spec, objective.updates_per_batch, extra)
  if inert:
    logging.warning("config.objective.constants: %s cannot act: %s",
                    ", ".join(sorted(inert)), next(iter(inert.values())))
  # The one default that only the run knows: the longest answer it can sample.
  defaults = dict(dict(length=float(sampling.max_new_tokens)),
                  **_renamed(preset, spec, extra))
  given = {k: v for k, v in c.constants.items() if v is not None}
  return objective, constants_lib.resolve(spec, defaults, given, extra)


def _check_surrogate(changes: dict[str, Any], preset: presets.Preset) -> None:
  """A choice that the surrogate does not read is refused, not ignored; one that
  brings its own level (a product, for TOPR) has it unless the config says."""
  name = changes.get("surrogate", preset.spec.surrogate)
  checks.choice("objective.surrogate", name, ops.SURROGATES)
  row = ops.SURROGATES[name]
  ignored = {"anchor", "level"} & set(changes)
  if ignored and not row.has_factor:
    raise ValueError(f"config.objective.{sorted(ignored)[0]}: {name!r} has no "
                     "ratio, so it would change nothing; a correction's is "
                     "written name:numerator:level")
  if "surrogate" in changes and row.has_factor:
    default = inspect.signature(row.fn).parameters["level"].default
    changes.setdefault("level", default)


def _renamed(preset: presets.Preset, spec: spec_lib.Spec, extra: Mapping
             ) -> dict[str, float]:
  """The preset's constants under the names that they have in `spec`."""
  now = constants_lib.names(spec, extra)
  return {now[place]: preset.constants[name]
          for place, name in constants_lib.names(preset.spec).items()
          if name in preset.constants and place in now}


def source_of(piece: ops.Row | Callable) -> str:
  """The text of a user's own piece: another text is another run."""
  fn = piece.fn if isinstance(piece, ops.Row) else piece
  try:
    return inspect.getsource(fn)
  except (OSError, TypeError):  # typed in a shell, or not a plain function
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def stand_in(logp_num, logp_behaviour, mask, *, level="token") -> Weights:
  """A correction that changes nothing, in place of one that is not at hand."""
  return Weights(jnp.where(mask, 1.0, 0.0), mask, logp_num - logp_behaviour)


def _try_out(name: str, row: ops.Row) -> None:
  """Calls a user's correction on shapes alone: its errors come at the start."""
  x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
  kwargs = {c.keyword or kw: 1.0 for kw, c in row.constants.items()}
  try:
    out = jax.eval_shape(
        lambda a, b, m: row.fn(a, b, m, level="token", **kwargs), x, x,
        jax.ShapeDtypeStruct((2, 3), jnp.bool_))
    shapes = {f: getattr(out, f).shape for f in ("weight", "keep", "log_ratio")}
  except Exception as error:
    raise ValueError(
        f"corrections: {name!r} failed on [2, 3] arrays: expected a function "
        "(logp_num, logp_behaviour, mask, *, level) -> Weights; "
        f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
  if set(shapes.values()) != {(2, 3)}:
    raise ValueError(f"corrections: {name!r}: expected [B, T] arrays, got "
                     f"{shapes} for B, T = 2, 3")


def _check_rollout(config: ConfigDict, objective: Objective, mesh: Mesh) -> None:
  """Groups, minibatches and mesh divide; the objective gets what it needs."""
  r, U = config.rollout, config.train.updates_per_batch
  checks.divisible("config.rollout.batch_size", r.batch_size,
                   "config.rollout.group_size", r.group_size)
  if objective.is_grouped and r.group_size < 2:
    raise ValueError(
        f"config.rollout.group_size = {r.group_size}: the advantage "
        f"{objective.spec.advantage!r} compares the samples of a prompt and "
        "needs at least 2")
  checks.divisible("config.rollout.batch_size", r.batch_size,
                   "config.train.updates_per_batch", U)
  M = config.train.microbatches
  checks.divisible("config.rollout.batch_size / updates_per_batch",
                   r.batch_size // U, "config.train.microbatches", M)
  mesh_lib.check_rows(
      mesh, "config.rollout.batch_size / updates_per_batch / microbatches",
      r.batch_size // U // M)
  if M > 1 and objective.coupled:
    raise ValueError(
        f"config.train.microbatches = {M}: {objective.coupled!r} compares all "
        "rows of an update and needs 1")
  mesh_lib.check_rows(mesh, "config.warm_start.batch", config.warm_start.batch)
  missing = objective.inputs_needed & {"baseline", "value"}
  if missing:
    raise ValueError(f"config.objective: {objective.spec.advantage!r} needs "
                     f"{sorted(missing)[0]}, which this loop does not record")
  if objective.spec.advantage == "given":
    raise ValueError("config.objective.advantage: 'given' is for losses in "
                     "another trainer; this loop makes its own")
  if objective.needs_behaviour and not r.record_logp:
    raise ValueError(
        f"config.objective: {objective.spec.surrogate!r} on "
        f"{objective.spec.anchor!r} with corrections "
        f"{[str(c) for c in objective.spec.corrections]} needs the sampler's "
        "log-probs; set config.rollout.record_logp=true")
  if r.rescore_share and not r.record_logp:
    raise ValueError(f"config.rollout.rescore_share = {r.rescore_share}: compares "
                     "log-probs; set config.rollout.record_logp=true")
  if r.record_top_k and not r.record_logp:
    raise ValueError(f"config.rollout.record_top_k = {r.record_top_k}: records "
                     "log-probs; set config.rollout.record_logp=true")
  if objective.needs_head and not r.record_top_k:
    raise ValueError(
        f"config.objective.centering: {objective.spec.centering!r} needs the "
        "sampler's most likely tokens; set config.rollout.record_top_k, for "
        "example to 128")


def make_meshes(config: ConfigDict, devices=None) -> tuple[Mesh, Mesh]:
  """(learner's, sampler's): one and the same, or disjoint.

  Beside each other on shared devices two programs with collectives may wait for
  each other for ever; only a single device of a process is shared, whose sampler
  has none. The learner's mesh goes over all processes, a sampler's is its own.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = config.mesh.to_dict()
  if config.rollout.mode != "async":
    mesh = mesh_lib.make(sizes, devices)
    return mesh, mesh
  by_process = collections.defaultdict(list)
  for device in devices:
    by_process[device.process_index].append(device)
  own = by_process[jax.process_index()]
  rows_only = functools.partial(mesh_lib.make, dict(data=-1, fsdp=1, tensor=1))
  count = config.rollout.sampler_devices
  if len(own) == 1 and count is None:
    mesh = mesh_lib.make(sizes, devices)
    return mesh, mesh if len(devices) == 1 else rows_only(own)
  count = len(own) // 2 if count is None else count
  if count >= len(own):
    raise ValueError(f"config.rollout.sampler_devices: expected less than the "
                     f"{len(own)} devices of a process, got {count}")
  return (mesh_lib.make(sizes, [d for its in by_process.values()
                                for d in its[:-count]]), rows_only(own[-count:]))


def rows_per_call(config: ConfigDict) -> int:
  """Sequences that the asynchronous generator of a process samples at once."""
  r = config.rollout
  return (r.batch_size // jax.process_count() if r.rows_per_call is None
          else r.rows_per_call)


def _check_mode(config: ConfigDict, sampler_mesh: Mesh) -> None:
  """Each mode has its own fields; one that would not act is refused."""
  r, U = config.rollout, config.train.updates_per_batch
  checks.choice("config.rollout.mode", r.mode, ("lag", "async"))
  checks.choice("config.rollout.order", r.order, asynchronous.ORDERS)
  checks.choice("config.rollout.swap_cache", r.swap_cache, generator.CACHES)
  idle = (["lag"] if r.mode == "async" else
          ["max_lag", "sampler_devices", "rows_per_call", "swap_tokens"])
  for name in idle:
    if r[name]:
      raise ValueError(f"config.rollout.{name} = {r[name]}: not read in mode "
                       f"{r.mode!r}")
  if r.mode == "lag":
    LagQueue(r.lag, U)  # refuses a lag that U does not divide
    if r.lag > U * config.train.steps:
      logging.warning("config.rollout.lag = %d is longer than the run of %d "
                      "steps: every batch comes from version 0", r.lag,
                      config.train.steps)
    return
  processes = jax.process_count()
  checks.divisible("config.rollout.batch_size / group_size",
                   r.batch_size // r.group_size, "processes", processes)
  rows = rows_per_call(config)
  checks.divisible("config.rollout.batch_size / processes",
                   r.batch_size // processes, "config.rollout.rows_per_call", rows)
  checks.divisible("config.rollout.rows_per_call", rows,
                   "config.rollout.group_size", r.group_size)
  mesh_lib.check_rows(sampler_mesh, "config.rollout.rows_per_call", rows)


def _check_mismatch(config: ConfigDict) -> None:
  """A dial that would not act, or could not, is refused."""
  m = config.mismatch
  mismatch.check_weights("config.mismatch", m.weights, m.bits)
  if m.weights in ("bf16", "mantissa") and (
      config.model.param_dtype == "float64"):
    raise ValueError(f"config.mismatch.weights: {m.weights!r} rounds float32 or "
                     "narrower, got model.param_dtype = 'float64'")
  if dict(bf16="bfloat16", f16="float16").get(
      m.weights) == config.model.param_dtype:
    raise ValueError(f"config.mismatch.weights: {m.weights!r} changes nothing: "
                     f"model.param_dtype = {config.model.param_dtype!r}")
  if m.spike_rate and (not m.spike_nats or m.spike_below == 1):
    raise ValueError(
        f"config.mismatch.spike_rate = {m.spike_rate} changes nothing: expected "
        "spike_nats other than 0 and spike_below < 1, got "
        f"{m.spike_nats} and {m.spike_below}")
  if m.top_p < 1 and config.rollout.top_k:
    raise ValueError(
        f"config.mismatch.top_p = {m.top_p}: expected rollout.top_k = 0 (its "
        f"kept set would tell the learner), got {config.rollout.top_k}")


def abstract_state(config: ConfigDict, parts: Parts) -> dict[str, Any]:
  """Shapes and placement of what a checkpoint of the run holds."""
  state = jax.eval_shape(
      lambda key: state_lib.init(key, parts.model, parts.tx, parts.objective),
      rng.key(config.seed, "init"))
  tree = dict(learner=state)
  if parts.objective.needs_ref:
    tree["ref"] = state.params
  return sharding.shaped(tree, parts.model.rules, parts.mesh)
