"""Synchronous against asynchronous wall time at equal steps, on two devices.

  python -m benchmarks.async_loop      # one JSON object on standard output

The sampler is made slower than the learner by sleeping, so the best that any
overlap can do is to hide the learner: ideal = the slower side's own time a step.
Both modes train the same tiny model on two forced host devices; a run of each
comes first, so that nothing is compiled while the clock runs.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from unittest import mock

os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") +
                           " --xla_force_host_platform_device_count=2")

from absl import app, flags, logging  # noqa: E402  (after XLA_FLAGS, as is all of jax)

from configs import addition  # noqa: E402
from rl_is import overrides, train  # noqa: E402
from rl_is.infra import metrics  # noqa: E402
from rl_is.rollout.generator import Generator  # noqa: E402

_STEPS = flags.DEFINE_integer("steps", 40, "timed steps of each mode")
_SLOWER = flags.DEFINE_float("slower", 1.5, "sampler's time over the learner's")
SKIPPED = 4  # steps at the start, while the queue fills


def config(mode: str, steps: int, warm_start: str):
  """A learner of some ten milliseconds a step; lag 2 on either side."""
  c = addition.get_config()
  changes = {
      "warm_start.path": warm_start, "warm_start.steps": 1,
      "objective.preset": "tis", "model.embed": 64, "rollout.batch_size": 64,
      "evaluate.prompts": 0, "train.steps": steps, "rollout.mode": mode,
      "checkpoint.every": 10**6,
      ("rollout.lag" if mode == "lag" else "rollout.max_lag"): 2}
  for path, value in changes.items():
    overrides.apply(c, path, value)
  return c


def run(mode: str, steps: int, folder: str, sleep: float) -> list[dict]:
  """The rows of a run whose sampler takes `sleep` seconds longer a batch."""
  real = Generator.groups

  def slow(self, *args, **kwargs):
    batch = real(self, *args, **kwargs)
    time.sleep(sleep)
    return batch

  workdir = tempfile.mkdtemp(dir=folder)
  with mock.patch.object(Generator, "groups", slow):
    train.run(config(mode, steps, os.path.join(folder, "warm")), workdir,
              label=mode)
  return metrics.read(workdir)


def measure(steps: int, slower: float) -> dict:
  seconds = lambda rows, *names: [
      sum(row[f"time/{name}_s"] for name in names) for row in rows[SKIPPED:]]
  with tempfile.TemporaryDirectory() as folder:
    run("async", SKIPPED + 2, folder, 0.0)
    plain = run("lag", SKIPPED + 12, folder, 0.0)[2:]  # compiles, then measures
    learner = statistics.median(seconds(plain, "learner"))
    sampler = statistics.median(seconds(plain, "generator"))
    sleep = max(0.0, slower * learner - sampler)
    sync = run("lag", steps + SKIPPED, folder, sleep)
    beside = run("async", steps + SKIPPED, folder, sleep)
  sync_s = seconds(sync, "generator", "learner")
  async_s = seconds(beside, "learner_wait", "learner")
  # Each side's own time, without the other in its way.
  ideal = max(sum(seconds(sync, side)) for side in ("generator", "learner"))
  share = lambda name: sum(seconds(beside, name)) / sum(async_s)
  return dict(
      steps=steps, devices=2, added_sleep_s=sleep,
      sync_s=sum(sync_s), async_s=sum(async_s),
      speedup=sum(sync_s) / sum(async_s),
      overlap_efficiency=ideal / sum(async_s),
      learner_wait_share=share("learner_wait"),
      generator_wait_share=share("generator_wait"))


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  if _STEPS.value < 2 or _SLOWER.value < 1:
    sys.exit("error: expected --steps >= 2 and --slower >= 1")
  logging.set_verbosity(logging.WARNING)
  print(json.dumps(measure(_STEPS.value, _SLOWER.value)))


if __name__ == "__main__":
  app.run(main)
