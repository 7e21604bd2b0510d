"""The splash kernel gives what XLA's attention gives: interpreted, and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.infra import mesh as mesh_lib
from rl_is.infra import sharding
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model

T, V = 140, 19
XLA = TransformerConfig(vocab_size=V, embed=8, layers=2, heads=4, kv_heads=2,
                        head_dim=8, mlp=8, scan_layers=True)


def rows():
  """Whole; padded left; padded right; on both sides, 5 real tokens."""
  column = jnp.arange(T)[None]
  first, end = (jnp.asarray(x)[:, None] for x in (
      [0, 30, 0, 90], [T, T, 100, 95]))
  return (jax.random.randint(jax.random.key(1), (4, T), 0, V),
          (column >= first) & (column < end))


def value_and_grad(config, mesh=None):
  model, (tokens, valid) = Model(config), rows()
  params = model.init(jax.random.key(0))
  weigh = jax.random.normal(jax.random.key(2), (4, T, 8)) * valid[..., None]
  if mesh is not None:
    params = jax.device_put(params, sharding.place(params, model.rules, mesh))
  with mesh_lib.use(mesh):
    return jax.device_get(jax.jit(jax.value_and_grad(lambda p: jnp.sum(
        weigh * model.hidden(p, tokens, valid))))(params))


def close(got, want):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=0, atol=2e-5 * np.abs(y).max()), got, want)


@pytest.mark.parametrize("changes", [{}, dict(window=9, global_every=2)])
def test_splash_is_the_same_attention(changes):
  config = dataclasses.replace(XLA, **changes)
  splash = dataclasses.replace(config, attention="splash")
  close(value_and_grad(splash), value_and_grad(config))


def test_splash_on_a_mesh():
  splash = dataclasses.replace(XLA, attention="splash", window=9,
                               global_every=2)
  mesh = mesh_lib.make(dict(data=1, fsdp=2, tensor=2), jax.devices()[:4])
  close(value_and_grad(splash, mesh), value_and_grad(splash))


def test_a_window_forgets():
  """A local layer's output hangs on the last `window` tokens, and no others."""
  local = Model(dataclasses.replace(XLA, layers=1, window=3, global_every=2))
  params = local.init(jax.random.key(0))
  tokens, valid = jnp.arange(8)[None] % V, jnp.ones((1, 8), bool)
  at = lambda change: local.hidden(
      params, tokens.at[0, change].add(1), valid)[0, 7]
  plain = local.hidden(params, tokens, valid)[0, 7]
  np.testing.assert_array_equal(at(4), plain)
  assert np.abs(at(5) - plain).max() > 1e-3
