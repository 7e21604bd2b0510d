"""Runs the points of a sweep file: those of one structure as one program.

  python -m experiments.run_sweep --config=configs/sweeps/tis_cap.py \\
      --workdir=runs/tis_cap

The file has `get_config(arg)` and `sweep(add)`, which calls `add(overrides,
seeds=range(n))` for each point. Finished points are skipped, what was cut goes
on. Writes `results.parquet` and `.csv` (a row a point, seed and step),
`summary.csv` (a row a point and seed), and the pictures `outcomes` (ends against
the constants) and `curves`, as SVG and PNG. `--dry_run` only says what there is to do
and for about how long. `--launcher=slurm` submits a job a structure (needs the
package submitit), `--launcher=xpk` prints the commands that do so on GKE; called
again without, it makes the tables of what they finished. Floor 5.
"""

import copy
import dataclasses
import hashlib
import json
import os
import runpy
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from absl import flags, logging
from ml_collections import ConfigDict, config_flags
from rich.console import Console
from rich.table import Table

from experiments import command as experiments_command
from experiments import stats, sweep_figures
from rl_is import build as build_lib
from rl_is import command, overrides
from rl_is import population as population_lib
from rl_is import sweep as sweep_lib
from rl_is import train
from rl_is.core import checks
from rl_is.infra import metrics
from rl_is.infra import workdir as workdir_lib
from rl_is.population import Population


