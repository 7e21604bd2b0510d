"""What V-trace converges to, against rho-bar. Floor 5."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments import sweep_figures
from rl_is import plots
from rl_is.exact.precision import in_float64
from rl_is.ops import values

KIND = "analytic"
K = 8  # actions of one step


@functools.partial(jax.jit, static_argnames="steps")
def _converged(logits, logits_q, reward, rho_bar, steps=3000):
  """V under expected updates V += 0.1 E_q[target - V]."""
  p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(logits_q)
  column = lambda x: x[:, None]

  def update(v, _):
    target = values.vtrace(column(p), column(q), column(reward), jnp.full((K, 1), v),
                           jnp.ones((K, 1), bool), rho_bar=rho_bar).target[:, 0]
    return v + 0.1 * (jnp.exp(q) @ target - v), None

  return jax.lax.scan(update, 0.0, length=steps)[0]


@in_float64
def numbers(tiny: bool):
  rows = []
  for seed in range(2 if tiny else 5):
    logits, noise, reward = jax.random.normal(jax.random.key(seed), (3, K))
    logits_q = logits + noise
    p, q = jax.nn.softmax(logits), jax.nn.softmax(logits_q)
    for rho in np.geomspace(0.02, 50, 9 if tiny else 40).tolist():
      between = jnp.exp(values.vtrace_policy(logits, logits_q, rho_bar=rho))
      rows.append(dict(
          seed=seed, rho_bar=rho, found=float(_converged(logits, logits_q, reward, rho)),
          closed=float(between @ reward), target=float(p @ reward),
          behaviour=float(q @ reward), largest=float(jnp.max(p / q)),
          smallest=float(jnp.min(p / q)),
          # Total variation from the target's policy.
          distance=float(0.5 * jnp.sum(jnp.abs(between - p)))))
  return dict(data=rows)


def draw(tables, stem, made_by):
  with plots.style():
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(10, 3.9), sharex=True,
                                               layout="constrained")
    for i, ((seed,), rows) in enumerate(sweep_figures.by(
        tables["data"], "seed").items()):
      x, color = [r["rho_bar"] for r in rows], plots.COLORS[i]
      share = lambda what: [(r[what] - r["behaviour"]) / (
          r["target"] - r["behaviour"]) for r in rows]
      left.plot(x, share("closed"), color=color)
      left.plot(x[::3], share("found")[::3], "x", color=color, markersize=4)
      right.plot(x, [r["distance"] for r in rows], color=color)
      right.axvline(rows[0]["largest"], color=color, linestyle=":", linewidth=1)
    left.set_xscale("log")
    left.set_ylabel("value: 0 the sampler's, 1 the learner's")
    left.set_title("Lines: of the policy min(rho q, p); crosses: V-trace iterated")
    right.set_ylabel("total variation from the learner's policy")
    right.set_title("Dotted: the largest ratio p / q")
    for ax in (left, right):
      ax.set_xlabel("rho-bar")
    figure.suptitle("rho-bar chooses whose value is learnt: V-trace converges to a "
                    "policy between sampler and learner", fontweight="bold",
                    fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
