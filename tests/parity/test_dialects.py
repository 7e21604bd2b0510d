"""What every dialect owes its reader, whatever its system."""

import math

import pytest

from rl_is import dialects as command
from rl_is.objective import constants as constants_lib, dialects
from rl_is.objective.compose import Objective

every = pytest.mark.parametrize("system", sorted(dialects.SYSTEMS))


def keys_of(system):
  """The names that it takes: the error on one that is near none lists them."""
  with pytest.raises(ValueError, match="one of: ") as error:
    dialects.translate(system, {"#" * 40: 1})
  return str(error.value).partition("one of: ")[2].split(", ")


@every
def test_its_defaults_are_an_objective(system):
  dialect = dialects.translate(system, {})
  values = constants_lib.resolve(dialect.spec, {}, dialect.constants)
  assert not any(math.isnan(x) for x in values.values())
  Objective(dialect.spec)


@every
def test_a_misspelt_key_is_refused_by_the_nearest_name(system):
  keys = keys_of(system)
  assert len(keys) > 3
  for key in keys:
    with pytest.raises(ValueError) as error:
      dialects.translate(system, {key + "_": 1})
    assert system in str(error.value) and key in str(error.value)


@every
def test_it_says_where_it_departs(system):
  departs = dialects.translate(system, {}).departs
  assert departs and all(isinstance(d, str) and d for d in departs)


@every
def test_the_command_prints_it(system, monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["rl_is.dialects", system])
  command.main()
  out = capsys.readouterr().out
  assert "objective.surrogate = " in out and f"{system} departs: " in out


@pytest.mark.parametrize("system,config,word", [
    ("prime_rl", dict(adv_tau=0.5), "adv_tau"),
    ("prime_rl", dict(type="custom"), "kind"),
    ("roll", dict(loss_agg_mode="seq-mean-token-sum-norm"), "padded width"),
    ("roll", dict(pg_variant="topr"), "pg_variant"),
    ("roll", dict(train_infer_correction=dict(is_weight=dict(detach=False))),
     "detach"),
    ("roll", dict(train_infer_correction=dict(filters=[
        dict(enabled=True), dict(enabled=True, agg_type="sequence")])),
     "several steps"),
    ("torchrl", dict(cls="CISPOLoss"), "CISPOLoss"),
    ("torchrl", dict(kl_mask_threshold=0.02), "kl_mask_threshold"),
    ("torchrl", dict(kl_to_ref_coeff=0.1, kl_to_inference_coeff=0.1),
     "one KL term"),
    ("torchrl", dict(kl_to_ref_coeff=0.1, aggregation="prompt_mean"),
     "prompt_mean"),
    ("trl", dict(loss_type="luspo"), "luspo"),
    ("trl", dict(loss_type="luspo", importance_sampling_level="sequence",
                 use_vllm=True, vllm_importance_sampling_mode="token_mask"),
     "luspo"),
    ("trl", dict(loss_type="vespo", use_vllm=True), "anchor"),
    ("trl", dict(loss_type="vespo", beta=0.1, use_bias_correction_kl=True),
     "use_bias_correction_kl"),
    ("trl", dict(top_entropy_quantile=0.5), "top_entropy_quantile"),
    ("tunix", dict(entropy_coef=0.1), "entropy_coef"),
    ("tunix", dict(epsilon_low=0.1), "epsilon_low"),
    ("nemo_rl", dict(use_kl_in_reward=True), "use_kl_in_reward")])
def test_what_cannot_be_followed_is_refused_by_name(system, config, word):
  with pytest.raises(ValueError, match=word):
    dialects.translate(system, config)


