"""Where a positive token is still pushed up: trust regions in (p, q). Floor 5."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments import sweep_figures
from rl_is import plots
from rl_is.ops import surrogates, surrogates_trust

KIND = "analytic"
# Each with the constants of its preset.


def _ppo(p, q, adv, on):
  return surrogates.ppo_clip(p, q, adv, on, eps_low=0.2, eps_high=0.2)


def _tv(p, q, adv, on):
  return surrogates_trust.dppo_tv(p, q, adv, on, delta_low=0.15, delta_high=0.15)


def _kl(p, q, adv, on):
  return surrogates_trust.dppo_kl(p, q, adv, on, delta_low=0.05, delta_high=0.05)


REGIONS = {"ppo": _ppo, "dppo_tv": _tv, "dppo_kl": _kl}


def numbers(tiny: bool):
  """Edges: at each q the largest p that a positive, the smallest p that a
  negative token is still moved from (on a grid of the log ratio)."""
  rows = []
  qs = np.geomspace(1e-3, 0.9, 7 if tiny else 50)
  ratio = np.exp(np.linspace(-5, 5, 2001))
  for name, fn in REGIONS.items():
    @jax.jit
    def moves(p, q, sign, fn=fn):
      on = jnp.ones(p.shape, bool)
      adv = jnp.full(p.shape, sign)
      g = jax.grad(lambda x: jnp.sum(fn(x, jnp.log(q), adv, on).loss))(jnp.log(p))
      return g != 0
    for q in qs.tolist():
      p = ratio * q
      p = p[p < 0.999][None]
      up = np.asarray(moves(p, np.full_like(p, q), 1.0))[0]
      down = np.asarray(moves(p, np.full_like(p, q), -1.0))[0]
      rows.append(dict(name=name, q=q, up=float(p[0][up].max()),
                       down=float(p[0][down].min()), last=float(p.max())))
  return dict(data=rows)


def draw(tables, stem, made_by):
  with plots.style():
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(10, 4),
                                               layout="constrained", sharex=True)
    for i, ((name,), rows) in enumerate(sweep_figures.by(
        tables["data"], "name").items()):
      q = np.array([r["q"] for r in rows])
      for what in ("up", "down"):
        edge = np.array([r[what] for r in rows])
        left.plot(q, edge, color=plots.COLORS[i + 1],
                  label=name if what == "up" else None)
        right.plot(q, edge / q, color=plots.COLORS[i + 1])
    for ax in (left, right):
      ax.set_xscale("log"), ax.set_yscale("log")
      ax.set_xlabel("probability at the anchor, q")
    left.plot(q, q, color="#999999", linewidth=0.8)
    left.set_ylabel("probability now, p: edges of the region")
    right.set_ylabel("the same as a ratio p / q")
    right.set_ylim(0.05, 150)
    left.legend()
    figure.suptitle("A ratio's window is the same for all tokens; a divergence's is "
                    "wide for rare tokens and tight for common ones",
                    fontweight="bold", fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
