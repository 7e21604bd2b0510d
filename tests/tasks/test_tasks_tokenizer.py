"""Characters and bytes: literal ids, several EOS ids, pad inside an answer."""

import numpy as np
import pytest

from rl_is.tasks import tokenizer


def test_char_ids_by_hand():
  tok = tokenizer.CharTokenizer("ab=")
  assert (tok.pad_id, tok.bos_id, tok.eos_ids) == (0, 1, (2,))
  assert tok.vocab_size == 6  # 3 specials, a=3, b=4, '='=5
  assert tok.encode("ba=") == [4, 3, 5]
  assert tok.encode("") == []
  assert tok.decode([4, 3, 5]) == "ba="


@pytest.mark.parametrize("tok", [
    tokenizer.CharTokenizer("ab="), tokenizer.ByteTokenizer()])
def test_prompt_has_exactly_one_bos(tok):
  ids = tok.encode_prompt("ab=")
  assert ids == [1, *tok.encode("ab=")]
  assert ids.count(tok.bos_id) == 1
  assert tok.encode_prompt("") == [1]


def test_byte_ids_by_hand():
  tok = tokenizer.ByteTokenizer()
  assert tok.vocab_size == 259
  assert tok.encode("A\n") == [68, 13]  # 65 + 3, 10 + 3
  assert tok.encode("é") == [0xC3 + 3, 0xA9 + 3]
  text = "π = 3.14\t\x00 and 漢字 🙂"
  assert tok.decode(tok.encode(text)) == text


def test_bytes_that_are_no_utf8_are_replaced():
  tok = tokenizer.ByteTokenizer()
  assert tok.decode([68, 0xC3 + 3]) == "A\ufffd"
  assert tok.decode([68, 0xFF + 3, 69]) == "A\ufffdB"


def test_decode_stops_at_first_eos():
  tok = tokenizer.CharTokenizer("ab")
  assert tok.decode([3, 2, 4, 4]) == "a"
  assert tok.decode([2, 3]) == ""
  # What lies after the EOS is padding of any kind.
  assert tok.decode([3, 2, -7, 99]) == "a"


@pytest.mark.parametrize("eos", [2, 4, 5])
def test_each_of_several_eos_ids_ends_the_answer(eos):
  tok = tokenizer.CharTokenizer("a<>", eos_ids=(2, 4, 5))
  assert tok.decode([3, 3, eos, 3]) == "aa"


def test_decode_skips_pad_and_bos_inside_an_answer():
  tok = tokenizer.CharTokenizer("ab")
  assert tok.decode([3, 0, 4, 1, 3]) == "aba"
  assert tok.decode([0, 0]) == ""


def test_decode_takes_numpy_but_no_floats():
  tok = tokenizer.CharTokenizer("ab")
  assert tok.decode(np.array([3, 4, 2], np.int32)) == "ab"
  with pytest.raises(TypeError):
    tok.decode([3.0])


def test_unknown_character_is_named_with_the_alphabet():
  with pytest.raises(ValueError, match="'x'.*'ab='"):
    tokenizer.CharTokenizer("ab=").encode("abx")


@pytest.mark.parametrize("tok,bad", [
    (tokenizer.CharTokenizer("ab"), 5), (tokenizer.CharTokenizer("ab"), -1),
    (tokenizer.ByteTokenizer(), 259)])
def test_id_outside_the_vocabulary_is_an_error(tok, bad):
  with pytest.raises(ValueError, match=f"id {bad} is outside"):
    tok.decode([3, bad])


def test_bad_alphabets_and_eos_ids():
  with pytest.raises(ValueError, match="at least one"):
    tokenizer.CharTokenizer("")
  with pytest.raises(ValueError, match="repeated"):
    tokenizer.CharTokenizer("aba")
  for eos_ids in ((), (0,), (1, 2), (5,), [2]):
    with pytest.raises(ValueError, match="eos_ids"):
      tokenizer.CharTokenizer("ab", eos_ids=eos_ids)


def test_equal_tokenizers_are_equal_and_hashable():
  a, b = tokenizer.CharTokenizer("ab"), tokenizer.CharTokenizer("ab")
  a.encode("a")  # the cached table is no part of the value
  assert a == b and hash(a) == hash(b)
