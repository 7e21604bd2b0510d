"""Floor 2: the policy network, scoring and sampling.

Flax NNX modules live in `transformer.py` and nowhere else: outside, parameters
are a plain nested dict of arrays and a model is a set of pure functions.
"""
