"""Whether a config fits a TPU slice, and what it costs there, without a TPU.

  python -m rl_is.aot --config=configs/qwen3_0p6b.py --topology=v5e:4x4

compiles the run's own train step, scoring and decode step for that topology
(needs the extra `tpu`, and minutes), prints a table, and on standard output one
JSON object. Floor 4.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from etils import epath
from jax.experimental import topologies
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from rl_is import build as build_lib
from rl_is import command
from rl_is.build import Parts
from rl_is.core.types import Batch, Prompts
from rl_is.infra import chips, hlo
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import sharding
from rl_is.infra import workdir as workdir_lib
from rl_is.learner import step as step_lib
from rl_is.models import flops as flops_lib
from rl_is.models import sampler

PROGRAMS = ("train_step", "scoring", "decode_step")
_SMOKE = dict(layers=2, tokens=128)


def devices_of(topology: str, slices: int = 1) -> list:
  """The devices of a slice that is not there."""
  chips.of(topology)
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError("aot needs libtpu: pip install 'rl_is[tpu]'")
  if not re.fullmatch(r"\w+:\d+(x\d+)+", topology):
    raise ValueError("--topology: expected a chip and the sides of its slice, as "
                     f"v5e:4x4, got {topology!r}")
  # No TPU machine to ask about itself, no chip that two processes could take.
  os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
  more = dict(num_slices=slices) if slices > 1 else {}
  try:
    return list(topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **more).devices)
  except Exception as error:  # libtpu's: of no one class
    raise ValueError(f"--topology: libtpu does not know {topology!r}: "
                     f"{str(error).splitlines()[0][:200]}") from error


def programs(parts: Parts, config: ConfigDict, prompt: int, new: int) -> dict:
  """name -> a jitted program of the run, and what to lower it with."""
  rows, M = config.rollout.batch_size, config.train.microbatches
  tree = build_lib.abstract_state(config, parts)
  state, shapes = tree["learner"], functools.partial(_shapes, mesh=parts.mesh)
  constants = jax.tree.map(lambda x: jnp.float32(x), parts.constants)
  batch = shapes(_batch(parts, rows, prompt + new))
  key = jax.eval_shape(lambda: jax.random.key(0))
  common = dict(objective=parts.objective, model=parts.model, microbatches=M)
  prepare = functools.partial(step_lib.prepare_batch, **common)
  minibatch = jax.eval_shape(prepare, state.params, tree.get("ref"), batch,
                             constants, key)[0]
  update = functools.partial(
      step_lib.train_step, tx=parts.tx,
      warmup_updates=config.optimizer.warmup_updates, **common)
  weights = jax.tree.map(
      lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
      state.params, sharding.place(state.params, parts.model.rules, parts.mesh,
                                   without=("fsdp",)))
  sampling = dataclasses.replace(parts.sampling, max_new_tokens=new)
  decode_rows = build_lib.rows_per_call(config)
  prompts = Prompts(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
      ((decode_rows, prompt), jnp.int32), ((decode_rows, prompt), bool),
      ((decode_rows,), jnp.int32), ((decode_rows,), jnp.int32))))
  begun = jax.eval_shape(
      functools.partial(sampler.begin, model=parts.model, sampling=sampling),
      weights, prompts, key)
  decode = lambda params, state: sampler.decode(
      params, state, jnp.int32(0), 1, model=parts.model, sampling=sampling)
  return dict(
      train_step=(jax.jit(update, donate_argnums=0),
                  (state, shapes(minibatch), constants, key)),
      scoring=(jax.jit(prepare), (state.params, tree.get("ref"), batch,
                                  constants, key)),
      decode_step=(jax.jit(decode, donate_argnums=1),
                   (weights, _decoding(begun, parts.mesh))))


def _batch(parts: Parts, rows: int, length: int) -> Batch:
  """As the run's own, from its sampler."""
  at = lambda dtype, *more: jax.ShapeDtypeStruct((rows, *more), dtype)
  token = lambda dtype, *more: at(dtype, length, *more)
  c, s = parts.model.config, parts.sampling
  head = token(jnp.int32, s.record_top_k) if s.record_top_k else None
  return Batch(
      tokens=token(jnp.int32), valid=token(bool), mask=token(bool),
      reward=at(jnp.float32), group=at(jnp.int32),
      logp_behaviour=token(jnp.float32), version=token(jnp.int32),
      version_now=at(jnp.int32),
      kept_ids=token(jnp.int32, s.top_k) if s.top_k else None, head_ids=head,
      head_logp_behaviour=head and token(jnp.float32, s.record_top_k),
      routes=(token(jnp.int16, c.layers, c.experts_per_token)
              if s.record_routes else None))


