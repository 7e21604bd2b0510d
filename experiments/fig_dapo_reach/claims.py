"""What a clip lets a probability reach. Floor 5."""

import math


def claims(data):
  # Where the bound binds before probability 1, up to one step beyond it:
  # d log p = (1 - p) d logit < 0.02.
  room = [r for r in data if (1 + r["eps"]) * r["start"] < 0.95]
  off = [math.log(r["reached"] / ((1 + r["eps"]) * r["start"])) for r in room]
  gain = {(r["eps"], r["start"]): r["reached"] - r["start"] for r in data}
  rare, common = min(s for _, s in gain), max(
      s for e, s in gain if (1 + e) * s < 0.95)
  free = [r for r in data if (1 + r["eps"]) * r["start"] > 1.05]
  wide, tight = max(e for e, _ in gain), min(e for e, _ in gain)
  return [
      (min(off) > -1e-6 and max(off) < 0.02, "a clipped probability ends at "
       f"(1 + eps) p, at most one update beyond: {min(off):+.4f} to "
       f"{max(off):+.4f} nats"),
      (gain[tight, rare] < 1e-3 < 0.05 < gain[tight, common],
       f"p = {rare:.3f} can gain {gain[tight, rare]:.4f}, p = {common:.2f} "
       f"{gain[tight, common]:.2f}"),
      (all(r["reached"] > r["start"] and r["reached"] > 0.98 for r in free),
       "p above 1 / (1 + eps) is not bounded at all"),
      (all(gain[wide, s] >= gain[tight, s] for _, s in gain),
       f"a higher bound ({wide:g} for {tight:g}) gives every token more room")]
