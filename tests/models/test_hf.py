"""Hugging Face's files: the logits that `transformers` gives, and back again.

golden/hf holds tiny random models as `save_pretrained` of transformers 5.24
left them (torch 2.14, eager attention), and the logits of some tokens.
"""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import models
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import sharding
from rl_is.kernels import logits as logits_lib
from rl_is.models import hf
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
NAMES = ("qwen3", "qwen3_moe", "llama", "gemma3")


def placed(model, devices=1, **sizes):
  mesh = mesh_lib.make(dict(dict(data=1, fsdp=1, tensor=1), **sizes),
                       jax.devices()[:devices])
  return sharding.shaped(jax.eval_shape(model.init, jax.random.key(0)),
                         model.rules, mesh)


def loaded(directory, **changes):
  model = Model(TransformerConfig(**hf.structure(directory), **changes))
  return model, hf.load(directory, model, placed(model))


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_are_those_of_transformers(name):
  model, params = loaded(GOLDEN / name, vocab_multiple=32)
  want = np.load(GOLDEN / name / "expected.npz")
  hidden = model.hidden(params, jnp.asarray(want["tokens"]),
                        jnp.ones(want["tokens"].shape, bool))
  logits = logits_lib.head_logits(hidden, model.unembed(params))
  np.testing.assert_allclose(logits[..., :24], want["logits"], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name, tmp_path):
  model, params = loaded(GOLDEN / name)
  hf.save(tmp_path, model, params)
  assert hf.structure(tmp_path) == hf.structure(GOLDEN / name)
  again = hf.load(tmp_path, model, placed(model, 8, data=2, fsdp=2, tensor=2))
  # Gemma's norms are stored less 1.
  atol = 1e-6 if name == "gemma3" else 0
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol),
               jax.device_get(again), jax.device_get(params))
  assert {x.sharding.is_fully_replicated
          for x in jax.tree.leaves(again)} == {True, False}


@pytest.mark.parametrize("key,value,word", [
    ("model_type", "qwen2", "model_type: .*did you mean qwen3"),
    ("hidden_act", "relu", "activation: .*'relu'"),
    ("attention_bias", True, "attention_bias: .*False, got True"),
    ("rope_parameters", dict(rope_type="yarn", rope_theta=1e4),
     "rope_type: .*'yarn'"),
    ("rope_scaling", dict(type="linear", factor=8.0), "rope_type: .*'linear'")])
def test_what_our_transformer_has_not_is_named(tmp_path, key, value, word):
  config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
  with pytest.raises(ValueError, match=word):
    hf.structure(tmp_path)


def test_a_gemma_of_another_pattern_is_named(tmp_path):
  config = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
  kinds = ["sliding_attention", "full_attention", "sliding_attention"]
  (tmp_path / "config.json").write_text(json.dumps(
      dict(config, layer_types=kinds[1:] + kinds[1:2])))
  with pytest.raises(ValueError, match="layer_types: expected every 1th"):
    hf.structure(tmp_path)
  del config["layer_types"], config["rope_parameters"]  # as older files are
  (tmp_path / "config.json").write_text(json.dumps(dict(
      config, rope_theta=1e6, rope_local_base_freq=1e4,
      sliding_window_pattern=3)))
  assert hf.structure(tmp_path) == hf.structure(GOLDEN / "gemma3")


def test_wrong_tensors_are_named(tmp_path):
  import safetensors.numpy
  model, _ = loaded(GOLDEN / "llama")
  good = safetensors.numpy.load_file(GOLDEN / "llama" / "model.safetensors")
  name = "model.layers.1.mlp.up_proj.weight"

  def load(tensors):
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    return hf.load(tmp_path, model, placed(model))

  missing = {k: v for k, v in good.items() if k != name}
  with pytest.raises(ValueError, match=f"unknown name '{name}'"):
    load(missing)
  with pytest.raises(ValueError, match=f"{name}: expected what makes"):
    load({**good, name: good[name][:-1]})
  with pytest.raises(ValueError, match="1 tensors .* does not have: extra"):
    load({**good, "extra": good[name]})
  (tmp_path / "model.safetensors").unlink()
  with pytest.raises(ValueError, match="no .*safetensors"):
    hf.load(tmp_path, model, placed(model))


def test_a_model_in_several_files(tmp_path):
  import safetensors.numpy
  model, want = loaded(GOLDEN / "qwen3")
  tensors = safetensors.numpy.load_file(GOLDEN / "qwen3" / "model.safetensors")
  shutil.copy(GOLDEN / "qwen3" / "config.json", tmp_path)
  for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
    safetensors.numpy.save_file({n: tensors[n] for n in names},
                                tmp_path / f"model-{i}-of-2.safetensors")
  got = hf.load(tmp_path, model, placed(model))
  jax.tree.map(np.testing.assert_array_equal, got, want)


# Of the models' cards: parameters in billions, embeddings counted once if tied.
SIZES = dict(qwen3_0p6b=0.596, qwen3_1p7b=1.72, qwen3_8b=8.19,
             qwen3_30b_a3b=30.5, llama3_8b=8.03, gemma3_270m=0.268,
             gemma3_1b=1.0)


@pytest.mark.parametrize("name", models.MODELS)
def test_published_models_have_their_number_of_parameters(name):
  model = Model(TransformerConfig(**models.MODELS[name]()))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  count = sum(x.size for x in jax.tree.leaves(shapes))
  assert count / 1e9 == pytest.approx(SIZES[name], rel=5e-3)
  # And every one of their parameters has a place.
  mesh = mesh_lib.make(dict(data=1, fsdp=8, tensor=1), jax.devices())
  sharding.place(shapes, model.rules, mesh)


def test_no_model_leaves_anything_to_the_next():
  names = {frozenset(fn()) for fn in models.MODELS.values()}
  assert len(names) == 1
  unset = {"head_precision", "logprob_impl", "logprob_chunk"}  # not structure
  assert next(iter(names)) | unset == {
      f.name for f in dataclasses.fields(TransformerConfig)}


def test_a_published_model_may_be_changed():
  fields = models.qwen3_8b(layers=2, remat="none")
  assert (fields["layers"], fields["remat"], fields["embed"]) == (2, "none", 4096)
