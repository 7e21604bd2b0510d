"""How far one batch can raise a probability under a clip. Floor 5."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments import sweep_figures
from rl_is import plots
from rl_is.ops import surrogates

KIND = "analytic"
BOUNDS = (0.2, 0.28)


@functools.partial(jax.jit, static_argnames="steps")
def _climb(start, eps, steps, rate=0.02):
  """The probability of a token of advantage 1 after many updates on one batch."""
  on = jnp.ones((1, 1), bool)
  logit = jnp.log(start) - jnp.log1p(-start)
  logp = lambda x: jax.nn.log_sigmoid(x)[None, None]

  def step(x, _):
    loss = lambda x: jnp.sum(surrogates.ppo_clip(
        logp(x), logp(logit), jnp.ones((1, 1)), on, eps_low=eps, eps_high=eps).loss)
    # Of a fixed size, as Adam's: a rare token's own gradient is tiny.
    return x - rate * jnp.sign(jax.grad(loss)(x)), None

  x, _ = jax.lax.scan(step, logit, length=steps)
  return jax.nn.sigmoid(x)


def numbers(tiny: bool):
  rows = []
  for eps in BOUNDS:
    for start in np.geomspace(0.001, 0.99, 7 if tiny else 40).tolist():
      rows.append(dict(eps=eps, start=start, reached=float(_climb(start, eps, 400))))
  return dict(data=rows)


def draw(tables, stem, made_by):
  with plots.style():
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(9.5, 3.8),
                                               layout="constrained")
    for i, ((eps,), rows) in enumerate(sweep_figures.by(
        tables["data"], "eps").items()):
      start = np.array([r["start"] for r in rows])
      reached = np.array([r["reached"] for r in rows])
      color = plots.COLORS[i + 1]
      left.plot(start, reached, "x", color=color, markersize=4,
                label=f"400 updates, eps {eps:g}")
      left.plot(start, np.minimum((1 + eps) * start, 1), color=color)
      right.plot(start, reached - start, color=color, label=f"eps {eps:g}")
    left.set_xscale("log"), left.set_yscale("log")
    left.set_xlabel("probability at sampling")
    left.set_ylabel("probability reached")
    left.set_title("Lines: (1 + eps) p")
    left.legend()
    right.set_xscale("log")
    right.set_xlabel("probability at sampling")
    right.set_ylabel("gain")
    right.legend()
    figure.suptitle("A clip of the ratio holds rare tokens down: 0.01 gains 0.003, "
                    "0.7 gains 0.2", fontweight="bold", fontsize=11, x=0.01,
                    ha="left")
    return plots.save(figure, stem, made_by)
