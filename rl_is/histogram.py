"""How large importance weights are: histograms by level and by lag. Floor 4."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from rl_is import plots
from rl_is.core.types import Batch

BINS = 60
_PARTS = 5  # shades that are told apart
LEVELS = ("token", "sequence")


def rows(batches: Sequence[Batch]) -> list[dict]:
  """Counts of the raw weights learner/sampler, in bins of equal width of ln w.

  Args:
    batches: numpy, with logp_prox and logp_behaviour finite under the mask.

  Returns:
    a row a level, lag and bin: `low` and `high` are the bin's borders as weights,
    `share` is of all tokens (or answers) of that lag. An answer's lag is that of
    its oldest token; of more than five lags, neighbours are put together.
  """
  out = []
  for level, (log_weight, lag) in zip(LEVELS, _values(batches)):
    if not len(lag):
      raise ValueError(f"histogram: expected at least 1 {level}, got none")
    edges = _edges(log_weight)
    for name, inside in _parts(lag):
      counts, _ = np.histogram(log_weight[inside], edges)
      out += [dict(level=level, lag=name, low=float(np.exp(low)),
                   high=float(np.exp(high)), count=int(n), share=n / inside.sum())
              for low, high, n in zip(edges, edges[1:], counts)]
  return out


def _values(batches):
  """(ln w, lag) of all tokens, and of all answers; float64."""
  tokens, answers = [], []
  for b in batches:
    mask = np.asarray(b.mask, bool)
    apart = np.where(mask, np.float64(b.logp_prox) - b.logp_behaviour, 0)
    lag = np.where(mask, b.version_now[:, None] - b.version, 0)
    some = mask.any(axis=1)
    tokens.append((apart[mask], lag[mask]))
    answers.append((apart.sum(axis=1)[some], lag.max(axis=1)[some]))
  return [tuple(map(np.concatenate, zip(*parts))) for parts in (tokens, answers)]


def _edges(log_weight: np.ndarray) -> np.ndarray:
  low, high = log_weight.min(), log_weight.max()
  if high - low < 1e-6:  # the learner is the sampler
    low, high = low - 0.05, high + 0.05
  return np.linspace(low, high, BINS + 1)


def _parts(lag: np.ndarray):
  """(name, which) of each lag, or of as many neighbouring ones as are needed."""
  for some in np.array_split(np.unique(lag), _PARTS):
    if len(some):
      first, last = some[0], some[-1]
      yield (f"{first}" if first == last else f"{first} to {last}",
             (lag >= first) & (lag <= last))


def draw(table: Sequence[dict], caps: Iterable[float], title: str, stem: str,
         made_by: str) -> list[str]:
  """A panel a level, a line a lag; dashed: caps, and the share beyond each."""
  shades = plots.plt.get_cmap("viridis")
  with plots.style():
    figure, axes = plots.plt.subplots(1, len(LEVELS), figsize=(8.6, 3.2),
                                      layout="constrained")
    for ax, level in zip(axes, LEVELS):
      ours = [r for r in table if r["level"] == level]
      lags = list(dict.fromkeys(r["lag"] for r in ours))
      for i, lag in enumerate(lags):
        one = [r for r in ours if r["lag"] == lag]
        ax.stairs([r["share"] for r in one], [one[0]["low"]] + [
            r["high"] for r in one], color=shades(0.9 * i / max(len(lags) - 1, 1)),
            label=f"lag {lag}", linewidth=1.4)
      ax.set(xscale="log", yscale="log", title=f"weight of a {level}")
      if max(r["high"] for r in ours) < 5 * min(r["low"] for r in ours):
        # Powers of ten say nothing here, and what is between them is too much.
        ax.xaxis.set(major_locator=MaxNLocator(5), minor_locator=NullLocator(),
                     major_formatter=ScalarFormatter(useOffset=False))
      ax.axvline(1, color="black", linewidth=0.8)
      for cap in caps:
        if min(r["low"] for r in ours) < cap < max(r["high"] for r in ours):
          ax.axvline(cap, color=plots.COLORS[1], linestyle="--", linewidth=0.9)
          ax.annotate(f"{cap:g}: {beyond(ours, cap):.1%}", (cap, 1), xycoords=(
              "data", "axes fraction"), rotation=90, va="top", ha="right",
              fontsize=7, color=plots.COLORS[1], bbox=dict(
                  facecolor="white", edgecolor="none", pad=1, alpha=0.8))
    axes[0].set_ylabel("share in a bin")
    axes[0].legend(fontsize=7.5)
    figure.suptitle(title, fontweight="bold", fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)


def beyond(table: Sequence[dict], cap: float) -> float:
  """The share of weights above the cap; the bin that holds it is split evenly."""
  total = sum(r["count"] for r in table)
  above = sum(r["count"] * np.clip(np.log(r["high"] / cap) / np.log(
      r["high"] / r["low"]), 0, 1) for r in table)
  return float(above / total)
