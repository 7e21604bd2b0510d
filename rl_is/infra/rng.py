"""Randomness is derived, never carried. Floor 2.

A key is a function of the run's seed, a purpose, and counters that the work
itself defines (update number, prompt cursor). So draws do not depend on hosts,
batch slots, resumption or placement, and nothing about them is checkpointed.
"""

import jax

from rl_is.core import checks

# A number, once given, is never given to another purpose.
PURPOSES = dict(init=0, warm_start=1, sample=2, learner=3, evaluate=4,
                mismatch=5)


def key(seed: int, purpose: str, *counters: int) -> jax.Array:
  """fold_in(seed, purpose), then the counters one after another."""
  checks.choice("rng.key: purpose", purpose, PURPOSES)
  k = jax.random.fold_in(jax.random.key(seed), PURPOSES[purpose])
  for counter in counters:
    k = jax.random.fold_in(k, counter)
  return k
