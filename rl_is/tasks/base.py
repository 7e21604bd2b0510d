"""What a task is: problems, a split, a verifier, a reward. Floor 2.

The tasks themselves are in toy.py and gym.py; batching, sampling and the
length of an answer are not here.
"""

import dataclasses
import functools
import hashlib
import math
import numbers
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np

from rl_is.core.types import Array
from rl_is.tasks import tokenizer as tokenizer_lib


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
  """A prompt, a demonstration, and what the verifier needs besides.

  `answer` scores 1.0 and is what a supervised warm start trains on; "" says
  that there is no demonstration (the problem can still be sampled and scored).
  """
  prompt: str
  answer: str
  entry: object = dataclasses.field(default=None, hash=False)


@dataclasses.dataclass(frozen=True)
class ExactArrays:
  """A verifier as arrays, for programs that hold a whole training run.

  1 where the answer's text is the demonstration's, else 0: of tokenizers with an
  id a character.
  """
  tokenizer: tokenizer_lib.CharTokenizer
  width: int  # of the longest demonstration

  def answer(self, problem: Problem) -> np.ndarray:
    """[A] ids, -1 behind the last."""
    ids = self.tokenizer.encode(problem.answer)
    return np.asarray(ids + [-1] * (self.width - len(ids)), np.int32)

  def reward(self, tokens: Array, mask: Array, answers: Array) -> Array:
    """tokens, mask [B, T] of the sampled answers; answers [B, A] -> [B]."""
    eos = jnp.asarray(self.tokenizer.eos_ids)[None, None]
    is_eos = mask & (tokens[..., None] == eos).any(axis=-1)
    before = jnp.cumsum(is_eos, axis=1) == 0
    said = mask & before & (tokens >= self.tokenizer.num_special)
    place = jnp.cumsum(said, axis=1) - 1
    wanted = jnp.take_along_axis(
        answers, jnp.clip(place, 0, self.width - 1), axis=1)
    right = jnp.where(said, (tokens == wanted) & (place < self.width), True)
    whole = said.sum(axis=1) == (answers >= 0).sum(axis=1)
    return (right.all(axis=1) & whole).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Task:
  """Problems on two disjoint sides and a verifier.

  `verify(problem, text)` is a score, or None where it cannot score (it
  abstains). It is called from several threads. Read it through `reward`.
  `arrays`, if there is one, gives the same scores inside a program.
  """
  name: str
  tokenizer: tokenizer_lib.Tokenizer
  train: tuple[Problem, ...]
  heldout: tuple[Problem, ...]
  verify: Callable[[Problem, str], float | None]
  num_too_long: int = 0  # problems left out by a limit on the prompt
  arrays: ExactArrays | None = None

  def __post_init__(self):
    if not self.train:
      raise ValueError(f"task {self.name!r}: train: expected at least 1 problem, "
                       "got none")
    # `split` cannot fail this; two sides put together by hand can.
    shared = {p.prompt for p in self.train} & {p.prompt for p in self.heldout}
    if shared:
      raise ValueError(f"task {self.name!r}: {len(shared)} prompts are both in "
                       f"train and heldout, among them {short(min(shared))}")

  @functools.cached_property
  def max_prompt_tokens(self) -> int:
    """Longest encoded prompt of both sides, its BOS included."""
    return max(len(self.tokenizer.encode_prompt(p.prompt))
               for p in self.train + self.heldout)

  @functools.cached_property
  def max_answer_tokens(self) -> int:
    """Longest encoded demonstration of both sides, plus one EOS."""
    lengths = [len(self.tokenizer.encode(p.answer)) + 1
               for p in self.train + self.heldout if p.answer]
    if not lengths:
      raise ValueError(f"task {self.name!r}: no problem has a demonstration, "
                       "so the answer length must be given by hand")
    return max(lengths)


def split(
    problems: Iterable[Problem], heldout_fraction: float = 0.1,
) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
  """(train, heldout): the side is a function of the prompt's text alone.

  So no prompt can be on both, whatever the order, the size or the seed of the
  list; a bigger list leaves every prompt where it was. A repeated prompt is
  kept once (its first problem). The fraction is met only on average.
  """
  sides = {False: {}, True: {}}
  for problem in problems:
    side = sides[_unit_hash(problem.prompt) < heldout_fraction]
    side.setdefault(problem.prompt, problem)
  train, heldout = (tuple(sides[s].values()) for s in (False, True))
  if not train or not heldout:
    raise ValueError(
        f"split: heldout_fraction={heldout_fraction} of "
        f"{len(train) + len(heldout)} distinct prompts left {len(train)} for "
        f"train and {len(heldout)} for heldout; both need at least 1")
  return train, heldout


def reward(task: Task, problem: Problem, text: str) -> float:
  """The verifier's score as a float; NaN where it abstained (None)."""
  at = where(task, problem)
  try:
    value = task.verify(problem, text)
  except Exception as e:
    # Never a silent 0: a broken verifier would look like a bad policy.
    raise raised(task, problem, text, e) from e
  if value is None:
    return math.nan
  if not isinstance(value, (numbers.Real, np.bool_)) or not math.isfinite(
      value):
    raise ValueError(f"{at}: expected a finite number or None from the "
                     f"verifier, got {value!r}")
  return float(value)


def raised(task: Task, problem: Problem, text: str, error: BaseException
           ) -> RuntimeError:
  return RuntimeError(
      f"{where(task, problem)}: the verifier raised {type(error).__name__}: "
      f"{error} on the answer {short(text)}")


def where(task: Task, problem: Problem) -> str:
  """Which task and prompt, for an error."""
  return f"task {task.name!r}: prompt {short(problem.prompt)}"


def _unit_hash(text: str) -> float:
  """A number in [0, 1), the same on every machine (`hash` is salted)."""
  digest = hashlib.blake2b(text.encode("utf-8"), digest_size=6).digest()
  return int.from_bytes(digest, "big") / 2**48


def short(text: str, limit: int = 120) -> str:
  """Quoted; cut, as prompts may be pages long."""
  return repr(text if len(text) <= limit else text[:limit] + "...")