def test_rolls_corrections_chain():
  dialect = dialects.translate("roll", dict(
      importance_sampling="seq", dual_clip_loss=True, pg_clip=0.3,
      train_infer_correction=dict(
          is_weight=dict(enabled=True, upper_bound=None),
          filters=[dict(enabled=True, ratio_high=1.5), dict(enabled=False)])))
  values = constants_lib.resolve(dialect.spec, {}, dialect.constants)
  assert [str(c) for c in dialect.spec.corrections] == [
      "ratio_mask@0:proximal:token", "tis:proximal:token"]
  assert (dialect.spec.level, dialect.spec.denominator) == (
      "sequence_mean", "removed")
  assert values["clip_c"] == 1.6 and values["high"] == 1.5
  assert values["cap"] == math.inf


@pytest.mark.parametrize("config,advantage,options", [
    (dict(), "grpo", (("std", "leave_one_out"),)),
    (dict(use_leave_one_out_baseline=False), "grpo", (("std", "unbiased"),)),
    (dict(normalize_rewards=False), "rloo", ()),
    (dict(adv_estimator=dict(name="reinforce_plus_plus")),
     "reinforce_pp_baseline", ()),
    (dict(adv_estimator="reinforce_plus_plus", minus_baseline=False),
     "reinforce_pp", ()),
    (dict(adv_estimator=dict(name="gdpo")), "given", ())])
def test_nemos_estimators(config, advantage, options):
  spec = dialects.translate("nemo_rl", config).spec
  assert (spec.advantage, spec.options) == (advantage, options)


_CORRECTION = "vllm_importance_sampling_correction"


@pytest.mark.parametrize("config,corrections", [
    (dict(), ["opsm:current/proximal:token"]),
    (dict(use_vllm=True), ["mis:proximal:sequence_sum", "opsm:current:token"]),
    ({_CORRECTION: True}, ["mis:proximal:sequence_sum", "opsm:current:token"]),
    ({"use_vllm": True, _CORRECTION: False}, ["opsm:current:token"]),
    ({"use_vllm": False, _CORRECTION: True}, ["opsm:current/proximal:token"])])
def test_trl_corrects_where_vllm_samples(config, corrections):
  spec = dialects.translate("trl", dict(
      config, off_policy_mask_threshold=0.1)).spec
  assert [str(c) for c in spec.corrections] == corrections


def test_tunix_has_the_advantage_of_its_variant():
  for config, advantage in (
      (dict(), "grpo"), (dict(algo_variant="ppo"), "given"),
      (dict(advantage_estimator="rloo"), "rloo")):
    assert dialects.translate("tunix", config).spec.advantage == advantage


HOSTILE = (None, [], {}, "", "x", -1, 0, 1e30, math.nan, math.inf, True, "no",
           "NO", "off", [1], [1, 2, 3], ["a", "b"], {"a": 1}, "1_2_3", "2_0.5")


@every
def test_a_hostile_value_gives_an_objective_or_one_line_with_its_key(system):
  """Every key, alone and beside what brings it into play: never a traceback."""
  beside = {
      "verl": [{}, dict(rollout_is="token"), dict(
          rollout_rs="token_k1", rollout_rs_threshold="0.5_2")],
      "trl": [{}, dict(use_vllm=True)],
      "areal": [{}, dict(use_decoupled_loss=True)],
      "nemo_rl": [{}, dict(
          use_importance_sampling_correction=True,
          truncated_importance_sampling_type="tis",
          truncated_importance_sampling_ratio=2.0)],
      "openrlhf": [{}, dict(enable_vllm_is_correction=True)],
      "slime": [{}, dict(use_tis=True, use_kl_loss=True, kl_loss_coef=0.1)],
      "tunix": [{}, dict(algo_variant="ppo"), dict(sampler_is="token")],
      "skyrl": [{}, dict(tis_ratio_type="token")]}
  for key in keys_of(system):
    for config in beside.get(system, [{}]):
      for value in HOSTILE:
        try:
          dialect = dialects.translate(system, {**config, key: value})
        except ValueError as error:
          assert system in str(error) and "\n" not in str(error)
          continue
        try:
          constants_lib.resolve(dialect.spec, {}, dialect.constants)
          Objective(dialect.spec)
        except ValueError as error:
          assert "objective" in str(error), (key, value)


