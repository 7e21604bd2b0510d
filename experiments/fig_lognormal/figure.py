"""Truncated weights and ESS of lognormal weights: formulas and draws. Floor 5."""

import math

import numpy as np

from experiments import sweep_figures
from experiments.fig_lognormal import claims as claims_lib
from rl_is import plots

KIND = "analytic"
VARIANCES = (0.01, 0.1, 0.5, 1.0, 2.0)


def numbers(tiny: bool):
  """Mean and ESS of min(w, C), log w ~ N(-v/2, v): E by quadrature, drawn too."""
  caps = np.exp(np.linspace(0, np.log(20), 5 if tiny else 60))
  caps = np.unique(np.concatenate([caps, [1, 2, 5, 10]]))
  rng = np.random.default_rng(0)
  drawn = rng.standard_normal(10**5 if tiny else 10**6)
  rows = []
  for v in VARIANCES:
    w = np.exp(-v / 2 + math.sqrt(v) * drawn)
    for cap in caps.tolist():
      mean, second = claims_lib.closed(v, cap)
      cut = np.minimum(w, cap)
      rows.append(dict(v=v, cap=cap, mean=mean, ess=mean**2 / second,
                       mean_drawn=cut.mean(), se=cut.std() / len(w)**0.5,
                       ess_drawn=cut.mean()**2 / np.mean(cut**2)))
  return dict(data=rows)


def draw(tables, stem, made_by):
  with plots.style():
    figure, axes = plots.plt.subplots(1, 2, figsize=(10, 3.9), sharex=True,
                                      layout="constrained")
    for i, ((v,), rows) in enumerate(sweep_figures.by(tables["data"], "v").items()):
      caps = [r["cap"] for r in rows]
      for ax, what in zip(axes, ("mean", "ess")):
        ax.plot(caps, [r[what] for r in rows], color=plots.COLORS[i],
                label=f"v = {v:g}")
        ax.plot(caps[::6], [r[f"{what}_drawn"] for r in rows][::6], "x",
                color=plots.COLORS[i], markersize=4)
        best = math.sqrt(2 * math.exp(v))
        ax.plot(best, np.interp(best, caps, [r[what] for r in rows]), "o",
                color=plots.COLORS[i])
        ax.set_xscale("log")
        ax.set_xlabel("cap C")
    axes[0].set_ylabel("E[min(w, C)]: weight that is left of 1")
    axes[1].set_ylabel("ESS / N of min(w, C)")
    axes[1].legend(title="variance of log w")
    for ax in axes:
      ax.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
      ax.minorticks_off()
    figure.suptitle("What a cap buys and costs for lognormal weights (crosses: a "
                    "million draws; dots: sqrt(2 e^v))", fontweight="bold",
                    fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
