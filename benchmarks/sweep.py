"""Variants of a run: as one population, as processes, and in a loop.

  python -m benchmarks.sweep           # one JSON object on standard output

The same runs three times, end to end, each way without anything compiled before:
every process starts Python, imports and compiles; the loop is one process that
runs them one after another and compiles once; so does the population, whose runs
are one program, dealt out over the machine's cores. The warm start that all share
is made before.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import jax
from absl import app, flags, logging

from configs import addition
from rl_is import build, overrides, train, warm_start
from rl_is import sweep as sweep_lib
from rl_is.infra import metrics
from rl_is.population import Population

_VARIANTS = flags.DEFINE_integer("variants", 16, "caps of TIS", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 60, "of each", lower_bound=1)
_TINY = flags.DEFINE_bool("tiny", False, "a model that learns nothing")
# Where each way runs alone: `python -m benchmarks.sweep --way=loop --folder=...`.
_WAY = flags.DEFINE_enum("way", None, ["population", "loop"], "for itself")
_FOLDER = flags.DEFINE_string("folder", None, "for itself")


def caps() -> list[float]:
  return [1.0 + 0.25 * i for i in range(_VARIANTS.value)]


def words(folder: str, cap: float) -> dict[str, object]:
  out = {"warm_start.path": os.path.join(folder, "warm_start"),
         "objective.preset": "tis", "objective.constants.cap": cap,
         "rollout.lag": 8, "evaluate.prompts": 0,
         "train.steps": _STEPS.value, "train.full_diagnostics": False}
  return out if _TINY.value else out | {"rollout.batch_size": 128}


def argument() -> str:
  return "tiny" if _TINY.value else ""


def config(folder: str, cap: float):
  c = addition.get_config(argument())
  for path, value in words(folder, cap).items():
    overrides.apply(c, path, value)
  return c


def population(folder: str) -> None:
  sweep_lib.run({f"cap{cap:g}": config(folder, cap) for cap in caps()},
                os.path.join(folder, "population"), devices=jax.devices())


def loop(folder: str) -> None:
  for cap in caps():
    train.run(config(folder, cap), os.path.join(folder, f"loop/cap{cap:g}"))


def processes(folder: str) -> None:
  for cap in caps():
    flags_ = [f"--config.{k}={v}" for k, v in words(folder, cap).items()]
    _call("rl_is.main", f"--config=configs/addition.py:{argument()}", *flags_,
          f"--workdir={folder}/processes/cap{cap:g}")


def _call(module: str, *more: str, devices: int = 1) -> None:
  environment = {k: v for k, v in os.environ.items()
                 if k != "JAX_COMPILATION_CACHE_DIR"}
  environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
  subprocess.run([sys.executable, "-m", module, *more], check=True,
                 env=environment, stdout=sys.stderr)


def measure() -> dict:
  seconds = {}
  with tempfile.TemporaryDirectory() as folder:
    first = config(folder, 1.0)
    parts = build.build(first)
    warm_start.params(first, parts, folder)
    own = [f"--variants={_VARIANTS.value}", f"--steps={_STEPS.value}",
           f"--folder={folder}", *["--tiny"] * _TINY.value]
    alone = lambda way, devices: _call(
        "benchmarks.sweep", f"--way={way}", *own, devices=devices)
    cores = min(os.cpu_count(), _VARIANTS.value)
    for way, run in (("population", lambda: alone("population", cores)),
                     ("loop", lambda: alone("loop", 1)),
                     ("processes", lambda: processes(folder))):
      began = time.perf_counter()
      run()
      seconds[way] = time.perf_counter() - began
      print(f"{way}: {seconds[way]:.1f} s", file=sys.stderr)
    same = all(_rewards(folder, "population", cap) == _rewards(folder, way, cap)
               for way in ("loop", "processes") for cap in caps())
    memory = _memory(folder)
  return dict(
      variants=_VARIANTS.value, steps=_STEPS.value, cores=cores,
      same_rewards=same,
      speedup_vs_processes=seconds["processes"] / seconds["population"],
      speedup_vs_loop=seconds["loop"] / seconds["population"],
      **{f"{way}_s": s for way, s in seconds.items()},
      **{f"bytes_a_member_{k}": v for k, v in memory.items()})


def _rewards(folder: str, way: str, cap: float) -> list[float]:
  return [row["reward/mean"] for row in metrics.read(
      os.path.join(folder, way, f"cap{cap:g}"))]


def _memory(folder: str) -> dict[str, float]:
  configs = [config(folder, cap) for cap in caps()]
  parts = [build.build(c) for c in configs]
  start = warm_start.params(configs[0], parts[0], folder)
  return Population(configs, parts, [start] * len(configs),
                    placement="map").memory()


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  logging.set_verbosity(logging.ERROR)
  if _WAY.value:
    dict(population=population, loop=loop)[_WAY.value](_FOLDER.value)
    return
  print(json.dumps(measure()))


if __name__ == "__main__":
  app.run(main)
