"""Bias and spread of k1, k2, k3, and whose gradient they have. Floor 5."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fig_kl_estimators import claims as claims_lib
from rl_is import ops, plots
from rl_is.exact.precision import in_float64
from rl_is.ops import regularizers

KIND = "analytic"
V = 16  # tokens; every expectation is a sum over them
NAMES = ("k1", "k2", "k3")
SDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


def _estimates(logits, logits_ref, logits_q, name, weighted):
  """Each token's estimate of KL(p || ref), [V]."""
  p, ref, q = (jax.nn.log_softmax(x)[None] for x in (logits, logits_ref, logits_q))
  on = jnp.ones((1, V), bool)
  kl = ops.REGULARIZERS[name].fn(p, ref, on)
  return (regularizers.importance_weighted(kl, p, q, on) if weighted else kl)[0]


@jax.jit
def _measure(logits, logits_ref, logits_q):
  q = jax.nn.softmax(logits_q)
  true = lambda x: jnp.sum(jax.nn.softmax(x) * (
      jax.nn.log_softmax(x) - jax.nn.log_softmax(logits_ref)))
  kl, grad = jax.value_and_grad(true)(logits)
  out = {}
  for name in NAMES:
    for weighted in (False, True):
      each = _estimates(logits, logits_ref, logits_q, name, weighted)
      g = jax.grad(lambda x: q @ _estimates(x, logits_ref, logits_q, name, weighted)
                   )(logits)
      out[name, weighted] = (q @ each / kl, jnp.sqrt(q @ each**2 - (q @ each)**2) / kl,
                             jnp.linalg.norm(g - grad) / jnp.linalg.norm(grad))
  return out


@in_float64
def numbers(tiny: bool):
  """Means over random policies. `on`: the sampler is the learner, x the distance
  of the reference; `off`: x the sampler's, the reference 0.4 away. SD of the
  logits' noise; value, spread and gradient's error relative to the KL's."""
  rows = []
  seeds = 5 if tiny else 50
  for panel in ("on", "off"):
    for sd in SDS:
      found = []
      for seed in range(seeds):
        base, a, b = jax.random.normal(jax.random.key(seed), (3, V))
        ref = base + (sd if panel == "on" else 0.4) * a
        found.append(_measure(base, ref, base + (sd if panel == "off" else 0) * b))
      for name, weighted in found[0]:
        value, spread, grad = np.mean([f[name, weighted] for f in found], axis=0)
        size = np.mean([abs(f[name, weighted][0] - 1) for f in found])
        rows.append(dict(panel=panel, sd=sd, name=name, weighted=int(weighted), value=value,
                         bias=size, spread=spread, gradient=grad))
  return dict(data=rows)


def draw(tables, stem, made_by):
  data = tables["data"]
  panels = (("on", "bias", "bias of the value, on-policy"),
            ("on", "spread", "standard deviation, on-policy"),
            ("on", "gradient", "error of the gradient, on-policy"),
            ("off", "bias", "bias of the value, off-policy"),
            ("off", "gradient", "error of the gradient, off-policy"))
  with plots.style():
    figure, axes = plots.plt.subplots(1, 5, figsize=(15, 3.6), layout="constrained")
    for ax, (panel, what, title) in zip(axes, panels):
      for i, name in enumerate(NAMES):
        for weighted in (False, True)[:1 + (panel == "off")]:
          curve = claims_lib.curve(data, panel, name, weighted, what)
          ys = np.maximum(list(curve.values()), 1e-4)
          ax.plot(list(curve), ys, marker=".", color=plots.COLORS[i + 1],
                  linestyle="--" if weighted else "-",
                  label=name + " x p/q" * weighted)
      ax.set_xscale("log"), ax.set_yscale("log")
      ax.set_xticks(SDS, [f"{x:g}" for x in SDS])
      ax.xaxis.minorticks_off()
      ax.set_title(title)
      ax.set_xlabel("sd of logits: " + ("reference" if panel == "on" else "sampler"))
    axes[0].set_ylabel("relative to the KL (drawn from 1e-4)")
    axes[0].legend(), axes[3].legend(fontsize=7)
    figure.suptitle("k3 estimates the KL well and k2 has its gradient; off-policy "
                    "both need the ratio", fontweight="bold", fontsize=11, x=0.01,
                    ha="left")
    return plots.save(figure, stem, made_by)
