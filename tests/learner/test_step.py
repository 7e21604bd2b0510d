"""One optimizer update: what moves the state, and what must not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_is.core.types import Batch
from rl_is.learner import optimizer, state as state_lib, step
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec

MODEL = Model(TransformerConfig(vocab_size=7, vocab_multiple=8, embed=8, layers=1,
                                heads=2, kv_heads=2, head_dim=4, mlp=8))
TX = optimizer.make("adamw")
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


def test_sharded_equals_one_device(state):
  """Eight devices on `data`: the same update, in norm."""
  from rl_is.infra import mesh as mesh_lib
  mesh = mesh_lib.make(dict(data=-1, fsdp=1, tensor=1))
  double = jax.tree.map(lambda x: jnp.concatenate([x, x]), make_batch())
  double = double.replace(group=jnp.arange(8, dtype=jnp.int32) // 2)
  placed = jax.device_put(double, mesh_lib.rows(mesh))
  spread = jax.device_put(state, mesh_lib.replicated(mesh))
  new, metrics = update(state, double)
  new_8, metrics_8 = update(spread, placed)
  for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(new_8.params)):
    assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(a)
  np.testing.assert_allclose(metrics["loss"].value(), metrics_8["loss"].value(),
                             rtol=1e-5)
  np.testing.assert_allclose(metrics["grad/norm"].value(),
                             metrics_8["grad/norm"].value(), rtol=1e-5)


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
