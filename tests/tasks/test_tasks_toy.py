"""Addition and words: literal problems, demonstrations, determinism."""

import dataclasses

import numpy as np
import pytest

from rl_is.tasks import base
from rl_is.tasks import toy


def _by_prompt(task):
  return {p.prompt: p for p in task.train + task.heldout}


@pytest.fixture(scope="module")
def addition():
  return toy.addition()


@pytest.fixture(scope="module")
def words():
  return toy.spell_backward()


@pytest.mark.parametrize("prompt,answer", [
    ("73+85=", "59"),    # 37 + 58 = 95
    ("00+00=", "0"),     # the sum is not padded
    ("50+50=", "01"),    # 5 + 5 = 10
    ("99+99=", "891"),   # 99 + 99 = 198
    ("01+70=", "71"),    # 10 + 7 = 17
])
def test_addition_by_hand(addition, prompt, answer):
  assert _by_prompt(addition)[prompt].answer == answer


def test_addition_is_the_whole_square(addition):
  problems = _by_prompt(addition)
  assert len(problems) == len(addition.train) + len(addition.heldout) == 10000
  for prompt, problem in problems.items():
    a, b = prompt.removesuffix("=").split("+")
    assert int(a[::-1]) + int(b[::-1]) == int(problem.answer[::-1])
  assert addition.max_prompt_tokens == 7  # BOS 73+85=
  assert addition.max_answer_tokens == 4  # 891 EOS


def test_one_digit():
  task = toy.addition(digits=1)
  assert len(_by_prompt(task)) == 100
  assert _by_prompt(task)["7+8="].answer == "51"


@pytest.mark.parametrize("digits", [0, 4, 2.0, True, "2"])
def test_other_digits_are_refused(digits):
  with pytest.raises(ValueError, match="digits: expected an int in 1..3.*enum"):
    toy.addition(digits=digits)


@pytest.mark.parametrize("text,score", [
    ("59", 1.0), (" 59\n", 1.0), ("95", 0.0), ("590", 0.0), ("5", 0.0),
    ("5 9", 0.0), ("", 0.0), ("59=", 0.0)])
def test_addition_verifier_is_exact(addition, text, score):
  problem = _by_prompt(addition)["73+85="]
  assert base.reward(addition, problem, text) == score


def test_words_are_spelled_backward(words):
  problems = _by_prompt(words)
  assert len(problems) == len(words.train) + len(words.heldout) == 4096
  for prompt, problem in problems.items():
    word = prompt.removesuffix("=")
    assert problem.answer == word[::-1] and 3 <= len(word) <= 6
  assert words.max_prompt_tokens == 8  # BOS, six letters, =
  assert words.max_answer_tokens == 7


def test_first_words_never_change():
  task = toy.spell_backward(num_words=40)
  prompts = [p.prompt for p in task.train[:4]]
  assert prompts == ["beta=", "visa=", "zolun=", "mes="]


def test_more_words_keep_the_first_ones_and_their_sides(words):
  fewer = toy.spell_backward(num_words=100)
  assert words.train[:len(fewer.train)] == fewer.train
  assert words.heldout[:len(fewer.heldout)] == fewer.heldout


def test_word_verifier(words):
  problem = words.train[0]
  word = problem.answer[::-1]
  assert base.reward(words, problem, f" {word[::-1]} ") == 1.0
  assert base.reward(words, problem, word[::-1].upper()) == 0.0
  assert base.reward(words, problem, word[::-1] + "a") == 0.0


@pytest.mark.parametrize("kwargs,message", [
    (dict(min_len=5, max_len=4), "min_len=5, max_len=4"),
    (dict(min_len=0), "min_len=0"),
    (dict(num_words=0), "num_words: expected 1"),
    # 70 syllables * 14 consonants = 980 words of three letters.
    (dict(num_words=491, min_len=3, max_len=3), r"1\.\.490.*got 491")])
def test_impossible_words_are_refused(kwargs, message):
  with pytest.raises(ValueError, match=message):
    toy.spell_backward(**kwargs)


def test_half_of_all_words_are_found():
  task = toy.spell_backward(num_words=490, min_len=3, max_len=3)
  assert len(_by_prompt(task)) == 490


@pytest.mark.parametrize("make", [toy.addition, toy.spell_backward])
def test_two_constructions_are_equal(make):
  a, b = make(), make()
  assert a.train == b.train and a.heldout == b.heldout
  assert a.tokenizer == b.tokenizer


@pytest.mark.parametrize("name", ["addition", "words"])
def test_demonstrations_score_one_through_the_tokenizer(name, request):
  task = request.getfixturevalue(name)
  tok = task.tokenizer
  for problem in (task.train + task.heldout)[::7]:
    ids = tok.encode(problem.answer) + [tok.eos_ids[0]]
    assert base.reward(task, problem, tok.decode(ids)) == 1.0
    assert len(tok.encode_prompt(problem.prompt)) <= task.max_prompt_tokens


@pytest.mark.parametrize("task,eos", [
    (toy.addition(2), None), (toy.spell_backward(64), None),
    (toy.addition(1), (5, 2))])  # "2" ends an answer too
def test_the_verifier_as_arrays_is_the_verifier(task, eos):
  """Right, wrong, too long, cut, with specials inside, behind an EOS, masked."""
  chars = task.tokenizer if eos is None else dataclasses.replace(
      task.tokenizer, eos_ids=eos)
  arrays = dataclasses.replace(task.arrays, tokenizer=chars)
  r = np.random.default_rng(0)
  T = arrays.width + 4
  rows, masks, problems = [], [], []
  for problem in task.train[:40]:
    ids = [i for i in task.tokenizer.encode(problem.answer)]
    for kind in range(7):
      row = list(ids)
      if kind == 1:
        row[r.integers(len(row))] = int(r.integers(3, chars.vocab_size))
      if kind == 2:
        row = row + [3]
      if kind == 3:
        row = row[:-1]
      if kind == 4:
        row.insert(int(r.integers(len(row) + 1)), int(r.integers(0, 2)))
      row = row + [2] if kind != 5 else row
      if kind == 6:
        row = row + [4]
      at = int(r.integers(0, T - len(row) + 1)) if len(row) < T else 0
      full = r.integers(0, chars.vocab_size, T)  # junk around it, masked
      full[at:at + len(row)] = row[:T - at]
      mask = np.zeros(T, bool)
      mask[at:at + len(row)] = True
      rows.append(full), masks.append(mask), problems.append(problem)
  rows, masks = np.asarray(rows, np.int32), np.asarray(masks)
  got = arrays.reward(rows, masks, np.stack([arrays.answer(p) for p in problems]))
  want = [task.verify(p, chars.decode(row[mask]))
          for p, row, mask in zip(problems, rows, masks)]
  np.testing.assert_array_equal(got, want)
  assert 0 < np.mean(want) < 1
