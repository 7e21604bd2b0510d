"""The arrays of many runs of one structure, and the program that takes them on.

The members differ in numbers only: constants of the objective, the optimizer and
the dials, the lag, the seed. They go through the very functions of the main loop,
`sample`, `prepare_batch` and `train_step`; what waits for its turn lies in a ring
of batches on the device. Floor 4.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from rl_is.build import Parts
from rl_is.core import checks, masked
from rl_is.core.types import Array, Batch, Params, Prompts, pytree
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import rng
from rl_is.infra import workdir as workdir_lib
from rl_is.learner import state as state_lib
from rl_is.learner import step as step_lib
from rl_is.learner.state import State
from rl_is.models import sampler
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.objective.compose import Objective
from rl_is.rollout import batching, mismatch
from rl_is.rollout.verify import Scores

PLACEMENTS = ("map", "vmap")
_CHUNK = 20  # steps, at most
NEVER = np.iinfo(np.int32).max
# Fields that may differ between members; all others are structure.
_DATA = ("seed", "rollout.lag", "rollout.temperature",
         "optimizer.learning_rate", "optimizer.weight_decay",
         "optimizer.grad_clip", "mismatch.bits", "mismatch.temperature",
         "mismatch.top_p", "mismatch.logit_sd", "mismatch.logit_seed",
         "mismatch.spike_rate", "mismatch.spike_nats", "mismatch.spike_below",
         "warm_start.path")
_DATA_GROUP = "objective.constants."


@dataclasses.dataclass(frozen=True)
class _How:
  """The structure of a population: what its program is compiled for."""

  objective: Objective
  model: Model
  tx: optax.GradientTransformation
  warmup_updates: int
  microbatches: int
  group_size: int
  prompts: int  # a batch
  record_logp: bool
  weights: str  # mismatch.weights
  reward: Callable
  total: int  # steps
  ring: int  # batches that it holds
  chunk: int
  placement: str


@pytree
class _Member:
  """What sets a member apart; every leaf has a first axis of members."""

  constants: dict[str, Array]
  sampling: Sampling
  bits: Array
  depth: Array  # batches that wait: lag / updates_per_batch
  sample_key: Array
  learner_key: Array
  stream: Array  # which of the streams of problems is its own


@pytree
class _Carry:
  """What a member takes from step to step."""

  state: State
  ref: Params | None
  ring: Batch  # [ring, B, ...]
  failed: Array  # int32: the step that could not be made; NEVER: none


@pytree
class _Table:
  """All problems of the task's training side, on the device."""

  tokens: Array  # [problems, P]
  valid: Array
  answers: Array  # [problems, A]


def structure(config: ConfigDict, parts: Parts) -> dict[str, Any]:
  """Equal for configs that can be members of one population."""
  flat = workdir_lib.flatten(json.loads(config.to_json_best_effort()))
  shape = {k: v for k, v in flat.items()
           if k not in _DATA and not k.startswith(_DATA_GROUP)}
  return shape | {
      "objective.constants": " ".join(sorted(parts.constants)),
      "mismatch": str(jax.tree.structure(parts.sampling))}


def check(config: ConfigDict, parts: Parts) -> None:
  """Refuses what a population does not have; such a run goes by itself."""
  no = None
  if parts.task.arrays is None:
    no = f"task.name = {config.task.name!r}: its verifier is not on arrays"
  elif config.rollout.mode != "lag":
    no = f"rollout.mode = {config.rollout.mode!r}: expected 'lag'"
  elif config.rollout.rescore_share:
    no = f"rollout.rescore_share = {config.rollout.rescore_share}: expected 0"
  elif config.store.every:
    no = f"store.every = {config.store.every}: expected 0"
  elif jax.process_count() > 1:
    no = f"{jax.process_count()} processes: expected 1"
  if no:
    raise ValueError(f"population: config.{no}; run it by itself")


