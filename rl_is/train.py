"""THE loop: mesh, model, state, restore, generator, steps, close. Floor 4.

A step is one batch: U optimizer updates. `run` reads top to bottom; what it
calls is a pure function of arrays (learner, objective) or owns one file or
queue (infra, rollout).
"""

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from rl_is import build as build_lib
from rl_is import evaluate as evaluate_lib
from rl_is import ops
from rl_is import psis
from rl_is import warm_start
from rl_is.build import Parts
from rl_is.core.types import Batch, Params
from rl_is.idle import Idle
from rl_is.infra import checkpoint as checkpoint_lib
from rl_is.infra import metrics as metrics_lib
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import hosts, preemption, progress, rng
from rl_is.infra import workdir as workdir_lib
from rl_is.infra.checkpoint import Checkpoints, Saved
from rl_is.infra.preemption import Preemption
from rl_is.learner import state as state_lib
from rl_is.learner import step as step_lib
from rl_is.learner.state import State
from rl_is.ops import diagnostics
from rl_is.rollout import batching
from rl_is.rollout.asynchronous import Asynchronous
from rl_is.rollout.generator import Generator, Swaps
from rl_is.rollout.lagged import Lagged
from rl_is.rollout.publisher import Publisher
from rl_is.rollout.store import Store


@dataclasses.dataclass(frozen=True)
class Result:
  params: Params
  last: dict[str, float]  # the last row of metrics.jsonl


def run(config: ConfigDict, workdir: str, *,
        corrections: Mapping[str, ops.Row | Callable] = {}, devices=None,
        label: str = "train") -> Result:
  """Trains to `config.train.steps`, from where the workdir stands.

  Args:
    config: see configs/common.py.
    workdir: this run's own directory; the same config resumes in it.
    corrections: a user's own pieces, by the name that
      `config.objective.corrections` calls them by; see `build`.
    devices: a subset of jax.devices().
    label: what the progress calls this run.

  Raises:
    preemption.Stopped: after SIGTERM or Ctrl-C, with all complete steps saved;
      called again alike it goes on.
  """
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(Preemption())
    # ---- What is asked for; what cannot work is refused here. --------------
    with stop.at_once():
      parts = build_lib.build(config, corrections=corrections, devices=devices)
    if config.train.psis:
      psis.check()
    hosts.first(lambda: _claim(workdir, config, corrections))
    stack.enter_context(mesh_lib.use(parts.mesh))
    U, steps = config.train.updates_per_batch, config.train.steps
    if hosts.is_first():
      stack.enter_context(workdir_lib.lock(workdir))
    # ---- State: 1. this run's newest checkpoint, 2. the warm start. ---------
    checkpoints = stack.enter_context(contextlib.closing(
        Checkpoints(workdir, keep=config.checkpoint.keep)))
    saved = checkpoints.restore_newest(build_lib.abstract_state(config, parts))
    start = stop.step = saved.position["step"] if saved else 0
    # start - 1: see `_rows`. Of several processes all have read, when one writes.
    first = hosts.largest(min(start, _rows(saved, workdir)))
    tell = functools.partial(print, file=sys.stderr) if hosts.is_first() else (
        lambda text: None)
    if first < steps and hosts.is_first():  # else this call makes nothing
      _header(config, parts, workdir, start)
    if saved:
      state, ref = saved.state["learner"], saved.state.get("ref")
      waiting, begun = saved.queue, saved.begun
    else:
      state, ref = _begin(config, parts, workdir, stop.check)
      waiting, begun = [], {}
    identity = _identity(config, parts, ref)
    if saved:
      _check_position(saved.position, identity, start)
    writer = stack.enter_context(contextlib.closing(metrics_lib.MetricsWriter(
        workdir, after_step=first, tensorboard=config.track.tensorboard)))
    if first >= steps:
      tell(f"{label}: already complete ({start} steps) in {workdir}")
      return Result(state.params, writer.last)
    if start:
      tell(f"{label}: resuming after step {start}")

    store = Store(workdir, **config.store.to_dict(), after_step=start,
                  tokenizer=parts.task.tokenizer, meta=dict(
                      config=config.to_dict(), constants=parts.constants))

    # ---- Generator: taking turns with the learner, or beside it. ------------
    source = stack.enter_context(contextlib.closing(
        _source(config, parts, waiting, begun, start, stop)))
    bar = stack.enter_context(progress.Steps(label, steps, done=start))

    # ---- The loop. ----------------------------------------------------------
    # Makes what a stop saves; None before the first step.
    last = (lambda: saved) if saved else None
    stack.enter_context(preemption.on_stop(
        lambda: last and checkpoints.save(last())))
    row = saved.position.get("row") if saved else None
    reward_average, idle = math.nan, Idle(config, parts)
    for n in range(first, steps):
      if n >= start:  # else it is trained, and only its evaluation was cut
        source.publish(n * U, state.params)
        batch = source.batch(n)
        stop.check()  # a batch that is not trained on is in `last`
        began = time.perf_counter()

        state, learned, minibatches = _learn(
            state, ref, batch, parts, config, n)

        row = {**batching.describe(batch, n * U), **learned, **source.metrics(),
               **parts.dials, "time/learner_s": time.perf_counter() - began}
        row |= _speeds(row)
        store.write(n + 1, batch, minibatches)
        del minibatches  # else the next step's lie on the devices beside them
        stop.step = n + 1
      if _is_due(n + 1, config.evaluate.every, steps) and config.evaluate.prompts:
        last = _saved(state, ref, source, identity, n + 1, row)
        with stop.at_once():
          row |= evaluate_lib.evaluate(state.params, config, parts)
      writer.write(n + 1, row)
      # A checkpoint comes after the row of its step: a resumed run drops the
      # rows behind the checkpoint, and none is missing before it.
      last = _saved(state, ref, source, identity, n + 1)
      if _is_due(n + 1, config.checkpoint.every, steps):
        checkpoints.save(last())
      idle.see(row)
      reward_average = _average(reward_average, row["reward/mean"])
      bar.update(n + 1, f"reward {reward_average:.3f}")
    idle.warn()
    return Result(state.params, dict(row, step=steps))


