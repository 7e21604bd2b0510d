"""Tasks of the reasoning-gym library (extra `tasks`). Floor 2.

Entries are made once, from (data set, seed, index), and stored; an answer is
scored by the data set's own verifier against the stored entry. The library
has no locks and no signals in its verifiers, so they may run in any thread.

Limits, of reasoning-gym 0.1.25 and not hidden here:
- Some verifiers raise on an answer that they cannot parse, as
  prime_factorization, boxnet, coin_flip and game_of_life do; `base.reward`
  then raises too.
- Some hand the answer to Python's or sympy's eval: binary_matrix, n_queens,
  spiral_matrix, string_insertion; countdown, puzzle24, simple_integration,
  intermediate_integration, polynomial_multiplication. Text that a large model
  wrote then runs as code, with no time limit: use a sandbox.
"""

import dataclasses
import os

from rl_is.core import checks
from rl_is.tasks import base
from rl_is.tasks.hf_tokenizer import HfTokenizer
from rl_is.tasks.tokenizer import ByteTokenizer

# (name, seed, index) must give one entry on every host and after a resume.
# These draw from a generator that nobody seeds.
_UNSEEDED = ("codeio", "list_functions")
# These walk over sets of strings, whose order is salted per process.
_SALTED = ("intermediate_integration", "isomorphic_strings",
           "polynomial_multiplication", "ransom_note", "word_ladder")


def reasoning_gym_task(
    dataset: str, size: int = 2000, seed: int = 0,
    max_prompt_chars: int | None = None, tokenizer: str = "",
    template: str = "{prompt}", **dataset_kwargs) -> base.Task:
  """`size` entries of one data set, less repeated and too long prompts.

  tokenizer: a directory, see `hf_tokenizer`, as is the template; "": bytes.

  `dataset_kwargs` are fields of the library's config for that data set. An
  entry without an answer becomes a problem without a demonstration.
  """
  name = f"gym:{dataset}"
  source = _create(name, dataset, dict(dataset_kwargs, size=size, seed=seed))
  # By index: the library's iterator keeps its place in the data set itself.
  problems = [_problem(source[i]) for i in range(size)]
  short = [p for p in problems
           if max_prompt_chars is None or len(p.prompt) <= max_prompt_chars]
  if not short:
    shortest = min(len(p.prompt) for p in problems)
    raise ValueError(
        f"task {name!r}: max_prompt_chars={max_prompt_chars} leaves none of "
        f"{size} prompts; the shortest has {shortest}")
  train, heldout = base.split(short)

  def verify(problem: base.Problem, text: str) -> float:
    return source.score_answer(answer=text.strip(), entry=problem.entry)

  if not tokenizer and template != "{prompt}":
    raise ValueError(f"task {name!r}: template: needs a tokenizer")
  ids = HfTokenizer(tokenizer, template) if tokenizer else ByteTokenizer()
  return base.Task(name, ids, train, heldout, verify,
                   num_too_long=len(problems) - len(short))


def _problem(entry: dict) -> base.Problem:
  return base.Problem(entry["question"], entry["answer"] or "", entry)


def _create(name: str, dataset: str, config_kwargs: dict):
  """The library's data set; its complaints as one ValueError with the name."""
  factory = _import_factory()
  checks.choice("gym data set", dataset, factory.DATASETS)
  _check_reproducible(name, dataset)
  _check_arguments(name, config_kwargs, factory.DATASETS[dataset][1])
  try:
    return factory.create_dataset(dataset, **config_kwargs)
  except (AssertionError, TypeError, ValueError) as e:
    raise ValueError(f"task {name!r}: the library refuses {config_kwargs}: "
                     f"{type(e).__name__}: {e}") from e


def _import_factory():
  try:
    from reasoning_gym import factory  # an extra: only who asks for it pays
  except ImportError as e:
    raise ImportError("gym tasks need reasoning-gym: "
                      "pip install -e '.[tasks]'") from e
  return factory


def _check_arguments(name: str, config_kwargs: dict, config_cls: type) -> None:
  fields = [f.name for f in dataclasses.fields(config_cls)]
  unknown = [key for key in config_kwargs if key not in fields]
  if unknown:
    raise ValueError(
        f"task {name!r}: unknown arguments {', '.join(unknown)}; accepted: "
        f"max_prompt_chars, tokenizer, template, {', '.join(sorted(fields))}")
  # The library reads seed=None as "any".
  for key, low in dict(size=1, seed=0).items():
    value = config_kwargs[key]
    if type(value) is not int or value < low:
      raise ValueError(f"task {name!r}: {key}: expected an int >= {low}, "
                       f"got {value!r}")


def _check_reproducible(name: str, dataset: str) -> None:
  if dataset in _UNSEEDED:
    raise ValueError(f"task {name!r}: its entries do not follow from the "
                     "seed, so hosts and resumed runs would disagree")
  if dataset in _SALTED and os.environ.get(
      "PYTHONHASHSEED", "random") in ("", "random"):
    raise ValueError(f"task {name!r}: its entries depend on Python's string "
                     "hashing; start Python with PYTHONHASHSEED=0")
