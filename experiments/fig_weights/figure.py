"""Objective and gradient weight of every surrogate against its ratio. Floor 5."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments import sweep_figures
from rl_is import ops, plots
from rl_is.exact.precision import in_float64

KIND = "analytic"
Q = 0.1  # of the anchor: what the trust regions in probability depend on
# name -> (row, its constants): as published, see `rl_is/objective/presets.py`.
CURVES = {
    "pg": ("pg", {}), "ppo": ("ppo_clip", dict(eps_low=0.2, eps_high=0.2)),
    "dapo": ("ppo_clip", dict(eps_low=0.2, eps_high=0.28)),
    "dual_clip": ("dual_clip", dict(eps_low=0.2, eps_high=0.2, clip_c=3.0)),
    "two_sided": ("two_sided", dict(eps_low=0.2, eps_high=0.2, delta=4.0)),
    "cispo": ("cispo", dict(cap=1.28)), "tis": ("tis", dict(cap=2.0)),
    "mis": ("mis", dict(cap=2.0)), "icepop": ("icepop", dict(low=0.5, high=5.0)),
    "sapo": ("sapo", dict(tau_pos=1.0, tau_neg=1.05)),
    "gmpo": ("gmpo", dict(log_low=0.4, log_high=0.4)),
    "aspo": ("aspo", dict(eps_low=0.2, eps_high=0.2, clip_c=3.0, cap=3.0)),
    "topr": ("topr", dict(cap=1.0)),
    "vespo": ("vespo", dict(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0)),
    "dppo_tv": ("dppo_tv", dict(delta_low=0.15, delta_high=0.15, cap=3.0)),
    "dppo_kl": ("dppo_kl", dict(delta_low=0.05, delta_high=0.05, cap=3.0)),
    "dro": ("dro", dict(beta=0.5)), "opmd": ("opmd", dict(tau=0.5)),
}
_PANELS = (("pg", "ppo", "dapo", "dual_clip", "two_sided"),
           ("cispo", "tis", "mis", "icepop", "topr"),
           ("sapo", "gmpo", "aspo", "vespo"), ("dppo_tv", "dppo_kl", "dro", "opmd"))


def _loss(logp, row, constants, sign):
  """The loss of one token whose ratio to the anchor is e^(logp - log Q)."""
  logp, on = logp[None, None], jnp.ones((1, 1), bool)
  anchor, adv = jnp.full((1, 1), jnp.log(Q)), jnp.full((1, 1), sign)
  if row in ops.CORRECTIONS:
    w = ops.CORRECTIONS[row].fn(jax.lax.stop_gradient(logp), anchor, on, **constants)
    return jnp.sum(jnp.where(w.keep, w.weight, 0) * ops.SURROGATES["pg"].fn(
        logp, adv, on).loss)
  given = (logp, adv, on) if row == "pg" else (logp, anchor, adv, on)
  return jnp.sum(ops.SURROGATES[row].fn(*given, **constants).loss)


@in_float64
def numbers(tiny: bool):
  """weight: what A times the score is multiplied by; objective: minus the loss."""
  x = np.exp(np.linspace(np.log(0.1), np.log(8), 9 if tiny else 200))
  marks = [0.1, 0.5, 0.8, 1.0, 1.28, 2.0, 5.0, 6.0]  # of the table of methods
  x = np.unique(np.concatenate([x, marks]))
  rows = []
  for name, (row, constants) in CURVES.items():
    for sign in (1.0, -1.0):
      value, slope = jax.jit(jax.vmap(jax.value_and_grad(
          lambda logp: _loss(logp, row, constants, sign))))(jnp.log(x * Q))
      rows += [dict(name=name, sign=sign, ratio=r, objective=-v, weight=-g * sign)
               for r, v, g in zip(x.tolist(), value.tolist(), slope.tolist())]
  return dict(data=rows)


def draw(tables, stem, made_by):
  by = sweep_figures.by(tables["data"], "name", "sign")
  kinds = [("weight", 1.0, "weight on A x score, A > 0"),
           ("weight", -1.0, "weight, A < 0"),
           ("objective", 1.0, "objective, A = 1"), ("objective", -1.0, "A = -1")]
  with plots.style():
    figure, axes = plots.plt.subplots(4, 4, figsize=(12, 9), sharex=True,
                                      sharey="row", layout="constrained")
    for column, names in enumerate(_PANELS):
      for ax, (what, sign, label) in zip(axes[:, column], kinds):
        for i, name in enumerate(names):
          points = by[name, sign]
          ax.plot([p["ratio"] for p in points], [p[what] for p in points],
                  color=plots.COLORS[i], label=name,
                  linestyle=["-", "--", "-.", ":", "-"][i])
        ax.set_ylim((-1, 6.2) if what == "weight" else (-8, 8))
        ax.axvline(1, color="#999999", linewidth=0.6)
        if column == 0:
          ax.set_ylabel(label)
      axes[0, column].legend(fontsize=7.5)
      axes[0, column].set_xscale("log")
      axes[0, column].set_xticks([0.1, 0.5, 1, 2, 5], ["0.1", "0.5", "1", "2", "5"])
      axes[0, column].minorticks_off()
      axes[3, column].set_xlabel("ratio current / anchor")
    figure.suptitle(
        "What a token weighs: clips cut one side only, caps level off, soft gates "
        "and trust regions close on both", fontweight="bold", fontsize=11, x=0.01,
        ha="left")
    return plots.save(figure, stem, made_by)
