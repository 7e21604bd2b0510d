"""Closed forms of truncated lognormal weights. Floor 5."""

import math

from scipy.stats import norm


def closed(v: float, cap: float) -> tuple[float, float]:
  """(E[min(w, C)], E[min(w, C)^2]) for log w ~ N(-v/2, v), so that E[w] = 1.

    E[min]   = Phi((ln C - v/2)/sd) + C (1 - Phi((ln C + v/2)/sd))
    E[min^2] = e^v Phi((ln C - 3v/2)/sd) + C^2 (1 - Phi((ln C + v/2)/sd))
  """
  sd, l = math.sqrt(v), math.log(cap)
  above = norm.sf((l + v / 2) / sd)
  return (norm.cdf((l - v / 2) / sd) + cap * above,
          math.exp(v) * norm.cdf((l - 1.5 * v) / sd) + cap**2 * above)


def claims(data):
  # v = 1: mean and ESS that the literature has, at C = 1, 2, 5, 10.
  known = {1.0: (0.617, 0.777), 2.0: (0.809, 0.632), 5.0: (0.954, 0.475),
           10.0: (0.990, 0.408)}
  rows = {r["cap"]: r for r in data if r["v"] == 1}
  off = max(abs(rows[c][k] - x) for c, pair in known.items()
            for k, x in zip(("mean", "ess"), pair))
  z = max(abs(r["mean"] - r["mean_drawn"]) / r["se"] for r in data)
  ess = max(abs(r["ess"] - r["ess_drawn"]) for r in data)
  loosest = max(data, key=lambda r: (r["v"] == 1, r["cap"]))
  return [
      (off < 6e-4, f"at v = 1 the formulas give the known numbers: {off:.1e} < 6e-4"),
      (z < 4.5, f"a million draws agree: the mean within {z:.1f} < 4.5 standard "
       f"errors at every v and C"),
      (ess < 0.02, f"and their ESS within {ess:.3f} < 0.02"),
      (abs(loosest["ess"] - math.exp(-1)) < 0.03, "without a cap ESS / N goes to "
       f"e^-v: {loosest['ess']:.3f} at C = {loosest['cap']:.0f}, e^-1 = 0.368")]
