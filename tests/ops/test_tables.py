"""ops/__init__.py: each row of each table against the function it names."""

import inspect

import pytest

from rl_is import ops
from rl_is.core import checks
from rl_is.ops import (advantages, aggregate, corrections, ratios, regularizers,
                       surrogates)

TABLES = {
    "surrogate": (ops.SURROGATES, surrogates),
    "correction": (ops.CORRECTIONS, corrections),
    "advantage": (ops.ADVANTAGES, advantages),
    "aggregation": (ops.AGGREGATIONS, aggregate),
    "regularizer": (ops.REGULARIZERS, regularizers),
}
ROWS = [(axis, name) for axis, (table, _) in TABLES.items() for name in table]


def _public(module):
  functions = inspect.getmembers(module, inspect.isfunction)
  return {name: fn for name, fn in functions
          if fn.__module__ == module.__name__ and not name.startswith("_")}


def _of(axis, name):
  """(row, the public function that it stands for)."""
  table, module = TABLES[axis]
  return table[name], getattr(module, name)


@pytest.mark.parametrize("axis", TABLES)
def test_every_public_function_has_a_row(axis):
  table, module = TABLES[axis]
  names = {name.removesuffix("_parts") for name in _public(module)}
  assert names == set(table)


@pytest.mark.parametrize("axis,name", ROWS)
def test_the_row_names_its_function(axis, name):
  row, fn = _of(axis, name)
  if axis == "aggregation":
    assert row.fn is getattr(aggregate, f"{name}_parts")
  else:
    assert row.fn is fn
  assert row.source and any(c.isdigit() for c in row.source)


@pytest.mark.parametrize("axis,name", ROWS)
def test_constants_are_the_keyword_only_parameters(axis, name):
  row, fn = _of(axis, name)
  signature = inspect.signature(fn).parameters.values()
  keywords = {p.name: p.default for p in signature
              if p.kind is p.KEYWORD_ONLY and p.name != "level"}
  constants = dict(row.constants)
  if axis == "regularizer":
    assert constants.pop("kl_coef").default == 0  # the objective's, not fn's
  assert constants.keys() == keywords.keys()
  assert inspect.signature(row.fn).parameters.keys() >= keywords.keys()
  for constant, default in keywords.items():
    if default is not inspect.Parameter.empty:
      assert constants[constant].default == default, constant


@pytest.mark.parametrize("axis,name", ROWS)
def test_defaults_lie_in_their_range(axis, name):
  for constant, c in _of(axis, name)[0].constants.items():
    assert c.help and c.low < c.high
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
    fn = _of(axis, name)[1]
    level = inspect.signature(fn).parameters.get("level")
    assert (level is not None) == (
        axis == "correction" or (axis == "surrogate" and name != "pg"))
    if level is not None:
      assert level.default == "token"
  assert ops.LEVELS is ratios.LEVELS
  assert set(ops.LEVELS) == {"token", "sequence_mean", "sequence_mean_token"}
  assert ops.ANCHORS == ("behaviour", "proximal", "current")


def test_factors_and_groups():
  for axis, name in ROWS:
    row = _of(axis, name)[0]
    assert row.has_factor == (
        axis == "correction" or (axis == "surrogate" and name != "pg"))
    assert row.grouped == (axis == "advantage" and name != "reward")


def test_published_defaults():
  defaults = {
      f"{name}.{constant}": c.default for axis, name in ROWS
      for constant, c in _of(axis, name)[0].constants.items()
      if constant not in ("max_log_ratio", "kl_coef")}
  assert defaults == {
      "ppo_clip.eps_low": None, "ppo_clip.eps_high": None,
      "dual_clip.eps_low": None, "dual_clip.eps_high": None,
      "dual_clip.clip_c": 3, "cispo.cap": None, "cispo.floor": 0,
      "tis.cap": 2, "mis.cap": 2, "icepop.low": .5, "icepop.high": 5,
      "grpo.std_eps": 1e-6, "constant_length.length": None}


def test_dual_clip_refuses_a_bound_of_one_or_less():
  c = ops.SURROGATES["dual_clip"].constants["clip_c"]
  for value in (.8, 1.):
    with pytest.raises(ValueError, match="clip_c"):
      checks.in_range("clip_c", value, c.low, c.high, c.closed)
