"""Named methods as rows: choices, constants, source. Floor 2.

Which policy a ratio is anchored on is the most important choice of all, and
papers rarely name it: "old" in PPO, GRPO, DAPO and GSPO is the policy that
sampled, so those rows anchor on `behaviour`. Where a paper recomputes the old
log-probs and corrects for the sampler apart, the row anchors on `proximal` and
the correction carries proximal/behaviour.
"""

import dataclasses
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
        Spec(**_SEQUENCE), _CLIP, "Shao et al. 2024, arXiv 2402.03300"),
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
    "tis": Preset(
        Spec(corrections=(Correction("tis", num="current"),)), dict(cap=2.0),
        "Yao et al. 2025 (REINFORCE form): the whole current/behaviour ratio"),
    "ppo_tis": Preset(
        dataclasses.replace(_DECOUPLED, corrections=(Correction("tis"),)),
        dict(_CLIP, cap=2.0),
        "Yao et al. 2025 (PPO form): proximal/behaviour on top of PPO"),
    "mis": Preset(
        dataclasses.replace(_DECOUPLED, corrections=(Correction("mis"),)),
        dict(_CLIP, cap=2.0), "Liu, Li et al. 2025"),
    "icepop": Preset(
        dataclasses.replace(_DECOUPLED, corrections=(Correction("icepop"),)),
        dict(_CLIP, low=0.5, high=5.0),
        "Ling Team 2025, arXiv 2510.18855"),
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
        preset=name, surrogate=s.surrogate,
        ratio=f"current/{s.anchor}, {s.level}" if anchored else "-",
        corrections=", ".join(map(str, s.corrections)) or "-",
        advantage=s.advantage, aggregation=s.aggregation,
        constants=" ".join(f"{k}={v:g}" for k, v in preset.constants.items())
        or "-", source=preset.source))
  return rows
