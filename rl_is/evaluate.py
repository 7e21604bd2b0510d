"""Accuracy and pass@k on held-out prompts, with the learner's weights. Floor 4.

Also a command: `python -m rl_is.evaluate --workdir=RUN --samples=16` prints one
JSON object for the newest checkpoint of a run.
"""

import dataclasses
import json
import math
import sys

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict

from rl_is import saved
from rl_is.build import Parts
from rl_is.core.types import Params
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import rng, sharding
from rl_is.rollout import batching, generator


def pass_at_k(n: int, c: int, k: int) -> float:
  """Unbiased chance that one of k samples is right, from c right ones of n.

    1 - C(n - c, k) / C(n, k)

  **Source**: Chen et al., "Evaluating Large Language Models Trained on Code",
    2021, https://arxiv.org/abs/2107.03374, eq. 1.

  Raises:
    ValueError: if k > n: it cannot be estimated.
  """
  if not 0 <= c <= n or not 1 <= k:
    raise ValueError(f"pass_at_k: expected 0 <= c <= n and k >= 1, got n={n}, "
                     f"c={c}, k={k}")
  if k > n:
    raise ValueError(f"pass_at_k: k: expected at most n = {n}, got {k}")
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def summarize(rewards: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
  """[prompts, samples] rewards -> metrics. Right means a reward of 1 or more;
  an unscorable (NaN) answer is left out of its prompt's n, and counted."""
  scored = ~np.isnan(rewards)
  right = np.where(scored, rewards >= 1, False)
  mean = lambda x: float(np.mean(x)) if len(x) else float("nan")
  out = {
      "eval/accuracy": mean(right[scored]),
      "eval/reward_mean": mean(rewards[scored]),
      "eval/length_mean": mean(lengths.reshape(-1)),
      "eval/unscorable": float(np.sum(~scored)),
      "eval/prompts": float(rewards.shape[0]),
  }
  k = 1
  while k <= rewards.shape[1]:
    estimates = [pass_at_k(int(n), int(c), k) for n, c in
                 zip(scored.sum(axis=1), right.sum(axis=1)) if n >= k]
    out[f"eval/pass@{k}"] = mean(estimates)
    k *= 2
  return out


def evaluate(params: Params, config: ConfigDict, parts: Parts
             ) -> dict[str, float]:
  """Samples `evaluate.samples` answers to each of the first held-out prompts."""
  e = config.evaluate
  problems = batching.sample_of(parts.task.heldout, e.prompts)
  # Greedy answers to one prompt are all the same: pass@k of them says nothing.
  samples = e.samples if e.temperature else 1
  sampling = dataclasses.replace(
      parts.sampling, greedy=e.temperature == 0, top_k=0, top_p=1.0,
      record_top_k=0, record_routes=False, temperature=e.temperature or 1.0, disturb=None)
  # About as many rows a call as in training, and a multiple of the mesh; the
  # last call is filled up with prompts that are not counted.
  devices = mesh_lib.data_size(parts.mesh)
  per_call = devices * max(
      config.rollout.batch_size // (samples * devices), 1)
  # As for the sampler: a decode reads all of the weights for each token.
  params = jax.device_put(params, sharding.place(
      params, parts.model.rules, parts.mesh, without=("fsdp",)))
  rewards, lengths, failed = [], [], 0
  for first in range(0, len(problems), per_call):
    chunk = problems[first:first + per_call]
    filled = (chunk * per_call)[:per_call]
    rollout, scores = generator.sample(
        params, parts.verifier, filled, range(first, first + per_call),
        rng.key(config.seed, "evaluate"), 0, group_size=samples,
        prompt_width=parts.task.max_prompt_tokens, model=parts.model,
        sampling=sampling, mesh=parts.mesh)
    shape = (per_call, samples)
    rewards.append(scores.reward.reshape(shape)[:len(chunk)])
    failed += int(scores.failed.reshape(shape)[:len(chunk)].sum())
    lengths.append(rollout.mask.sum(axis=1).reshape(shape)[:len(chunk)])
  return dict(summarize(np.concatenate(rewards), np.concatenate(lengths)),
              **{"eval/failed": float(failed)})


def of_run(workdir: str, **changes) -> dict[str, float]:
  """`evaluate` of a run's newest checkpoint; changes: of `config.evaluate`."""
  config = saved.config_of(workdir)
  config.evaluate.update({k: v for k, v in changes.items() if v is not None})
  if config.evaluate.prompts < 1:
    raise ValueError(f"prompts: expected >= 1, got {config.evaluate.prompts}")
  run = saved.newest(workdir, config)
  return dict(step=run.step, **evaluate(run.state.params, config, run.parts))


def main() -> None:
  flags.DEFINE_string("workdir", None, "The run's directory.", required=True)
  flags.DEFINE_integer("prompts", None, "Held-out prompts; unset: the run's.")
  flags.DEFINE_integer("samples", None, "Answers a prompt; unset: the run's.")
  flags.DEFINE_float("temperature", None, "0: greedy; unset: the run's.")
  try:
    app.run(_main)
  except (ValueError, FileNotFoundError) as error:
    sys.exit(f"error: {error}")


def _main(argv) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  given = flags.FLAGS
  print(json.dumps(of_run(given.workdir, prompts=given.prompts,
                          samples=given.samples,
                          temperature=given.temperature)))


if __name__ == "__main__":
  main()
