"""Forward and backward of PPO + TIS + k3 on [B, T], beside the peers' own.

  python -m benchmarks.loss            # one JSON object on standard output

Tunix, TRL and verl are timed where they are installed (`pip install
google-tunix`, `trl`, `verl`): see `loss_peers`. Log-probs are the input on every
side. TRL and verl run as they do in their trainers: PyTorch, eager, with their
metrics.
"""

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import loss_peers
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
PEERS = ("tunix", "trl", "verl")
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


def measure(rows: int, length: int, repeats: int) -> dict:
  """Seconds, each a median over rounds that time every side in turn."""
  x = inputs(rows, length)
  constants = {k: jnp.float32(v) for k, v in constants_lib.resolve(
      SPEC, {}, CONSTANTS).items()}
  traces = {side: [] for side in OURS}
  sides = {side: ours(side.partition("_")[0], traces[side]) for side in OURS}
  peers = {name: getattr(loss_peers, name)(x, CONSTANTS) for name in PEERS}
  sides |= {name: fn for name, fn in peers.items() if fn is not None}
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
  for peer in (p for p in PEERS if p in sides):
    want = np.asarray(results[peer][1])
    for name in OURS:
      out[f"{name}_over_{peer}"] = statistics.median(
          a / b for a, b in zip(seconds[name], seconds[peer]))
    gap = np.abs(np.asarray(results[OURS[0]][1]) - want).max()
    out[f"gradient_difference_{peer}"] = float(gap / np.abs(want).max())
  out["compilations"] = max(map(len, traces.values()))
  return out


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  print(json.dumps(measure(_ROWS.value, _LENGTH.value, _REPEATS.value)))


if __name__ == "__main__":
  app.run(main)
