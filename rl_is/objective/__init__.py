"""Floor 2: objectives as products of the pieces in `ops`, and their presets."""
