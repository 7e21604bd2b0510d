"""Orderings of bias and variance, over random policies. Floor 5."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import sweep_figures

ORDER = ("none", "token_tis", "token_is", "prefix_is", "seq_is")


def medians(rows: Sequence[Mapping], along: str, what: str) -> dict[float, float]:
  """x -> median over the policies."""
  return {x: float(np.median([r[what] for r in group])) for (x,), group in sorted(
      sweep_figures.by(rows, along).items())}


def claims(data):
  noise = [r for r in data if r["panel"] == "mismatch"]
  at = lambda name, x, what: medians(
      [r for r in noise if r["estimator"] == name], "x", what)[x]
  far = [x for x in sorted({r["x"] for r in noise}) if x >= 0.35]
  bias = {x: [at(n, x, "bias") for n in ORDER] for x in far}
  variance = {x: [at(n, x, "variance") for n in ORDER[1:]] for x in far}
  unbiased = max(r["bias"] for r in data if r["estimator"] == "seq_is")
  # Neighbours may stand within 2 % of each other: a cap that never binds.
  falls = lambda xs: all(b < 1.02 * a for a, b in zip(xs, xs[1:]))
  caps = [r for r in data if r["panel"] == "cap"]
  curve = lambda name, what: list(medians(
      [r for r in caps if r["estimator"] == name], "cap", what).values())
  token, sequence = curve("token_tis", "bias"), curve("sequence_tis", "bias")
  against = [s for (s,), rows in sweep_figures.by(
      [r for r in caps if r["estimator"] == "token_tis"], "seed").items()
             if {r["cap"]: r["bias"] for r in rows}[math.inf] > 1.02 * min(
                 r["bias"] for r in rows)]
  seeds = len({r["seed"] for r in caps})
  worst = max(far)
  cosine = at("token_tis", worst, "cosine")
  show = lambda xs: " > ".join(f"{x:.3g}" for x in xs)
  return [
      (unbiased < 1e-10, "the whole sequence's weight is unbiased in every "
       f"setting: {unbiased:.1e} < 1e-10"),
      (all(falls(b) for b in bias.values()),
       f"bias falls from {' to '.join(ORDER)}: medians at noise {worst:g}: "
       f"{show(bias[worst])}"),
      (all(falls(v[::-1]) for v in variance.values()),
       f"variance rises from {' to '.join(ORDER[1:])}: medians at noise "
       f"{worst:g}: {' < '.join(f'{x:.3g}' for x in variance[worst])}"),
      (falls(sequence) and all(np.diff(curve("sequence_tis", "variance")) > -1e-9),
       f"a looser cap on sequences has less bias and more variance: {show(sequence)}"),
      (falls(token), f"so it is for tokens in the median: {show(token)}"),
      (0 < len(against) < seeds / 2,
       "but it is no law: token IS without a cap is further off than with one in "
       f"{len(against)} of {seeds} policies"),
      (cosine > 1 - at("token_tis", worst, "bias"),
       f"the direction suffers less than the length: token TIS at noise {worst:g} "
       f"has bias {at('token_tis', worst, 'bias'):.2f} and cosine {cosine:.2f}")]
