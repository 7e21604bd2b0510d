"""Floor 1: the maths on arrays, and the literal tables of it.

A table row says which function it is, the constants it takes with their default
and range, and where it comes from. `--list_presets` and the property tests are
generated from these rows, and the config's list of constants is held to them; a
new piece is one function, one row here and one test. A function called directly
refuses a plain number outside its row's range. `[B, T]` everywhere; jax only.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from rl_is.ops import advantages as _advantages
from rl_is.ops import aggregate as _aggregate
from rl_is.ops import corrections as _corrections
from rl_is.ops import regularizers as _regularizers
from rl_is.ops import rejection as _rejection
from rl_is.ops import surrogates as _surrogates
from rl_is.ops import surrogates_soft as _soft
from rl_is.ops import surrogates_trust as _trust
from rl_is.ops import token_advantages as _token_advantages
from rl_is.ops import values as _values
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
  keyword: str | None = None  # of the function, where it is not the name


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Row:
  """One piece of one axis."""

  fn: Callable
  source: str
  constants: Mapping[str, Constant] = dataclasses.field(default_factory=dict)
  # Static choices of the function: keyword -> values, the default first.
  options: Mapping[str, tuple[str, ...]] = dataclasses.field(
      default_factory=dict)
  # Arrays of the batch that it is given by keyword, besides its usual ones.
  inputs: tuple[str, ...] = ()
  # What a correction is given first: two log-probs, two versions, or the weights
  # of the chain before it.
  takes: str = "ratio"
  # It multiplies the loss by a ratio: for a surrogate ("current", its anchor),
  # for a correction (its numerator, its denominator).
  has_factor: bool = False
  multiplies: bool = True  # False: it has an anchor, and adds a penalty
  has_level: bool = True
  # Needs the whole minibatch at once: refused with more than one microbatch.
  is_coupled: bool = False
  grouped: bool = False  # an advantage that compares the samples of a prompt


_INF = math.inf


def _c(default=None, low=0.0, high=_INF, closed=False, help="", keyword=None):
  return Constant(default, low, high, closed, help, keyword)


_LOG_CLAMP = dict(max_log_ratio=_c(
    20.0, help="nats; log ratios are clamped to +- this"))
_EPS = _c(help="distance of the clip bound from 1")
_CAP = _c(help="absolute bound on the ratio")
_CLIP = dict(eps_low=_EPS, eps_high=_EPS, **_LOG_CLAMP)
_LOW, _HIGH = (_c(help=f"{side} edge of the band, absolute")
               for side in ("lower", "upper"))
_ANY = dict(low=-_INF, high=_INF, closed=True)  # any number at all

_COV_RATIO = _c(2e-4, high=1.0, closed=True,
                help="share of the tokens that it acts on; 0: off")
_WHITEN = dict(ddof=_c(1.0, closed=True, help="n - ddof in the variance"),
               var_eps=_c(1e-8, closed=True, help="added to the variance"))


def _surrogate(fn, source, constants, **flags):
  return Row(fn, source, dict(constants, **_LOG_CLAMP), has_factor=True, **flags)


SURROGATES = {
    "pg": Row(_surrogates.pg, "Williams 1992"),
    "ppo_clip": _surrogate(
        _surrogates.ppo_clip, "Schulman et al. 2017, arXiv 1707.06347", _CLIP),
    "dual_clip": _surrogate(
        _surrogates.dual_clip, "Ye et al. 2020, arXiv 1912.09729",
        dict(_CLIP, clip_c=_c(3.0, low=1.0, help="bound on r where A < 0"))),
    "two_sided": _surrogate(
        _surrogates.two_sided, "INTELLECT-2 2025, arXiv 2505.07291",
        dict(_CLIP, delta=_c(help="bound on r before the min, both signs"))),
    "cispo": _surrogate(
        _surrogates.cispo, "MiniMax-M1 2025, arXiv 2506.13585",
        dict(cap=_CAP, floor=_c(0.0, closed=True, help="0: no floor"))),
    "sapo": _surrogate(
        _soft.sapo, "Qwen 2025, arXiv 2511.20347",
        dict(tau_pos=_c(1.0, help="steepness of the gate, A > 0"),
             tau_neg=_c(1.05, help="and A <= 0"))),
    "gmpo": _surrogate(
        _soft.gmpo, "Zhao et al. 2025, arXiv 2507.20673",
        dict(log_low=_c(0.4, help="bound on the log ratio below, nats"),
             log_high=_c(0.4, help="and above"))),
    "topr": _surrogate(
        _soft.topr, "Le Roux et al. 2025, arXiv 2503.14286",
        dict(cap=dataclasses.replace(_CAP, default=1.0))),
    "vespo": _surrogate(
        _soft.vespo, "VESPO 2026, arXiv 2602.10693",
        dict(k_pos=_c(2.0, help="power of W, A >= 0"),
             lambda_pos=_c(3.0, help="decay in W, A >= 0"),
             k_neg=_c(3.0, help="power of W, A < 0"),
             lambda_neg=_c(2.0, help="decay in W, A < 0"))),
    "aspo": _surrogate(
        _soft.aspo, "ASPO 2025, arXiv 2510.06062",
        dict(_CLIP, clip_c=_c(3.0, low=1.0, help="bound on r where A < 0"),
             cap=_c(3.0, help="bound on 1/r where A > 0"))),
    "dro": _surrogate(
        _soft.dro, "Richemond et al. 2024, arXiv 2405.19107",
        dict(beta=_c(closed=True, help="weight of the squared log ratio")),
        multiplies=False),
    "opmd": _surrogate(
        _soft.opmd, "Kimi k1.5 2025, arXiv 2501.12599",
        dict(tau=_c(closed=True,
                    help="weight of the squared sequence log ratio")),
        multiplies=False),
    "dppo_tv": _surrogate(
        _trust.dppo_tv, "DPPO 2026, arXiv 2602.04879",
        dict(delta_low=_c(0.15, help="largest fall of a probability, A <= 0"),
             delta_high=_c(0.15, help="largest rise of one, A > 0"),
             cap=dataclasses.replace(_CAP, default=_INF),
             kl_tau=_c(0.0, closed=True, help="weight of (log r)^2")),
        options=dict(form=("score", "ratio"), sides=("advantage", "both"))),
    "dppo_kl": _surrogate(
        _trust.dppo_kl, "DPPO 2026, arXiv 2602.04879",
        dict(delta_low=_c(0.05, help="largest binary KL, nats, A <= 0"),
             delta_high=_c(0.05, help="and A > 0"),
             cap=dataclasses.replace(_CAP, default=_INF)),
        options=dict(form=("score", "ratio"))),
    "bapo": _surrogate(
        _trust.bapo, "BAPO 2025, arXiv 2510.18927",
        dict(low=_c(0.6, help="lower bound on r that the search begins with"),
             low_max=_c(0.8, help="and ends with"),
             low_step=_c(0.05, closed=True, help="and its step"),
             high=_c(1.2, help="upper bound on r that the search begins with"),
             high_max=_c(2.0, help="and ends with"),
             high_step=_c(0.05, closed=True, help="and its step"),
             target=_c(0.5, high=1.0,
                       help="share of the positive contribution")),
        is_coupled=True),
    "clip_cov": _surrogate(
        _trust.clip_cov, "Cui et al. 2025, arXiv 2505.22617",
        dict(_CLIP, cov_ratio=_COV_RATIO,
             cov_low=_c(1.0, **_ANY, help="lower edge of the covariance"),
             cov_high=_c(5.0, **_ANY, help="upper edge of it")), inputs=("key",), is_coupled=True),
    "kl_cov": _surrogate(
        _trust.kl_cov, "Cui et al. 2025, arXiv 2505.22617",
        dict(cov_ratio=_COV_RATIO,
             cov_penalty=_c(1.0, closed=True, keyword="kl_coef",
                            help="weight of |log r| on them")),
        is_coupled=True),
}


def _mask_row(fn, source, constants, **flags):
  return Row(fn, source, constants, has_level=False, **flags)


CORRECTIONS = {
    "tis": Row(
        _corrections.tis, "Ionides 2008; Yao et al. 2025",
        dict(cap=dataclasses.replace(_CAP, default=2.0),
             floor=_c(0.0, closed=True, help="0: no floor"), **_LOG_CLAMP),
        options=dict(binds=_corrections.BINDS), has_factor=True),
    "mis": Row(
        _corrections.mis, "Liu, Li et al. 2025",
        dict(cap=dataclasses.replace(_CAP, default=2.0), **_LOG_CLAMP),
        has_factor=True),
    "icepop": Row(
        _corrections.icepop, "Ling Team 2025, arXiv 2510.18855",
        dict(low=dataclasses.replace(_LOW, default=0.5),
             high=dataclasses.replace(_HIGH, default=5.0), **_LOG_CLAMP),
        options=dict(outside=("drop", "zero")), has_factor=True),
    "trace": Row(
        _corrections.trace, "Espeholt et al. 2018, arXiv 1802.01561",
        dict(cap=dataclasses.replace(_CAP, default=1.0), **_LOG_CLAMP),
        has_factor=True, has_level=False),
    "ratio_mask": Row(
        _rejection.ratio_mask, "Liu, Li et al. 2025",
        dict(low=dataclasses.replace(_LOW, closed=True), high=_HIGH)),
    "geometric_mask": _mask_row(
        _rejection.geometric_mask, "Liu, Li et al. 2025",
        dict(low=dataclasses.replace(_LOW, default=0.99, closed=True),
             high=dataclasses.replace(_HIGH, default=1.01))),
    "token_veto": _mask_row(
        _rejection.token_veto, "Liu, Li et al. 2025",
        dict(low=_c(1e-4, closed=True, help="a token below drops its row"),
             high=_c(_INF, help="a token above drops its row"))),
    "k_rejection": _mask_row(
        _rejection.k_rejection, "Schulman 2020; verl",
        dict(upper=_c(**_ANY, help="largest statistic kept, nats"),
             lower=_c(-_INF, **_ANY, help="smallest one"), **_LOG_CLAMP),
        options=dict(estimator=("k3", "k1", "k2"),
                     statistic=("mean", "token", "sum", "max"),
                     direction=("behaviour_to_num", "num_to_behaviour"),
                     clamped=("k3", "all"))),
    "m2po": _mask_row(
        _rejection.m2po, "M2PO 2025, arXiv 2510.01161",
        dict(tau=_c(0.04, help="mean squared log ratio of what is kept")),
        is_coupled=True),
    "opsm": _mask_row(
        _rejection.opsm, "DeepSeek-V3.2 2025",
        dict(delta=_c(0.5, low=-_INF, help="nats a token")), inputs=("adv",)),
    "vaco_tv": _mask_row(
        _rejection.vaco_tv, "open-instruct 2026",
        dict(high=_HIGH, low=_c(0.0, closed=True, help="lower edge, absolute"),
             **_LOG_CLAMP),
        inputs=("adv",)),
    "version_mask": Row(
        _rejection.version_mask, "slime, TRL",
        dict(max_lag=_c(closed=True, help="updates, inclusive")),
        options=dict(level=("token", "sequence")), takes="version",
        has_level=False),
    "self_normalise": Row(
        _rejection.self_normalise, "verl",
        options=dict(level=("token", "sequence")), takes="weights",
        has_level=False, is_coupled=True),
    "geometric_mean": _mask_row(
        _corrections.geometric_mean, "verl",
        dict(log_eps=_c(1e-10, closed=True, help="added before the log")),
        takes="weights"),
}

_STD_EPS = _c(1e-6, closed=True, help="added to the std")
_LONE = dict(lone=_advantages.LONE)
ADVANTAGES = {
    "grpo": Row(_advantages.grpo, "Shao et al. 2024, arXiv 2402.03300",
                dict(std_eps=_STD_EPS), grouped=True, options=dict(
                    std=("unbiased", "biased", "leave_one_out", "batch"),
                    **_LONE)),
    "dr_grpo": Row(_advantages.dr_grpo, "Liu et al. 2025, arXiv 2503.20783",
                   grouped=True, options=_LONE),
    "rloo": Row(_advantages.rloo, "Ahmadian et al. 2024, arXiv 2402.14740",
                grouped=True, options=_LONE),
    "remax": Row(_advantages.remax, "Li et al. 2023, arXiv 2310.10505",
                 inputs=("baseline",)),
    "opo": Row(_advantages.opo, "Hao et al. 2025, arXiv 2505.23585",
               inputs=("length",), grouped=True, options=_LONE),
    "gpg": Row(_advantages.gpg, "Chu et al. 2025, arXiv 2504.02546",
               grouped=True, options=_LONE),
    "pass_at_k": Row(
        _advantages.pass_at_k, "verl grpo_passk", dict(std_eps=_STD_EPS),
        options=dict(std=("none", "unbiased")), grouped=True),
    "max_rl": Row(_advantages.max_rl, "MaxRL 2026; SkyRL",
                  dict(mean_eps=_c(1e-6, closed=True,
                                   help="added to the mean")), grouped=True, options=_LONE),
    "reinforce_pp": Row(
        _token_advantages.reinforce_pp, "Hu et al. 2025, arXiv 2501.03262",
        dict(gamma=_c(1.0, closed=True, high=1.0, help="discount a token"),
             **_WHITEN),
        options=dict(holes=_values.HOLES), inputs=("mask",)),
    "reinforce_pp_baseline": Row(
        _token_advantages.reinforce_pp_baseline,
        "Hu et al. 2025, arXiv 2501.03262",
        _WHITEN,
        inputs=("mask",), grouped=True, options=_LONE),
    "reward": Row(_advantages.reward, "Williams 1992"),
    # The batch's own `adv`, per token: for losses in another trainer.
    "given": Row(None, "the caller", options=dict(over=("token", "sequence"))),
}

# These rows hold the `_parts` form: objective.prepare needs weights and counts
# apart, because it fixes the denominators before any split.
_EMPTY = dict(options=dict(empty=("exclude", "count")))
AGGREGATIONS = {
    "token_mean": Row(_aggregate.token_mean_parts,
                      "Yu et al. 2025, arXiv 2503.14476"),
    "token_sum": Row(_aggregate.token_sum_parts, "MiniRL 2025, arXiv 2512.01374"),
    "sequence_mean_token_mean": Row(
        _aggregate.sequence_mean_token_mean_parts,
        "Shao et al. 2024, arXiv 2402.03300", **_EMPTY),
    "sequence_mean_token_sum": Row(
        _aggregate.sequence_mean_token_sum_parts, "verl", **_EMPTY),
    "constant_length": Row(
        _aggregate.constant_length_parts, "Liu et al. 2025, arXiv 2503.20783",
        dict(length=_c(help="tokens that a sequence's sum is over")), **_EMPTY),
    "prompt_mean": Row(
        _aggregate.prompt_mean_parts, "ScaleRL 2025, arXiv 2510.13786",
        inputs=("group",), **_EMPTY),
}


def _kl(fn, clamp, source="Schulman 2020"):
  """Its own clamp: the estimators differ in whether they need one."""
  return Row(fn, source, dict(
      kl_coef=_c(closed=True, help="weight of the KL term"),
      kl_clamp=_c(clamp, help="nats; the log ratio is clamped to +- this",
                  keyword="max_log_ratio"),
      max_kl=_c(_INF, help="nats; beyond it the gradient is zero")))


REGULARIZERS = {
    "k1": _kl(_regularizers.k1, _INF),
    "k2": _kl(_regularizers.k2, _INF),
    "k3": _kl(_regularizers.k3, 20.0),
    "abs_kl": _kl(_regularizers.abs_kl, _INF, "verl"),
    "k1_straight": _kl(_regularizers.k1_straight, _INF, "verl k1+"),
    "k3_straight": _kl(_regularizers.k3_straight, 20.0, "verl k3+"),
}


def _hold(constants: Mapping[str, Constant], *fns: Callable) -> None:
  """The ranges of a row also hold where its function is called directly."""
  for fn in fns:
    fn.ranges |= {c.keyword or name: (c.low, c.high, c.closed)
                  for name, c in constants.items()}


for _table in (SURROGATES, CORRECTIONS, ADVANTAGES, AGGREGATIONS, REGULARIZERS):
  for _row in _table.values():
    if _row.constants:
      _hold(_row.constants, _row.fn)
# Two that take a row's constants without being its function.
_hold(SURROGATES["bapo"].constants, _trust.bapo_bounds)
_hold(_WHITEN, _values.whiten, _token_advantages.batch_norm)