@dataclasses.dataclass(frozen=True)
class Point:
  """One run of the sweep."""

  overrides: dict[str, Any]
  seed: int
  config: ConfigDict

  @property
  def id(self) -> str:
    """Of its overrides, the same on every machine: what it is called by."""
    text = json.dumps(self.overrides, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()

  @property
  def name(self) -> str:
    return f"{self.id}-seed{self.seed}"


def points_of(sweep: Callable, config: ConfigDict) -> list[Point]:
  """In the order of the file, each once; a wrong name or value is refused."""
  found: dict[str, Point] = {}
  repeated = []

  def add(changes: Mapping[str, Any], seeds: Iterable[int] = (0,)) -> None:
    if not isinstance(changes, Mapping) or not isinstance(seeds, Iterable):
      raise ValueError("sweep: expected add({name: value, ...}, seeds=[...]), got "
                       f"add({changes!r}, seeds={seeds!r})")
    if "seed" in changes:
      raise ValueError("sweep: 'seed' is not one of the overrides: "
                       "add({...}, seeds=range(n))")
    for seed in seeds:
      own = copy.deepcopy(config)
      for path, value in changes.items():
        overrides.apply(own, str(path), value)
      overrides.apply(own, "seed", seed)
      # As the config took them: 2, 2.0 and "2" are one value.
      taken = {path: overrides.value(own, path) for path in changes}
      point = Point(taken, own.seed, own)
      if found.setdefault(point.name, point) is not point:
        repeated.append(point.name)

  sweep(add)
  if repeated:
    print(f"{len(repeated)} runs stand twice in the file and are made once",
          file=sys.stderr)
  if not found:
    raise ValueError("sweep: expected at least 1 point, got none")
  return list(found.values())


def grouped(points: Sequence[Point]) -> tuple[list[list[Point]], list[Point]]:
  """(those that can be one program, by structure; those that run alone)."""
  groups: dict[str, list[Point]] = {}
  alone = []
  for point in points:
    parts = build_lib.build(point.config, devices=jax.devices()[:1])
    try:
      population_lib.check(point.config, parts)
    except ValueError as error:
      logging.warning("%s %s: %s", point.id, point.overrides, error)
      alone.append(point)
      continue
    key = json.dumps(population_lib.structure(point.config, parts),
                     sort_keys=True)
    groups.setdefault(key, []).append(point)
  return list(groups.values()), alone


class Sweep:
  """A directory of points: which are done, how the others get done."""

  def __init__(self, workdir: str, points: Sequence[Point],
               placement: str | None = None):
    """placement: as of `sweep.run`; the members lie on all devices there are."""
    self._workdir, self.points, self._placement = workdir, points, placement
    self.commit = workdir_lib.provenance()["git"]
    self.left = [p for p in points if not self._is_done(p)]

  def finished(self) -> list[Point]:
    return [p for p in self.points if os.path.exists(self._done_file(p))]

  def _done_file(self, point: Point) -> str:
    return os.path.join(self._workdir, "points", point.name, "done.json")

  def done(self, point: Point) -> dict[str, Any]:
    with open(self._done_file(point)) as file:
      return json.load(file)

  def _is_done(self, point: Point) -> bool:
    if not os.path.exists(self._done_file(point)):
      return False
    record = self.done(point)
    then, now = (workdir_lib.flatten(x) for x in (
        record["config"], json.loads(json.dumps(point.config.to_dict()))))
    differ = sorted(k for k in then.keys() | now.keys()
                    if then.get(k) != now.get(k))
    if differ:
      raise ValueError(
          f"{self._done_file(point)} is of another config ({differ[0]}: "
          f"{then.get(differ[0])!r} there, {now.get(differ[0])!r} now); give "
          "another workdir, or remove it")
    return True

  def say(self) -> None:
    finished = self.finished()
    other = {self.done(p)["git"] for p in finished} - {self.commit}
    print(f"{len({p.id for p in self.points})} points, {len(self.points)} runs, "
          f"{len(finished)} of them finished",
          file=sys.stderr)
    if other:
      logging.warning("finished points were made by other code (%s; now %s)",
                      ", ".join(sorted(c[:12] for c in other)), self.commit[:12])

  def keep(self, names: Sequence[str]) -> None:
    """Of what is left, only these."""
    known = {p.name for p in self.points}
    for name in names:
      checks.choice("--only", name, known)
    self.left = [p for p in self.left if p.name in names]

  def run(self, groups: Sequence[Sequence[Point]], alone: Sequence[Point]
          ) -> None:
    left = {p.name: p for p in self.left}
    # What was cut goes on as it was, whatever has come to the file since.
    batches = [names for names in self._cut() if names <= left.keys()]
    for group in groups:
      rest = {p.name for p in group} - set().union(*batches)
      batches += [rest] if rest else []
    for names in batches:
      members = [p for p in self.left if p.name in names]
      directory = self._population(members)
      results = sweep_lib.run(
          {p.name: p.config for p in members}, directory,
          placement=self._placement, devices=jax.local_devices()[:len(members)],
          label=f"{len(members)} runs of one structure")
      for point in members:
        self._finish(point, os.path.join(directory, point.name),
                     results[point.name].failed)
    for i, point in enumerate(alone):
      directory = os.path.join(self._workdir, "points", point.name, "run")
      train.run(point.config, directory, label=f"alone {i + 1}/{len(alone)}")
      self._finish(point, directory, None)

  def _population(self, members: Sequence[Point]) -> str:
    return os.path.join(self._workdir, "populations", names_digest(members))

  def _cut(self) -> list[set[str]]:
    """The names of each population that was begun."""
    root = os.path.join(self._workdir, "populations")
    out = []
    for directory in sorted(os.listdir(root)) if os.path.isdir(root) else []:
      file = os.path.join(root, directory, "population.json")
      if os.path.exists(file):
        with open(file) as text:
          out.append(set(json.load(text)))
    return out

  def _finish(self, point: Point, directory: str, failed: str | None) -> None:
    os.makedirs(os.path.dirname(self._done_file(point)), exist_ok=True)
    workdir_lib.write_json(self._done_file(point), dict(
        overrides=point.overrides, seed=point.seed, failed=failed,
        config=point.config.to_dict(), git=self.commit,
        rows=os.path.relpath(directory, self._workdir)))

  def rows(self) -> list[dict[str, Any]]:
    """Of all finished points: overrides, seed, step, metrics."""
    return [{"point": point.id, **point.overrides, "seed": point.seed, **row}
            for point in self.finished() for row in metrics.read(
                os.path.join(self._workdir, self.done(point)["rows"]))]

  def summary(self) -> list[dict[str, Any]]:
    out = []
    for point in self.finished():
      record = self.done(point)
      rows = metrics.read(os.path.join(self._workdir, record["rows"]))
      reward = [row["reward/mean"] for row in rows]
      out.append({
          "point": point.id, **point.overrides, "seed": point.seed,
          "steps": len(rows), "failed": record["failed"],
          "final": stats.final(reward) if rows else None,
          "auc": stats.auc(reward) if rows else None,
          "collapse_step": stats.collapse_step(reward) if rows else None,
          "heldout": rows[-1].get("eval/accuracy") if rows else None})
    return out


def write(workdir: str, sweep: Sweep) -> list[str]:
  """The tables and the pictures of what is finished; their paths."""
  varied = list(dict.fromkeys(k for p in sweep.points for k in p.overrides))
  results, summary = sweep.rows(), sweep.summary()
  return [*_write_tables(workdir, varied, results=results, summary=summary),
          *sweep_figures.draw(workdir, summary, results, varied, shlex.join(
              ["python", "-m", "experiments.run_sweep", *sys.argv[1:]]))]


def _write_tables(workdir: str, varied: Sequence[str], **tables) -> list[str]:
  """results.parquet, results.csv, summary.csv."""
  import pyarrow  # the extra `data`
  from pyarrow import csv, parquet
  paths = []
  for name, rows in tables.items():
    columns = list(dict.fromkeys(
        ["point", *varied, "seed", *(k for row in rows for k in row)]))
    table = pyarrow.table({k: _column([row.get(k) for row in rows])
                           for k in columns})
    path = os.path.join(workdir, name)
    csv.write_csv(table, path + ".csv")
    paths.append(path + ".csv")
    if name == "results":
      parquet.write_table(table, path + ".parquet")
      paths.append(path + ".parquet")
  return paths


def _column(values: Sequence):
  """A metric that no run has is a number, too: pandas would call it an object."""
  import pyarrow
  empty = all(value is None for value in values)
  return pyarrow.array(values, pyarrow.float64() if empty else None)


def seconds_of(group: Sequence[Point]) -> float:
  """About how long it takes: one member for a chunk, after compiling."""
  point = group[0]
  parts = build_lib.build(point.config, devices=jax.devices()[:1])
  params = jax.jit(parts.model.init)(jax.random.key(0))
  one = Population([point.config], [parts], [params], placement="map")
  one.advance(0)
  began = time.monotonic()
  one.advance(one.how.chunk)
  steps = min(one.how.chunk, one.how.total - one.how.chunk)
  return (time.monotonic() - began) / max(steps, 1) * one.how.total * len(group)


# ---- Elsewhere: the same command, of some of the points.


def words_of(group: Sequence[Point]) -> list[str]:
  """The command that runs these points alone."""
  own = [w for w in sys.argv[1:] if not w.lstrip("-").startswith(
      ("launcher", "slurm_", "xpk", "only"))]
  return [*own, "--only=" + ",".join(p.name for p in group)]


def submit(groups: Sequence[Sequence[Point]], workdir: str, cluster: str | None,
           parameters: Mapping[str, str]) -> list:
  """A SLURM job a group; the jobs."""
  try:
    import submitit
  except ImportError as error:
    raise ImportError("--launcher=slurm needs submitit: pip install submitit"
                      ) from error
  executor = submitit.AutoExecutor(os.path.join(workdir, "jobs"), cluster=cluster)
  executor.update_parameters(**parameters)
  return [executor.submit(submitit.helpers.CommandFunction(
      [sys.executable, "-m", "experiments.run_sweep", *words_of(group)],
      verbose=False)) for group in groups]


def xpk_lines(groups: Sequence[Sequence[Point]], words: Sequence[str]
              ) -> list[str]:
  """A workload a group; `words`: which cluster, image, chip."""
  return [shlex.join([
      "xpk", "workload", "create", f"--workload=sweep-{names_digest(group)}",
      *words, "--command=" + shlex.join(
          ["python", "-m", "experiments.run_sweep", *words_of(group)])])
          for group in groups]


def names_digest(group: Sequence[Point]) -> str:
  text = " ".join(sorted(p.name for p in group))
  return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def dry_run(groups: Sequence[Sequence[Point]], alone: Sequence[Point]) -> None:
  table = Table("group", "point", "overrides", "seeds")
  for g, group in enumerate([*groups, *([p] for p in alone)]):
    by_id: dict[str, list[Point]] = {}
    for point in group:
      by_id.setdefault(point.id, []).append(point)
    for id_, same in by_id.items():
      table.add_row(str(g + 1), id_, ", ".join(
          f"{k.rpartition('.')[2]}={v}" for k, v in same[0].overrides.items()),
          " ".join(str(p.seed) for p in same))
  Console(width=110).print(table)
  seconds = [seconds_of(group) for group in groups]
  print(f"{len(groups)} structures, {sum(map(len, groups))} runs: about "
        f"{sum(seconds) / 60:.1f} min here, and their warm starts and "
        f"compilation; {len(alone)} runs by themselves")


def _main(changes: command.Changes) -> None:
  given = flags.FLAGS
  command.need("config", "workdir")
  logging.set_verbosity(logging.WARNING)
  config = command.changed(given.config, changes)
  path = config_flags.get_config_filename(given["config"])
  file = runpy.run_path(path)
  if "sweep" not in file:
    raise ValueError(f"--config: {path} has no function sweep(add)")
  sweep = Sweep(given.workdir, points_of(file["sweep"], config),
                given.placement)
  if given.only is not None:
    sweep.keep(given.only)
  groups, alone = grouped(sweep.left)
  sweep.say()
  if len(groups) > 1:
    print(f"{len(groups)} structures: one program each", file=sys.stderr)
  if given.dry_run:
    dry_run(groups, alone)
    return
  if given.launcher != "local":
    jobs = [*groups, *([point] for point in alone)]
    if given.launcher == "xpk":
      print("\n".join(xpk_lines(jobs, given.xpk)))
    else:
      parameters = {name: int(x) if x.isdecimal() else x for name, _, x in (
          p.partition("=") for p in given.slurm_parameters)}
      for job in submit(jobs, given.workdir, given.slurm_cluster, parameters):
        print(f"job {job.job_id}: {job.paths.stderr}")
    return
  with experiments_command.runs():
    sweep.run(groups, alone)
  if given.only is None:  # else others are at work in the directory
    print("\n".join(write(given.workdir, sweep)))


def main() -> None:
  flags.DEFINE_string("workdir", None, "Where it all goes.")
  flags.DEFINE_bool("dry_run", False, "Only say what there is to do.")
  flags.DEFINE_enum("launcher", "local", ["local", "slurm", "xpk"], "Where.")
  flags.DEFINE_enum("placement", None, ["map", "vmap"], "Of the members on a "
                    "device; unset: map on CPUs.")
  flags.DEFINE_list("only", None, "Names of the points to run.")
  flags.DEFINE_string("slurm_cluster", None, "Of submitit; \"local\": here.")
  flags.DEFINE_list("slurm_parameters", [], "Of submitit: timeout_min=60,...")
  flags.DEFINE_list("xpk", [], "Words for xpk: --cluster=...,--tpu-type=...")
  command.run(_main)


if __name__ == "__main__":
  main()
