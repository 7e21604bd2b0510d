"""What the sweep of caps against lags is held to. Floor 5."""

import math
from collections.abc import Mapping, Sequence

from experiments import stats

LAG, CAP, FINAL = "rollout.lag", "objective.constants.cap", "final"
NONE = 0.0  # stands for "no correction" among the caps


def finals(summary: Sequence[Mapping]) -> dict[tuple[float, float], dict]:
  """(lag, cap) -> seed -> mean reward of the last 20 steps."""
  out: dict[tuple[float, float], dict] = {}
  for row in summary:
    key = row[LAG], NONE if row[CAP] is None else row[CAP]
    out.setdefault(key, {})[row["seed"]] = row[FINAL]
  return out


def claims(summary: Sequence[Mapping], curves: Sequence[Mapping] = ()
           ) -> list[tuple[bool, str]]:
  del curves  # for the eye alone
  by = finals(summary)
  lags = sorted({lag for lag, _ in by})
  caps = sorted({cap for _, cap in by} - {NONE})
  mean = {key: stats.mean(list(seeds.values())).value
          for key, seeds in by.items()}
  stale, on = [lag for lag in lags if lag], mean[0.0, NONE]
  spread = max(abs(mean[0.0, cap] - on) for cap in caps)
  worst = {lag: mean[lag, NONE] for lag in stale}
  back = {lag: max(mean[lag, cap] for cap in caps) for lag in stale}
  tight = [stats.paired(by[lag, math.inf], by[lag, 1.0]) for lag in stale]
  open_ = [stats.paired(by[lag, math.inf], by[lag, 2.0]) for lag in stale]
  name = lambda values: ", ".join(f"{x:+.3f}" for x in values)
  return [
      (spread <= 0.01,
       f"on-policy a cap does nothing: over caps the end moves by {spread:.4f} "
       "<= 0.01"),
      (all(worst[lag] < 0.5 * on for lag in stale if lag >= 8),
       "uncorrected, 8 updates or more of lag end below half of on-policy: "
       f"{', '.join(f'{worst[lag]:.3f}' for lag in stale if lag >= 8)} < 0.5 x "
       f"{on:.3f}"),
      (all(back[lag] >= 0.85 * on for lag in stale),
       "the best cap ends at 0.85 of on-policy or more at every lag: "
       f"{', '.join(f'{back[lag]:.3f}' for lag in stale)} >= 0.85 x {on:.3f}"),
      (all(p.wins == p.n > 0 for p in tight),
       "no cap ends above C = 1 in every seed at every lag: differences "
       f"{name(p.difference.value for p in tight)} (n = {tight[0].n} seeds)"),
      (all(p.difference.value >= -0.02 for p in open_),
       "no cap ends no worse than C = 2, the usual value: differences "
       f"{name(p.difference.value for p in open_)} >= -0.02"),
  ]


def outcomes(summary: Sequence[Mapping], lag: float, with_cap: bool
             ) -> dict[float, stats.Estimate]:
  """Cap -> end less that of on-policy with the same seed, at a lag."""
  by = finals(summary)
  return {cap: stats.paired(seeds, by[0.0, NONE]).difference
          for (at, cap), seeds in by.items()
          if at == lag and (cap != NONE) == with_cap}
