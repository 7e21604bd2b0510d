"""The fixed point of V-trace. Floor 5."""


def claims(data):
  off = max(abs(r["found"] - r["closed"]) for r in data if r["rho_bar"] > 0.1)
  high = max(abs(r["found"] - r["target"]) for r in data
             if r["rho_bar"] > r["largest"])
  low = max(abs(r["closed"] - r["behaviour"]) for r in data
            if r["rho_bar"] < r["smallest"])
  by = {}
  for r in sorted(data, key=lambda r: r["rho_bar"]):
    by.setdefault(r["seed"], []).append(r["distance"])
  falls = all(b <= a + 1e-12 for d in by.values() for a, b in zip(d, d[1:]))
  one = [min(d for r in data if r["seed"] == s
             for d in [r["distance"]] if 0.8 < r["rho_bar"] < 1.3) for s in by]
  return [
      (off < 1e-8, "iterated, V-trace ends at the value of min(rho q, p): "
       f"{off:.1e} < 1e-8 for rho-bar > 0.1"),
      (high < 1e-8, "above the largest ratio that is the learner's own value: "
       f"{high:.1e} < 1e-8"),
      (low < 1e-8, f"below the smallest it is the sampler's: {low:.1e} < 1e-8"),
      (falls, "the policy only comes nearer to the learner's as rho-bar grows"),
      (min(one) > 0.02, "at the usual rho-bar of 1 it is not the learner's: total "
       f"variation {min(one):.2f} or more")]
