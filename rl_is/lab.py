"""Bias, variance and cosine of estimators, exactly. Floor 4.

  python -m rl_is.lab                                    # the main ones, three samplers
  python -m rl_is.lab --estimators=token_tis,ppo,gspo --sweep='cap=1,2,5,inf' \
    --behaviours=noise:0.5,stale:8,round:0.5,temperature:0.9 --csv=lab.csv

The policy is small enough to enumerate (V^T sequences), so every expectation is a
sum: nothing is sampled, except for objectives that compare the sequences of a
batch, which have error bars.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags

from rl_is import tables
from rl_is.core import checks
from rl_is.core.types import Params
from rl_is.exact import enumerate as enum
from rl_is.exact import estimators, monte_carlo, policies
from rl_is.exact.policies import Policy
from rl_is.infra import progress
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model
from rl_is.objective import settings
from rl_is.objective.settings import Corrections

MAIN = tuple(settings.PLAIN)
BATCHES = (1, 64, 4096)  # sequences that a mean squared error is of
_BEHAVIOURS = ("noise", "stale", "round", "temperature", "top_p")


class Setting(NamedTuple):
  """A learner's policy, what it is rewarded for, and how it got there."""

  policy: Policy
  params: Params
  reward: Callable
  path: list[Params]  # of exact training: the last are the learner's
  seed: int = 0

  def behaviour(self, text: str) -> tuple[Policy, Params, int]:
    """"noise:0.5" -> (policy, parameters, how many updates it is behind)."""
    kind, colon, value = text.partition(":")
    checks.choice("behaviour", kind, _BEHAVIOURS)
    try:
      x = float(value)
      if not math.isfinite(x):
        raise ValueError
    except ValueError:
      raise ValueError(f"behaviour: expected {kind}:NUMBER, got {text!r}") from None
    if kind == "stale":
      if x != int(x) or not 0 <= x < len(self.path):
        raise ValueError(f"behaviour: {text}: expected 0 to {len(self.path) - 1} "
                         "updates, as many as the learner was trained for")
      return self.policy, self.path[-1 - int(x)], int(x)
    checks.in_range(f"behaviour: {kind}", x, 0.0, 1.0 if kind == "top_p" else
                    math.inf, closed=kind == "noise")
    if kind == "noise":
      return self.policy, policies.noisy(
          self.params, jax.random.key(self.seed + 1), x), 0
    if kind == "round":
      return self.policy, policies.rounded(self.params, x), 0
    other = policies.tempered if kind == "temperature" else policies.nucleus
    return other(self.policy), (x, self.params), 0


def setting(policy: str = "bigram", *, vocab: int = 4, length: int = 6,
            reward: str = "graded", steps: int = 8, learning_rate: float = 0.1,
            seed: int = 0) -> Setting:
  """A random policy of a kind, trained for `steps` updates by exact gradients."""
  makers = dict(tabular=policies.tabular, bigram=policies.bigram,
                transformer=_transformer)
  checks.choice("policy", policy, makers)
  enum.count(vocab, length)
  made, earned = makers[policy](vocab, length), policies.reward(reward)
  path = enum.ascend(made, made.init(jax.random.key(seed)), earned, steps=steps,
                     learning_rate=learning_rate)
  if not all(np.isfinite(x).all() for x in jax.tree.leaves(path[-1])):
    raise ValueError(f"lab: the learner's parameters are not finite after {steps} "
                     f"steps at learning_rate={learning_rate}")
  return Setting(made, path[-1], earned, path, seed)


def _transformer(vocab: int, length: int) -> Policy:
  return policies.transformer(Model(TransformerConfig(
      vocab_size=vocab, embed=8, layers=1, heads=2, kv_heads=2, head_dim=4,
      mlp=8)), length)


