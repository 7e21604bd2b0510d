"""The edges by their formulas. Floor 5."""

import math

from scipy.optimize import brentq

from experiments import sweep_figures


def kl(q, p):
  return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def kl_edge(q, delta=0.05):
  """The p above q at which the binary KL is delta."""
  return brentq(lambda p: kl(q, p) - delta, q, 1 - 1e-9)


def claims(data):
  step = math.exp(0.005) * (1 + 1e-9)  # of the grid of ratios
  by = {name: rows for (name,), rows in sweep_figures.by(data, "name").items()}
  # "last": the grid ends before probability 1.
  near = lambda found, edge, last: (
      edge / step <= found <= edge * (1 + 1e-4) or (found == last and edge >= last))
  ppo = all(near(r["up"], 1.2 * r["q"], r["last"]) for r in by["ppo"])
  tv = all(near(r["up"], r["q"] + 0.15, r["last"]) for r in by["dppo_tv"])
  by_kl = all(near(r["up"], kl_edge(r["q"]), r["last"]) for r in by["dppo_kl"])
  low = [r["down"] for r in by["dppo_tv"] if r["q"] < 0.15]
  ratio = {name: [r["up"] / r["q"] for r in (rows[0], rows[-2])]
           for name, rows in by.items()}
  rare, common = by["ppo"][0]["q"], by["ppo"][-2]["q"]
  return [
      (ppo, "PPO's edge is 1.2 q everywhere"),
      (tv, "DPPO-TV's is q + 0.15: a ratio of 1 + 0.15 / q"),
      (by_kl, "DPPO-KL's is where the binary KL is 0.05"),
      (all(x < 0.01 for x in low), "a token rarer than 0.15 may fall to nothing "
       "under DPPO-TV"),
      (ratio["dppo_tv"][0] > 20 * ratio["ppo"][0] and
       ratio["dppo_tv"][1] <= 1.01 * ratio["ppo"][1],
       f"at q = {rare:.3g} TV lets the ratio go to {ratio['dppo_tv'][0]:.0f}, at "
       f"{common:.2f} to {ratio['dppo_tv'][1]:.2f}; PPO to 1.2 at both")]