def _speeds(row: Mapping[str, float]) -> dict[str, float]:
  """Tokens a second of each side while it worked; NaN where it did not."""
  per = lambda tokens, seconds: tokens / seconds if seconds else math.nan
  return {"time/generator_tokens_per_s": per(row["rollout/sampled_tokens"],
                                             row["time/generator_s"]),
          "time/learner_tokens_per_s": per(row["rollout/tokens"],
                                           row["time/learner_s"])}


def _claim(workdir: str, config: ConfigDict, corrections: Mapping) -> None:
  """The directory is this run's: config, and the text of a user's own pieces."""
  if not (epath.Path(workdir) / "config.json").exists() and (
      epath.Path(workdir) / "checkpoints").exists():
    raise ValueError(f"{workdir}: has checkpoints but no config.json, so nobody "
                     "can say whose they are; give another workdir")
  workdir_lib.claim(workdir, config.to_dict())
  if corrections:
    workdir_lib.claim(workdir, {name: build_lib.source_of(piece) for name, piece
                                in corrections.items()}, name="corrections.json")


def _header(config: ConfigDict, parts: Parts, workdir: str, start: int) -> None:
  """Prints, and adds to provenance.jsonl, what runs where and from which code."""
  provenance = dict(workdir_lib.provenance(), mesh=mesh_lib.describe(parts.mesh))
  resolved = dict(objective=dataclasses.asdict(parts.objective.spec),
                  constants=parts.constants, mismatch=parts.dials,
                  max_new_tokens=parts.sampling.max_new_tokens)
  shown = dict(config=config.to_dict(), resolved=resolved, **provenance)
  print(json.dumps(shown, indent=1, default=str), file=sys.stderr)
  file = epath.Path(workdir) / "provenance.jsonl"
  before = file.read_text() if file.exists() else ""
  workdir_lib.write_text(file, before + json.dumps(
      dict(after_step=start, **provenance, resolved=resolved), default=str) + "\n")


def _begin(config: ConfigDict, parts: Parts, workdir: str,
           check_stop: Callable[[], None]) -> tuple[State, Params | None]:
  """The state at step 0, and the KL reference if the objective has one."""
  born = functools.partial(state_lib.born, model=parts.model, mesh=parts.mesh)
  more = dict(tx=parts.tx, objective=parts.objective)
  if config.warm_start.steps or config.warm_start.weights:
    params = warm_start.params(config, parts, workdir, check_stop)
    state = born(functools.partial(state_lib.create, **more))(params)
  else:
    state = born(functools.partial(
        state_lib.init, model=parts.model, **more))(
            rng.key(config.seed, "init"))
  # A copy: the state is donated to the first update.
  return state, jax.tree.map(jax.numpy.copy, state.params) if (
      parts.objective.needs_ref) else None


