"""Config files and the setting of their fields."""

import importlib
import pathlib

import jax
import pytest

from configs import addition, common
from rl_is import build, fields, overrides
from rl_is.objective import constants as constants_lib

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.py")
                 if p.stem not in ("common", "models"))


def test_every_constant_of_the_tables_is_listed():
  assert list(common.CONSTANTS) == constants_lib.all_names()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_builds_and_is_a_lab_card(name, one_device):
  module = importlib.import_module(f"configs.{name}")
  for word in ("Command:", "Hardware:", "Expect:", "Argument:"):
    assert word in module.__doc__
  config = module.get_config("size=40" if name == "gym" else None)
  assert config.is_locked
  needs = config.mesh.tensor  # a pod's config may need more than one device
  build.build(config, devices=jax.devices() if needs > 1 else one_device)


@pytest.mark.parametrize("path", overrides.leaves(common.base()))
def test_every_field_accepts_its_own_value(path):
  """Case G02: no documented key is refused."""
  config = addition.get_config()
  node = config
  for part in path.split("."):
    node = getattr(node, part)
  if node is None:  # a placeholder
    overrides.apply(config, path, "none")
  elif path != "task.kwargs":
    overrides.apply(config, path, str(node))
    value = config
    for part in path.split("."):
      value = getattr(value, part)
    assert value == node and type(value) is type(node)


@pytest.mark.parametrize("text", ["1e-5", "5e-6", "3E-4", "1e5", "1e-05", "1",
                                  "0.5"])
def test_numbers_as_text_become_numbers(text):
  """Case G01: what PyYAML would leave a string."""
  config = addition.get_config()
  overrides.apply(config, "optimizer.learning_rate", text)
  assert config.optimizer.learning_rate == float(text)
  overrides.apply(config, "objective.constants.cap", text)
  assert config.objective.constants.cap == float(text)


@pytest.mark.parametrize("path,value,word", [
    ("optimizer.learning_rate", "fast", "expected a number"),
    ("optimizer.learning_rate", "nan", "NaN"),
    ("optimizer.learning_rate", True, "expected a number"),
    ("objective.constants.eps_low", True, "expected a number"),
    ("objective.constants.eps_low", float("nan"), "NaN"),
    ("objective.constants.eps_low", "nan", "NaN"),
    ("rollout.group_size", "8.5", "expected an integer"),
    ("rollout.group_size", True, "expected a number"),
    ("rollout.group_size", 8.5, "expected an integer"),
    ("train.steps", "1e3", "expected an integer"),
    ("track.tensorboard", "yes", "true or false"),
    ("track.tensorboard", 1, "expected bool"),
    ("objective.preset", 3, "expected str"),
    ("rollout", "x", "is a group"),
    ("optimizer.learning_rat", "1e-5", "optimizer.learning_rate"),
    ("rollout.lagg", "1", "rollout.lag"),
    ("objective.constants.eps_hi", "1", "objective.constants.eps_high"),
    ("optimizer.learning_rate.x", "1", "optimizer.learning_rate"),
    ("nothing", "1", "unknown name"),
])
def test_bad_values_are_refused_by_name(path, value, word):
  config = addition.get_config()
  before = config.to_json_best_effort()
  with pytest.raises(ValueError, match=word) as error:
    overrides.apply(config, path, value)
  assert path.split(".")[0] in str(error.value)
  assert "\n" not in str(error.value)  # one line, not the whole config
  assert config.to_json_best_effort() == before  # nothing was set


@pytest.mark.parametrize("path,value", [
    ("objective.constants.eps_low", 0.1), ("objective.surrogate", "cispo"),
    ("rollout.max_new_tokens", 5)])
def test_none_unsets_again(path, value):
  """Case G03."""
  config = addition.get_config()
  overrides.apply(config, path, value)
  overrides.apply(config, path, "none")
  node = config
  for part in path.split("."):
    node = getattr(node, part)
  assert node is None
  overrides.apply(config, path, value)  # and may be set once more


def test_no_corrections_is_a_choice(one_device):
  """Not the preset's, which has one."""
  config = addition.get_config()
  config.objective.preset = "tis"
  overrides.apply(config, "objective.corrections", "none")
  spec = build.build(config, devices=one_device).objective.spec
  assert spec.corrections == ()


def test_no_centering_is_a_choice(one_device):
  config = addition.get_config()
  config.objective.preset = "tis_score_centering"
  config.rollout.record_top_k = 4
  parts = build.build(config, devices=one_device)
  assert parts.objective.needs_head and parts.sampling.record_top_k == 4
  overrides.apply(config, "objective.centering", "none")
  assert not build.build(config, devices=one_device).objective.needs_head


def test_a_number_that_is_needed_cannot_be_unset():
  with pytest.raises(ValueError, match="expected a number"):
    overrides.apply(addition.get_config(), "optimizer.learning_rate", "none")


def test_true_in_the_file_itself_is_found():
  """ConfigDict takes True for an int; the check before the run does not."""
  config = addition.get_config()
  config.train.steps = True
  with pytest.raises(ValueError, match="config.train.steps"):
    fields.check(config)


