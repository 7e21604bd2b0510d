"""One optimizer update: what moves the state, and what must not."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_is.core.types import Batch
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import sharding
from rl_is.learner import optimizer, state as state_lib, step
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec
from rl_is.ops import diagnostics

MODEL = Model(TransformerConfig(vocab_size=7, vocab_multiple=8, embed=8, layers=1,
                                heads=2, kv_heads=2, head_dim=4, mlp=8))
TX, SGD_TX = optimizer.make("adamw"), optimizer.make("sgd")
OBJECTIVE = Objective(Spec("pg", corrections=(Correction("tis", "current"),)))
CONSTANTS = dict(learning_rate=1e-2, weight_decay=0.1, grad_clip=1.0,
                 temperature=1.0, cap=2.0, floor=0.0, max_log_ratio=20.0,
                 std_eps=1e-6, entropy_coef=0.0)


def make_batch(reward=(1.0, 0.0, 0.0, 1.0)):
  r = np.random.default_rng(0)
  mask = np.ones((4, 5), bool)
  mask[:, :2] = False
  return Batch(
      tokens=jnp.asarray(r.integers(0, 7, (4, 5)), jnp.int32),
      valid=jnp.ones((4, 5), bool), mask=jnp.asarray(mask),
      reward=jnp.asarray(reward), group=jnp.array([0, 0, 1, 1], jnp.int32),
      logp_behaviour=jnp.where(mask, -2.0, 0.0),
      version=jnp.where(mask, 0, -1).astype(jnp.int32))


@pytest.fixture(scope="module")
def state():
  return state_lib.init(jax.random.key(0), MODEL, TX)


def update(state, batch, constants=CONSTANTS, objective=OBJECTIVE):
  minibatch, = step.jit_prepare_batch(
      state.params, None, batch, constants, objective=objective, model=MODEL)
  fresh = jax.tree.map(jnp.copy, state)  # train_step donates its state
  return step.jit_train_step(fresh, minibatch, constants, objective=objective,
                             model=MODEL, tx=TX)


def assert_untouched(new, old):
  jax.tree.map(np.testing.assert_array_equal, (new.params, new.opt_state),
               (old.params, old.opt_state))


def test_moves_and_counts(state):
  new, metrics = update(state, make_batch())
  moved = max(float(jnp.abs(a - b).max()) for a, b in zip(
      jax.tree.leaves(new.params), jax.tree.leaves(state.params)))
  assert moved > 1e-4 and int(new.version) == 1
  assert int(metrics["update/first_bad"].value()) == -1
  assert float(metrics["update/without_signal"].value()) == 0


def test_equal_rewards_move_nothing_and_are_counted(state):
  """No advantage, no regulariser: not even weight decay or moments."""
  new, metrics = update(state, make_batch(reward=(1.0, 1.0, 0.7, 0.7)))
  assert_untouched(new, state)
  assert int(new.version) == 1
  assert float(metrics["update/without_signal"].value()) == 1
  assert np.isfinite(float(metrics["loss"].value()))


def test_a_correction_that_drops_everything_is_no_signal(state):
  """Case A06: the gradient is zero, so decay and momentum do not act either."""
  objective = Objective(Spec("pg", corrections=(Correction("mis", "current"),)))
  new, metrics = update(state, make_batch(), dict(CONSTANTS, cap=1e-9), objective)
  assert_untouched(new, state)
  assert float(metrics["update/without_signal"].value()) == 1


def test_a_surrogate_that_pulls_where_the_advantage_is_zero_is_a_signal(state):
  """dro's penalty acts at A = 0: such an update must not be thrown away."""
  objective = Objective(Spec("dro"))
  new, metrics = update(state, make_batch(reward=(1.0,) * 4),
                        dict(CONSTANTS, beta=1.0), objective)
  assert float(metrics["update/without_signal"].value()) == 0
  assert float(metrics["grad/norm"].value()) > 0


def test_an_update_that_would_be_non_finite_is_not_made(state):
  new, metrics = update(state, make_batch(), dict(CONSTANTS, learning_rate=np.inf))
  assert_untouched(new, state)
  assert int(metrics["update/nonfinite"].value()) == 1


