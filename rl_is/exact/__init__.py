"""Floor 3: policies small enough to enumerate, where every expectation is exact."""