def _shapes(tree: Any, mesh) -> Any:
  """Rows where they lie; scalars as they are."""
  where = mesh_lib.rows(mesh)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=where if x.ndim else None), tree)


def _decoding(begun: dict, mesh) -> dict:
  """The cache's second axis is the rows, and its kv heads may be split."""
  split = jax.sharding.NamedSharding(
      mesh, jax.P(None, ("data", "fsdp"), None, "tensor"))
  put = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
  cache = begun["cache"]
  placed = dataclasses.replace(cache, k=put(cache.k, split), v=put(cache.v, split))
  rest = _shapes({k: x for k, x in begun.items() if k != "cache"}, mesh)
  return dict(rest, cache=placed)


def compile_(name: str, program, args, mesh) -> dict:
  """Bytes a device, what is sent, seconds to compile."""
  began = time.monotonic()
  print(f"{name}: compiling ...", end=" ", file=sys.stderr, flush=True)
  with mesh_lib.use(mesh):
    compiled = program.lower(*args).compile()
  seconds = time.monotonic() - began
  print(f"{seconds:.0f} s", file=sys.stderr)
  m = compiled.memory_analysis()
  kept = (m.argument_size_in_bytes + m.output_size_in_bytes
          - m.alias_size_in_bytes)
  return dict(arguments=m.argument_size_in_bytes,
              outputs=m.output_size_in_bytes, donated=m.alias_size_in_bytes,
              temporaries=m.temp_size_in_bytes,
              peak=kept + m.temp_size_in_bytes,
              collectives=hlo.collectives(compiled.as_text()),
              compile_seconds=round(seconds, 1))


def report(config: ConfigDict, topology: str, slices: int = 1, *,
           prompt: int | None = None, new: int | None = None,
           smoke: bool = False) -> dict:
  chip, devices = chips.of(topology), devices_of(topology, slices)
  config = _alone(config, smoke)
  parts = build_lib.build(config, devices=devices)
  prompt = prompt or parts.task.max_prompt_tokens
  new = new or parts.sampling.max_new_tokens
  if smoke:
    prompt, new = _SMOKE["tokens"] // 2, _SMOKE["tokens"] // 2
  made = programs(parts, config, prompt, new)
  done = {name: compile_(name, *made[name], parts.mesh)
          for name in (PROGRAMS[:1] if smoke else PROGRAMS)}
  params = made["train_step"][1][0].params
  peak = max(program["peak"] for program in done.values())
  return dict(
      topology=topology, slices=slices, devices=len(devices),
      mesh={axis: parts.mesh.shape[axis] for axis in mesh_lib.AXES},
      parameters=sum(x.size for x in jax.tree.leaves(params)),
      rows=config.rollout.batch_size, tokens_a_row=prompt + new,
      hbm=chip.hbm, peak=peak, fits=peak <= chip.hbm, programs=done,
      **_roofline(config, parts, prompt + new, done["train_step"], chip,
                  len(devices)))


def _alone(config: ConfigDict, smoke: bool) -> ConfigDict:
  """Nothing that only a machine of one's own has is asked for."""
  config = ConfigDict(config.to_dict())
  config.update(dict(store=dict(every=0), track=dict(tensorboard=False),
                     warm_start=dict(weights="")))
  config.rollout.mode = "lag"  # the whole slice: the larger of two halves
  if smoke:
    config.model.layers = min(config.model.layers, _SMOKE["layers"])
  return config