def table(names: Sequence[str] = MAIN, *, at: Setting | None = None,
          behaviours: Sequence[str] = ("noise:0.5",),
          sweep: Mapping[str, Sequence[float]] = {},
          corrections: Corrections = {}, batches: Sequence[int] = BATCHES,
          draws: int = 200, may_lose_support: bool = False) -> list[dict]:
  """A row an estimator, point of the sweep and behaviour policy.

  Args:
    names: of `estimators.named`: ours, presets, one's own corrections.
    at: the learner; `setting()` by default.
    behaviours: "noise:SD" and "round:STEP" of all parameters, "stale:UPDATES",
      "temperature:FACTOR", "top_p:MASS".
    sweep: constant -> values; each estimator takes those that it has.
    corrections: one's own, by name, as `train.run` takes them.
    batches: sequences that the mean squared errors are of.
    draws: batches that a sampled row is of (the largest of `batches`).
    may_lose_support: measure where the sampler never draws what the learner may.

  Returns:
    Rows of the divergences (`kl_qp`, `chi2`, `ess`: nats, of sequences), the
    swept constants, and relative to the exact gradient `bias`, `cosine`,
    `variance` (of one sequence) and `mse_N`. `method` is "exact" or "sampled":
    then `*_se` are standard errors, and `mse_N` is of one N alone.

  Raises:
    ValueError: an unknown name or constant; lost support.
  """
  for what, given in (("names", names), ("behaviours", behaviours),
                      ("batches", batches)):
    if not given:
      raise ValueError(f"lab: {what}: expected at least 1, got none")
  if min(batches) < 1:
    raise ValueError(f"lab: batches: expected sizes of at least 1, got {min(batches)}")
  at = setting() if at is None else at
  named = {name: estimators.named(name, corrections) for name in names}
  settings.check_swept(sweep, (objective for objective, _ in named.values()))
  exact = enum.gradient(at.policy, at.params, at.reward)
  out, done = [], 0
  with progress.Steps("lab", len(behaviours) * len(named)) as bar:
    for text in behaviours:
      q, q_params, lag = at.behaviour(text)
      sampler = (at.policy, at.params, q, q_params, at.reward)
      apart = enum.divergence(*sampler)
      if math.isnan(apart.ess):
        raise ValueError(f"behaviour: {text}: its weights are not finite numbers")
      head = dict(behaviour=text, kl_qp=float(apart.kl_qp),
                  chi2=float(apart.chi2), ess=float(apart.ess))
      for name, (objective, defaults) in named.items():
        points = settings.points(objective.spec, defaults, sweep,
                                 dict(objective.extra))
        if estimators.is_coupled(objective.spec, dict(objective.extra)):
          found = _sampled(sampler, objective, points, exact, batches, lag, draws)
        else:
          found = _exact(sampler, objective, points, exact, batches, lag,
                         may_lose_support)
        out += [dict(head, estimator=name,
                     **{k: p.get(k) for k in sweep}, **row)
                for p, row in zip(points, found)]
        done += 1
        bar.update(done, f"{text} {name}")
  return out


def _exact(sampler, objective, points, exact, batches, lag, may_lose_support):
  found = estimators.quality(estimators.moments(
      *sampler, objective, settings.stacked(points), lag=lag,
      may_lose_support=may_lose_support), exact)
  for i in range(len(points)):
    yield dict(method="exact", bias=float(found.bias[i]),
               cosine=float(found.cosine[i]), variance=float(found.variance[i]),
               **{f"mse_{n}": float(found.mse(n)[i]) for n in batches})


def _sampled(sampler, objective, points, exact, batches, lag, draws):
  batch = max(batches)
  for point in points:
    found = monte_carlo.sampled(*sampler, objective, point, exact, batch=batch,
                                draws=draws, group=1, lag=lag)
    yield dict(
        method="sampled", bias=found.bias.value, bias_se=found.bias.se,
        cosine=found.cosine.value, cosine_se=found.cosine.se,
        variance=batch * found.variance.value,
        variance_se=batch * found.variance.se,
        **{f"mse_{n}": found.mse.value if n == batch else float("nan")
           for n in batches})


def main() -> None:
  flags.DEFINE_enum("policy", "bigram", ["tabular", "bigram", "transformer"],
                    "Kind of the policy.")
  flags.DEFINE_integer("vocab", 4, "V.")
  flags.DEFINE_integer("length", 6, "T; V^T sequences are enumerated.")
  flags.DEFINE_enum("reward", "graded", sorted(policies.REWARDS), "Of a sequence.")
  flags.DEFINE_integer("steps", 8, "Exact updates that the learner has behind it.",
                       lower_bound=0)
  flags.DEFINE_float("learning_rate", 0.1, "Adam's, of these updates.")
  flags.DEFINE_integer("seed", 0, "Of the first parameters and of the noise.")
  flags.DEFINE_list("behaviours", ["noise:0.2", "noise:0.5", "stale:8"],
                    "noise:SD, round:STEP, stale:UPDATES, temperature:FACTOR, "
                    "top_p:MASS.")
  flags.DEFINE_list("estimators", list(MAIN), "Ours, or presets (`python -m "
                    "rl_is.main --list_presets`): "
                    + ", ".join(estimators.names()))
  flags.DEFINE_string("sweep", "", "'cap=1,2,inf;eps_high=0.1,0.2'.")
  flags.DEFINE_list("batches", list(map(str, BATCHES)),
                    "Sequences that the mean squared errors are of.")
  flags.DEFINE_integer("draws", 200, "Batches, where it has to be sampled.")
  flags.DEFINE_bool("may_lose_support", False, "Measure a sampler that never "
                    "draws what the learner may, as with top_p.")
  flags.DEFINE_string("csv", None, "Also write the rows there.")
  try:
    app.run(_main)
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")


def _main(argv) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected argument {argv[1]!r}")
  f = flags.FLAGS
  if f.csv and (os.path.isdir(f.csv) or not os.path.isdir(
      os.path.dirname(f.csv) or ".")):
    raise ValueError(f"--csv: expected a file in a folder that exists, got {f.csv}")
  rows = table(
      f.estimators, at=setting(
          f.policy, vocab=f.vocab, length=f.length, reward=f.reward,
          steps=f.steps, learning_rate=f.learning_rate, seed=f.seed),
      behaviours=f.behaviours, sweep=settings.parse_sweep(f.sweep),
      batches=[int(n) for n in f.batches], draws=f.draws,
      may_lose_support=f.may_lose_support)
  if f.csv:
    tables.write_csv(rows, f.csv)
  tables.show(rows, "relative to the exact gradient; variance of one sequence",
              hidden=["method"])


if __name__ == "__main__":
  main()
