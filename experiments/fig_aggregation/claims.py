"""Weights by hand: 8 answers of 1, 2, 4, ..., 128 tokens, 255 in all. Floor 5."""

from experiments import sweep_figures


def claims(data):
  by = {name: {r["length"]: r for r in rows} for (name,), rows in
        sweep_figures.by(data, "name").items()}
  hand = {
      "token_mean": lambda T: 1 / 255,
      "sequence_mean_token_mean": lambda T: 1 / (8 * T),
      "sequence_mean_token_sum": lambda T: 1 / 8,
      "constant_length": lambda T: 1 / (8 * 128),
      # Prompts of 1 + 2 + 4 + 8 = 15 and 16 + ... + 128 = 240 tokens.
      "prompt_mean": lambda T: 1 / (2 * (15 if T <= 8 else 240))}
  off = {name: max(abs(r["weight"] / hand[name](T) - 1) for T, r in rows.items())
         for name, rows in by.items()}
  share = lambda name: by[name][128]["share"]
  even = by["sequence_mean_token_mean"]
  return [
      (max(off.values()) < 1e-6, f"all five are as by hand: {max(off.values()):.1e} "
       "< 1e-6"),
      (len({round(r["answer"], 7) for r in even.values()}) == 1,
       "a mean of means gives every answer 1/8, so a token of 128 weighs 1/128 of "
       "one that stands alone"),
      (abs(share("token_mean") - 128 / 255) < 1e-6 and abs(
          share("sequence_mean_token_sum") - share("token_mean")) < 1e-6
       and abs(share("constant_length") - share("token_mean")) < 1e-6,
       "token_mean, token sums and a constant length weigh tokens alike: the longest "
       f"answer has {share('token_mean'):.0%} of the loss, against "
       f"{share('sequence_mean_token_mean'):.1%}; they differ in scale alone")]
