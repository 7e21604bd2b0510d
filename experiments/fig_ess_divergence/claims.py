"""ESS, KL and chi-square of the same pairs. Floor 5."""

import math


def claims(data):
  off = max(abs(r["ess"] - 1 / (1 + r["chi2"])) for r in data)
  above = max(r["ess"] - math.exp(-r["kl_pq"]) for r in data)
  near = [r for r in data if r["kl_qp"] < 0.02]
  close = max(abs(r["ess"] - math.exp(-2 * r["kl_qp"])) for r in near)
  ratio = [math.log(r["ess"]) / (-2 * r["kl_qp"]) for r in data if r["kl_qp"] > 0.2]
  return [
      (off < 1e-9, f"ESS / N = 1 / (1 + chi2) in every setting: {off:.1e} < 1e-9"),
      (above < 1e-12, "ESS / N never passes exp(-KL(learner || sampler)), as Jensen has it: by "
       f"{above:.1e} < 1e-12"),
      (close < 0.03, f"for KL < 0.02 exp(-2 KL) is good to {close:.3f} < 0.03"),
      (min(ratio) < 0.9 and max(ratio) > 1.3, "farther away it is a guess: log ESS "
       f"is {min(ratio):.2f} to {max(ratio):.2f} times -2 KL where KL > 0.2")]