def test_an_all_masked_batch_moves_nothing(state):
  """Case B06."""
  batch = make_batch()
  new, metrics = update(state, batch.replace(mask=jnp.zeros_like(batch.mask)))
  assert_untouched(new, state)
  assert float(metrics["loss"].value()) == 0
  assert np.isnan(float(metrics["policy/logp"].value()))  # absent, not 0


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_a_non_finite_input_is_found_and_moves_nothing(state, bad):
  batch = make_batch()
  batch = batch.replace(logp_behaviour=batch.logp_behaviour.at[2, 3].set(bad))
  new, metrics = update(state, batch)
  assert_untouched(new, state)
  assert int(metrics["update/first_bad"].value()) == 2 * 5 + 3


def test_a_non_finite_weight_is_found(state):
  params = dict(state.params, head=state.params["head"].at[0, 0].set(jnp.nan))
  broken = state_lib.State(params, state.opt_state, state.version)
  new, metrics = update(broken, make_batch())
  assert_untouched(new, broken)
  assert int(metrics["update/first_bad"].value()) >= 0


def test_equals_optax_by_hand(state):
  """Clipped gradient, AdamW with decoupled decay: optax's own chain."""
  batch = make_batch()
  minibatch, = step.prepare_batch(state.params, None, batch, CONSTANTS,
                                  objective=OBJECTIVE, model=MODEL)

  def loss(params):
    from rl_is.models import scoring
    out = scoring.score(params, minibatch, model=MODEL, temperature=1.0)
    return OBJECTIVE.loss(out, minibatch, CONSTANTS)[0]

  tx = optax.chain(optax.clip_by_global_norm(1.0),
                   optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1))
  grads = jax.grad(loss)(state.params)
  updates, _ = tx.update(grads, tx.init(state.params), state.params)
  expected = optax.apply_updates(state.params, updates)
  new, _ = update(state, batch)
  for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_cosine_with_the_gradient_before():
  """The same gradient twice: 1; the advantages turned round: -1; first: none."""
  state = state_lib.init(jax.random.key(0), MODEL, TX, OBJECTIVE)
  still = dict(CONSTANTS, learning_rate=0.0, weight_decay=0.0)
  batch = make_batch()
  cosines = []
  for reward in (batch.reward, batch.reward, 1 - batch.reward):
    state, metrics = update(state, batch.replace(reward=reward), still)
    cosines.append(metrics["grad/cosine_previous"])
  assert int(cosines[0].count) == 0
  assert float(cosines[1].value()) == pytest.approx(1.0, abs=1e-5)
  assert float(cosines[2].value()) == pytest.approx(-1.0, abs=1e-5)


def test_constants_are_data(state):
  """Forty values of cap and learning rate: not one more compilation."""
  update(state, make_batch())
  before = step.jit_train_step._cache_size()
  losses = {float(update(state, make_batch(), dict(
      CONSTANTS, cap=0.01 * i, learning_rate=1e-4 * i))[1]["loss"].value())
            for i in range(1, 41)}
  assert step.jit_train_step._cache_size() == before and len(losses) > 10


MESHES = [(2, 1, 1), (1, 1, 2), (1, 4, 1), (8, 1, 1), (2, 2, 2)]
WIDE = Model(TransformerConfig(
    vocab_size=7, embed=8, layers=2, heads=2, kv_heads=2, head_dim=4, mlp=16,
    scan_layers=True, remat="full"))


@pytest.fixture(scope="module")
def eight_rows():
  double = jax.tree.map(lambda x: jnp.concatenate([x, x]), make_batch())
  return double.replace(group=jnp.arange(8, dtype=jnp.int32) // 2)


def moved_on(mesh, batch, tx, model=WIDE, **constants):
  """(gradient norm and metrics, movement of each leaf) of one update there."""
  born = state_lib.born(functools.partial(
      state_lib.init, model=model, tx=tx, objective=OBJECTIVE), model, mesh)
  placed = jax.device_put(batch, mesh_lib.rows(mesh))
  values = dict(CONSTANTS, weight_decay=0.0) | constants
  with mesh_lib.use(mesh):
    state = born(jax.random.key(0))
    before = jax.device_get(state.params)
    minibatch, = step.jit_prepare_batch(
        state.params, None, placed, values, objective=OBJECTIVE, model=model)
    new, metrics = step.jit_train_step(
        state, minibatch, values, objective=OBJECTIVE, model=model, tx=tx)
  places = sharding.place(new, model.rules, mesh)
  assert all(x.sharding.is_equivalent_to(where, x.ndim) for x, where in zip(
      jax.tree.leaves(new), jax.tree.leaves(places)))
  return diagnostics.finish(jax.device_get(metrics)), jax.tree.map(
      lambda a, b: np.asarray(a) - b, jax.device_get(new.params), before)


@pytest.mark.parametrize("name,limit", [("sgd", 1e-5), ("adamw", 1e-3)])
def test_sharded_equals_one_device(eight_rows, name, limit):
  """Every mesh: metrics, and the step of each leaf in norm; fsdp is real."""
  tx = optimizer.make(name)
  # A step of SGD is far above the last bit of what it moves: a scale of 1.0
  # cannot tell steps of 0.01 apart to 1e-5.
  rate = dict(learning_rate=1024.0) if name == "sgd" else {}
  expected, whole = moved_on(
      mesh_lib.make(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1]),
      eight_rows, tx, **rate)
  for shape in MESHES if name == "sgd" else MESHES[-1:]:
    mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, shape)),
                         jax.devices()[:math.prod(shape)])
    metrics, step_ = moved_on(mesh, eight_rows, tx, **rate)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(step_)):
      assert np.linalg.norm(a - b) <= limit * np.linalg.norm(a), shape
    for key, value in expected.items():
      np.testing.assert_allclose(metrics[key], value, rtol=2e-5, atol=1e-6,
                                 err_msg=f"{key} on {shape}")