def _roofline(config, parts, length, program, chip, devices) -> dict:
  """Seconds of one batch by what bounds them; each a lower bound of its own."""
  c, U = parts.model.config, config.train.updates_per_batch
  objective = parts.objective
  scored = (objective.needs_ref + (
      objective.needs_prox and objective.spec.proximal == "start"))
  work = flops_lib.of_step(c, config.rollout.batch_size, length, scored=scored,
                           tiled_head=c.logprob_impl != "reference")
  total = sum(work.values())
  # Weights are read whole by every device in each pass of each microbatch, the
  # state is read and written at each update.
  passes = (3 + (c.remat == "full")) * U * config.train.microbatches + scored
  weights = jnp.dtype(c.dtype).itemsize * _count(parts) / (
      parts.mesh.shape["tensor"])
  moved = passes * weights + 2 * U * program["arguments"]
  wire = U * program["collectives"]["wire_bytes"]
  seconds = dict(compute=total / devices / chip.flops,
                 hbm=moved / chip.hbm_rate, ici=wire / chip.ici_rate)
  bound = max(seconds, key=seconds.get)
  model = work["update"] + work["scoring"]
  return dict(
      flops=work, model_flops_a_step=model,
      hbm_bytes_a_device=moved, ici_bytes_a_device=wire,
      flops_a_hbm_byte=total / devices / moved,
      seconds_a_step_at_least=seconds, bound_by=bound,
      mfu_at_most=model / devices / chip.flops / seconds[bound])


def _count(parts: Parts) -> int:
  shapes = jax.eval_shape(parts.model.init, jax.random.key(0))
  return sum(x.size for x in jax.tree.leaves(shapes))


def table(found: dict) -> Table:
  gib = lambda x: f"{x / 2**30:.2f}"
  mesh = " x ".join(f"{k}={v}" for k, v in found["mesh"].items())
  out = Table(
      "program", "arguments", "temporaries", "peak", "sent", "compile s",
      title=f"{found['topology']}, {found['devices']} devices ({mesh}), "
      f"{found['parameters'] / 1e9:.2f} B parameters, {found['rows']} x "
      f"{found['tokens_a_row']} tokens; GiB a device")
  for name, p in found["programs"].items():
    out.add_row(name, *(gib(x) for x in (
        p["arguments"], p["temporaries"], p["peak"],
        p["collectives"]["wire_bytes"])), f"{p['compile_seconds']:.0f}")
  return out


def verdict(found: dict) -> str:
  room = (found["hbm"] - found["peak"]) / 2**30
  what = "FITS" if found["fits"] else "DOES NOT FIT"
  seconds = found["seconds_a_step_at_least"]
  return (f"{what}: peak {found['peak'] / 2**30:.2f} of "
          f"{found['hbm'] / 2**30:.0f} GiB, {abs(room):.2f} GiB "
          f"{'free' if room >= 0 else 'missing'}. A learner step takes at least "
          f"{max(seconds.values()):.3g} s (bound by {found['bound_by']}; MFU at "
          f"most {found['mfu_at_most']:.0%}).")


def _cached(directory: str, identity: dict, fresh: bool, make) -> dict:
  text = json.dumps(identity, sort_keys=True, default=str)
  name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
  file = epath.Path(directory) / f"{name}.json"
  if file.exists() and not fresh:
    print(f"from {file}; --fresh compiles again", file=sys.stderr)
    return json.loads(file.read_text())
  found = make()
  file.parent.mkdir(parents=True, exist_ok=True)
  workdir_lib.write_json(file, found)
  return found


def _main(changes: command.Changes) -> None:
  given = flags.FLAGS
  command.need("config", "topology")
  config = command.changed(given.config, changes)
  how = dict(topology=given.topology, slices=given.slices, smoke=given.smoke,
             prompt=given.prompt_tokens, new=given.new_tokens)
  identity = dict(how, config=config.to_dict(), versions={
      name: importlib.metadata.version(name) for name in (
          "jax", "jaxlib", "libtpu", "flax")})
  found = _cached(given.cache_dir, identity, given.fresh,
                  lambda: report(config, **how))
  console = Console(stderr=True)
  Console(stderr=True, width=max(console.width, 120)).print(table(found))
  print(verdict(found), file=sys.stderr)
  print(json.dumps(found))


def main() -> None:
  flags.DEFINE_string("topology", None, "A chip and the sides of a slice: v5e:4x4.")
  flags.DEFINE_integer("slices", 1, "Slices of that topology.", lower_bound=1)
  flags.DEFINE_bool("smoke", False, "The train step alone, of 2 layers.")
  flags.DEFINE_integer("prompt_tokens", None, "Unset: the task's longest.",
                       lower_bound=1)
  flags.DEFINE_integer("new_tokens", None, "Unset: the config's.", lower_bound=1)
  flags.DEFINE_bool("fresh", False, "Compile again what was compiled before.")
  flags.DEFINE_string("cache_dir", os.path.expanduser("~/.cache/rl_is/aot"),
                      "Where results are kept.")
  command.run(_main)


if __name__ == "__main__":
  main()
