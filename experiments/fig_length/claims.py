"""Products and means of T ratios, each lognormal with mean 1. Floor 5."""

import math

import numpy as np
from scipy.stats import norm

LOW, HIGH = 3e-4, 4e-4  # GSPO's


def excess(sd: float) -> float:
  """c: the variance of one token's ratio, e^(sd^2) - 1."""
  return math.expm1(sd**2)


def ess(sd: float, T: float) -> float:
  """1 / (1 + c)^T: the product's variance is (1 + c)^T - 1."""
  return (1 + excess(sd))**-T


def half(sd: float) -> float:
  """The length at which half of the sample is left."""
  return math.log(2) / math.log1p(excess(sd))


def inside(sd: float, T: float) -> float:
  """Of the mean log ratio ~ N(-sd^2/2, sd^2/T), the share in GSPO's window."""
  at = lambda x: (math.log(x) + sd**2 / 2) * math.sqrt(T) / sd
  return norm.cdf(at(1 + HIGH)) - norm.cdf(at(1 - LOW))


def claims(weights, window):
  # ESS is a ratio of heavy-tailed means: drawn, it is far off where it is small.
  off = max(abs(r["ess"] - r["ess_drawn"]) for r in weights if r["ess"] > 0.5)
  z = max(abs(r["inside"] - r["inside_drawn"]) / math.sqrt(
      max(r["inside"] * (1 - r["inside"]), 1 / r["draws"]) / r["draws"])
          for r in window)
  c = lambda variance: math.log(2) / math.log1p(variance)
  at_half = [float(np.interp(half(sd), *zip(*[(r["T"], r["ess"]) for r in weights
                                              if r["sd"] == sd])))
             for sd in {r["sd"] for r in weights} if half(sd) < 5000]
  small = min(r["sd"] for r in window)
  share = {r["T"]: r["inside"] for r in window if r["sd"] == small}
  loose = {r["T"]: r["inside"] for r in window if r["sd"] == 0.02}
  T = max(share)
  return [
      (off < 0.05, f"draws agree with (1 + c)^-T where half is left: {off:.3f} < 0.05"),
      (round(c(0.01)) == 70 and round(c(0.001)) == 693 and all(
          abs(x - 0.5) < 0.02 for x in at_half), "half of the sample is gone "
       f"after {c(0.01):.0f} tokens at c = 0.01, {c(0.001):.0f} at c = 0.001"),
      (z < 4.5, f"draws agree with the window's formula: {z:.1f} < 4.5 errors"),
      (share[T] > 0.99 and share[1] < 0.1, f"at sd {small:g} GSPO's window has "
       f"{share[1]:.0%} of answers of one token and {share[T]:.0%} of {T:.0f}"),
      (loose[T] < 0.9, f"at sd 0.02 it has {loose[T]:.0%} even of those: bounds "
       "belong to a length and a mismatch, and cannot be copied")]
