"""Bias, variance and cosine of estimators against mismatch, lag and cap. Floor 5."""

import math

from experiments import sweep_figures
from experiments.fig_bias_variance import claims as claims_lib
from rl_is import lab, plots

KIND = "analytic"
NAMES = ("none", "token_tis", "token_is", "prefix_is", "seq_is", "geometric_is",
         "sequence_mis", "icepop_is")
NOISE = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
LAGS = (1, 2, 4, 8, 16)
CAPS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, math.inf)
_KEPT = ("chi2", "ess", "kl_qp", "estimator", "cap", "bias", "cosine", "variance")


def numbers(tiny: bool):
  """`learners`: random bigram policies; V = 4, T = 6, graded reward."""
  size = dict(vocab=2, length=3) if tiny else {}
  rows = []
  for seed in range(2 if tiny else 8):
    noise = NOISE[3:5] if tiny else NOISE
    for panel, texts, names, sweep, steps in (
        ("mismatch", [f"noise:{x}" for x in noise], NAMES, {}, 0),
        ("lag", [f"stale:{x}" for x in LAGS], NAMES, {}, 16),
        ("cap", ["noise:0.5"], ("token_tis", "sequence_tis"), dict(cap=CAPS), 0)):
      at = lab.setting(seed=seed, steps=steps, **size)
      rows += [dict(panel=panel, seed=seed, x=float(r["behaviour"].split(":")[1]),
                    **{k: r.get(k) for k in _KEPT})
               for r in lab.table(names, at=at, behaviours=texts, sweep=sweep)]
  return dict(data=rows)


def draw(tables, stem, made_by):
  data = tables["data"]
  colors = dict(zip(NAMES, (*plots.COLORS, "#777777")))
  colors["sequence_tis"] = colors["seq_is"]
  labels = dict(bias="relative bias", variance="relative variance of one sequence",
                cosine="cosine with the exact gradient")
  titles = dict(mismatch="against mismatch: normal noise on the logits",
                lag="against lag: exact updates behind",
                cap="against the cap C, at noise 0.5")
  with plots.style():
    figure, axes = plots.plt.subplots(3, 3, figsize=(12, 8.4), sharex="col",
                                      layout="constrained")
    for column, panel in enumerate(titles):
      along = "cap" if panel == "cap" else "x"
      ours = [r for r in data if r["panel"] == panel]
      for row, what in enumerate(labels):
        ax = axes[row, column]
        for (name,), points in sweep_figures.by(ours, "estimator").items():
          curve = claims_lib.medians(points, along, what)
          if what == "bias" and name == "seq_is":
            continue  # 0
          xs = [x if math.isfinite(x) else 40.0 for x in curve]
          ax.plot(xs, list(curve.values()), color=colors[name], marker=".",
                  label=name)
        ax.set_xscale("log")
        if what != "cosine":
          ax.set_yscale("log")
        if what == "bias":
          ax.set_ylim(bottom=3e-3)  # below: nothing was capped
        if column == 0:
          ax.set_ylabel(labels[what])
        if row == 0:
          ax.set_title(titles[panel])
      ticks = sorted({r[along] for r in ours})
      axes[2, column].set_xticks([x if math.isfinite(x) else 40.0 for x in ticks],
                                 [f"{x:g}" for x in ticks])
      axes[2, column].minorticks_off()
    axes[1, 0].legend(fontsize=7.5)
    axes[1, 2].legend(fontsize=7.5)
    figure.suptitle(
        "Each step from no weight to the whole sequence's takes bias away and adds "
        "variance; the direction survives most of them (medians of "
        f"{len({r['seed'] for r in data})} policies)", fontweight="bold",
        fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
