"""Constants out of their range, given to an op directly, not by a config.

Generated from the rows: each of a row's constants is held to the row's range.
"""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is import ops
from rl_is.core import checks
from rl_is.core.types import Weights
from rl_is.ops import (aggregate, centering, corrections, ratios, rejection,
                       surrogates, surrogates_trust, token_advantages, values)

X = np.array([[-1.0, -0.5], [-0.2, -2.0]], np.float32)
MASK = np.ones((2, 2), bool)
ARRAYS = dict(
    logp=X, logp_anchor=X, adv=X, logp_num=X, logp_behaviour=X, logp_ref=X,
    mask=MASK, reward=X[0], group=np.zeros(2, np.int32), length=X[0] + 3,
    baseline=X[0], loss=X, version=MASK + 0, version_now=np.int32(1),
    weights=Weights(X, MASK, X), key=jax.random.key(0))
# Inside every range that a constant of the name has, in any row.
INSIDE = dict(clip_c=3.0, cov_low=-1.0, gamma=0.5, cov_ratio=0.5, high=2.0,
              cap=2.0, floor=0.1, low_max=0.8, high_max=3.0, upper=1.0,
              lower=0.1)
ROWS = {
    f"{axis} {name}": row for axis, table in dict(
        surrogate=ops.SURROGATES, correction=ops.CORRECTIONS,
        advantage=ops.ADVANTAGES, aggregation=ops.AGGREGATIONS,
        regularizer=ops.REGULARIZERS).items()
    for name, row in table.items() if row.fn is not None}


def keywords(row):
  """The row's constants by the keyword of the function."""
  takes = inspect.signature(row.fn).parameters
  return {c.keyword or name: c for name, c in row.constants.items()
          if (c.keyword or name) in takes}


def call(row, **constants):
  given = {kw: INSIDE.get(kw, 0.7) for kw in keywords(row)}
  # A constant hides an array of its name: `length` is both.
  arrays = {p: ARRAYS[p] for p in inspect.signature(row.fn).parameters
            if p in ARRAYS and p not in given}
  return row.fn(**arrays, **{**given, **constants})


def outside(c):
  """The nearest numbers that the range leaves out."""
  below = math.nextafter(c.low, -math.inf) if c.closed else c.low
  any_low, any_high = c.closed and c.low == -math.inf, c.high == math.inf
  return ([] if any_low else [below]) + (
      [] if any_high else [math.nextafter(c.high, math.inf)])


CASES = [(name, kw) for name, row in ROWS.items() for kw in keywords(row)]


@pytest.mark.parametrize("name,kw", CASES)
def test_each_constant_is_held_to_its_range(name, kw):
  row, c = ROWS[name], keywords(ROWS[name])[kw]
  call(row)
  for value in (*outside(c), math.nan, "1", None, True):
    for given in (value, *([np.float64(value), np.array(value)]
                           if isinstance(value, float) else [])):
      with pytest.raises(ValueError, match=f"^[a-z0-9_]+: {kw}: ") as error:
        call(row, **{kw: given})
      assert "\n" not in str(error.value) and "got" in str(error.value)
  # Its own edges are inside, where the other edge of a band allows it.
  if c.closed and c.low > -math.inf:
    call(row, **{kw: c.low})


@pytest.mark.parametrize("name", [n for n, r in ROWS.items() if r.constants])
def test_a_traced_constant_is_let_through(name):
  """Its value is not known: the call must trace, whatever it will be."""
  row = ROWS[name]
  bad = {kw: jnp.float32(-1) for kw in keywords(row)}
  jax.eval_shape(jax.jit(lambda given: (call(row, **given), None)[1]), bad)


@pytest.mark.parametrize("name,low,high", [
    (name, low, high) for name, row in ROWS.items()
    for low, high in checks.BANDS
    if {low, high} <= set(keywords(row))])
def test_the_edges_of_a_band_are_in_order(name, low, high):
  with pytest.raises(ValueError, match=(
      f"^[a-z0-9_]+: {low}: expected at most {high} = 0.5, got 0.75$")):
    call(ROWS[name], **{low: 0.75, high: 0.5})
  call(ROWS[name], **{low: 0.5, high: 0.5})


@pytest.mark.parametrize("call_it,message", [
    (lambda: surrogates.ppo_clip(X, X, X, MASK, eps_low=-1, eps_high=.2),
     r"ppo_clip: eps_low: expected a value in \(0, inf\], got -1"),
    (lambda: corrections.tis(X, X, MASK, cap=0),
     r"tis: cap: .*\(0, inf\], got 0"),
    (lambda: corrections.tis(X, X, MASK, cap=1, floor=2),
     "tis: floor: expected at most cap = 1, got 2"),
    (lambda: rejection.ratio_mask(X, X, MASK, low=2., high=.5),
     "ratio_mask: low: expected at most high = 0.5, got 2"),
    (lambda: values.gae(X, X, MASK, gamma=1.1, lam=1),
     r"gae: gamma: .*\[0, 1\], got 1.1"),
    (lambda: values.vtrace(X, X, X, X, MASK, leak=-.1),
     r"vtrace: leak: .*, got -0.1"),
    (lambda: values.whiten(X, MASK, ddof=-1), r"whiten: ddof: .*\[0, inf\]"),
    (lambda: values.value_loss(X, X, X, MASK, clip=0), "value_loss: clip"),
    (lambda: token_advantages.reinforce_pp(
        X[0], ARRAYS["group"], MASK, gamma=2), "reinforce_pp: gamma"),
    (lambda: surrogates_trust.bapo_bounds(None, X, X, X, MASK, target=0),
     "bapo_bounds: target"),
    (lambda: aggregate.constant_length(X, MASK, length=0),
     "constant_length: length"),
    (lambda: ratios.ewma({}, {}, 1.5), r"ewma: decay: .*\[0, 1\]"),
    (lambda: ratios.log_linear_anchor(X, X, MASK, alpha=-.5),
     "log_linear_anchor: alpha"),
    (lambda: centering.score_centering(
        X[None], X[None], MASK[None], X[:1], MASK[:1], low=3, high=2),
     "score_centering: low: expected at most high = 2, got 3")])
def test_the_line_says_what_was_expected_and_what_came(call_it, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    call_it()


def test_numbers_of_any_kind_and_arrays_pass():
  for eps in (1, np.float32(.2), np.array(.2), jnp.float32(.2), math.inf):
    surrogates.ppo_clip(X, X, X, MASK, eps_low=eps, eps_high=eps)
  ratios.log_linear_anchor(X, X, MASK, alpha=np.full_like(X, .5))
