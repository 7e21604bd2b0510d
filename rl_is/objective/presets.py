"""Named methods as rows: choices, constants, source. Floor 2.

Which policy a ratio is anchored on is the most important choice of all, and
papers rarely name it: "old" in PPO, GRPO, DAPO and GSPO is the policy that
sampled, so those rows anchor on `behaviour`. Where a paper recomputes the old
log-probs and corrects for the sampler apart, the row anchors on `proximal` and
the correction carries proximal/behaviour.
"""

import dataclasses
import math
from collections.abc import Mapping

from rl_is import ops
from rl_is.core import checks
from rl_is.objective.spec import Correction, Spec


@dataclasses.dataclass(frozen=True)
class Preset:
  spec: Spec
  constants: Mapping[str, float]
  source: str


_PPO = Spec(surrogate="ppo_clip", anchor="behaviour")
_DECOUPLED = dataclasses.replace(
    _PPO, anchor="proximal", aggregation="sequence_mean_token_mean")
_SEQUENCE = dict(surrogate="ppo_clip", anchor="behaviour",
                 aggregation="sequence_mean_token_mean")
_CLIP = dict(eps_low=0.2, eps_high=0.2)

PRESETS = {
    "pg": Preset(
        Spec(), {}, "Williams 1992; nothing corrects stale data"),
    "rloo": Preset(
        Spec(advantage="rloo", aggregation="sequence_mean_token_mean"), {},
        "Ahmadian et al. 2024, arXiv 2402.14740"),
    "ppo": Preset(
        _PPO, _CLIP, "Schulman et al. 2017, arXiv 1707.06347 (group baseline "
        "in place of the critic)"),
    "ppo_dual": Preset(
        dataclasses.replace(_PPO, surrogate="dual_clip"),
        dict(eps_low=0.2, eps_high=0.28, clip_c=3.0),
        "Ye et al. 2020, arXiv 1912.09729"),
    "grpo": Preset(
        Spec(**_SEQUENCE), _CLIP, "Shao et al. 2024, arXiv 2402.03300, without "
        "its KL term (k3, kl_coef 0.04)"),
    "dapo": Preset(
        _PPO, dict(eps_low=0.2, eps_high=0.28),
        "Yu et al. 2025, arXiv 2503.14476"),
    "dr_grpo": Preset(
        dataclasses.replace(_PPO, advantage="dr_grpo",
                            aggregation="constant_length"),
        _CLIP, "Liu et al. 2025, arXiv 2503.20783"),
    "gspo": Preset(
        Spec(**_SEQUENCE, level="sequence_mean"),
        dict(eps_low=3e-4, eps_high=4e-4),
        "Zheng et al. 2025, arXiv 2507.18071 (bounds for answers of thousands "
        "of tokens)"),
    "gspo_token": Preset(
        Spec(**_SEQUENCE, level="sequence_mean_token"),
        dict(eps_low=3e-4, eps_high=4e-4),
        "Zheng et al. 2025, arXiv 2507.18071, section 4.3"),
    "cispo": Preset(
        Spec(surrogate="cispo", anchor="behaviour"), dict(cap=5.0),
        "MiniMax-M1 2025, arXiv 2506.13585; cap 5 from ScaleRL, arXiv "
        "2510.13786 (the paper's is not published)"),
    "gpg": Preset(
        Spec(advantage="gpg"), {}, "Chu et al. 2025, arXiv 2504.02546"),
    "reinforce_pp": Preset(
        dataclasses.replace(_PPO, advantage="reinforce_pp"), _CLIP,
        "Hu et al. 2025, arXiv 2501.03262"),
    "luspo": Preset(
        Spec(surrogate="ppo_clip", level="sequence_mean",
             aggregation="sequence_mean_token_sum"),
        dict(eps_low=2e-3, eps_high=2.5e-3),
        "LUSPO 2026, arXiv 2602.05261: the GSPO loss times the length"),
    "gmpo": Preset(
        Spec(surrogate="gmpo", aggregation="sequence_mean_token_mean"),
        dict(log_low=0.4, log_high=0.4), "Zhao et al. 2025, arXiv 2507.20673"),
    "sapo": Preset(
        Spec(surrogate="sapo", aggregation="sequence_mean_token_mean"),
        dict(tau_pos=1.0, tau_neg=1.05), "Qwen 2025, arXiv 2511.20347"),
    "aspo": Preset(
        Spec(surrogate="aspo"),
        dict(eps_low=0.2, eps_high=0.2, clip_c=3.0, cap=3.0),
        "ASPO 2025, arXiv 2510.06062"),
    "bapo": Preset(
        Spec(surrogate="bapo"), dict(low=0.6, low_max=0.8, high=1.2, high_max=2.0,
                                     target=0.5), "BAPO 2025, arXiv 2510.18927"),
    "dppo_tv": Preset(
        Spec(surrogate="dppo_tv"), dict(delta_low=0.15, delta_high=0.15, cap=3.0),
        "DPPO 2026, arXiv 2602.04879 (cap 3 as verl)"),
    "dppo_kl": Preset(
        Spec(surrogate="dppo_kl"), dict(delta_low=0.05, delta_high=0.05, cap=3.0),
        "DPPO 2026, arXiv 2602.04879 (cap 3 as verl)"),
    "clip_cov": Preset(
        Spec(surrogate="clip_cov"),
        dict(_CLIP, cov_ratio=2e-4, cov_low=1.0, cov_high=5.0),
        "Cui et al. 2025, arXiv 2505.22617"),
    "kl_cov": Preset(
        Spec(surrogate="kl_cov"), dict(cov_ratio=2e-3, cov_penalty=1.0),
        "Cui et al. 2025, arXiv 2505.22617"),
    "vespo": Preset(
        Spec(surrogate="vespo", level="sequence_sum"),
        dict(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0),
        "VESPO 2026, arXiv 2602.10693 (constants of its config)"),
    "topr": Preset(
        Spec(surrogate="topr", level="sequence_sum", advantage="dr_grpo",
             aggregation="sequence_mean_token_sum"),
        dict(cap=1.0), "Le Roux et al. 2025, arXiv 2503.14286"),
    "opmd": Preset(
        Spec(surrogate="opmd", level="sequence_sum", advantage="dr_grpo",
             aggregation="sequence_mean_token_sum"),
        dict(tau=0.1), "Kimi k1.5 2025, arXiv 2501.12599 (tau unpublished)"),
    "intellect_2": Preset(
        dataclasses.replace(_PPO, surrogate="two_sided"),
        dict(_CLIP, delta=4.0), "INTELLECT-2 2025, arXiv 2505.07291, without "
        "its KL term (kl_coef 0.001)"),
    "tis": Preset(
        Spec(corrections=(Correction("tis", num="current"),)), dict(cap=2.0),
        "Yao et al. 2025 (REINFORCE form): the whole current/behaviour ratio"),
    "score_centering": Preset(
        Spec(centering="score"), {}, "Marek and Ryabinin 2026, arXiv 2609.20807: "
        "no weight, the sampler's expected score taken out"),
    "tis_score_centering": Preset(
        Spec(corrections=(Correction("tis", num="current"),),
             centering="score"), dict(cap=2.0),
        "Marek and Ryabinin 2026, arXiv 2609.20807, with TIS"),
    "ppo_tis": Preset(
        dataclasses.replace(_DECOUPLED, corrections=(Correction("tis"),)),
        dict(_CLIP, cap=2.0),
        "Yao et al. 2025 (PPO form): proximal/behaviour on top of PPO"),
    "seq_tis": Preset(
        dataclasses.replace(_DECOUPLED, corrections=(
            Correction("tis", level="sequence_sum"),)),
        dict(_CLIP, cap=2.0), "Liu, Li et al. 2025: the row's product, capped"),
    "vtrace_llm": Preset(
        Spec(corrections=(Correction("trace", num="current"),),
             advantage="dr_grpo"),
        dict(cap=1.0), "Espeholt et al. 2018, arXiv 1802.01561, for an outcome "
        "reward and a group's baseline"),
    "aipo": Preset(
        Spec(corrections=(Correction("tis", num="current"),), advantage="dr_grpo"),
        dict(cap=4.0), "LlamaRL 2025, arXiv 2505.24034 (cap between 2 and 10)"),
    "mis": Preset(
        dataclasses.replace(_DECOUPLED, corrections=(Correction("mis"),)),
        dict(_CLIP, cap=2.0), "Liu, Li et al. 2025"),
    "seq_mis": Preset(
        dataclasses.replace(_DECOUPLED, corrections=(
            Correction("mis", level="sequence_sum"),)),
        dict(_CLIP, cap=2.0), "Liu, Li et al. 2025"),
    "geo_rs": Preset(
        dataclasses.replace(_DECOUPLED, denominator="kept", corrections=(
            Correction("geometric_mask"),)),
        dict(_CLIP, low=0.99, high=1.01),
        "Liu, Li et al. 2025 (verl: 0.999 to 1.001)"),
    "icepop": Preset(
        dataclasses.replace(_DECOUPLED, corrections=(Correction("icepop"),)),
        dict(_CLIP, low=0.5, high=5.0),
        "Ling Team 2025, arXiv 2510.18855"),
    "glm5_async": Preset(
        Spec(corrections=(Correction("icepop", num="current"),),
             aggregation="sequence_mean_token_mean"),
        dict(low=0.8, high=1.28), "GLM-5 2026, arXiv 2602.15763: no proximal "
        "policy, the whole ratio weighs and masks, for both signs"),
    "m2po": Preset(
        Spec(surrogate="ppo_clip", corrections=(Correction("m2po"),),
             denominator="kept"),
        dict(eps_low=math.inf, eps_high=math.inf, tau=0.04),
        "M2PO 2025, arXiv 2510.01161: the mask is the trust region, no clip"),
    "areal_decoupled": Preset(
        dataclasses.replace(_DECOUPLED, aggregation="token_mean",
                            corrections=(Correction("mis"),)),
        dict(_CLIP, cap=5.0), "AReaL 2025, arXiv 2505.24298; Hilton et al. 2021, "
        "arXiv 2110.00641 (behaviour weight above 5 dropped)"),
    "a3po": Preset(
        dataclasses.replace(_DECOUPLED, aggregation="token_mean",
                            proximal="log_linear", corrections=(
                                Correction("mis"),)),
        dict(_CLIP, cap=5.0), "A-3PO 2025, arXiv 2512.06547: the proximal policy "
        "between behaviour and current, by version"),
    "ppo_ewma": Preset(
        dataclasses.replace(_DECOUPLED, aggregation="token_mean",
                            proximal="ewma", corrections=(Correction("tis"),)),
        dict(_CLIP, ewma_decay=0.9, cap=math.inf),
        "Hilton et al. 2021, arXiv 2110.00641"),
    "minirl": Preset(
        Spec(surrogate="ppo_clip", anchor="proximal", advantage="dr_grpo",
             aggregation="token_sum", corrections=(Correction("tis"),)),
        dict(eps_low=0.2, eps_high=0.27, cap=5.0),
        "Qwen 2025, arXiv 2512.01374"),
    "scalerl": Preset(
        Spec(surrogate="cispo", aggregation="prompt_mean", advantage="dr_grpo",
             advantage_norm="rows"), dict(cap=5.0),
        "ScaleRL 2025, arXiv 2510.13786"),
    "deepseek_v32": Preset(
        dataclasses.replace(_PPO, regularizer="k3", kl_weight="behaviour",
                            corrections=(Correction("opsm", num="current"),)),
        dict(_CLIP, delta=0.5, kl_coef=1e-3),
        "DeepSeek-V3.2 2025, arXiv 2512.02556 (delta and KL weight "
        "unpublished)"),
    "prime_rl": Preset(
        Spec(surrogate="dppo_tv", options=(("form", "ratio"),)),
        dict(delta_low=0.2, delta_high=0.2, kl_tau=1e-3),
        "prime-rl default loss, 2026"),
    "nemo_rl_async_grpo": Preset(
        Spec(surrogate="ppo_clip", anchor="proximal",
             options=(("std", "leave_one_out"),),
             corrections=(Correction("tis"),)),
        dict(_CLIP, cap=math.inf),
        "NeMo-RL asynchronous GRPO defaults, 2026: uncapped weight"),
}


def get(name: str) -> Preset:
  checks.choice("objective.preset", name, PRESETS)
  return PRESETS[name]


def describe() -> list[dict[str, str]]:
  """One row of text a preset, for `--list_presets`."""
  rows = []
  for name, preset in PRESETS.items():
    s = preset.spec
    anchored = ops.SURROGATES[s.surrogate].has_factor
    rows.append(dict(
        preset=name, surrogate=s.surrogate + (
            "" if s.centering == "none" else f" + {s.centering} centering"),
        ratio=f"current/{s.anchor}, {s.level}" if anchored else "-",
        corrections=", ".join(map(str, s.corrections)) or "-",
        advantage=s.advantage, aggregation=s.aggregation,
        constants=" ".join(f"{k}={v:g}" for k, v in preset.constants.items())
        or "-", source=preset.source))
  return rows
