"""ops/__init__.py: each row of each table against the function it names."""

import inspect

import pytest

from rl_is import ops
from rl_is.core import checks
from rl_is.ops import (advantages, aggregate, corrections, ratios, regularizers,
                       rejection, surrogates, surrogates_soft, surrogates_trust,
                       token_advantages)

TABLES = {
    "surrogate": (ops.SURROGATES, (surrogates, surrogates_soft,
                                   surrogates_trust)),
    "correction": (ops.CORRECTIONS, (corrections, rejection)),
    "advantage": (ops.ADVANTAGES, (advantages, token_advantages)),
    "aggregation": (ops.AGGREGATIONS, (aggregate,)),
    "regularizer": (ops.REGULARIZERS, (regularizers,)),
}
ROWS = [(axis, name) for axis, (table, _) in TABLES.items() for name in table
        if name != "given"]  # the caller's own advantage: no function
# Public, and no piece of an axis: helpers, and what needs more than a batch.
NO_ROW = {
    "bapo_bounds", "unknown_versions", "centre", "lone_row",
    "group_sum", "batch_norm",
    "optimal_baseline", "optimal_token_baseline", "importance_weighted",
    "with_score", "entropy_sampled", "k3_unbiased"}


def _public(module):
  functions = inspect.getmembers(module, inspect.isfunction)
  return {name: fn for name, fn in functions
          if fn.__module__ == module.__name__ and not name.startswith("_")}


def _of(axis, name):
  """(row, the public function that it stands for)."""
  row = TABLES[axis][0][name]
  return row, getattr(aggregate, name) if axis == "aggregation" else row.fn


@pytest.mark.parametrize("axis", TABLES)
def test_every_public_function_has_a_row(axis):
  table, modules = TABLES[axis]
  names = {name.removesuffix("_parts") for m in modules for name in _public(m)}
  assert names - NO_ROW == {row for a, row in ROWS if a == axis} - {"gpg"} | (
      {"gpg"} & names)


@pytest.mark.parametrize("axis,name", ROWS)
def test_the_row_names_its_function(axis, name):
  row, _ = _of(axis, name)
  assert row.fn.__name__ == (f"{name}_parts" if axis == "aggregation" else name)
  assert row.source


@pytest.mark.parametrize("axis,name", ROWS)
def test_keywords_are_the_constants_options_and_inputs(axis, name):
  """Nothing that a piece takes is left out of its row, nor the other way."""
  row, fn = _of(axis, name)
  usual = {"level", "dtype", "counted", "logp", "logp_anchor", "adv", "mask",
           "logp_num", "logp_behaviour", "logp_ref", "reward", "group", "loss",
           "version", "version_now", "weights", "penalty"}
  parameters = inspect.signature(fn).parameters
  keywords = {p.name: p.default for p in parameters.values()
              if p.name not in usual or p.name in row.inputs}
  if not row.has_level and "level" in parameters:
    keywords["level"] = parameters["level"].default
  constants = {c.keyword or kw: c for kw, c in row.constants.items()}
  if axis == "regularizer":
    assert constants.pop("kl_coef").default is None  # the objective's
  assert set(keywords) == set(constants) | set(row.options) | set(row.inputs)
  for kw, default in keywords.items():
    if default is inspect.Parameter.empty:
      continue
    if kw in constants:
      assert constants[kw].default == default, kw
    elif kw in row.options:
      assert row.options[kw][0] == default, kw


@pytest.mark.parametrize("axis,name", ROWS)
def test_defaults_lie_in_their_range(axis, name):
  for constant, c in _of(axis, name)[0].constants.items():
    assert c.help and c.low < c.high, constant
    if c.default is not None:
      checks.in_range(constant, c.default, c.low, c.high, c.closed)
    if not c.closed:
      with pytest.raises(ValueError, match=constant):
        checks.in_range(constant, c.low, c.low, c.high, c.closed)


@pytest.mark.parametrize("axis,name", ROWS)
def test_docstrings_have_the_sections(axis, name):
  doc = inspect.getdoc(_of(axis, name)[1])
  places = [doc.find(section) for section in (
      "**Source**:", "**Departs**:", "Args:", "Returns:")]
  assert -1 not in places and places == sorted(places)
  assert "Raises:" in doc or "Limits:" in doc
  for p in inspect.signature(_of(axis, name)[1]).parameters:
    assert p in doc[places[2]:places[3]], f"{p} is not under Args"
  first = doc.splitlines()
  assert first[0].endswith(".") and not first[1]


def test_levels_and_anchors():
  for axis, name in ROWS:
    row, fn = _of(axis, name)
    level = inspect.signature(fn).parameters.get("level")
    if axis == "surrogate":
      assert (level is not None) == row.has_factor
    elif axis == "correction":
      assert row.has_level <= (level is not None)
  assert ops.LEVELS is ratios.LEVELS
  assert set(ops.LEVELS) == {
      "token", "sequence_mean", "sequence_mean_token", "sequence_sum", "prefix",
      "suffix", "segment"}
  assert ops.ANCHORS == ("behaviour", "proximal", "current")


def test_what_multiplies_and_what_only_tests():
  factors = {n for n, row in ops.CORRECTIONS.items() if row.has_factor}
  assert factors == {"tis", "mis", "icepop", "trace"}
  assert all(row.has_factor == (n != "pg") for n, row in ops.SURROGATES.items())
  ungrouped = {n for n, row in ops.ADVANTAGES.items() if not row.grouped}
  assert ungrouped == {"reward", "given", "remax", "reinforce_pp"}


def test_published_defaults():
  value = lambda table, name: {
      kw: c.default for kw, c in table[name].constants.items()
      if kw != "max_log_ratio"}
  assert value(ops.SURROGATES, "dual_clip")["clip_c"] == 3
  assert value(ops.SURROGATES, "sapo") == dict(tau_pos=1.0, tau_neg=1.05)
  assert value(ops.SURROGATES, "vespo") == dict(
      k_pos=2, lambda_pos=3, k_neg=3, lambda_neg=2)
  assert value(ops.CORRECTIONS, "tis") == dict(cap=2, floor=0)
  assert value(ops.CORRECTIONS, "icepop") == dict(low=.5, high=5)
  assert value(ops.CORRECTIONS, "m2po") == dict(tau=.04)
  assert value(ops.ADVANTAGES, "grpo") == dict(std_eps=1e-6)


def test_dual_clip_refuses_a_bound_of_one_or_less():
  c = ops.SURROGATES["dual_clip"].constants["clip_c"]
  for value in (.8, 1.):
    with pytest.raises(ValueError, match="clip_c"):
      checks.in_range("clip_c", value, c.low, c.high, c.closed)