def _source(config: ConfigDict, parts: Parts, waiting: list[Batch],
            begun: dict[str, list[int]], start: int, stop: Preemption
            ) -> Lagged | Asynchronous:
  """What gives batch n of the run, going on from a checkpoint's `snapshot`."""
  r = config.rollout
  generator = Generator(
      parts.verifier, key=rng.key(config.seed, "sample"), seed=config.seed,
      group_size=r.group_size, model=parts.model, sampling=parts.sampling,
      mesh=parts.sampler_mesh, record_logp=r.record_logp,
      swaps=Swaps(r.swap_tokens, r.swap_cache) if r.swap_tokens else None,
      rescore_share=r.rescore_share, temperature=r.temperature)
  publisher = Publisher(parts.sampler_mesh, parts.model.rules,
                        parts.sampler_weights)
  common = dict(updates_per_batch=config.train.updates_per_batch,
                batches=config.train.steps, first=start, waiting=waiting,
                stop=stop)
  if r.mode == "lag":
    return Lagged(generator, publisher, lag=r.lag,
                  prompts_per_batch=r.batch_size // r.group_size, **common)
  return Asynchronous(
      generator, publisher, max_lag=r.max_lag, order=r.order,
      batch_size=r.batch_size, group_size=r.group_size,
      groups_per_call=build_lib.rows_per_call(config) // r.group_size,
      **common, **begun)


def _identity(config: ConfigDict, parts: Parts, ref: Params | None
              ) -> dict[str, int | str | None]:
  """What is the same at every step of a run, and held to be so on resume.

  The resolved aggregation: a preset's own may have changed since.
  """
  return dict(seed=config.seed, aggregation=parts.objective.spec.aggregation,
              reference=None if ref is None else checkpoint_lib.fingerprint(ref))


def _saved(state: State, ref: Params | None, source: Lagged | Asynchronous,
           identity: dict[str, int | str | None], step: int,
           row: dict[str, float] | None = None) -> Callable[[], Saved]:
  """What makes the checkpoint of now, if it is called before the next update.

  row: of the step, if it is trained but not yet evaluated and written.
  """
  tree = dict(learner=state)
  if ref is not None:
    tree["ref"] = ref
  snapshot = source.snapshot()
  position = dict(identity, step=step, metrics_rows=step)
  if row is not None:
    position |= dict(metrics_rows=step - 1, row=dict(row))

  def make() -> Saved:
    waiting, begun = snapshot()
    return Saved(tree, waiting, position, begun)

  return make


def _rows(saved: Saved | None, workdir: str) -> int:
  """Of how many steps the rows are written, by the checkpoint or on disk.

  One less than its step where the evaluation was cut: the checkpoint holds that
  row. Its step is evaluated first, and then the row is on disk.
  """
  if saved is None:
    return 0
  return max(saved.position["metrics_rows"], len(metrics_lib.read(workdir)))


def _check_position(position: dict, identity: dict, step: int) -> None:
  expected = dict(identity, step=step)
  found = {k: position.get(k) for k in expected}
  if found != expected:
    raise RuntimeError(f"checkpoint {step}: expected position {expected}, got "
                       f"{found}")


def _learn(state: State, ref: Params | None, batch: Batch, parts: Parts,
           config: ConfigDict, n: int
           ) -> tuple[State, dict[str, float], list[Batch]]:
  """The U updates on one batch; metrics over all of them; its minibatches."""
  version = n * config.train.updates_per_batch
  batch = batch.replace(version_now=np.full(len(batch.reward), version, np.int32))
  placed = hosts.place(batch, mesh_lib.rows(parts.mesh))
  key = rng.key(config.seed, "learner", version)
  minibatches = step_lib.jit_prepare_batch(
      state.params, ref, placed, parts.constants, key,
      objective=parts.objective, model=parts.model,
      microbatches=config.train.microbatches)
  total = None
  for u, minibatch in enumerate(minibatches):
    state, metrics = step_lib.jit_train_step(
        state, minibatch, parts.constants, jax.random.fold_in(key, u),
        objective=parts.objective, model=parts.model, tx=parts.tx,
        warmup_updates=config.optimizer.warmup_updates,
        microbatches=config.train.microbatches)
    metrics = hosts.fetch(metrics)
    _check_health(metrics, minibatch, n + 1, u)
    total = metrics if total is None else {
        name: total[name] + metrics[name] for name in metrics}
  report = psis.report(total) if config.train.psis else {}
  return state, diagnostics.finish(total) | report, minibatches


def _check_health(metrics, minibatch: Batch, step: int, u: int) -> None:
  """Stops on what is not finite: the state is still the one before it."""
  bad = int(metrics["update/first_bad"].value())
  if bad >= 0:
    row, token = divmod(bad, minibatch.mask.shape[1])
    culprit = next((name for name in ("logp_behaviour", "logp_prox", "logp_ref",
                                      "adv")
                    if getattr(minibatch, name) is not None and not np.isfinite(
                        getattr(minibatch, name)[row, token])), "logp")
    raise FloatingPointError(
        f"step {step}: non-finite {culprit} at sample "
        f"{row + u * minibatch.mask.shape[0]}, token {token}")
  if int(metrics["update/nonfinite"].value()):
    raise FloatingPointError(
        f"step {step}, update {u}: non-finite loss, gradient (norm "
        f"{float(metrics['grad/norm'].value())}) or updated parameters, from "
        "finite inputs")


def _is_due(step: int, every: int, last: int) -> bool:
  return step == last or (every > 0 and step % every == 0)


def _average(average: float, value: float) -> float:
  """A moving average for the eye; a step without a value leaves it."""
  if math.isnan(value):
    return average
  return value if math.isnan(average) else 0.9 * average + 0.1 * value
