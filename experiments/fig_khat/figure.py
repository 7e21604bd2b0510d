"""k-hat: a tail that a sample does not show. Floor 5. Extra `stats`."""

import math

import numpy as np

from rl_is import plots, psis

KIND = "analytic"
N = 1000


def numbers(tiny: bool):
  """`pareto`: weights u^-k; `lognormal`: log w ~ N(-v/2, v), of mean 1."""
  draws = 5 if tiny else 50
  rng = np.random.default_rng(0)
  pareto, lognormal = [], []
  for k in (0.1, 0.3, 0.5, 0.7, 0.9, 1.2):
    found = [psis.smooth(-k * np.log(rng.random(N)))[1] for _ in range(draws)]
    pareto.append(dict(k=k, khat=np.median(found), low=np.quantile(found, 0.1),
                       high=np.quantile(found, 0.9)))
  for v in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 9.0, 16.0):
    log_w = rng.standard_normal((draws, N)) * math.sqrt(v) - v / 2
    w = np.exp(log_w)
    ess = w.mean(axis=1)**2 / np.mean(w**2, axis=1)
    lognormal.append(dict(
        v=v, khat=np.median([psis.smooth(x)[1] for x in log_w]),
        error=np.median(np.abs(w.mean(axis=1) - 1)), ess=math.exp(-v),
        ess_drawn=np.median(ess)))
  return dict(pareto=pareto, lognormal=lognormal)


def draw(tables, stem, made_by):
  pareto, lognormal = tables["pareto"], tables["lognormal"]
  with plots.style():
    figure, (left, middle, right) = plots.plt.subplots(
        1, 3, figsize=(12, 3.7), layout="constrained")
    k = [r["k"] for r in pareto]
    left.errorbar(k, [r["khat"] for r in pareto], [
        [r["khat"] - r["low"] for r in pareto],
        [r["high"] - r["khat"] for r in pareto]], fmt="o", color=plots.COLORS[2])
    left.plot(k, k, color="#999999", linewidth=1)
    left.set_xlabel("true shape k of Pareto weights")
    left.set_ylabel(f"k-hat of {N} weights (80 % of samples)")
    khat = [r["khat"] for r in lognormal]
    middle.plot(khat, [r["error"] for r in lognormal], "o-", color=plots.COLORS[1])
    middle.set_ylabel("typical error of the mean weight, which is 1")
    right.plot(khat, [r["ess_drawn"] for r in lognormal], "o-",
               color=plots.COLORS[1], label="as the sample shows it")
    right.plot(khat, [r["ess"] for r in lognormal], "o-", color="black",
               label="true, e^-v")
    right.set_ylabel("ESS / N")
    right.legend()
    for ax in (middle, right):
      ax.set_xlabel("k-hat of lognormal weights, v = 0.1 to 16")
      ax.set_yscale("log")
      ax.axvline(0.7, color="#999999", linestyle=":")
    figure.suptitle("Above a k-hat of 0.7 the sample's own ESS is too good by orders "
                    "of magnitude; k-hat says so, ESS does not", fontweight="bold",
                    fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
