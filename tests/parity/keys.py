"""What the harness of the golden numbers adds to a peer's own config keys.

One literal table a peer: which keys are the harness's, and how a case that is a
helper called alone (an advantage, a KL estimate) is told from its config.
"""

HARNESS = {"nemo": ("sample_mask", "adv_const", "rewards"),
           "openrlhf": ("dp_size", "batch_num_tokens")}
# A helper called alone is told by a key that only it has.
HELPERS = {"nemo": {"kl_type": "kl or advantage",
                    "use_leave_one_out_baseline": "advantage",
                    "minus_baseline": "advantage", "gamma": "advantage"},
           "openrlhf": {"kl": "kl", "clip_eps": "value loss"}}
SYSTEM = {"nemo": "nemo_rl", "openrlhf": "openrlhf"}
