"""Floor 3: the host-side generator loop: weights in, rollouts out."""
