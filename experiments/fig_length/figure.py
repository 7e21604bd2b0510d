"""Sequence weights against length, and what GSPO's window lets through. Floor 5."""

import numpy as np

from experiments.fig_length import claims as claims_lib
from rl_is import plots

KIND = "analytic"
SDS = (0.005, 0.02, 0.1)  # of a token's log ratio, nats


def numbers(tiny: bool):
  """`weights`: ESS of products of T i.i.d. ratios; `window`: GSPO's clip."""
  lengths = np.unique(np.geomspace(1, 10_000, 9 if tiny else 60).astype(int))
  rng = np.random.default_rng(0)
  draws = 2000 if tiny else 20_000
  weights, window = [], []
  for sd in SDS:
    for T in lengths.tolist():
      # A sum of T normals is one normal: drawn as such.
      log_w = sd * T**0.5 * rng.standard_normal(draws) - sd**2 * T / 2
      w = np.exp(log_w)
      weights.append(dict(sd=sd, T=T, ess=claims_lib.ess(sd, T),
                          ess_drawn=w.mean()**2 / np.mean(w**2)))
      s = np.exp(log_w / T)
      inside = (s >= 1 - claims_lib.LOW) & (s <= 1 + claims_lib.HIGH)
      window.append(dict(sd=sd, T=T, inside=claims_lib.inside(sd, T),
                         inside_drawn=inside.mean(), draws=draws))
  return dict(weights=weights, window=window)


def draw(tables, stem, made_by):
  with plots.style():
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(10, 3.9), sharex=True,
                                               layout="constrained")
    for i, sd in enumerate(SDS):
      for ax, name, what in ((left, "weights", "ess"), (right, "window", "inside")):
        rows = [r for r in tables[name] if r["sd"] == sd]
        T = [r["T"] for r in rows]
        ax.plot(T, [r[what] for r in rows], color=plots.COLORS[i],
                label=f"sd {sd:g} nats a token")
        ax.plot(T[::4], [r[f"{what}_drawn"] for r in rows][::4], "x",
                color=plots.COLORS[i], markersize=4)
      left.axvline(claims_lib.half(sd), color=plots.COLORS[i], linestyle=":",
                   linewidth=1)
    left.set_xscale("log")
    left.set_ylabel("ESS / N of the sequence's weight")
    left.set_title("Dotted: ln 2 / ln(1 + c), half is left")
    right.set_ylabel("sequences inside GSPO's window")
    right.set_title(f"ratio's geometric mean in [1 - {claims_lib.LOW:g}, "
                    f"1 + {claims_lib.HIGH:g}]")
    for ax in (left, right):
      ax.set_xlabel("length T, tokens")
    left.legend()
    figure.suptitle("A product's ESS falls exponentially with the length; a mean's "
                    "window opens as the square root", fontweight="bold",
                    fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