def test_the_bytes_of_a_device_are_its_share(eight_rows):
  """fsdp 4 x tensor 2: an eighth of every matrix on each of eight devices."""
  mesh = mesh_lib.make(dict(data=1, fsdp=4, tensor=2))
  state = state_lib.born(functools.partial(
      state_lib.init, model=WIDE, tx=TX), WIDE, mesh)(jax.random.key(0))
  for x in jax.tree.leaves(state.opt_state) + jax.tree.leaves(state.params):
    if x.ndim > 2 or x.size == 64:
      assert x.addressable_shards[0].data.size * 8 == x.size


@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_only_add(state, eight_rows, parts):
  """Losses, every metric and the step, of the same rows in other parts."""
  how = dict(objective=OBJECTIVE, model=MODEL)
  minibatch, = step.jit_prepare_batch(state.params, None, eight_rows, CONSTANTS,
                                      **how)
  again, = step.jit_prepare_batch(state.params, None, eight_rows, CONSTANTS,
                                  microbatches=parts, **how)
  assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5,
                                   atol=1e-6)
  jax.tree.map(assert_close, again, minibatch)
  new, metrics = step.jit_train_step(
      jax.tree.map(jnp.copy, state), minibatch, CONSTANTS, tx=SGD_TX, **how)
  split, summed = step.jit_train_step(
      jax.tree.map(jnp.copy, state), minibatch, CONSTANTS, tx=SGD_TX,
      microbatches=parts, **how)
  jax.tree.map(assert_close, split.params, new.params)
  finished, expected = diagnostics.finish(summed), diagnostics.finish(metrics)
  assert finished.keys() == expected.keys()
  for key, value in expected.items():
    assert_close(finished[key], value, err_msg=key)


def test_a_bad_token_is_found_in_any_microbatch(state, eight_rows):
  """Row 5, token 3 is in part 1 of 4, row 1 of it: said as of the whole."""
  minibatch, = step.jit_prepare_batch(
      state.params, None, eight_rows, CONSTANTS, objective=OBJECTIVE,
      model=MODEL)
  bad = minibatch.replace(
      logp_behaviour=minibatch.logp_behaviour.at[5, 3].set(jnp.nan))
  _, metrics = step.jit_train_step(
      jax.tree.map(jnp.copy, state), bad, CONSTANTS, objective=OBJECTIVE,
      model=MODEL, tx=TX, microbatches=4)
  assert int(metrics["update/first_bad"].value()) == 5 * 5 + 3


@pytest.mark.parametrize("norm,limit,expected", [
    (0.0, 0.0, 1.0), (2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (1.0, 0.0, 0.0)])
def test_clip_scale(norm, limit, expected):
  """Case A23: zero gradient with limit 0 is 1, not NaN."""
  assert float(optimizer.clip_scale(jnp.float32(norm), limit)) == expected


def test_warm_up_is_linear_then_constant():
  """Case E09: the rate follows from the update number alone."""
  rates = [float(optimizer.warm_up(1.0, jnp.int32(i), 4)) for i in range(6)]
  np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1, 1, 1])
  assert float(optimizer.warm_up(0.3, jnp.int32(0), 0)) == pytest.approx(0.3)


def test_equal_optimizers_are_one_object():
  assert optimizer.make("adamw", 0.9) is optimizer.make("adamw", 0.9)
  with pytest.raises(ValueError, match="adamw"):
    optimizer.make("adam")
