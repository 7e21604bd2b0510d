"""ESS against KL and chi-square, of every kind of sampler. Floor 5."""

import numpy as np

from experiments import sweep_figures
from rl_is import lab, plots
from rl_is.exact import enumerate as enum

KIND = "analytic"
_KINDS = {"noise": (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0),
          "stale": (1, 2, 4, 8, 12, 16), "round": (0.25, 0.5, 1.0),
          "temperature": (0.7, 0.8, 0.9, 1.1, 1.25, 1.5)}


def numbers(tiny: bool):
  """Sequences of random bigram policies, 16 exact updates on; V = 4, T = 6."""
  size = dict(vocab=2, length=3) if tiny else {}
  rows = []
  for seed in range(1 if tiny else 4):
    at = lab.setting(seed=seed, steps=16, **size)
    for kind, values in _KINDS.items():
      for x in values:
        q, q_params, _ = at.behaviour(f"{kind}:{x}")
        found = enum.divergence(at.policy, at.params, q, q_params, at.reward)
        rows.append(dict(kind=kind, x=x, seed=seed, kl_qp=float(found.kl_qp),
                         kl_pq=float(found.kl_pq), chi2=float(found.chi2),
                         ess=float(found.ess)))
  return dict(data=rows)


def draw(tables, stem, made_by):
  with plots.style():
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(10, 3.9),
                                               layout="constrained", sharey=True)
    for i, ((kind,), rows) in enumerate(sweep_figures.by(
        tables["data"], "kind").items()):
      for ax, along in ((left, "kl_qp"), (right, "chi2")):
        ax.plot([r[along] for r in rows], [r["ess"] for r in rows], "o",
                color=plots.COLORS[i + 1], markersize=4, alpha=0.7, label=kind)
    kl, chi2 = np.geomspace(1e-3, 5, 100), np.geomspace(2e-3, 2e4, 100)
    left.plot(kl, np.exp(-2 * kl), color="black", label="exp(-2 KL): lognormal")
    right.plot(chi2, 1 / (1 + chi2), color="black", label="1 / (1 + chi2)")
    for ax, name in ((left, "KL(sampler || learner), nats a sequence"),
                     (right, "chi-square of a sequence")):
      ax.set_xscale("log")
      ax.set_xlabel(name)
      ax.legend(fontsize=7.5)
    left.set_ylabel("ESS / N of sequence weights")
    figure.suptitle("ESS is chi-square by another name; from KL it can only be "
                    "guessed", fontweight="bold", fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
