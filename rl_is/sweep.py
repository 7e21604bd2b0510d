"""Many runs of one structure as one compiled program, as if each was a run.

Steps go by in chunks, between which metrics are written, a row a member and step,
checkpoints saved and accuracies measured. Floor 4.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from rl_is import build as build_lib
from rl_is import evaluate as evaluate_lib
from rl_is import population as population_lib
from rl_is import psis, warm_start
from rl_is.build import Parts
from rl_is.core.types import Batch, Params
from rl_is.idle import Idle
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import metrics as metrics_lib
from rl_is.infra import preemption, progress, rng
from rl_is.infra import workdir as workdir_lib
from rl_is.infra.checkpoint import Checkpoints, Saved
from rl_is.infra.preemption import Preemption
from rl_is.ops import diagnostics
from rl_is.population import Population
from rl_is.rollout import batching


@dataclasses.dataclass(frozen=True)
class Result:
  """How a member ended."""

  rows: int  # steps that it made
  failed: str | None  # what stopped it before the last step; None: nothing
  last: dict[str, float]  # its last row


def run(members: Mapping[str, ConfigDict], workdir: str, *,
        placement: str | None = None, devices=None,
        corrections: Mapping[str, Any] = {}, label: str = "population"
        ) -> dict[str, Result]:
  """Trains all members to `train.steps`, from where the workdir stands.

  Args:
    members: by name; each has its own `workdir/<name>/metrics.jsonl`.
    placement: "map": one after another, each as in the main loop, bit for bit;
      "vmap": side by side. None: "map" on CPUs.
    devices: the members are dealt out over them. None: all on one.
    corrections: as of `train.run`.

  Raises:
    ValueError: members that are not of one structure, or that no population has.
    preemption.Stopped: after SIGTERM or Ctrl-C, with all complete chunks saved.
  """
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(Preemption())
    # ---- What is asked for; what cannot work is refused here. --------------
    configs = list(members.values())
    with stop.at_once():
      parts = [build_lib.build(
          config, corrections=corrections, devices=(devices or jax.devices())[:1])
               for config in configs]
      _check(list(members), configs, parts)
    workdir_lib.claim(workdir, {name: config.to_dict() for name, config in
                                members.items()}, name="population.json")
    stack.enter_context(workdir_lib.lock(workdir))
    # ---- The members, where they stand. -------------------------------------
    with stop.at_once():
      starts = _starts(configs, parts, workdir, stop.check)
      population = Population(
          configs, parts, starts, devices=devices, placement=placement or (
              "map" if jax.default_backend() == "cpu" else "vmap"))
    del starts
    checkpoints = stack.enter_context(contextlib.closing(
        Checkpoints(workdir, keep=configs[0].checkpoint.keep)))
    saved = checkpoints.restore_newest(population.abstract())
    n, reasons = population.begin, {}
    if saved:
      population.resume(saved.state)
      n = saved.position["next"]
      reasons = saved.position["reasons"]
    # The last chunk may go beyond the last step.
    total, chunk = population.how.total, population.how.chunk
    books = [stack.enter_context(contextlib.closing(_Book(
        f"{workdir}/{name}", config, its, min(max(n, 0), end, total))))
             for name, config, its, end in zip(
                 members, configs, parts, population.ends())]
    bar = stack.enter_context(progress.Steps(label, total, done=max(n, 0)))
    stop.step = max(n, 0)
    snapshot = lambda: Saved(population.members(), [], dict(
        step=n - population.begin, next=n, reasons=reasons))
    stack.enter_context(preemption.on_stop(
        lambda: n > population.begin and checkpoints.save(snapshot())))
    # ---- The loop. ----------------------------------------------------------
    while n < total:
      stop.check()
      out = population.advance(n)
      ends, done = population.ends(), min(n + chunk, total)
      for i, (name, book) in enumerate(zip(members, books)):
        if ends[i] < done and name not in reasons:
          reasons[name] = _reason(out, i, ends[i] - n, ends[i] + 1)
          logging.warning("%s: %s; it stays as it was, the others go on", name,
                          reasons[name])
        book.write(jax.tree.map(lambda x: x[i], out), n, min(ends[i], done),
                   functools.partial(population.params, i))
      n += chunk
      stop.step = max(done, 0)
      every = configs[0].checkpoint.every
      if done == total or (every and stop.step // every > (n - chunk) // every):
        checkpoints.save(snapshot())
      rewards = [b.last["reward/mean"] for b in books if b.last]
      bar.update(stop.step, f"reward {np.nanmin(rewards):.2f} to "
                 f"{np.nanmax(rewards):.2f}" if rewards else "")
    _warn_of_idle({name: book.idle for name, book in zip(members, books)})
    return {name: Result(book.last.get("step", 0), reasons.get(name), book.last)
            for name, book in zip(members, books)}


class _Book:
  """The rows of a member, as the main loop writes them."""

  def __init__(self, directory: str, config: ConfigDict, parts: Parts,
               after: int):
    """after: the steps whose rows are to stay."""
    epath.Path(directory).mkdir(parents=True, exist_ok=True)
    self._config, self._parts = config, parts
    self._writer = metrics_lib.MetricsWriter(
        directory, after_step=after, tensorboard=config.track.tensorboard)
    self.last, self.idle = self._writer.last, Idle(config, parts)

  def write(self, out: dict[str, Any], first: int, end: int,
            params: Callable[[], Params]) -> None:
    """Steps max(0, first) to `end` of a chunk that began with step `first`.

    params: those after the chunk, which ends where an accuracy is due.
    """
    config, e = self._config, self._config.evaluate
    for n in range(max(0, first), end):
      at = jax.tree.map(lambda x: x[n - first], out)
      row = {"step": n + 1, **_described(at, n, config), **self._parts.dials}
      if e.prompts and (n + 1 == config.train.steps or (
          e.every and (n + 1) % e.every == 0)):
        row |= evaluate_lib.evaluate(params(), config, self._parts)
      self.last = row
      self.idle.see(row)
      self._writer.write(n + 1, row)

  def close(self) -> None:
    self._writer.close()


def _warn_of_idle(idle: Mapping[str, Idle]) -> None:
  """A sweep over a constant that touched no token is one run repeated."""
  by_constant: dict[str, list[str]] = {}
  for name, its in idle.items():
    for constant in its.never():
      by_constant.setdefault(constant, []).append(name)
  for constant, names in by_constant.items():
    logging.warning(
        "config.objective.constants.%s acted on no token in %d of %d members (%s)",
        constant, len(names), len(idle), ", ".join(names[:8]) + (
            ", ..." if len(names) > 8 else ""))


def _described(out: dict[str, Any], n: int, config: ConfigDict
               ) -> dict[str, float]:
  rows = len(out["reward"])
  batch = Batch(
      tokens=None, valid=None, mask=out["mask"], reward=out["reward"],
      group=np.arange(rows) // config.rollout.group_size,
      version=out["version"], stop_token=out["stop_token"])
  return {**batching.describe(batch, n * config.train.updates_per_batch),
          **diagnostics.finish(out["metrics"]),
          **(psis.report(out["metrics"]) if config.train.psis else {})}


def _check(names: Sequence[str], configs: Sequence[ConfigDict],
           parts: Sequence[Parts]) -> None:
  if not configs:
    raise ValueError("population: members: expected at least 1, got none")
  for config, its in zip(configs, parts):
    population_lib.check(config, its)
  first = population_lib.structure(configs[0], parts[0])
  for name, config, its in zip(names, configs, parts):
    other = population_lib.structure(config, its)
    differ = [k for k in first | other if first.get(k) != other.get(k)]
    if differ:
      raise ValueError(
          f"population: {differ[0]} is structure: {first.get(differ[0])!r} in "
          f"{names[0]}, {other.get(differ[0])!r} in {name}")


def _starts(configs: Sequence[ConfigDict], parts: Sequence[Parts], workdir: str,
            check_stop: Callable[[], None]) -> list[Params]:
  """What each member begins with; made once where it is the same."""
  made = {}
  keys = [json.dumps(warm_start.identity(c), sort_keys=True) for c in configs]
  for key, config, its in zip(keys, configs, parts):
    if key not in made:
      directory = f"{workdir}/warm_starts/{len(made)}"
      with mesh_lib.use(its.mesh):
        made[key] = (
            warm_start.params(config, its, directory, check_stop)
            if config.warm_start.steps or config.warm_start.weights else
            jax.jit(its.model.init)(rng.key(config.seed, "init")))
  return [made[key] for key in keys]


def _reason(out: dict[str, Any], i: int, s: int, step: int) -> str:
  """What was not finite, at place s of the chunk."""
  if s < 0 or out["sampler_broke"][i, s]:
    return f"step {step}: non-finite log-prob of the sampler"
  bad = int(out["metrics"]["update/first_bad"].largest[i, s])
  if bad >= 0:
    row, token = divmod(bad, out["mask"].shape[-1])
    return (f"step {step}: non-finite log-prob or advantage at sample {row}, "
            f"token {token}")
  return (f"step {step}: non-finite loss, gradient or updated parameters, from "
          "finite inputs")
