"""Which estimator is right about what. Floor 5."""


def curve(data, panel, name, weighted, what):
  return {r["sd"]: r[what] for r in data if r["panel"] == panel
          and r["name"] == name and r["weighted"] == weighted}


def claims(data):
  on = lambda name, what: curve(data, "on", name, False, what)
  off = lambda name, what, w: curve(data, "off", name, w, what)
  values = max(*on("k1", "bias").values(), *on("k3", "bias").values())
  far = max(on("k2", "bias"))
  spread = {sd: on("k1", "spread")[sd] / on("k3", "spread")[sd] for sd in
            on("k1", "spread")}
  k2 = max(on("k2", "gradient").values())
  k1 = min(on("k1", "gradient").values())
  near = min(on("k3", "gradient"))
  fixed = max(*off("k1", "bias", True).values(), *off("k3", "bias", True).values())
  fixed_grad = max(off("k3", "gradient", True).values())
  return [
      (values < 1e-9, f"on-policy k1 and k3 are unbiased: {values:.1e} < 1e-9"),
      (0.02 < on("k2", "bias")[far] < 1 and on("k2", "bias")[min(spread)] < 0.02,
       f"k2 is biased, by {on('k2', 'bias')[far]:.1%} of the KL at sd {far:g}, by "
       f"{on('k2', 'bias')[min(spread)]:.2%} at {min(spread):g}"),
      (all(s > 1.2 for s in spread.values()),
       f"k3 is steadier than k1: by {min(spread.values()):.1f} to "
       f"{max(spread.values()):.0f} times in standard deviation"),
      (k2 < 1e-9 and abs(k1 - 1) < 1e-9, "but as losses k2 alone has the KL's "
       f"gradient ({k2:.1e}); k1's is zero in the mean (error {k1:.2f})"),
      (on("k3", "gradient")[near] < 0.05 < 0.3 < on("k3", "gradient")[far],
       f"and k3's is good only near: {on('k3', 'gradient')[near]:.1%} off at sd "
       f"{near:g}, {on('k3', 'gradient')[far]:.0%} at {far:g}"),
      (min(off(n, "bias", False)[far] for n in ("k1", "k2", "k3")) > 0.1,
       "off-policy each is biased: by "
       + ", ".join(f"{off(n, 'bias', False)[far]:.0%}" for n in ("k1", "k2", "k3"))
       + f" at sd {far:g}"),
      (fixed < 1e-9 and fixed_grad < 1e-9, "times p/q (DeepSeek-V3.2) k1 and k3 are "
       f"unbiased again, and so is k3's gradient: {fixed:.1e}, {fixed_grad:.1e}")]
