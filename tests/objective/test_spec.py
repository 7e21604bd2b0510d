"""Structures: names, constants, and ratios that must telescope."""

import math

import pytest

from rl_is import ops
from rl_is.objective import constants as constants_lib, presets
from rl_is.objective import spec as spec_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_whole(name):
  """It checks, and each of its constants is taken and in range."""
  preset = presets.get(name)
  Objective(preset.spec)
  takes = constants_lib.taken(preset.spec)
  assert set(preset.constants) <= set(takes)
  values = constants_lib.resolve(preset.spec, dict(preset.constants), {}
                            if "length" not in takes else dict(length=4.0))
  assert set(values) == set(takes) and preset.source


def test_unknown_names_are_answered_with_the_nearest():
  for change, near in ((dict(surrogate="ppo_clp"), "ppo_clip"),
                       (dict(level="sequence"), "sequence_mean"),
                       (dict(advantage="grop"), "grpo"),
                       (dict(corrections=(Correction("icepo"),)), "icepop")):
    with pytest.raises(ValueError, match=near):
      spec_lib.check(Spec(**change))
  with pytest.raises(ValueError, match="did you mean gspo"):
    presets.get("gpso")


@pytest.mark.parametrize("spec,both", [
    # current/behaviour x proximal/behaviour: behaviour is divided by twice.
    (Spec("ppo_clip", "behaviour", corrections=(Correction("tis"),)),
     ("ppo_clip", "tis")),
    # current/proximal x current/behaviour: current stands above the line twice.
    (Spec("ppo_clip", "proximal", corrections=(Correction("tis", "current"),)),
     ("ppo_clip", "tis")),
    # CISPO on the whole ratio with TIS on top (case: double correction).
    (Spec("cispo", "behaviour", corrections=(Correction("tis", "current"),)),
     ("cispo", "tis")),
    (Spec("pg", corrections=(Correction("tis"), Correction("icepop"))),
     ("tis", "icepop")),
])
def test_double_counting_is_refused_with_both_names(spec, both):
  with pytest.raises(ValueError) as error:
    spec_lib.check(spec)
  assert all(name in str(error.value) for name in both)
  assert "twice" in str(error.value)


@pytest.mark.parametrize("spec", [
    Spec("ppo_clip", "proximal", corrections=(Correction("tis"),)),
    Spec("ppo_clip", "behaviour"),
    Spec("cispo", "proximal", corrections=(Correction("icepop"),)),
    Spec("pg", corrections=(Correction("mis", "current"),)),
    Spec("ppo_clip", "current", corrections=(Correction("tis"),)),
])
def test_ratios_that_telescope_are_accepted(spec):
  spec_lib.check(spec)


def test_kept_denominator_needs_masks_known_before():
  with pytest.raises(ValueError, match="kept"):
    spec_lib.check(Spec("pg", denominator="kept",
                        corrections=(Correction("icepop", "current"),)))
  spec_lib.check(Spec("pg", denominator="kept",
                      corrections=(Correction("icepop", "proximal"),)))


def test_a_correction_stands_once():
  with pytest.raises(ValueError, match="twice"):
    spec_lib.check(Spec("pg", corrections=(Correction("tis"),
                                           Correction("tis", "current"))))


def test_a_shared_keyword_is_told_apart():
  spec = Spec("cispo", "proximal", corrections=(Correction("tis"),))
  takes = constants_lib.taken(spec)
  assert {"cispo_cap", "tis_cap", "tis_floor"} <= set(takes) and "cap" not in takes
  values = constants_lib.resolve(spec, {}, dict(cispo_cap=5.0, tis_cap=3.0))
  assert values["cispo_cap"] == 5 and values["tis_cap"] == 3
  with pytest.raises(ValueError, match="tis_cap"):
    constants_lib.resolve(spec, {}, dict(cap=2.0))


def test_the_long_name_always_works():
  spec = Spec("pg", corrections=(Correction("tis", "current"),))
  assert constants_lib.resolve(spec, {}, dict(tis_cap=3.0))["cap"] == 3


def test_a_constant_nobody_takes_is_refused_with_those_they_do():
  with pytest.raises(ValueError) as error:
    constants_lib.resolve(presets.get("pg").spec, {}, dict(eps_high=0.2))
  assert "eps_high" in str(error.value) and "entropy_coef" in str(error.value)


@pytest.mark.parametrize("name,value", [
    ("eps_low", 0.0), ("eps_low", -0.1), ("eps_high", 0), ("clip_c", 1.0),
    ("clip_c", 0.8), ("eps_low", math.nan), ("eps_low", True),
    ("eps_low", "0.2"), ("max_log_ratio", 0.0), ("entropy_coef", -1.0)])
def test_values_out_of_range_are_refused_by_name(name, value):
  """Cases A11 (c <= 1), G07 (eps = 0) and G01 among them."""
  preset = presets.get("ppo_dual")
  with pytest.raises(ValueError, match=name):
    constants_lib.resolve(preset.spec, preset.constants, {name: value})


def test_a_constant_without_a_value_is_named():
  with pytest.raises(ValueError, match="eps_low|eps_high"):
    constants_lib.resolve(Spec("ppo_clip"), {}, {})


@pytest.mark.parametrize("text,expected", [
    ("none", ()), ("", ()), ("tis", (Correction("tis"),)),
    ("tis:current", (Correction("tis", "current"),)),
    ("tis:current:sequence_mean, icepop",
     (Correction("tis", "current", "sequence_mean"), Correction("icepop")))])
def test_corrections_as_text(text, expected):
  assert spec_lib.parse_corrections(text) == expected


@pytest.mark.parametrize("text", ["tis::token", ",", "a:b:c:d"])
def test_malformed_corrections_are_refused(text):
  with pytest.raises(ValueError, match="corrections"):
    spec_lib.parse_corrections(text)


@pytest.mark.parametrize("spec,message", [
    (Spec(corrections=(Correction("tis@", "current"),)), "label after the @"),
    (Spec(kl_weight="behaviour"), "kl_weight='behaviour' weighs no regularizer"),
    (Spec(surrogate=["pg"]), "surrogate: unknown name")])
def test_what_says_nothing_is_refused(spec, message):
  with pytest.raises(ValueError, match=message):
    spec_lib.check(spec)


def test_a_users_own_correction_may_not_take_our_name():
  with pytest.raises(ValueError, match="tis"):
    spec_lib.corrections_table(dict(tis=ops.CORRECTIONS["tis"]))


def test_double_counting_may_be_meant():
  """Peers that do it are reproduced, when the config says so."""
  spec_lib.check(Spec("ppo_clip", "behaviour", allow_double_counting=True,
                      corrections=(Correction("tis"),)))


@pytest.mark.parametrize("anchor,U,inert", [
    ("proximal", 1, {"eps_low", "eps_high"}), ("proximal", 2, set()),
    ("behaviour", 1, set()), ("current", 4, {"eps_low", "eps_high"})])
def test_constants_that_cannot_act_are_known(anchor, U, inert):
  found = constants_lib.inert(Spec("ppo_clip", anchor), U)
  assert set(found) == inert
  assert all(anchor in why for why in found.values())
  assert not constants_lib.inert(Spec("pg"), 1)
