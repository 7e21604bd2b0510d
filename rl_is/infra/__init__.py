"""Floor 2: mesh, randomness, checkpoints, metrics, progress."""
