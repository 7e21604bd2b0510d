"""Peers' own numbers: config -> dialect -> objective -> loss and gradient.

Cases are known by their config, never by their name. Another folder of the same
form is read with RL_IS_GOLDEN_DIR.
"""

import functools
import json
import os
import pathlib

import numpy as np
import pytest

from parity import cases, keys
from rl_is.objective import dialects

GOLDEN = pathlib.Path(os.environ.get(
    "RL_IS_GOLDEN_DIR", pathlib.Path(__file__).parents[1] / "golden"))
INPUTS = dict(np.load(GOLDEN / "inputs.npz"))  # all at once: small, often read


def variants():
  for peer in keys.PEERS:
    if (GOLDEN / f"{peer}.json").exists():
      manifest = json.loads((GOLDEN / f"{peer}.json").read_text())["variants"]
      for name, variant in manifest.items():
        yield pytest.param(peer, name, variant, id=f"{peer}-{name}")


def case_of(variant, s):
  x = {key.partition("|")[2]: INPUTS[key] for key in INPUTS
       if key.startswith(s + "|")}
  return cases.Case(
      dict(variant["config"]), variant.get("function"), variant["arrays"],
      variant["adv"], x, s in variant["nonfinite"])


@functools.cache
def numbers_of(peer):
  return np.load(GOLDEN / f"{peer}.npz")


def stored(peer, name, variant, s):
  numbers = numbers_of(peer)
  return {what: numbers[f"{name}|{s}|{what}"] for what in variant["arrays"]
          if f"{name}|{s}|{what}" in numbers.files}


@pytest.mark.parametrize("peer,name,variant", list(variants()))
def test_the_peers_numbers(peer, name, variant):
  table = keys.PEERS[peer]
  for s in variant["sets"]:
    want = stored(peer, name, variant, s)
    why = [rule.why for rule in table.rules if rule.when(case_of(variant, s))]
    try:
      got = cases.evaluate(table, case_of(variant, s))
    except ValueError as error:
      assert why, error  # only what a rule names may be refused
      continue
    wrong = cases.compare(case_of(variant, s), got, want, table.skipped)
    assert bool(wrong) == bool(why), (s, wrong, why)


def test_the_suite_can_fail():
  """Another clip bound is not the peer's number."""
  variant = dict(config=dict(ratio_clip_max=0.28, reference_policy_kl_penalty=0),
                 arrays=["loss", "grad"], adv="tok", nonfinite=[])
  want = stored("nemo", "ppo_asym", variant, "p1_medium")
  for high, wrong in ((0.28, []), (0.1, ["loss", "grad"])):
    variant["config"]["ratio_clip_max"] = high
    case = case_of(variant, "p1_medium")
    got = cases.evaluate(keys.PEERS["nemo"], case)
    assert cases.compare(case, got, want, ()) == wrong


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
               "objective.options = ", "icepop:",
               "  w = sg(k) 1[low <= k <= high],  k = num / behaviour",
               "  (1/B) sum_i (1/|y_i|) sum_t loss_it",
               "openrlhf departs: "):
    assert line in text
  with pytest.raises(ValueError, match="key=value"):
    command.parse(["dual_clip"])
