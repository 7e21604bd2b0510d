"""The weights by their formulas, written from the papers. Floor 5."""

import numpy as np

from experiments import sweep_figures

Q = 0.1  # as in `figure`


def closed(name: str, x: np.ndarray, sign: float) -> np.ndarray:
  """The weight on A x score at ratio x."""
  up = sign > 0
  inside = lambda on: np.where(on, x, 0.0)
  sigmoid = lambda z: 1 / (1 + np.exp(-z))
  p = np.minimum(x * Q, 1 - 1e-8)
  kl = Q * np.log(Q / (x * Q)) + (1 - Q) * np.log((1 - Q) / (1 - p))
  tau = 1.0 if up else 1.05
  gate = sigmoid(tau * (x - 1))
  k, lam = (2, 3) if up else (3, 2)
  moved_up, moved_down = x * Q - Q > 0.15, Q - x * Q > 0.15
  return {
      "pg": np.ones_like(x),
      "ppo": inside(x <= 1.2 if up else x >= 0.8),
      "dapo": inside(x <= 1.28 if up else x >= 0.8),
      "dual_clip": inside(x <= 1.2 if up else (x >= 0.8) & (x <= 3)),
      "two_sided": inside(x <= 1.2 if up else (x >= 0.8) & (x <= 4)),
      "cispo": np.minimum(x, 1.28), "tis": np.minimum(x, 2.0),
      "mis": inside(x <= 2), "icepop": inside((x >= 0.5) & (x <= 5)),
      "sapo": 4 * gate * (1 - gate) * x,
      "gmpo": inside(np.log(x) <= 0.4 if up else np.log(x) >= -0.4),
      "aspo": (np.where(x <= 1.2, np.minimum(1 / x, 3.0), 0.0) if up else
               inside((x >= 0.8) & (x <= 3))),
      "topr": np.ones_like(x) if up else np.minimum(x, 1.0),
      "vespo": x**k * np.exp(lam * (1 - x)),
      "dppo_tv": np.where(moved_up if up else moved_down, 0, np.minimum(x, 3)),
      "dppo_kl": np.where((kl > 0.05) & ((x > 1) if up else (x < 1)), 0,
                          np.minimum(x, 3)),
      # The pull to the anchor does not turn with A: divided by its sign.
      "dro": 1 - sign * 0.5 * np.log(x), "opmd": 1 - sign * 0.5 * np.log(x),
  }[name]


# Of methods.md 3.1, at these ratios.
_AT = (0.1, 0.5, 0.8, 1.0, 1.28, 2.0, 5.0, 6.0)
_TABLE = {
    ("ppo", 1.0): (0.1, 0.5, 0.8, 1, 0, 0, 0, 0),
    ("ppo", -1.0): (0, 0, 0.8, 1, 1.28, 2, 5, 6),
    ("cispo", 1.0): (0.1, 0.5, 0.8, 1, 1.28, 1.28, 1.28, 1.28),
    ("tis", 1.0): (0.1, 0.5, 0.8, 1, 1.28, 2, 2, 2),
    ("icepop", 1.0): (0, 0.5, 0.8, 1, 1.28, 2, 5, 0),
    ("sapo", 1.0): (0.082, 0.470, 0.792, 1, 1.255, 1.573, 0.353, 0.160),
    ("sapo", -1.0): (0.081, 0.467, 0.791, 1, 1.253, 1.536, 0.291, 0.125),
    ("vespo", 1.0): (0.149, 1.120, 1.166, 1, 0.707, 0.199, 0.0002, 0),
    ("vespo", -1.0): (0.006, 0.340, 0.764, 1, 1.198, 1.083, 0.042, 0.010)}


def claims(data) -> list[tuple[bool, str]]:
  curves = {key: (np.array([r["ratio"] for r in rows]),
                  np.array([r["weight"] for r in rows]))
            for key, rows in sweep_figures.by(data, "name", "sign").items()}
  # At a corner itself the derivative is either side's.
  corners = (0.8, 1.2, 1.28, 2.0, 3.0, 4.0, 5.0, 0.5)
  off, where = max((float(np.max(np.abs(w - closed(name, x, sign))[
      ~np.isclose(x[:, None], corners).any(axis=1)])), f"{name} {sign:+.0f}")
      for (name, sign), (x, w) in curves.items())
  table = max(abs(w[np.argmin(np.abs(x - at))] - value)
              for key, values in _TABLE.items() for at, value in zip(_AT, values)
              for x, w in [curves[key]]
              if at not in corners or key[0] in ("sapo", "vespo", "cispo"))
  at_one = max(abs(np.interp(1.0, x, w) - 1) for x, w in curves.values())
  return [
      (off < 1e-6, f"autodiff = closed form for {len(curves)} curves: largest "
       f"difference {off:.1e} ({where}) < 1e-6"),
      (table < 6e-4, "the table of weights in the literature holds to its digits: "
       f"{table:.1e} < 6e-4"),
      (at_one < 1e-9, "every surrogate weighs A x score by 1 on-policy: "
       f"{at_one:.1e} < 1e-9")]