@pytest.mark.parametrize("changes,words", [
    ({"objective.preset": "gpso"}, ["gspo"]),
    ({"rollout.group_size": 1, "rollout.batch_size": 4}, ["group_size", "grpo"]),
    ({"rollout.batch_size": 250}, ["250", "8", "248 or 256"]),
    ({"rollout.lag": 3, "train.updates_per_batch": 2}, ["3", "2", "2 or 4"]),
    ({"train.updates_per_batch": 3}, ["256", "3", "255 or 258"]),
    ({"rollout.top_p": 0.9}, ["top_p", "top_k"]),
    ({"rollout.temperature": 0.0, "objective.preset": "tis"}, ["temperature"]),
    ({"rollout.record_logp": False, "objective.preset": "tis"},
     ["record_logp", "tis"]),
    ({"rollout.record_logp": False, "objective.preset": "ppo"}, ["record_logp"]),
    ({"objective.preset": "ppo", "objective.constants.eps_low": 0.0},
     ["eps_low"]),
    ({"objective.preset": "tis", "objective.constants.cap": -1.0}, ["cap"]),
    ({"objective.preset": "ppo_dual", "objective.constants.clip_c": 0.8},
     ["clip_c"]),
    ({"objective.constants.eps_low": 0.2}, ["eps_low", "entropy_coef"]),
    ({"objective.preset": "ppo", "objective.corrections": "tis"},
     ["ppo_clip", "tis", "twice"]),
    ({"rollout.mode": "asink"}, ["mode", "async"]),
    ({"rollout.mode": "async", "rollout.lag": 2}, ["lag = 2", "async"]),
    ({"rollout.max_lag": 2}, ["max_lag = 2", "'lag'"]),
    ({"rollout.mode": "async", "rollout.order": "newest"},
     ["order", "freshest"]),
    ({"rollout.mode": "async", "rollout.rows_per_call": 12},
     ["rows_per_call", "12"]),
    ({"rollout.mode": "async", "rollout.rows_per_call": 4},
     ["group_size", "4"]),
    ({"rollout.mode": "async", "rollout.sampler_devices": 1},
     ["sampler_devices", "1 devices"]),
    ({"objective.level": "sequence_mean"}, ["level", "pg"]),
    ({"objective.preset": "icepop", "objective.constants.low": 6.0},
     ["low", "high"]),
    ({"objective.regularizer": "k3"}, ["kl_coef"]),
    ({"objective.preset": "cispo", "objective.corrections": "tis:proximal",
      "objective.anchor": "proximal", "objective.constants.tis_cap": 0.0},
     ["tis_cap"]),
    ({"objective.preset": "score_centering"}, ["centering", "record_top_k"]),
    ({"rollout.record_top_k": 4, "rollout.record_logp": False},
     ["record_top_k = 4", "record_logp"]),
    ({"rollout.record_top_k": -1}, ["record_top_k", "-1"]),
    ({"objective.preset": "ppo", "objective.centering": "score",
      "rollout.record_top_k": 4}, ["centering", "'pg'", "ppo_clip"]),
    ({"objective.centering": "scores"}, ["centering", "score"]),
    ({"optimizer.b1": 1.0}, ["b1"]),
    ({"model.dtype": "float8"}, ["model.dtype", "float32"]),
    ({"optimizer.name": "adam"}, ["adamw"]),
    ({"optimizer.learning_rate": -1.0}, ["learning_rate"]),
    ({"model.heads": 3}, ["heads", "kv_heads"]),
    ({"task.name": "additon"}, ["addition"]),
    ({"mesh.data": 3}, ["data=3", "devices"]),
])
def test_what_cannot_work_is_refused_before_anything_compiles(
    changes, words, one_device):
  config = addition.get_config()
  for path, value in changes.items():
    overrides.apply(config, path, value)
  with pytest.raises(ValueError) as error:
    build.build(config, devices=one_device)
  assert all(word in str(error.value) for word in words), error.value
  assert "\n" not in str(error.value)


def test_the_mesh_must_divide_the_batch():
  """Case F02: 8 devices, 12 rows."""
  config = addition.get_config()
  config.rollout.update(dict(batch_size=12, group_size=4))
  with pytest.raises(ValueError, match="12 .*8; nearest valid: 8 or 16"):
    build.build(config)


def test_choices_override_the_preset(one_device):
  config = addition.get_config()
  for path, value in {
      "objective.preset": "ppo", "objective.anchor": "proximal",
      "objective.corrections": "icepop", "objective.advantage": "rloo",
      "objective.constants.eps_high": 0.3}.items():
    overrides.apply(config, path, value)
  parts = build.build(config, devices=one_device)
  spec = parts.objective.spec
  assert (spec.surrogate, spec.anchor, spec.advantage) == (
      "ppo_clip", "proximal", "rloo")
  assert [c.name for c in spec.corrections] == ["icepop"]
  assert parts.constants["eps_high"] == 0.3  # given
  assert parts.constants["eps_low"] == 0.2  # the preset's
  assert parts.constants["high"] == 5.0  # the row's
  assert "std_eps" not in parts.constants  # rloo takes none


def test_unknown_fields_of_a_file_are_refused(one_device):
  """Case G02, where no flag is involved."""
  config = addition.get_config().copy_and_resolve_references()
  with config.unlocked():
    config.rollout.topk = 5
  with pytest.raises(ValueError, match="rollout.topk.*rollout.top_k"):
    build.build(config, devices=one_device)


def test_a_surrogate_brings_its_own_level(one_device):
  config = addition.get_config()
  config.objective.surrogate = "topr"
  assert build.build(config, devices=one_device).objective.spec.level == (
      "sequence_sum")


def test_constant_length_is_the_longest_answer_unless_set(one_device):
  config = addition.get_config()
  config.objective.preset = "dr_grpo"
  parts = build.build(config, devices=one_device)
  assert parts.constants["length"] == parts.sampling.max_new_tokens == 4
  config.objective.constants.length = 7.0
  assert build.build(config, devices=one_device).constants["length"] == 7


@pytest.mark.parametrize("arg,word", [
    ("lagg=8", "lagg.*lag"), ("lag=x", "expected int"), ("tiny=maybe", "true")])
def test_bad_config_arguments_are_named(arg, word):
  with pytest.raises(ValueError, match=word):
    addition.get_config(arg)