@every
def test_a_switch_is_never_read_by_the_truth_of_a_text(system):
  for key in keys_of(system):
    for word in ("no", "off", "No", "0.5"):
      try:
        got = dialects.translate(system, {key: word})
      except ValueError:
        continue
      assert got == dialects.translate(system, {}), (key, word)
  # What JSON and Python write is read as it is meant.
  switches = dict(nemo_rl="use_cispo", verl="use_kl_loss", trl="use_vllm",
                  areal="recompute_logprob", openrlhf="token_level_loss",
                  slime="use_rollout_logprobs", skyrl="use_tis",
                  roll="dual_clip_loss", prime_rl="ref_kl",
                  torchrl="entropy_bonus", tunix="use_rollout_logps")
  of = lambda value: dialects.translate(system, {switches[system]: value})
  assert of("TRUE") == of(1) == of(True) != of(False) == of(0) == of("False")


@pytest.mark.parametrize("system,config,words", [
    ("nemo_rl", dict(sequence_level_importance_ratios=True),
     ["sequence_level_importance_ratios", "token_level_loss"]),
    ("nemo_rl", dict(use_cispo=True, ratio_clip_c=3.0), ["ratio_clip_c"]),
    ("nemo_rl", dict(use_cispo=True, force_on_policy_ratio=True),
     ["force_on_policy_ratio"]),
    ("nemo_rl", dict(use_cispo=True, disable_ppo_ratio=True),
     ["disable_ppo_ratio"]),
    ("nemo_rl", dict(disable_ppo_ratio=True, force_on_policy_ratio=True),
     ["disable_ppo_ratio", "force_on_policy_ratio"]),
    ("nemo_rl", dict(sequence_level_importance_ratios=True,
                     token_level_loss=False,
                     use_importance_sampling_correction=True,
                     truncated_importance_sampling_type="seq-mask-tis",
                     truncated_importance_sampling_ratio=1.3),
     ["seq-mask-tis", "sequence_level_importance_ratios"]),
    ("nemo_rl", dict(truncated_importance_sampling_type="tis",
                     truncated_importance_sampling_ratio=2.0),
     ["truncated_importance_sampling_type",
      "use_importance_sampling_correction"]),
    ("nemo_rl", dict(use_importance_sampling_correction=True,
                     truncated_importance_sampling_type="tis"),
     ["truncated_importance_sampling_ratio is needed"]),
    ("nemo_rl", dict(reference_policy_kl_type="k4"), ["kl_type", "k4"]),
    ("tunix", dict(algo_variant="ppo", beta=0.1), ["beta", "grpo"]),
    ("prime_rl", dict(kind="ipo", type="default"), ["kind", "type"]),
    ("verl", dict(rollout_is="token", rollout_is_threshold="0.5_2_3"),
     ["rollout_is_threshold", "0.5_2_3"]),
    ("verl", dict(rollout_rs="token_k3", rollout_rs_threshold=-1),
     ["rollout_rs_threshold", "-1"]),
    ("verl", dict(rollout_rs="token_k1", rollout_rs_threshold=0),
     ["rollout_rs_threshold", "got 0"]),
    ("openrlhf", dict(enable_vllm_is_correction=True,
                      vllm_is_truncated_threshold=[5, 0.5]), ["low <= high"]),
    ("torchrl", dict(clip_epsilon=[0.1, 0.2, 0.3]), ["clip_epsilon"]),
    ("areal", dict(use_decoupled_loss=True, rejection_sampling=dict(
        agg="max", level="sequence", upper=0)), ["upper", "got 0"])])
def test_a_combination_without_a_meaning_is_refused(system, config, words):
  with pytest.raises(ValueError) as error:
    dialects.translate(system, config)
  assert all(word in str(error.value) for word in [system, *words])
