"""What the replay answers. Floor 5."""

import math


def claims(data, apart):
  at = lambda name, cap=None: next(r for r in data if r["objective"] == name
                                   and r["cap"] == cap)
  none, ppo, gspo = at("none"), at("ppo"), at("gspo")
  tis = {r["cap"]: r for r in data if r["objective"] == "token_tis"}
  seq = {r["cap"]: r for r in data if r["objective"] == "sequence_tis"}
  caps = sorted(seq)
  inert = [c for c in caps if tis[c]["capped"] == 0]
  lowest = min(r["ess"] for r in seq.values())
  drop = ppo["clip_low"] + ppo["clip_high"]
  return [
      (apart[0]["lag_mean"] >= 8, f"the data are stale: {apart[0]['lag_mean']:.1f} "
       f"updates in the mean, KL {apart[0]['is/kl_k1']:.3f} nats a token"),
      (lowest > 0.5 and seq[caps[0]]["ess"] > seq[math.inf]["ess"],
       "which cap keeps ESS above 0.5? any, and none too: "
       f"{seq[math.inf]['ess']:.2f} without one, {seq[caps[0]]['ess']:.2f} at 1"),
      (bool(inert) and min(inert) > 2, "where is a token cap inert? from "
       f"C = {min(inert, default=math.nan):g}; C = 2 cuts "
       f"{tis[2.0]['capped']:.1%} of the tokens"),
      (0 < drop < 0.15, f"what did the run's own clip touch? {drop:.1%} of the tokens "
       f"({ppo['clip_low']:.1%} from below, {ppo['clip_high']:.1%} from above)"),
      (gspo["dropped"] > 0.4, "GSPO's published bounds, for answers of thousands of "
       f"tokens, would drop {gspo['dropped']:.0%} of these"),
      (none["cosine"] + 2 * none["cosine_se"] < tis[2.0]["cosine"],
       f"without a weight the cosine with the unbiased gradient is "
       f"{none['cosine']:.2f} +- {none['cosine_se']:.2f}, with C = 2 "
       f"{tis[2.0]['cosine']:.3f}"),
      (tis[1.0]["grad_norm"] < 0.8 * tis[math.inf]["grad_norm"],
       "a cap shortens more than it turns: at C = 1 the norm is "
       f"{tis[1.0]['grad_norm'] / tis[math.inf]['grad_norm']:.2f} of the uncapped, "
       f"the cosine {tis[1.0]['cosine']:.3f}")]
