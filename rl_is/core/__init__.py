"""Floor 0: pytree types, masked reductions, checks. Imports jax only."""
