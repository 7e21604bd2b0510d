"""Floor 1: the maths on arrays, and the literal tables of it.

A table row says which function it is, the constants it takes with their default
and range, and where it comes from. Config fields, `--list_presets` and the
property tests are generated from these rows; a new piece is one function, one
row here and one test. `[B, T]` everywhere; jax only.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from rl_is.ops import advantages as _advantages
from rl_is.ops import aggregate as _aggregate
from rl_is.ops import corrections as _corrections
from rl_is.ops import regularizers as _regularizers
from rl_is.ops import surrogates as _surrogates
from rl_is.ops.ratios import LEVELS

ANCHORS = ("behaviour", "proximal", "current")


@dataclasses.dataclass(frozen=True)
class Constant:
  """A number that a piece takes; valid in (low, high], or [low, high]."""

  default: float | None  # None: a preset or the config must say it
  low: float = 0.0
  high: float = math.inf
  closed: bool = False  # low itself is allowed
  help: str = ""


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Row:
  """One piece of one axis."""

  fn: Callable
  source: str
  constants: Mapping[str, Constant] = dataclasses.field(default_factory=dict)
  # What it multiplies the loss by, as (numerator, denominator): for a surrogate
  # ("current", its anchor), for a correction (its numerator, "behaviour").
  has_factor: bool = False
  grouped: bool = False  # an advantage that compares the samples of a prompt


_LOG_CLAMP = Constant(20.0, help="nats; log ratios are clamped to +- this")
_EPS = Constant(None, help="distance of the clip bound from 1")
_CAP = Constant(None, help="absolute bound on the ratio")

SURROGATES = {
    "pg": Row(_surrogates.pg, "Williams 1992"),
    "ppo_clip": Row(
        _surrogates.ppo_clip, "Schulman et al. 2017, arXiv 1707.06347",
        dict(eps_low=_EPS, eps_high=_EPS, max_log_ratio=_LOG_CLAMP),
        has_factor=True),
    "dual_clip": Row(
        _surrogates.dual_clip, "Ye et al. 2020, arXiv 1912.09729",
        dict(eps_low=_EPS, eps_high=_EPS,
             clip_c=Constant(3.0, low=1.0, help="bound on r where A < 0"),
             max_log_ratio=_LOG_CLAMP),
        has_factor=True),
    "cispo": Row(
        _surrogates.cispo, "MiniMax-M1 2025, arXiv 2506.13585",
        dict(cap=_CAP, floor=Constant(0.0, closed=True, help="0: no floor"),
             max_log_ratio=_LOG_CLAMP),
        has_factor=True),
}

CORRECTIONS = {
    "tis": Row(
        _corrections.tis, "Ionides 2008; Yao et al. 2025",
        dict(cap=dataclasses.replace(_CAP, default=2.0),
             max_log_ratio=_LOG_CLAMP), has_factor=True),
    "mis": Row(
        _corrections.mis, "Liu, Li et al. 2025",
        dict(cap=dataclasses.replace(_CAP, default=2.0),
             max_log_ratio=_LOG_CLAMP), has_factor=True),
    "icepop": Row(
        _corrections.icepop, "Ling Team 2025, arXiv 2510.18855",
        dict(low=Constant(0.5, help="lower edge of the band, absolute"),
             high=Constant(5.0, help="upper edge of the band, absolute"),
             max_log_ratio=_LOG_CLAMP), has_factor=True),
}

ADVANTAGES = {
    "grpo": Row(_advantages.grpo, "Shao et al. 2024, arXiv 2402.03300",
                dict(std_eps=Constant(1e-6, closed=True, help="added to the std")),
                grouped=True),
    "dr_grpo": Row(_advantages.dr_grpo, "Liu et al. 2025, arXiv 2503.20783",
                   grouped=True),
    "rloo": Row(_advantages.rloo, "Ahmadian et al. 2024, arXiv 2402.14740",
                grouped=True),
    "reward": Row(_advantages.reward, "Williams 1992"),
}

# These rows hold the `_parts` form: objective.prepare needs weights and counts
# apart, because it fixes the denominators before any split.
AGGREGATIONS = {
    "token_mean": Row(_aggregate.token_mean_parts,
                      "Yu et al. 2025, arXiv 2503.14476"),
    "sequence_mean_token_mean": Row(_aggregate.sequence_mean_token_mean_parts,
                                    "Shao et al. 2024, arXiv 2402.03300"),
    "constant_length": Row(
        _aggregate.constant_length_parts, "Liu et al. 2025, arXiv 2503.20783",
        dict(length=Constant(None, help="tokens that a sequence's sum is over"))),
}

_KL_COEF = Constant(0.0, closed=True, help="weight of the KL term")
REGULARIZERS = {
    "k1": Row(_regularizers.k1, "Schulman 2020", dict(kl_coef=_KL_COEF)),
    "k2": Row(_regularizers.k2, "Schulman 2020", dict(kl_coef=_KL_COEF)),
    "k3": Row(_regularizers.k3, "Schulman 2020",
              dict(kl_coef=_KL_COEF, max_log_ratio=_LOG_CLAMP)),
}
