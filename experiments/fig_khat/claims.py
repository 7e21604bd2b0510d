"""What k-hat warns of. Floor 5."""


def claims(pareto, lognormal):
  off = max(abs(r["khat"] - r["k"]) for r in pareto)
  khat = [r["khat"] for r in lognormal]
  over = {r["khat"]: r["ess_drawn"] / r["ess"] for r in lognormal}
  good = [r for r in lognormal if r["khat"] < 0.5]
  bad = [r for r in lognormal if r["khat"] > 0.7]
  return [
      (off < 0.15, f"k-hat finds the shape of a known tail to {off:.2f} < 0.15"),
      (khat == sorted(khat), "it rises with the variance of log w: "
       + ", ".join(f"{k:.2f}" for k in khat)),
      (max(r["error"] for r in good) < 0.1 and max(
          over[r["khat"]] for r in good) < 1.5,
       f"below 0.5 the mean weight is within {max(r['error'] for r in good):.3f} < "
       f"0.1, and ESS true within {max(over[r['khat']] for r in good):.2f} < 1.5"),
      (len(bad) >= 2 and min(r["error"] for r in bad) > 0.1 and min(
          over[r["khat"]] for r in bad) > 2,
       f"above 0.7 the mean is off by {min(r['error'] for r in bad):.2f} or more, and "
       f"the sample's ESS too good by {min(over[r['khat']] for r in bad):.0f} to "
       f"{max(over[r['khat']] for r in bad):.0f} times")]
