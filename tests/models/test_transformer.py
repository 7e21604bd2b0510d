"""The transformer: padding, the cache, and an independent forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_is.core.types import Batch
from rl_is.models import cache as cache_lib
from rl_is.models import scoring
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model

CONFIG = TransformerConfig(vocab_size=11, vocab_multiple=4, embed=12, layers=2,
                           heads=4, kv_heads=2, head_dim=6, mlp=20)
MODEL = Model(CONFIG)


@pytest.fixture(scope="module")
def params():
  return jax.tree.map(lambda x: x * 2, MODEL.init(jax.random.key(0)))


def rms(x, scale):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x, theta=10_000.0):
  """x: [T, heads, h]; position t turns the pair (i, i + h/2)."""
  T, _, h = x.shape
  out = np.empty_like(x)
  for t in range(T):
    for i in range(h // 2):
      angle = t * theta ** (-i / (h // 2))
      a, b = x[t, :, i], x[t, :, i + h // 2]
      out[t, :, i] = a * np.cos(angle) - b * np.sin(angle)
      out[t, :, i + h // 2] = b * np.cos(angle) + a * np.sin(angle)
  return out


def numpy_hidden(params, tokens):
  """An independent float64 forward pass of one unpadded row."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = p["embed"][tokens]
  for i in range(CONFIG.layers):
    b = jax.tree.map(lambda x: x[i], p["blocks"])
    y = rms(x, b["attention_norm"]["scale"])
    q, k, v = (np.einsum("td,dnh->tnh", y, b["attention"][n]) for n in "qkv")
    q = rotate(rms(q, b["attention"]["q_norm"]["scale"]))
    k = rotate(rms(k, b["attention"]["k_norm"]["scale"]))
    out = np.zeros_like(q)
    for head in range(CONFIG.heads):
      group = head // (CONFIG.heads // CONFIG.kv_heads)
      logits = q[:, head] @ k[:, group].T / np.sqrt(CONFIG.head_dim)
      logits[np.triu_indices(len(tokens), 1)] = -np.inf
      weight = np.exp(logits - logits.max(-1, keepdims=True))
      out[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, group]
    x = x + np.einsum("tnh,nhd->td", out, b["attention"]["o"])
    y = rms(x, b["mlp_norm"]["scale"])
    gate = y @ b["mlp"]["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (y @ b["mlp"]["up"])) @ b["mlp"]["down"]
  return rms(x, p["final_norm"]["scale"])


def test_equals_an_independent_forward_pass(params):
  tokens = np.array([1, 5, 9, 3, 10, 2])
  ours = MODEL.hidden(params, jnp.asarray(tokens)[None], jnp.ones((1, 6), bool))
  np.testing.assert_allclose(ours[0], numpy_hidden(params, tokens), atol=2e-5)


@pytest.mark.parametrize("pads", [0, 1, 3, 8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_shift_positions(params, pads, side):
  """Case C06: the same log-probs with any number of pads on either side."""
  tokens = np.array([[1, 5, 9, 3]], np.int32)
  width = ((0, 0), (pads, 0) if side == "left" else (0, pads))
  padded, valid = np.pad(tokens, width), np.pad(np.ones((1, 4), bool), width)
  logp = lambda t, v: np.asarray(scoring.score(
      params, Batch(jnp.asarray(t), jnp.asarray(v), jnp.asarray(v), None, None),
      model=MODEL, temperature=1.0).logp)
  plain = logp(tokens, np.ones((1, 4), bool))[0, 1:]
  first = pads if side == "left" else 0
  np.testing.assert_allclose(
      logp(padded, valid)[0, first + 1:first + 4], plain, atol=1e-5)


def test_a_row_of_padding_is_finite(params):
  hidden = MODEL.hidden(params, jnp.zeros((2, 3), jnp.int32),
                        jnp.zeros((2, 3), bool))
  assert np.isfinite(hidden).all()


@pytest.mark.parametrize("split", [1, 2, 5])
def test_cached_pieces_equal_the_full_pass(params, split):
  tokens = jnp.asarray([[0, 5, 9, 3, 10, 2], [7, 8, 1, 4, 4, 6]], jnp.int32)
  valid = jnp.ones((2, 6), bool).at[0, 0].set(False)
  full = MODEL.hidden(params, tokens, valid)
  cache = cache_lib.empty(CONFIG, 2, 6)
  a, cache = MODEL.extend(params, tokens[:, :split], valid, cache, 0)
  b, cache = MODEL.extend(params, tokens[:, split:], valid, cache, split)
  np.testing.assert_allclose(jnp.concatenate([a, b], 1)[valid], full[valid],
                             atol=1e-5)


def test_the_future_changes_nothing(params):
  tokens = jnp.asarray([[1, 5, 9, 3, 10, 2]], jnp.int32)
  valid = jnp.ones((1, 6), bool)
  changed = MODEL.hidden(params, tokens.at[0, 4].set(7), valid)
  plain = MODEL.hidden(params, tokens, valid)
  np.testing.assert_array_equal(changed[0, :4], plain[0, :4])
  assert not np.allclose(changed[0, 4:], plain[0, 4:])


def test_tokens_outside_the_loss_are_still_attended_to(params):
  """Case B18: a tool token is not trained on, but later tokens see it."""
  tokens = jnp.asarray([[1, 5, 9, 3]], jnp.int32)
  valid = jnp.ones((1, 4), bool)
  def logp(t):
    return np.asarray(scoring.score(
        params, Batch(t, valid, valid.at[0, 1].set(False), None, None),
        model=MODEL, temperature=1.0).logp)
  assert abs(logp(tokens)[0, 3] - logp(tokens.at[0, 1].set(6))[0, 3]) > 1e-4


def test_uniform_and_copy_models_score_as_they_must(params):
  """Case C01: position t is scored with the logits of t - 1."""
  tokens = jnp.asarray([[4, 4, 4, 2]], jnp.int32)
  valid = jnp.ones((1, 4), bool)
  batch = Batch(tokens, valid, valid, None, None)
  flat = dict(params, head=jnp.zeros_like(params["head"]))
  uniform = scoring.score(flat, batch, model=MODEL, temperature=1.0,
                          return_entropy=True)
  np.testing.assert_allclose(uniform.logp[0, 1:], -np.log(11), rtol=1e-6)
  np.testing.assert_allclose(uniform.entropy[0, 1:], np.log(11), rtol=1e-6)
  assert uniform.logp[0, 0] == 0  # nothing predicts the first token
  # A head that repeats the token it stands on: no attention, no MLP.
  copy = jax.tree.map(jnp.zeros_like, params)
  copy["final_norm"]["scale"] = jnp.ones(12)
  copy["embed"] = jnp.eye(12)
  copy["head"] = 50 * jnp.eye(12)
  logp = scoring.score(copy, batch, model=MODEL, temperature=1.0).logp
  np.testing.assert_allclose(logp[0, 1:3], 0, atol=1e-5)
  assert logp[0, 3] < -10  # 2 after 4 is no copy


@pytest.mark.parametrize("changes", [
    dict(logprob_impl="chunked", logprob_chunk=5), dict(logprob_impl="pallas")])
def test_the_config_chooses_how_log_probs_are_made(params, changes):
  batch = Batch(jnp.asarray([[1, 5, 9, 3], [2, 7, 7, 0]], jnp.int32),
                *2 * [jnp.ones((2, 4), bool)], None, None)
  score = lambda model, **kwargs: jax.value_and_grad(
      lambda p: jnp.sum(scoring.score(p, batch, model=model, temperature=0.7,
                                      **kwargs).logp))(params)
  got = score(Model(dataclasses.replace(CONFIG, **changes)))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got,
               score(MODEL, impl="reference"))


def test_tied_embeddings_have_no_head():
  tied = Model(dataclasses.replace(CONFIG, tie_embeddings=True))
  params = tied.init(jax.random.key(0))
  assert "head" not in params
  np.testing.assert_array_equal(tied.unembed(params), params["embed"].T)


def test_head_dim_is_independent_of_the_width(params):
  """Case I01: q is [D, heads, head_dim], whatever D / heads is."""
  assert params["blocks"]["attention"]["q"].shape == (2, 12, 4, 6)
  assert params["blocks"]["attention"]["k"].shape == (2, 12, 2, 6)


@pytest.mark.parametrize("changes,word", [
    (dict(heads=3), "kv_heads"), (dict(layers=0), "layers"),
    (dict(head_dim=5), "head_dim"),
    (dict(logprob_impl="chunk"), "logprob_impl: .*did you mean chunked"),
    (dict(logprob_chunk=-1), "logprob_chunk: expected >= 0, got -1")])
def test_refuses_impossible_shapes(changes, word):
  with pytest.raises(ValueError, match=word):
    dataclasses.replace(CONFIG, **changes)


def test_bfloat16_activations_score_in_float32(params):
  half = Model(dataclasses.replace(CONFIG, dtype="bfloat16"))
  valid = jnp.ones((1, 4), bool)
  batch = Batch(jnp.asarray([[1, 5, 9, 3]], jnp.int32), valid, valid, None, None)
  logp = scoring.score(params, batch, model=half, temperature=1.0).logp
  full = scoring.score(params, batch, model=MODEL, temperature=1.0).logp
  assert logp.dtype == jnp.float32
  np.testing.assert_allclose(logp, full, atol=0.1)
  assert (logp <= 0).all()
