"""Where we depart from a peer on purpose: (peer, condition, reason).

The suite checks that a covered case really differs (or is really refused).
"""


def _overflowed_sequence_weight(config, inputs):
  """exp(sum(old - behaviour)) beyond float32 becomes 0 there, stays here."""
  if not (config.get("sequence_level_importance_ratios")
          and config.get("use_importance_sampling_correction")):
    return False
  total = ((inputs["old"] - inputs["behav"]) * inputs["mask"]).sum(axis=1)
  return (total > 80).any()


RULES = [
    ("nemo", lambda config, inputs: config.get("positive_example_nll_weight"),
     "a supervised term on good answers is no off-policy objective"),
    ("nemo", _overflowed_sequence_weight,
     "a weight that overflows is turned into 0 by nan_to_num"),
]


def reason(peer, config, inputs):
  for name, condition, why in RULES:
    if name == peer and condition(config, inputs):
      return why
  return None
