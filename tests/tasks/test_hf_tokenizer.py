"""A tokenizer from files: special tokens, ends, template, and a task with it."""

import json

import pytest

from rl_is.tasks import make_task
from rl_is.tasks.hf_tokenizer import HfTokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def directory(tmp_path):
  """Bytes as tokens, and three special ones; <s> stands before a prompt."""
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  inner.train_from_iterator([], tokenizers.trainers.BpeTrainer(
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      special_tokens=["<s>", "</s>", "<end>"], show_progress=False))
  inner.post_processor = tokenizers.processors.TemplateProcessing(
      single="<s> $A", special_tokens=[("<s>", 0)])
  inner.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "config.json").write_text(json.dumps(dict(eos_token_id=1)))
  (tmp_path / "generation_config.json").write_text(
      json.dumps(dict(eos_token_id=[1, 2], pad_token_id=None)))
  return str(tmp_path)


def test_text_goes_there_and_back(directory):
  t = HfTokenizer(directory)
  assert t.vocab_size == 259 and t.eos_ids == (1, 2) and t.pad_id == 1
  for text in ("a b", "1 + 2 = 3\n", "déjà ∀", ""):
    assert t.decode(t.encode(text)) == text
    assert t.encode_prompt(text) == [0, *t.encode(text)]


def test_an_answer_ends_at_its_first_end(directory):
  t = HfTokenizer(directory)
  a, b = t.encode("a") + t.encode("b")
  assert t.decode([a, 2, b]) == t.decode([a, 1, b]) == "a"
  assert t.decode([0, a, 300, b]) == "ab"  # a model's table may be larger


def test_a_template_is_written_out(directory):
  t = HfTokenizer(directory, "Q: {prompt}<end>A:")
  assert t.encode_prompt("x") == [0, *t.encode("Q: x"), 2, *t.encode("A:")]
  with pytest.raises(ValueError, match="template: expected {prompt}"):
    HfTokenizer(directory, "Q")


def test_what_is_missing_is_said(directory, tmp_path):
  (tmp_path / "generation_config.json").write_text("{}")
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="no eos_token_id"):
    HfTokenizer(directory)
  (tmp_path / "config.json").write_text(json.dumps(dict(eos_token_id=999)))
  with pytest.raises(ValueError, match=r"eos_token_id: .*\[0, 259\)"):
    HfTokenizer(directory)
  with pytest.raises(ValueError, match="no eos_token_id|no file"):
    HfTokenizer(str(tmp_path / "nowhere"))


def test_a_gym_task_with_it(directory):
  task = make_task("gym:basic_arithmetic", size=20, tokenizer=directory,
                   template="{prompt}<end>")
  prompt = task.tokenizer.encode_prompt(task.train[0].prompt)
  assert prompt[0] == 0 and prompt[-1] == 2
  assert task.tokenizer.decode(prompt[1:]) == task.train[0].prompt
  with pytest.raises(ValueError, match="template: needs a tokenizer"):
    make_task("gym:basic_arithmetic", size=20, template="Q {prompt}")
