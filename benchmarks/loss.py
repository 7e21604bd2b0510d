"""Forward and backward of PPO + TIS + k3 on [B, T], beside Tunix's own.

  python -m benchmarks.loss            # one JSON object on standard output

Tunix is timed where google-tunix is installed (`pip install google-tunix`); its
loss function is called as it is, with a stand-in for the model: log-probs are
the input on both sides, and its entropy is of a vocabulary of one.
"""

import json
import statistics
import sys
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from rl_is.core.types import Batch, PolicyOutputs
from rl_is.objective import constants as constants_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec

_ROWS = flags.DEFINE_integer("rows", 64, "B")
_LENGTH = flags.DEFINE_integer("length", 2048, "T")
_REPEATS = flags.DEFINE_integer("repeats", 20, "timed rounds, after a warm-up")

SPEC = Spec("ppo_clip", "proximal", corrections=(Correction("tis"),),
            advantage="given", aggregation="token_mean", regularizer="k3")
OURS = ("no_diagnostics", "some_diagnostics", "full_diagnostics")
CONSTANTS = dict(eps_low=0.2, eps_high=0.28, kl_coef=0.05, cap=2.0)


def inputs(rows: int, length: int) -> dict[str, jax.Array]:
  """Log-probs with a spread that clips some tokens, and ragged rows."""
  r = np.random.default_rng(0)
  logp = -np.abs(r.normal(1.0, 1.0, (rows, length)))
  near = lambda scale: logp + scale * r.normal(size=logp.shape)
  lengths = r.integers(length // 4, length + 1, rows)
  arrays = dict(logp=logp, old=near(0.1), behaviour=near(0.2), ref=near(0.2),
                adv=np.broadcast_to(r.normal(size=(rows, 1)), logp.shape))
  out = {k: jnp.asarray(v, jnp.float32) for k, v in arrays.items()}
  return out | dict(mask=jnp.asarray(np.arange(length) < lengths[:, None]))


def ours(diagnostics: str, traces: list[str]):
  """f(x, constants) -> ((loss, metrics), gradient): weights, loss, backward.

  With "no" diagnostics the metrics are not asked for, so jit leaves them out.
  Every program that jit makes of it adds a line to `traces`.
  """
  objective = Objective(SPEC, full_diagnostics=diagnostics == "full")

  def step(x, constants):
    traces.append(str(jax.tree.map(jnp.shape, x)))
    mask = x["mask"]
    batch = objective.prepare(Batch(
        tokens=jnp.zeros(mask.shape, jnp.int32), valid=mask, mask=mask,
        reward=jnp.zeros(mask.shape[0]),
        group=jnp.zeros(mask.shape[0], jnp.int32), adv=x["adv"],
        logp_behaviour=x["behaviour"], logp_prox=x["old"], logp_ref=x["ref"]),
                              constants)
    (loss, metrics), grad = jax.value_and_grad(lambda logp: objective.loss(
        PolicyOutputs(logp), batch, constants), has_aux=True)(x["logp"])
    return (loss, {} if diagnostics == "no" else metrics), grad

  return jax.jit(step)


def tunix():
  """The same of google-tunix: its GRPO loss, token mean; None: not installed."""
  try:
    from flax import nnx
    from tunix.rl import algo_core, common
  except ImportError:
    return None
  config = types.SimpleNamespace(
      beta=CONSTANTS["kl_coef"], epsilon=CONSTANTS["eps_low"],
      epsilon_high=CONSTANTS["eps_high"], loss_algo="grpo",
      loss_agg_mode="token-mean", temperature=1.0, kl_loss_mode="low_var_kl",
      kl_clamp_value=None)

  def step(x, constants):
    del constants  # its constants are part of the program
    lr = jnp.clip(x["old"] - x["behaviour"], -20.0, 20.0)
    example = types.SimpleNamespace(
        prompt_ids=None, completion_ids=None, completion_mask=x["mask"],
        advantages=x["adv"], ref_per_token_logps=x["ref"],
        old_per_token_logps=x["old"],
        sampler_is_weights=jnp.minimum(jnp.exp(lr), CONSTANTS["cap"]))

    def loss(logp):
      scored = lambda *args, **kwargs: (logp, jnp.zeros(logp.shape + (1,)))
      with mock.patch.object(common, "compute_per_token_logps", scored):
        return algo_core.grpo_loss_fn(nnx.Module(), example, config, 0, 1)

    return jax.value_and_grad(loss, has_aux=True)(x["logp"])

  return jax.jit(step)


def measure(rows: int, length: int, repeats: int) -> dict:
  """Seconds, each a median over rounds that time every side in turn."""
  x = inputs(rows, length)
  constants = {k: jnp.float32(v) for k, v in constants_lib.resolve(
      SPEC, {}, CONSTANTS).items()}
  traces = {side: [] for side in OURS}
  sides = {side: ours(side.partition("_")[0], traces[side]) for side in OURS}
  sides["tunix"] = tunix()
  sides = {name: fn for name, fn in sides.items() if fn is not None}
  results = {name: fn(x, constants) for name, fn in sides.items()}  # compiles
  seconds = {name: [] for name in sides}
  for i in range(repeats):
    varied = constants | dict(cap=jnp.float32(2 + i / 10))
    for name, fn in sides.items():
      start = time.perf_counter()
      jax.block_until_ready(fn(x, varied))
      seconds[name].append(time.perf_counter() - start)
    print(f"round {i + 1} of {repeats}", file=sys.stderr)
  out = dict(rows=rows, length=length, repeats=repeats,
             device=jax.devices()[0].device_kind,
             loss={name: float(r[0][0]) for name, r in results.items()})
  out |= {f"{name}_s": statistics.median(s) for name, s in seconds.items()}
  if "tunix" in sides:
    want = results["tunix"][1]
    for name in OURS:
      out[f"{name}_over_tunix"] = statistics.median(
          a / b for a, b in zip(seconds[name], seconds["tunix"]))
      difference = jnp.abs(results[name][1] - want).max() / jnp.abs(want).max()
      out[f"{name}_gradient_difference"] = float(difference)
  out["compilations"] = max(map(len, traces.values()))
  return out


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  print(json.dumps(measure(_ROWS.value, _LENGTH.value, _REPEATS.value)))


if __name__ == "__main__":
  app.run(main)
