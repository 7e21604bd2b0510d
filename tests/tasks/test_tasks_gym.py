"""reasoning-gym behind our Task: stored entries, its own verifier, threads."""

import concurrent.futures
import sys
import time

import pytest

from rl_is import tasks
from rl_is.tasks import base
from rl_is.tasks import gym

factory = pytest.importorskip("reasoning_gym.factory")

SETS = ("basic_arithmetic", "spell_backward", "leg_counting", "number_sorting",
        "gcd", "chain_sum")


def _all(task):
  return task.train + task.heldout


@pytest.fixture(scope="module")
def legs():
  return gym.reasoning_gym_task("leg_counting", size=200)


@pytest.mark.parametrize("dataset", SETS)
def test_demonstrations_score_one_and_nonsense_does_not(dataset):
  task = tasks.make_task(f"gym:{dataset}", size=60, seed=1)
  assert task.name == f"gym:{dataset}"
  assert not {p.prompt for p in task.train} & {p.prompt for p in task.heldout}
  for problem in _all(task):
    text = task.tokenizer.decode(task.tokenizer.encode(problem.answer) + [2])
    assert base.reward(task, problem, text) == 1.0
    assert base.reward(task, problem, f"  {text}\n") == 1.0  # H07
    assert base.reward(task, problem, "") == 0.0
    assert base.reward(task, problem, "no idea at all") < 1.0


def test_entries_are_the_library_s(legs):
  source = factory.create_dataset("leg_counting", size=200, seed=0)
  by_index = {p.entry["metadata"]["source_index"]: p for p in _all(legs)}
  for i in (0, 7, 100):
    assert by_index[i].entry == source[i]
    assert by_index[i].prompt == source[i]["question"]
    assert by_index[i].answer == source[i]["answer"]


def test_entry_follows_from_name_seed_and_index(legs):
  again = gym.reasoning_gym_task("leg_counting", size=200)
  assert again.train == legs.train and again.heldout == legs.heldout
  other = gym.reasoning_gym_task("leg_counting", size=200, seed=12345)
  assert {p.prompt for p in _all(other)} != {p.prompt for p in _all(legs)}


def test_scoring_never_makes_an_entry(legs, monkeypatch):
  def never(*args, **kwargs):
    raise AssertionError("an entry was made to score an answer")
  monkeypatch.setattr(factory.DATASETS["leg_counting"][0], "__getitem__", never)
  monkeypatch.setattr(factory, "create_dataset", never)
  start = time.monotonic()
  scores = [base.reward(legs, p, p.answer)
            for _ in range(5) for p in _all(legs)]
  assert len(scores) >= 900 and set(scores) == {1.0}
  assert time.monotonic() - start < 1.0  # H15


def test_threads_score_as_the_main_thread(legs):
  jobs = [(p, text) for p in _all(legs)
          for text in (p.answer, "4", f"{p.answer} legs")]
  main = [base.reward(legs, *job) for job in jobs]
  assert 0.0 in main and 1.0 in main
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert list(pool.map(lambda job: base.reward(legs, *job), jobs)) == main


def test_scoring_leaves_the_entry_alone(legs):
  problem = legs.train[0]
  before = repr(problem.entry)
  base.reward(legs, problem, "12")
  assert repr(problem.entry) == before


def test_long_prompts_are_left_out_and_counted():
  whole = gym.reasoning_gym_task("basic_arithmetic", size=100)
  lengths = sorted(len(p.prompt) for p in _all(whole))
  limit = lengths[len(lengths) // 2]
  task = gym.reasoning_gym_task(
      "basic_arithmetic", size=100, max_prompt_chars=limit)
  assert whole.num_too_long == 0
  assert len(_all(task)) == sum(n <= limit for n in lengths)
  assert task.num_too_long == sum(n > limit for n in lengths) > 0
  assert max(len(p.prompt) for p in _all(task)) <= limit
  with pytest.raises(ValueError, match=f"none of 100.*shortest.* {lengths[0]}"):
    gym.reasoning_gym_task("basic_arithmetic", size=100, max_prompt_chars=3)


def test_no_oracle_answer_means_no_demonstration():
  task = gym.reasoning_gym_task("graph_color", size=30)
  assert {p.answer for p in _all(task)} == {""}
  assert base.reward(task, task.train[0], "{}") < 1.0
  with pytest.raises(ValueError, match="no problem has a demonstration"):
    _ = task.max_answer_tokens


def test_config_fields_are_passed():
  task = tasks.make_task("gym:spell_backward", size=50, min_word_len=4,
                         max_word_len=4)
  assert {len(p.answer) for p in _all(task)} == {4}
  assert task.max_answer_tokens == 5


def test_unknown_data_set_is_named_with_the_nearest():
  with pytest.raises(ValueError, match="'leg_countin'.*leg_counting"):
    gym.reasoning_gym_task("leg_countin")


def test_unknown_argument_is_named_with_the_accepted_ones():
  with pytest.raises(
      ValueError, match="gym:spell_backward.*unknown arguments word_len; "
      "accepted: max_prompt_chars.*min_word_len"):
    tasks.make_task("gym:spell_backward", word_len=3)


def test_what_the_library_refuses_is_one_error_with_the_name():
  with pytest.raises(ValueError, match="gym:spell_backward.*max_word_len") as e:
    tasks.make_task("gym:spell_backward", min_word_len=5, max_word_len=4)
  assert isinstance(e.value.__cause__, AssertionError)
  with pytest.raises(ValueError, match="size: expected an int >= 1, got 0"):
    tasks.make_task("gym:spell_backward", size=0)
  with pytest.raises(ValueError, match="seed: expected an int >= 0, got None"):
    tasks.make_task("gym:spell_backward", seed=None)


def test_data_sets_that_no_seed_reproduces_are_refused(monkeypatch):
  with pytest.raises(ValueError, match="do not follow from the seed"):
    gym.reasoning_gym_task("list_functions")
  monkeypatch.delenv("PYTHONHASHSEED", raising=False)
  with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
    gym.reasoning_gym_task("ransom_note", size=50)
  monkeypatch.setenv("PYTHONHASHSEED", "0")
  assert gym.reasoning_gym_task("ransom_note", size=50).train


def test_a_verifier_of_the_library_that_raises_is_not_a_zero():
  task = gym.reasoning_gym_task("prime_factorization", size=50)
  with pytest.raises(RuntimeError, match="gym:prime_factorization.*banana"):
    base.reward(task, task.train[0], "banana")


def test_missing_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  with pytest.raises(ImportError, match=r"pip install -e '.\[tasks\]'"):
    gym.reasoning_gym_task("leg_counting")
