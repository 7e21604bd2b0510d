"""Peers' own numbers: config -> dialect -> objective -> loss and gradient.

Cases are known by their config, never by their name. Another folder of the same
form is read with RL_IS_GOLDEN_DIR.
"""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity import keys, rules
from rl_is.core.types import Batch, PolicyOutputs
from rl_is.objective import constants as constants_lib, dialects
from rl_is.objective.compose import Objective

GOLDEN = pathlib.Path(os.environ.get(
    "RL_IS_GOLDEN_DIR", pathlib.Path(__file__).parents[1] / "golden"))
INPUTS = np.load(GOLDEN / "inputs.npz")


def cases():
  for peer in keys.SYSTEM:
    if not (GOLDEN / f"{peer}.json").exists():
      continue
    variants = json.loads((GOLDEN / f"{peer}.json").read_text())["variants"]
    for name, variant in variants.items():
      if not set(variant["config"]) & set(keys.HELPERS[peer]):
        yield pytest.param(peer, name, variant, id=f"{peer}-{name}")


def inputs_of(name):
  return {key.partition("|")[2]: INPUTS[key] for key in INPUTS.files
          if key.startswith(name + "|")}


def objective_of(peer, config):
  own = {k: v for k, v in config.items() if k not in keys.HARNESS[peer]}
  dialect = dialects.translate(keys.SYSTEM[peer], own)
  spec = dialect.spec
  if config.get("sample_mask") == "valid":  # rows without a token do not count
    spec = dataclasses.replace(spec, options=())
  return Objective(spec, full_diagnostics=False), constants_lib.resolve(
      spec, {}, dialect.constants)


def evaluate(peer, variant, x):
  """(loss, gradient) of our objective on a set of inputs."""
  config = variant["config"]
  objective, constants = objective_of(peer, config)
  adv = x["adv"] if variant["adv"] == "tok" else np.broadcast_to(
      x["adv_seq"][:, None], x["adv"].shape)
  if "adv_const" in config:
    adv = np.full_like(x["adv"], config["adv_const"])
  mask = jnp.asarray(x["mask"] != 0)
  batch = Batch(
      tokens=jnp.zeros(mask.shape, jnp.int32), valid=mask, mask=mask,
      reward=jnp.zeros(mask.shape[0]), group=jnp.zeros(mask.shape[0], jnp.int32),
      logp_behaviour=jnp.asarray(x["behav"]), logp_prox=jnp.asarray(x["old"]),
      logp_ref=jnp.asarray(x["ref"]), adv=jnp.asarray(adv))
  prepared = objective.prepare(batch, constants)
  scale = 1.0
  if "batch_num_tokens" in config:  # a global count in place of this batch's
    scale = mask.sum() * config["dp_size"] / config["batch_num_tokens"]
  return jax.value_and_grad(lambda logp: scale * objective.loss(
      PolicyOutputs(logp), prepared, constants)[0])(jnp.asarray(x["logp"]))


def agrees(loss, grad, want_loss, want_grad):
  """The tolerances of golden/README.md."""
  return (abs(loss - want_loss) <= 1e-4 * max(abs(want_loss), 1e-3)
          and np.all(np.abs(grad - want_grad)
                     <= 1e-5 * np.abs(want_grad).max() + 1e-8))


@pytest.mark.parametrize("peer,name,variant", list(cases()))
def test_loss_and_gradient(peer, name, variant):
  stored = np.load(GOLDEN / f"{peer}.npz")
  for s in variant["sets"]:
    x, config = inputs_of(s), variant["config"]
    want = [stored[f"{name}|{s}|{what}"] for what in ("loss", "grad")]
    why = rules.reason(peer, config, x)
    try:
      loss, grad = evaluate(peer, variant, x)
    except ValueError as error:
      assert why, error  # only what a rule names may be refused
      continue
    same = agrees(float(loss), np.asarray(grad), *want)
    assert same != bool(why), (s, float(loss), float(want[0]), why)


def test_the_suite_can_fail():
  """Another clip bound is not the peer's number."""
  variant = next(c.values[2] for c in cases()
                 if c.values[2]["config"].get("ratio_clip_max") == 0.28)
  x = inputs_of("p1_medium")
  stored = np.load(GOLDEN / "nemo.npz")
  right = [stored[f"ppo_asym|p1_medium|{what}"] for what in ("loss", "grad")]
  changed = dict(variant, config=dict(variant["config"], ratio_clip_max=0.1))
  assert agrees(*map(np.asarray, evaluate("nemo", variant, x)), *right)
  assert not agrees(*map(np.asarray, evaluate("nemo", changed, x)), *right)


@pytest.mark.parametrize("config,word", [
    (dict(ratio_clip_mim=0.2), "ratio_clip_min"),
    (dict(positive_example_nll_weight=0.1), "positive_example_nll_weight"),
    (dict(use_importance_sampling_correction=True,
          truncated_importance_sampling_type="icepopp"), "icepop")])
def test_unknown_and_unsupported_keys_are_refused_by_name(config, word):
  with pytest.raises(ValueError, match=word):
    dialects.translate("nemo_rl", config)


def test_the_command_prints_the_objective(capsys):
  from rl_is import dialects as command
  words = command.parse(["dual_clip=3.0", "token_level_loss=false",
                         "vllm_is_correction_type=icepop",
                         "enable_vllm_is_correction=True",
                         "vllm_is_truncated_threshold=[0.5, 4]"])
  text = command.describe("openrlhf", words)
  for line in ("objective.surrogate = dual_clip",
               "objective.corrections = icepop:proximal:token",
               "objective.constants.high = 4", "objective.constants.clip_c = 3",
               "openrlhf departs: "):
    assert line in text
  with pytest.raises(ValueError, match="key=value"):
    command.parse(["dual_clip"])
