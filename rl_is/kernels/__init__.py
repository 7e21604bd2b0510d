"""Floor 1: the logit transform and the log-prob of sampled tokens. jax only."""
