"""The cap with the least mean squared error, by batch size. Floor 5."""

import numpy as np

from experiments import sweep_figures
from experiments.fig_best_cap import claims as claims_lib
from rl_is import lab, plots

KIND = "analytic"
NOISE = (0.2, 0.35, 0.5)


def numbers(tiny: bool):
  """Bias and variance of sequence TIS at each cap, for random bigram policies."""
  size = dict(vocab=2, length=3) if tiny else {}
  caps = np.exp(np.linspace(np.log(0.25), np.log(400), 13 if tiny else 61)).tolist()
  rows = []
  for seed in range(2 if tiny else 8):
    at = lab.setting(seed=seed, steps=0, **size)
    noise, = lab.table(["none"], at=at, behaviours=["noise:0"])
    rows += [dict(seed=seed, on_policy=noise["variance"],
                  noise=float(r["behaviour"].split(":")[1]),
                  **{k: r[k] for k in ("chi2", "cap", "bias", "variance")})
             for r in lab.table(["sequence_tis"], at=at, sweep=dict(cap=caps),
                                behaviours=[f"noise:{x}" for x in NOISE])]
  return dict(data=rows)


def draw(tables, stem, made_by):
  data, batches = tables["data"], claims_lib.BATCHES
  with plots.style():
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(11, 4.4),
                                               layout="constrained")
    rows = [r for r in data if r["seed"] == 0 and r["noise"] == NOISE[-1]]
    shades = plots.plt.get_cmap("viridis")(np.linspace(0, 0.85, 4))
    for color, n in zip(shades, (1, 64, 4096, 65536)):
      caps, mse = claims_lib.errors(rows, n)
      left.plot(caps, mse, color=color, label=f"N = {n}")
      left.plot(caps[np.argmin(mse)], mse.min(), "o", color=color)
    left.set_xscale("log"), left.set_yscale("log")
    left.set_xlabel("cap C of the sequence's weight")
    left.set_ylabel("relative mean squared error of a batch of N")
    left.set_title(f"One policy, chi2 = {rows[0]['chi2']:.2f}; dots: the best C")
    left.legend()
    for i, ((noise,), group) in enumerate(sweep_figures.by(data, "noise").items()):
      found, rule, scaled = claims_lib.best(group)
      chi2 = np.median([r["chi2"] for r in group])
      right.plot(batches, found, ".-", color=plots.COLORS[i + 1],
                 label=f"best C, chi2 about {chi2:.2g}")
      right.plot(batches, rule, ":", color=plots.COLORS[i + 1], linewidth=1)
      right.plot(batches, scaled, "--", color=plots.COLORS[i + 1], linewidth=1)
    right.set_xscale("log"), right.set_yscale("log")
    right.set_xlabel("sequences a batch, N")
    right.set_title("Dotted: N^(1/4) sqrt(2 (1 + chi2)); dashed: N / V in place "
                    f"of N\nV: relative variance on-policy; medians of "
                    f"{len({r['seed'] for r in data})} policies")
    right.legend()
    figure.suptitle("The best cap grows with the batch: variance is averaged away, "
                    "bias is not", fontweight="bold", fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