class Population:
  """The arrays of all members, and the program that takes them on."""

  def __init__(self, configs: Sequence[ConfigDict], parts: Sequence[Parts],
               starts: Sequence[Params], *, placement: str, devices=None):
    """starts: the parameters that each member begins with."""
    checks.choice("population: placement", placement, PLACEMENTS)
    config, first = configs[0], parts[0]
    devices = list(jax.devices()[:1] if devices is None else devices)
    # Each device takes as many; the last member may stand in more than once.
    self.count = len(configs)
    extra = -len(configs) % len(devices)
    configs, parts, starts = ([*x, *x[-1:] * extra]
                              for x in (configs, parts, starts))
    r, U = config.rollout, config.train.updates_per_batch
    depths = [c.rollout.lag // U for c in configs]
    every = config.evaluate.every
    self.how = _How(
        objective=first.objective, model=first.model, tx=first.tx,
        warmup_updates=config.optimizer.warmup_updates,
        microbatches=config.train.microbatches, group_size=r.group_size,
        prompts=r.batch_size // r.group_size, record_logp=r.record_logp,
        weights=config.mismatch.weights, reward=first.task.arrays.reward,
        total=config.train.steps, ring=max(depths) + 1,
        chunk=max(d for d in range(1, _CHUNK + 1) if every % d == 0),
        placement=placement)
    # Before step 0 the batches are sampled that have no older weights.
    self.begin = -self.how.chunk * math.ceil(max(depths) / self.how.chunk)
    seeds = sorted({c.seed for c in configs})
    self._mesh = Mesh(
        np.asarray(devices).reshape(-1, 1, 1, 1), ("sweep", *mesh_lib.AXES),
        axis_types=(AxisType.Auto,) * 4)
    self._members = self._place(_Member(
        constants=_stacked([p.constants for p in parts]),
        sampling=_stacked([p.sampling for p in parts]),
        bits=np.asarray([c.mismatch.bits or 0 for c in configs], np.int32),
        depth=np.asarray(depths, np.int32),
        sample_key=jnp.stack([rng.key(c.seed, "sample") for c in configs]),
        learner_key=jnp.stack([rng.key(c.seed, "learner") for c in configs]),
        stream=np.asarray([seeds.index(c.seed) for c in configs], np.int32)))
    problems = first.task.train
    self._streams = np.asarray(
        [[batching.problem_index(seed, cursor, len(problems))
          for cursor in range(self.how.total * self.how.prompts)]
         for seed in seeds], np.int32).reshape(len(seeds), self.how.total, -1)
    asked = batching.encode_prompts(
        first.task.tokenizer, problems, range(len(problems)), 1,
        first.task.max_prompt_tokens)
    self._table = _Table(asked.tokens, asked.valid, np.stack(
        [first.task.arrays.answer(p) for p in problems]))
    self.carry = self._place(self._born(starts))

  def _born(self, starts: Sequence[Params]) -> _Carry:
    how = self.how
    create = functools.partial(state_lib.create, tx=how.tx,
                               objective=how.objective)
    params = _stacked(starts)
    state = jax.vmap(create)(params)
    one = lambda tree: jax.tree.map(lambda x: x[0], tree)
    batch = jax.eval_shape(
        functools.partial(_sampled, how=how), one(state), one(self._members),
        self._streams, self._table, jnp.int32(0))[0]
    ring = jax.tree.map(lambda x: jnp.zeros(
        (len(starts), how.ring, *x.shape), x.dtype), batch)
    ref = jax.tree.map(jnp.copy, params) if how.objective.needs_ref else None
    return _Carry(state, ref, ring,
                  jnp.full(len(starts), NEVER, jnp.int32))

  def _place(self, tree: Any) -> Any:
    return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec("sweep")))

  def members(self) -> _Carry:
    """`carry` with each member once: what is kept, however many devices there are."""
    if len(self.carry.failed) == self.count:
      return self.carry
    # On the host: a slice across devices is a collective for every leaf, and so
    # many at once can wait for each other forever where devices share few cores.
    return jax.tree.map(lambda x: x[:self.count], jax.device_get(self.carry))

  def abstract(self) -> _Carry:
    """Shapes and places of `members()`, for a restore."""
    even = self.count % self._mesh.size == 0
    place = NamedSharding(self._mesh, PartitionSpec("sweep" if even else None))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        (self.count, *x.shape[1:]), x.dtype, sharding=place), self.carry)

  def resume(self, members: _Carry) -> None:
    """What `members()` gave goes on."""
    extra = -self.count % self._mesh.size
    self.carry = self._place(jax.tree.map(
        lambda x: jnp.concatenate([x, *[x[-1:]] * extra]) if extra else x, members))

  def advance(self, first: int) -> dict[str, Any]:
    """A chunk of steps from `first`; what came of them, numpy, [members, chunk]."""
    with jax.set_mesh(self._mesh):
      carry, out = _advance(self.carry, *self._arguments(first), how=self.how,
                            mesh=self._mesh)
    self.carry = self._place(carry)  # where it is; but jit would name it anew
    return jax.tree.map(lambda x: x[:self.count], jax.device_get(out))

  def ends(self) -> list[int]:
    """Of each member the step that it could not make; NEVER: none so far."""
    return np.asarray(self.carry.failed)[:self.count].tolist()

  def params(self, i: int) -> Params:
    """Of member i, on one device."""
    device = self._mesh.devices.flat[0]
    where, at = divmod(i, len(self.carry.failed) // self._mesh.size)
    home = self._mesh.devices.flat[where]

    def own(x):  # from where it lies: x[i] would ask all devices
      shard, = (s.data for s in x.addressable_shards if s.device == home)
      return jax.device_put(shard[at], device)

    return jax.tree.map(own, self.carry.state.params)

  def _arguments(self, first: int) -> tuple:
    return self._members, self._streams, self._table, np.int32(first)

  def memory(self) -> dict[str, float]:
    """Bytes a member: what it holds, and of the work on all of them its share."""
    with jax.set_mesh(self._mesh):
      found = _advance.lower(
          self.carry, *self._arguments(0), how=self.how, mesh=self._mesh
      ).compile().memory_analysis()
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    members = len(self.carry.failed)
    return dict(carried=size(self.carry) / members,
                temporary=found.temp_size_in_bytes * self._mesh.size / members)


def _stacked(trees: Sequence[Any]) -> Any:
  """A first axis of members; numbers become float32, as jit would have them."""
  leaf = lambda *xs: jnp.stack([jnp.asarray(
      x, jnp.float32 if isinstance(x, float) else None) for x in xs])
  return jax.tree.map(leaf, *trees)


# ---- The program.


@functools.partial(jax.jit, static_argnames=("how", "mesh"), donate_argnums=0)
def _advance(carry: _Carry, members: _Member, streams: Array, table: _Table,
             first: Array, *, how: _How, mesh: Mesh):
  """`how.chunk` steps of every member, from step `first`."""
  def all_of_them(carry, members, streams, table, first):
    def one(args):
      carry, member = args
      return lax.scan(
          lambda c, n: _step(c, n, member, streams, table, how), carry,
          first + jnp.arange(how.chunk, dtype=jnp.int32))

    if how.placement == "vmap":
      return jax.vmap(lambda *args: one(args))(carry, members)
    return lax.map(one, (carry, members))

  if mesh.shape["sweep"] == 1:
    return all_of_them(carry, members, streams, table, first)
  own, all_ = PartitionSpec("sweep"), PartitionSpec()
  return jax.shard_map(
      all_of_them, mesh=mesh, in_specs=(own, own, all_, all_, all_),
      out_specs=own, axis_names={"sweep"}, check_vma=False)(
          carry, members, streams, table, first)


def _step(carry: _Carry, n: Array, member: _Member, streams: Array,
          table: _Table, how: _How):
  """As the main loop at step n: samples a batch, trains on another one."""
  due = n + member.depth
  place = lambda x, at: lax.dynamic_update_index_in_dim(
      x[0], x[1], at % how.ring, 0)

  def sample(ring):
    batch, bad = _sampled(carry.state, member, streams, table, due, how=how)
    return jax.tree.map(lambda r, b: place((r, b), due), ring, batch), bad

  ring, bad = lax.cond(
      (0 <= due) & (due < how.total) & (n < carry.failed), sample,
      lambda ring: (ring, jnp.bool_(False)), carry.ring)
  failed = jnp.where(bad, jnp.minimum(carry.failed, jnp.maximum(n, 0)),
                     carry.failed)
  batch = jax.tree.map(lambda r: lax.dynamic_index_in_dim(
      r, n % how.ring, 0, keepdims=False), ring)
  learn = functools.partial(_learn, ref=carry.ref, batch=batch, n=n,
                            member=member, how=how)
  shapes = jax.eval_shape(learn, carry.state)[1:]
  nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  state, total, broke = lax.cond(
      (0 <= n) & (n < how.total) & (n < failed), learn,
      lambda state: (state, *nothing), carry.state)
  failed = jnp.where(broke, jnp.minimum(failed, n), failed)
  shown = {name: getattr(batch, name) for name in (
      "reward", "mask", "version", "stop_token")}
  return (_Carry(state, carry.ref, ring, failed),
          dict(metrics=total, sampler_broke=bad, **shown))


def _sampled(state: State, member: _Member, streams: Array, table: _Table,
             due: Array, *, how: _How) -> tuple[Batch, Array]:
  """Batch `due`, drawn and scored now; whether a log-prob of it is not finite."""
  G = how.group_size
  problems = jnp.repeat(streams[member.stream, due], G, axis=0)
  prompts = Prompts(
      table.tokens[problems], table.valid[problems],
      cursor=jnp.repeat(due * how.prompts + jnp.arange(how.prompts), G),
      sample=jnp.tile(jnp.arange(G), how.prompts))
  params = state.params
  if how.weights != "none":
    params = mismatch.weights(params, how.weights, member.bits)
  rollout = sampler.sample(params, prompts, member.sample_key, state.version,
                           model=how.model, sampling=member.sampling)
  reward = how.reward(rollout.tokens, rollout.mask, table.answers[problems])
  batch = batching.assemble(
      rollout, Scores(reward, jnp.zeros_like(reward, bool)), G)
  bad = masked.first_bad(batch.mask, batch.logp_behaviour) >= 0
  return batch if how.record_logp else batch.replace(logp_behaviour=None), bad


def _learn(state: State, *, ref: Params | None, batch: Batch, n: Array,
           member: _Member, how: _How):
  """The updates on one batch: state, metrics, whether one could not be made."""
  U = how.objective.updates_per_batch
  version = n * U
  key = jax.random.fold_in(member.learner_key, version)
  common = dict(objective=how.objective, model=how.model,
                microbatches=how.microbatches)
  batch = batch.replace(version_now=jnp.full(
      batch.reward.shape, version, jnp.int32))
  minibatches = _apart(functools.partial(step_lib.prepare_batch, **common), n)(
      state.params, ref, batch, member.constants, key)

  def update(state, minibatch, key):
    state, metrics = step_lib.train_step(
        state, minibatch, member.constants, key, tx=how.tx,
        warmup_updates=how.warmup_updates, **common)
    return state, metrics, (metrics["update/first_bad"].largest >= 0) | (
        metrics["update/nonfinite"].largest > 0)

  state, total, broke = _apart(update, n)(
      state, minibatches[0], jax.random.fold_in(key, 0))
  for u in range(1, U):  # after one that broke, none is made
    state, metrics, broke = lax.cond(
        broke, lambda s, *args, total=total: (s, jax.tree.map(
            jnp.zeros_like, total), jnp.bool_(True)), update, state,
        minibatches[u], jax.random.fold_in(key, u))
    total = {name: total[name] + metrics[name] for name in metrics}
  return state, total, broke


def _apart(fn: Callable, n: Array) -> Callable:
  """`fn` as a program of its own inside the program, as in the main loop.

  Else XLA fuses over its borders, and the last bits are other ones. A branch is
  never fused with what is around it; n >= 0 holds, but the compiler cannot know.
  """
  def apart(*args):
    out = jax.eval_shape(fn, *args)
    return lax.cond(n >= 0, fn, lambda *args: jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), out), *args)

  return apart
