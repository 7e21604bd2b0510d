"""Floor 3: the learner's state, optimizer and update step."""
