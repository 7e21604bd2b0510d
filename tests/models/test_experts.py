"""Mixture of experts: the sum it is, nothing dropped, on a mesh, replayed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.core.types import Prompts
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import sharding
from rl_is.models import experts, sampler, scoring
from rl_is.models.config import TransformerConfig
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.rollout import batching
from rl_is.rollout.verify import Scores

B, T, D, E, F, K = 4, 5, 6, 4, 8, 2
V = 11
CONFIG = TransformerConfig(vocab_size=V, embed=8, layers=3, heads=2, kv_heads=2,
                           head_dim=4, mlp=8, experts=E, experts_per_token=K)
MODEL = Model(CONFIG)


def arrays(seed=0):
  r = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(r.standard_normal(shape), jnp.float32)
  return draw(B, T, D), draw(D, E), draw(E, D, F), draw(E, D, F), draw(E, F, D)


def layer(x, router, gate, up, down, count=K):
  routes, share = experts.route(x, router, count)
  return experts.mix(x, routes, share, gate, up, down, jax.nn.silu)


def test_route_by_hand():
  # Logits (0, ln 2, ln 4, ln 1): p = (1, 2, 4, 1) / 8. The two largest are 2
  # and 1 with 4/8 and 2/8: shares 2/3 and 1/3.
  x = jnp.ones((1, 1, 1))
  router = jnp.log(jnp.asarray([[1.0, 2, 4, 1]]))
  routes, share = experts.route(x, router, 2)
  assert routes.tolist() == [[[2, 1]]]
  np.testing.assert_allclose(share[0, 0], [2 / 3, 1 / 3], rtol=1e-6)
  # Given 0 and nothing: 0 with 1/8, and the likeliest second, 1 with 2/8.
  given = jnp.asarray([[[0, -1]]])
  routes, share = experts.route(x, router, 2, given)
  assert routes.tolist() == [[[0, 1]]]
  np.testing.assert_allclose(share[0, 0], [1 / 3, 2 / 3], rtol=1e-6)


def twin(x, router, gate, up, down):
  """One token after another in float64."""
  x, router, gate, up, down = (np.asarray(a, np.float64)
                               for a in (x, router, gate, up, down))
  out = np.zeros_like(x)
  for at in np.ndindex(*x.shape[:2]):
    p = np.exp(x[at] @ router)
    chosen = np.argsort(-p)[:K]
    for e in chosen:
      g = x[at] @ gate[e]
      out[at] += p[e] / p[chosen].sum() * (
          (g / (1 + np.exp(-g)) * (x[at] @ up[e])) @ down[e])
  return out


def test_mix_is_the_weighted_sum_of_the_experts():
  np.testing.assert_allclose(layer(*arrays()), twin(*arrays()), rtol=1e-4,
                             atol=1e-5)


def test_gradients_are_those_of_all_experts_at_once():
  """Every expert on every token, those not chosen with share 0."""
  def dense(x, router, gate, up, down):
    routes, share = experts.route(x, router, K)
    full = jnp.sum(jax.nn.one_hot(routes, E) * share[..., None], axis=2)
    h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum(
        "btd,edf->btef", x, up)
    return jnp.einsum("btef,efd,bte->btd", h, down, full)

  weigh = jnp.cos(jnp.arange(B * T * D, dtype=jnp.float32)).reshape(B, T, D)
  grads = [jax.grad(lambda args, fn=fn: jnp.sum(weigh * fn(*args)))(arrays())
           for fn in (layer, dense)]
  for got, want in zip(*grads):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_no_expert_has_a_capacity():
  """All tokens to one of them: its MLP on each, nothing dropped."""
  x, router, gate, up, down = arrays()
  given = jnp.full((B, T, 1), 1)
  routes, share = experts.route(x, router, 1, given)
  got = experts.mix(x, routes, share, gate, up, down, jax.nn.silu)
  want = (jax.nn.silu(x @ gate[1]) * (x @ up[1])) @ down[1]
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_one_expert_is_a_dense_mlp():
  one = Model(dataclasses.replace(CONFIG, experts=1, experts_per_token=1))
  dense = Model(dataclasses.replace(CONFIG, experts=0, experts_per_token=0))
  params = one.init(jax.random.key(0))
  blocks = dict(params["blocks"])
  only = blocks.pop("experts")
  blocks["mlp"] = {k: only[k][:, 0] for k in ("gate", "up", "down")}
  tokens, valid = jnp.arange(12).reshape(2, 6) % V, jnp.ones((2, 6), bool)
  np.testing.assert_allclose(
      one.hidden(params, tokens, valid),
      dense.hidden(dict(params, blocks=blocks), tokens, valid), rtol=1e-5,
      atol=1e-5)


@pytest.mark.parametrize("sizes", [
    dict(data=2, fsdp=2, tensor=2), dict(data=1, fsdp=4, tensor=1)])
def test_sharded_is_the_same(sizes):
  params = MODEL.init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (8, 6), 0, V)
  weigh = jax.random.normal(jax.random.key(2), (8, 6, 8))

  def loss(params, tokens):
    return jnp.sum(weigh * MODEL.hidden(params, tokens,
                                        jnp.ones(tokens.shape, bool)))

  want = jax.jit(jax.value_and_grad(loss))(params, tokens)
  count = np.prod(list(sizes.values()))
  mesh = mesh_lib.make(sizes, jax.devices()[:count])
  with mesh_lib.use(mesh):
    got = jax.jit(jax.value_and_grad(loss))(
        jax.device_put(params, sharding.place(params, MODEL.rules, mesh)),
        jax.device_put(tokens, mesh_lib.rows(mesh)))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=0, atol=1e-5 * max(1, np.abs(y).max())), got, want)


def drawn(params, record, N=4, **changes):
  rows = jnp.arange(8)
  prompts = Prompts(jax.random.randint(jax.random.key(3), (8, 3), 0, V),
                    jnp.arange(3)[None] >= (rows % 3)[:, None], rows, 0 * rows)
  return sampler.sample(
      params, prompts, jax.random.key(1), 0, model=MODEL,
      sampling=Sampling(1.0, max_new_tokens=N, record_routes=record, **changes))


def scored(params, rollout):
  batch = batching.assemble(
      rollout, Scores(np.zeros(8, np.float32), np.zeros(8, bool)), 4)
  return scoring.score(params, batch, model=MODEL, temperature=1.0).logp


def test_a_replay_takes_the_experts_of_the_sampler():
  """Of a router that is another one: as after an update, or a coarser engine."""
  params = jax.tree.map(lambda x: 3 * x, MODEL.init(jax.random.key(0)))
  rollout = jax.jit(lambda p: drawn(p, True))(params)
  assert rollout.routes.shape == (8, 7, 3, K)
  fed = np.arange(7)[None] < 6  # all but the last token were fed
  assert ((rollout.routes >= 0) == fed[..., None, None]).all()
  np.testing.assert_allclose(
      np.where(rollout.mask, scored(params, rollout), 0),
      rollout.logp_behaviour, atol=1e-5)
  # With the columns of the router in another order the experts are others, but
  # for what was recorded; equal shares, so that only the choice matters.
  flat = dict(params, blocks=dict(params["blocks"], experts=dict(
      params["blocks"]["experts"],
      router=1e-6 * params["blocks"]["experts"]["router"])))
  other = dict(flat, blocks=dict(flat["blocks"], experts=dict(
      flat["blocks"]["experts"],
      router=flat["blocks"]["experts"]["router"][..., ::-1])))
  rollout = jax.jit(lambda p: drawn(p, True))(flat)
  off = lambda r: np.abs(np.where(
      r.mask, scored(other, r) - r.logp_behaviour, 0)).max()
  assert off(rollout) < 1e-4 < 1e-2 < off(dataclasses.replace(
      rollout, routes=None))


def test_nothing_is_recorded_unasked():
  assert drawn(MODEL.init(jax.random.key(0)), False, N=1).routes is None


@pytest.mark.parametrize("changes", [
    dict(experts=4, experts_per_token=0), dict(experts=2, experts_per_token=3),
    dict(experts=0, experts_per_token=1), dict(experts=-1)])
def test_refuses_impossible_numbers(changes):
  with pytest.raises(ValueError, match="experts_per_token: expected"):
    dataclasses.replace(CONFIG, **changes)
