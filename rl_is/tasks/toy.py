"""Tasks that need no data and have an exact verifier. Floor 2.

Prompts and answers are a few tokens long, for models that train on a CPU.
"""

import itertools
import random
import string
from collections.abc import Iterator

from rl_is.tasks import base
from rl_is.tasks import tokenizer

_MAX_DIGITS = 3
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_SYLLABLES = tuple(c + v for c in _CONSONANTS for v in _VOWELS)
_WORDS_SEED = 20240229


def addition(digits: int = 2) -> base.Task:
  """a + b for all a, b < 10**digits, least significant digit first.

  "73+85=" (37 + 58) is answered "59" (95): each digit of the sum then depends
  on digits already read and one carry. Terms are padded with zeros, sums are
  not. a+b and b+a are different prompts and may be on different sides.
  """
  if type(digits) is not int or not 1 <= digits <= _MAX_DIGITS:
    raise ValueError(
        f"addition: digits: expected an int in 1..{_MAX_DIGITS} (all "
        f"100**digits pairs are enumerated), got {digits!r}")
  problems = (
      base.Problem(f"{_reversed(a, digits)}+{_reversed(b, digits)}=",
                   _reversed(a + b, 1))
      for a, b in itertools.product(range(10**digits), repeat=2))
  train, heldout = base.split(problems)
  return _task("addition", "0123456789+=", train, heldout)


def spell_backward(
    num_words: int = 4096, min_len: int = 3, max_len: int = 6) -> base.Task:
  """A made-up word, to be spelled backward: "bako=" is answered "okab"."""
  _check_words(num_words, min_len, max_len)
  words = itertools.islice(_distinct_words(min_len, max_len), num_words)
  train, heldout = base.split(base.Problem(f"{w}=", w[::-1]) for w in words)
  return _task("spell_backward", string.ascii_lowercase + "=", train, heldout)


def _task(name: str, alphabet: str, train, heldout) -> base.Task:
  chars = tokenizer.CharTokenizer(alphabet)
  longest = max(len(p.answer) for p in train + heldout)
  return base.Task(name, chars, train, heldout, _exact,
                   arrays=base.ExactArrays(chars, longest))


def _exact(problem: base.Problem, text: str) -> float:
  return float(text.strip() == problem.answer)


def _reversed(number: int, digits: int) -> str:
  return f"{number:0{digits}d}"[::-1]


def _check_words(num_words: int, min_len: int, max_len: int) -> None:
  if not 1 <= min_len <= max_len:
    raise ValueError("spell_backward: expected 1 <= min_len <= max_len, got "
                     f"min_len={min_len}, max_len={max_len}")
  num_possible = sum(_num_words(n) for n in range(min_len, max_len + 1))
  # Above a half, drawing until a new word comes takes ever longer.
  if not 1 <= num_words <= num_possible // 2:
    raise ValueError(
        f"spell_backward: num_words: expected 1..{num_possible // 2} (half of "
        f"the words of {min_len}..{max_len} letters), got {num_words}")


def _num_words(length: int) -> int:
  return len(_SYLLABLES)**(length // 2) * len(_CONSONANTS)**(length % 2)


def _distinct_words(min_len: int, max_len: int) -> Iterator[str]:
  """Endless; asking for more words leaves the first ones as they were."""
  rng = random.Random(_WORDS_SEED)

  def draw(n: int) -> int:
    # Of random.Random only random() is promised the same on every Python.
    return int(rng.random() * n)

  seen = set()
  while True:
    length = min_len + draw(max_len - min_len + 1)
    num_syllables = (length + 1) // 2
    word = "".join(_SYLLABLES[draw(len(_SYLLABLES))]
                   for _ in range(num_syllables))[:length]
    if word not in seen:
      seen.add(word)
      yield word
