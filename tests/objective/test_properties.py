"""Symmetries of every row and preset, on batches that hypothesis draws.

Generated from the tables, by the helpers of `test_every_piece` (which has the
junk under the mask, bit for bit, and the metrics). The batch is `[B, T]`, a row
a sequence: there is no packed form in which two share a row. What packing means
here is that a row's tokens may stand in any columns, in their order and with
masked ones between them, as the turns of a dialogue do.

One program a row of the tables, of one shape, does nearly all of the work: the
data has 4 x 5 positions, and the 8 x 8 of the program leave room for padding,
other places and a second copy. Where nothing is placed stands junk, in rows
that cannot be scored.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from objective import test_every_piece as pieces
from rl_is import ops
from rl_is.core.types import Batch, PolicyOutputs
from rl_is.objective import spec as spec_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Spec

ROWS, COLS, WIDE = 4, 5, 8
KEY = jax.random.key(0)
SPECS = pieces.SPECS | {
    "advantage remax": Spec("pg", advantage="remax"),
    "advantage given": Spec("pg", advantage="given")}
# Other constants are no reason to run slow code again.
ONE_A_STRUCTURE = {spec: name for name, spec in SPECS.items()}.values()
JUNK = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
C = 4.0  # the factor of every test of a scale

# Twice the same batch is another problem, as the number of tokens or rows
# itself is part of what these do.
NO_COPY = {
    "advantage_norm": ("rows", "tokens"),  # n - 1 in the variance
    "surrogate": ("kl_cov",),  # acts on floor(ratio n) tokens
    "correction": ("m2po",)}  # of two equal tokens it may drop one
# A surrogate is linear in A together with its constants that weigh something
# against A or are compared with it; the others only know ratios.
IN_UNITS_OF_REWARD = {
    "dro": ("beta",), "opmd": ("tau",),  # of the squared log ratio
    "dppo_tv": ("kl_tau",), "kl_cov": ("cov_penalty",),
    "clip_cov": ("cov_low", "cov_high")}  # of A times log-probs
# The rewards times C are the advantages times C to this power.
DEGREE = {"grpo": 0, "max_rl": 0, "reinforce_pp": 0, "reinforce_pp_baseline": 0,
          "dr_grpo": 1, "rloo": 1, "opo": 1, "gpg": 1, "pass_at_k": 1,
          "remax": 1, "reward": 1, "given": 0}

few = settings(max_examples=4, deadline=None, derandomize=True, database=None)
# Without the compiled program: some 60 ms an example.
fewer = settings(few, max_examples=2)


@dataclasses.dataclass(frozen=True)
class Case:
  """A small batch, made from numbers that shrink well."""

  seed: int
  scale: float  # of the log ratios, nats
  density: float  # of the mask
  group: tuple[int, ...]

  @functools.cached_property
  def data(self) -> dict[str, np.ndarray]:
    r = np.random.default_rng(self.seed)
    shape = ROWS, COLS
    logp = -r.exponential(1.0, shape)
    near = lambda: logp + self.scale * r.normal(size=shape)
    mask = r.random(shape) < self.density
    mask[0, 0] = True
    return dict(
        mask=mask, logp=logp, logp_behaviour=near(), logp_prox=near(),
        logp_ref=near(), entropy=r.exponential(1.0, shape),
        adv=r.normal(size=shape), version=r.integers(1, 6, shape),
        reward=r.integers(0, 2, ROWS) + r.choice([0, 0.25], ROWS),
        baseline=r.random(ROWS), group=np.array(self.group))


cases = st.builds(
    Case, st.integers(0, 99), st.sampled_from([0.3, 0.01, 3.0]),
    st.sampled_from([0.7, 1.0, 0.3]),
    st.sampled_from([(0, 0, 1, 1), (1, 0, 1, 0), (2, 2, 2, 2), (0, 3, 3, 3)]))
row_places = st.permutations(range(WIDE)).map(lambda x: np.array(x[:ROWS]))
FIRST_ROWS, FIRST_COLS = np.arange(ROWS), np.arange(COLS)


def column_places(name):
  """Ascending columns; a run of the mask stays one where a level asks it."""
  if SPECS[name].level == "segment":
    return st.integers(0, WIDE - COLS).map(lambda x: x + FIRST_COLS)
  return st.sets(st.integers(0, WIDE - 1), min_size=COLS, max_size=COLS).map(
      lambda x: np.array(sorted(x)))


def batch_of(data) -> tuple[PolicyOutputs, Batch]:
  as_dtype = {"f": np.float32, "i": np.int32, "b": bool}
  data = {k: x.astype(as_dtype[x.dtype.kind]) for k, x in data.items()}
  logp, entropy = data.pop("logp"), data.pop("entropy")
  rows, cols = logp.shape
  return PolicyOutputs(logp, entropy), Batch(
      tokens=np.zeros((rows, cols), np.int32), valid=data["mask"],
      version_now=np.full(rows, 5, np.int32), **data)


def place(data, rows=FIRST_ROWS, cols=FIRST_COLS, copy=None):
  """The data at these rows and columns of a wide batch; `copy`: once more."""
  empty = {"mask": False, "version": -1, "group": 0, "reward": np.nan}
  out = {}
  for name, x in data.items():
    wide = np.resize(empty.get(name, JUNK), (WIDE,) * x.ndim)
    for at, shift in ((rows, 0), (copy, ROWS)):
      if at is not None:
        where = at if x.ndim == 1 else np.ix_(at, cols)
        wide[where] = x + shift if name == "group" else x
    out[name] = wide
  return batch_of(out)


def constants_of(name):
  constants = {"entropy_coef": 0.0}
  if name in pieces.SPECS:
    constants = pieces.constants_of(name)
  if SPECS[name].surrogate == "clip_cov":
    constants["cov_ratio"] = 1.0  # all candidates: nothing is left to the key
  return constants


def prepare(objective, batch, constants, scale):
  """A prepared batch, whose advantages are multiplied by `scale`."""
  batch = objective.prepare(pieces.with_head(batch), constants, KEY)
  return batch.replace(adv=batch.adv * scale)


def loss(objective, outputs, batch, constants):
  """(loss, its gradient)."""
  return jax.value_and_grad(lambda logp: objective.loss(
      pieces.outputs_of(logp, outputs.entropy), batch, constants, KEY)[0]
  )(outputs.logp)


# Level 0: to compile is all the work here. Equal structures share a program.
COMPILE = dict(static_argnums=0,
               compiler_options={"xla_backend_optimization_level": 0})
PREPARE, LOSS = jax.jit(prepare, **COMPILE), jax.jit(loss, **COMPILE)


@pytest.fixture(scope="module", params=SPECS)
def name(request):
  return request.param


def objective_of(name):
  return Objective(SPECS[name], full_diagnostics=False)


def on_host(result):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), result)


def run(name, placed, constants=None, scale=1.0):
  """(loss, gradient) of a placed batch, by the compiled program."""
  objective, (outputs, batch) = objective_of(name), placed
  constants = constants or constants_of(name)
  prepared = PREPARE(objective, batch, constants, scale)
  return on_host(LOSS(objective, outputs, prepared, constants))


def agree(got, want):
  """Up to the order of summation in float32."""
  (value, grad), (value_, grad_) = got, want
  assert np.isfinite(value_) and np.isfinite(grad_).all()
  size = np.abs(grad_).max()
  np.testing.assert_allclose(value, value_, rtol=2e-5, atol=1e-5 * (1 + size))
  np.testing.assert_allclose(grad, grad_, rtol=2e-5, atol=1e-5 * size)


def at(grad, rows=FIRST_ROWS, cols=FIRST_COLS):
  """The gradient where the data is; elsewhere it must be 0."""
  rest = grad.copy()
  rest[np.ix_(rows, cols)] = 0
  assert (rest == 0).all()
  return grad[np.ix_(rows, cols)]


@few
@given(case=cases, rows=row_places)
def test_the_order_of_the_rows_is_free(name, case, rows):
  value, grad = run(name, place(case.data))
  value_2, grad_2 = run(name, place(case.data, rows=rows))
  agree((value_2, at(grad_2, rows=rows)), (value, at(grad)))


@few
@given(data=st.data(), case=cases)
def test_the_columns_of_the_tokens_are_free(name, data, case):
  cols = data.draw(column_places(name))
  value, grad = run(name, place(case.data))
  value_2, grad_2 = run(name, place(case.data, cols=cols))
  agree((value_2, at(grad_2, cols=cols)), (value, at(grad)))


@fewer
@given(case=cases)
def test_padding_changes_nothing(name, case):
  """Columns of junk, and empty rows of it that have no reward."""
  if name not in ONE_A_STRUCTURE:
    return
  objective, constants = objective_of(name), constants_of(name)
  outputs, batch = batch_of(case.data)
  prepared = prepare(objective, batch, constants, 1.0)
  small = on_host(loss(objective, outputs, prepared, constants))
  value, grad = run(name, place(case.data))
  agree((value, at(grad)), small)


@few
@given(case=cases, order=st.permutations(range(ROWS)))
def test_microbatches_add_up(name, case, order):
  """A prepared batch in two parts, each filled up with rows without tokens."""
  objective, constants = objective_of(name), constants_of(name)
  if any(row.is_coupled for row in spec_lib.rows(SPECS[name]).values()):
    return  # refused by the loop
  outputs, batch = place(case.data)
  prepared = jax.device_get(PREPARE(objective, batch, constants, 1.0))
  parts = []
  for half in (order[:2], order[2:]):
    rows = np.array([i if i in half else ROWS for i in range(WIDE)])
    part = jax.tree.map(lambda x: x[rows], (outputs, prepared))
    parts.append(on_host(LOSS(objective, *part, constants)))
  (value_a, grad_a), (value_b, grad_b) = parts
  agree((value_a + value_b, grad_a + grad_b), run(name, (outputs, batch)))


@few
@given(case=cases)
def test_twice_the_batch_is_the_same_mean(name, case):
  """The copies are other prompts; a sum over tokens is twice as large."""
  spec = SPECS[name]
  if (spec.advantage_norm in NO_COPY["advantage_norm"]
      or spec.surrogate in NO_COPY["surrogate"]
      or {c.row for c in spec.corrections} & set(NO_COPY["correction"])):
    return
  constants = constants_of(name)
  if "ddof" in constants:
    constants["ddof"] = 0.0  # n - 1 is not twice n - 1
  value, grad = run(name, place(case.data), constants)
  copy = FIRST_ROWS + ROWS
  value_2, grad_2 = run(name, place(case.data, copy=copy), constants)
  times = 2 if spec.aggregation == "token_sum" else 1
  for rows in (FIRST_ROWS, copy):
    agree((value_2, 2 * grad_2[np.ix_(rows, FIRST_COLS)]),
          (times * value, times * at(grad)))


@few
@given(case=cases)
def test_the_policy_loss_is_linear_in_the_advantage(name, case):
  constants = constants_of(name) | {"entropy_coef": 0.0}
  if "kl_coef" in constants:
    constants["kl_coef"] = 0.0
  value, grad = run(name, place(case.data), constants)
  scaled = {k: C * constants[k]
            for k in IN_UNITS_OF_REWARD.get(SPECS[name].surrogate, ())}
  agree(run(name, place(case.data), constants | scaled, C),
        (C * value, C * grad))


@few
@given(case=cases)
def test_each_coefficient_scales_its_own_term(name, case):
  constants = constants_of(name) | {"entropy_coef": 0.0}
  without = {k: 0.0 for k in ("kl_coef", "entropy_coef") if k in constants}
  with_ = lambda **given: run(name, place(case.data),
                              {**constants, **without, **given})
  value_0, grad_0 = with_()
  for coef in without:
    value_1, grad_1 = with_(**{coef: 1.0})
    value_c, grad_c = with_(**{coef: C})
    assert value_1 != value_0
    agree((value_c, grad_c), (value_0 + C * (value_1 - value_0),
                             grad_0 + C * (grad_1 - grad_0)))


@few
@given(case=cases)
def test_the_unit_of_the_reward(name, case):
  """Advantages that are divided by a spread have none; the others have it."""
  if not name.startswith("advantage "):
    return
  constants = constants_of(name)
  constants |= {k: 0.0 for k in constants if k.endswith("_eps")}
  data = case.data
  scaled = data | {k: C * data[k] for k in ("reward", "baseline")}
  times = C ** DEGREE[SPECS[name].advantage]
  value, grad = run(name, place(data), constants)
  agree(run(name, place(scaled), constants), (times * value, times * grad))


def test_the_cases_have_a_gradient(name):
  """Or all of the above would hold of nothing."""
  _, grad = run(name, place(Case(0, 0.3, 1.0, (0, 0, 1, 1)).data))
  assert (grad != 0).sum() >= 2


@pytest.mark.parametrize("surrogate", IN_UNITS_OF_REWARD)
def test_the_exceptions_are_none_of_the_rule(surrogate):
  name = f"surrogate {surrogate}"
  placed = place(Case(0, 0.3, 1.0, (0, 0, 1, 1)).data)
  constants = constants_of(name) | {
      k: 0.5 for k in IN_UNITS_OF_REWARD[surrogate] if k != "cov_high"}
  value, _ = run(name, placed, constants)
  scaled, _ = run(name, placed, constants, C)
  assert abs(scaled - C * value) > 1e-3 * abs(scaled)


def test_the_exceptions_name_what_there_is():
  assert set(DEGREE) == set(ops.ADVANTAGES)
  for surrogate, names in IN_UNITS_OF_REWARD.items():
    assert set(names) <= set(ops.SURROGATES[surrogate].constants)
  assert set(NO_COPY["surrogate"]) <= set(ops.SURROGATES)
  assert set(NO_COPY["correction"]) <= set(ops.CORRECTIONS)
  assert set(NO_COPY["advantage_norm"]) <= set(spec_lib.ADVANTAGE_NORMS)
