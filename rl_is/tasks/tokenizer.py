"""Text <-> token ids for the small tasks: characters or bytes. Floor 2.

Ids: pad 0, bos 1, eos 2, then one id a character (or byte). Nothing outside
this file may read a length or a mask from token values: an answer is as long
as the sampler says, and a policy is free to write the pad id in the middle.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator

from rl_is.tasks.hf_tokenizer import HfTokenizer

_PAD, _BOS, _EOS = 0, 1, 2
_NUM_SPECIAL = 3


def _check_eos(tokenizer: "Tokenizer") -> None:
  """At least one EOS, each a token that may end an answer."""
  eos = tokenizer.eos_ids
  if not isinstance(eos, tuple) or not eos or any(
      not _EOS <= i < tokenizer.vocab_size for i in eos):
    raise ValueError(
        f"eos_ids: expected a tuple of one or more ids in [{_EOS}, "
        f"{tokenizer.vocab_size}), got {eos!r}")


def _answer_ids(tokenizer: "Tokenizer", ids: Iterable[int]) -> Iterator[int]:
  """The ids that stand for text, up to the first EOS.

  Pad and BOS inside an answer are sampled tokens like any other; they stand
  for no text, so they are skipped. Ids after the EOS are not looked at.
  """
  for raw in ids:
    i = operator.index(raw)  # numpy integers too; a float is a mistake
    if not 0 <= i < tokenizer.vocab_size:
      raise ValueError(f"decode: id {i} is outside the vocabulary "
                       f"[0, {tokenizer.vocab_size})")
    if i in tokenizer.eos_ids:
      return
    if i >= _NUM_SPECIAL:
      yield i


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
  """One id a character of `alphabet`, in its order.

  `eos_ids`: any of them ends an answer. A character's id may be one of them
  (as a chat model's turn marker is); the first is what demonstrations end on.
  """
  alphabet: str
  eos_ids: tuple[int, ...] = (_EOS,)

  pad_id = _PAD
  bos_id = _BOS
  num_special = _NUM_SPECIAL  # ids below it stand for no character

  def __post_init__(self):
    if not self.alphabet:
      raise ValueError("alphabet: expected at least one character, got ''")
    if len(set(self.alphabet)) != len(self.alphabet):
      raise ValueError(f"alphabet: a character is repeated in "
                       f"{self.alphabet!r}")
    _check_eos(self)

  @property
  def vocab_size(self) -> int:
    return _NUM_SPECIAL + len(self.alphabet)

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    return {c: i for i, c in enumerate(self.alphabet, _NUM_SPECIAL)}

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone: no BOS, no EOS."""
    try:
      return [self._ids[c] for c in text]
    except KeyError as e:
      raise ValueError(f"encode: character {e.args[0]!r} is not in the "
                       f"alphabet {self.alphabet!r}") from None

  def encode_prompt(self, text: str) -> list[int]:
    """Exactly one BOS, then the text."""
    return [self.bos_id, *self.encode(text)]

  def decode(self, ids: Iterable[int]) -> str:
    """Text before the first EOS; pad and BOS stand for nothing."""
    return "".join(self.alphabet[i - _NUM_SPECIAL]
                   for i in _answer_ids(self, ids))


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
  """One id a UTF-8 byte: every text has an encoding, 259 ids in all."""
  eos_ids: tuple[int, ...] = (_EOS,)

  pad_id = _PAD
  bos_id = _BOS
  vocab_size = _NUM_SPECIAL + 256

  def __post_init__(self):
    _check_eos(self)

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone: no BOS, no EOS."""
    return [_NUM_SPECIAL + b for b in text.encode("utf-8")]

  def encode_prompt(self, text: str) -> list[int]:
    """Exactly one BOS, then the text."""
    return [self.bos_id, *self.encode(text)]

  def decode(self, ids: Iterable[int]) -> str:
    """Text before the first EOS; bytes that are not UTF-8 become U+FFFD."""
    raw = bytes(i - _NUM_SPECIAL for i in _answer_ids(self, ids))
    return raw.decode("utf-8", errors="replace")


Tokenizer = CharTokenizer | ByteTokenizer | HfTokenizer
