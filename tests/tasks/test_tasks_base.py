"""Splits are disjoint by construction; rewards are numbers, NaN or errors."""

import fractions
import math
import random

import numpy as np
import pytest

from rl_is import tasks
from rl_is.tasks import base


def _problems(n):
  return [base.Problem(f"p{i}", str(i)) for i in range(n)]


def _task(verify, train=(base.Problem("ab", "b"),),
          heldout=(base.Problem("b", "ab"),)):
  return base.Task("toy", tasks.CharTokenizer("ab"), train, heldout, verify)


def _reward_of(value):
  task = _task(lambda problem, text: value)
  return base.reward(task, task.train[0], "b")


def test_split_is_disjoint_complete_and_about_the_fraction():
  train, heldout = base.split(_problems(5000))
  assert not {p.prompt for p in train} & {p.prompt for p in heldout}
  assert {p.prompt for p in train + heldout} == {f"p{i}" for i in range(5000)}
  # Binomial(5000, .1): 500 +- 21; five of those.
  assert 394 < len(heldout) < 606


def test_side_depends_on_the_prompt_alone():
  problems = _problems(1000)
  _, heldout = base.split(problems)
  shuffled = random.Random(0).sample(problems, 1000)
  _, again = base.split(shuffled)
  assert {p.prompt for p in again} == {p.prompt for p in heldout}
  _, smaller = base.split(problems[:300])
  assert smaller == tuple(p for p in heldout if p in problems[:300])
  other_answers = [base.Problem(p.prompt, "other") for p in problems]
  assert ([p.prompt for p in base.split(other_answers)[1]]
          == [p.prompt for p in heldout])


def test_side_is_the_same_on_every_machine():
  # blake2b, not `hash`: written down from a run, to notice a change of rule.
  _, heldout = base.split(_problems(60))
  assert [p.prompt for p in heldout] == ["p9", "p29", "p45", "p48"]


def test_repeated_prompt_keeps_its_first_problem():
  problems = _problems(100) + [base.Problem("p3", "late")]
  train, heldout = base.split(problems)
  assert len(train) + len(heldout) == 100
  assert [p.answer for p in train + heldout if p.prompt == "p3"] == ["3"]


@pytest.mark.parametrize("problems,fraction,counts", [
    ([], 0.1, "left 0 for train and 0 for heldout"),
    (_problems(20), 0.0, "left 20 for train and 0 for heldout"),
    (_problems(20), 1.0, "left 0 for train and 20 for heldout")])
def test_empty_side_is_an_error_with_counts(problems, fraction, counts):
  with pytest.raises(ValueError, match=counts):
    base.split(problems, fraction)


def test_sides_made_by_hand_are_checked():
  same = (base.Problem("ab", "b"),)
  with pytest.raises(ValueError, match="'toy'.*1 prompts.*'ab'"):
    _task(lambda p, t: 1.0, train=same, heldout=same)


def test_max_tokens_by_hand():
  task = _task(lambda p, t: 1.0)
  assert task.max_prompt_tokens == 3  # BOS a b
  assert task.max_answer_tokens == 3  # a b EOS, on the heldout side


def test_problem_without_demonstration_does_not_count():
  task = _task(lambda p, t: 1.0, heldout=(base.Problem("b", ""),))
  assert task.max_answer_tokens == 2  # b EOS
  task = _task(lambda p, t: 1.0, train=(base.Problem("ab", ""),),
               heldout=(base.Problem("b", ""),))
  with pytest.raises(ValueError, match="'toy': no problem has a demonstr"):
    _ = task.max_answer_tokens


@pytest.mark.parametrize("value,expected", [
    (1, 1.0), (0.25, 0.25), (-2.0, -2.0), (True, 1.0), (np.bool_(False), 0.0),
    (np.float32(0.5), 0.5), (np.int64(3), 3.0),
    (fractions.Fraction(1, 4), 0.25)])
def test_reward_is_a_python_float(value, expected):
  got = _reward_of(value)
  assert type(got) is float and got == expected


def test_none_is_nan():
  assert math.isnan(_reward_of(None))


@pytest.mark.parametrize("value", [
    math.inf, -math.inf, math.nan, "1.0", [1.0], np.ones(1), 1j])
def test_a_value_that_is_no_finite_number_is_an_error(value):
  with pytest.raises(ValueError, match="task 'toy': prompt 'ab'.*got"):
    _reward_of(value)


def test_verifier_exception_names_task_and_prompt():
  def verify(problem, text):
    raise KeyError("gone")
  task = _task(verify)
  with pytest.raises(
      RuntimeError, match="task 'toy': prompt 'ab'.*KeyError.*'bb'") as e:
    base.reward(task, task.train[0], "bb")
  assert isinstance(e.value.__cause__, KeyError)


def test_verify_gets_the_problem_and_its_entry():
  problem = base.Problem("a", "b", entry={"target": "b"})
  task = _task(lambda p, t: float(t == p.entry["target"]), train=(problem,))
  assert base.reward(task, problem, "b") == 1.0
  assert base.reward(task, problem, "a") == 0.0
  assert hash(problem) == hash(base.Problem("a", "b"))


def test_make_task_names_are_suggested():
  with pytest.raises(ValueError, match="'additon'.*addition.*gym:"):
    tasks.make_task("additon")
  with pytest.raises(ValueError, match="basic_arithmetic"):
    tasks.make_task("gym:basic_arithmetics")


def test_make_task_refuses_unknown_arguments():
  with pytest.raises(
      ValueError, match="'addition': unknown arguments digit, n; "
      "accepted: digits"):
    tasks.make_task("addition", digit=1, n=2)


def test_make_task_passes_arguments():
  task = tasks.make_task("addition", digits=1)
  assert task.name == "addition"
  assert len(task.train) + len(task.heldout) == 100
