"""The tiled log-probs, held to float64 and to the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, PartitionSpec

from rl_is.infra import mesh as mesh_lib
from rl_is.kernels import (logits, logprob, logprob_chunked, logprob_pallas,
                           logprob_parts)

B, T, D, V, REAL, K = 2, 5, 3, 23, 21, 3
TILED = ("chunked", "pallas")
STATIC = ("support", "vocab_size", "logit_softcap", "return_entropy",
          "head_precision", "impl", "chunk", "token_chunk", "mesh")
PLAIN = dict(temperature=.7, vocab_size=REAL)
VARIANTS = {
    "all outputs": dict(ids=True, return_entropy=True),
    "capped": dict(ids=True, return_entropy=True, logit_softcap=2.),
    "log-prob alone": dict(ids=False, return_entropy=False),
    "kept": dict(ids=True, return_entropy=True, support="ids"),
}


def batch(seed=0, *, rows=B, length=T, embed=D, width=V, real=REAL):
  """(hidden, unembed, targets, ids, cotangents); ids has unused slots."""
  r = np.random.default_rng(seed)
  ids = np.stack([r.permutation(real)[:K] for _ in range(rows * length)])
  ids = ids.reshape(rows, length, K).astype(np.int32)
  ids[0, 0, 1] = ids[1, 1, 0] = -1
  targets = r.integers(0, real, (rows, length)).astype(np.int32)
  targets[0, 1] = ids[0, 1, 2]  # one target is among its ids
  shapes = (rows, length), (rows, length), (rows, length, K)
  return (r.normal(size=(rows, length, embed)), r.normal(size=(embed, width)),
          targets, ids, [r.normal(size=s) for s in shapes])


@functools.partial(jax.jit, static_argnames=STATIC)
def evaluate(hidden, unembed, targets, ids, cotangents, temperature, **kwargs):
  """(outputs, gradients of hidden, unembed, temperature)."""
  def loss(hidden, unembed, temperature):
    out = logprob.token_logprob(hidden, unembed, targets, ids=ids,
                                temperature=temperature, **kwargs)
    # The -1e30 of an unused slot is not added up.
    terms = [jnp.sum(jnp.where(x > -1e29, x, 0) * g)
             for x, g in zip(out, cotangents) if x is not None]
    return sum(terms), out
  grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(
      hidden, unembed, temperature)
  return out, grads


def run(data, dtype=np.float32, *, ids=True, temperature=.7, **kwargs):
  hidden, unembed, targets, ids_, cotangents = data
  kwargs = dict(vocab_size=REAL) | kwargs
  wide = np.float64 if dtype == np.float64 else np.float32
  return jax.device_get(evaluate(
      jnp.asarray(hidden, dtype), jnp.asarray(unembed, dtype), targets,
      ids_ if ids else None, [wide(g) for g in cotangents], wide(temperature),
      **kwargs))


def twin(data, *, temperature=.7, ids=True, support="all", logit_softcap=None,
         return_entropy=True, real=REAL):
  """The same in float64, its gradient in closed form.

  d/dz of g logp_y + h H + sum_k c_k logp_k, with G = g + sum_k c_k, is
  [v = y] g + sum_k [v = id_k] c_k - p_v G - h p_v (log p_v + H).
  """
  hidden, unembed, targets, id_sets, (g, h, c) = data
  raw = np.float64(hidden) @ np.float64(unembed)
  u, slope = raw, np.ones_like(raw)
  if logit_softcap is not None:
    u = logit_softcap * np.tanh(raw / logit_softcap)
    slope = 1 - np.tanh(raw / logit_softcap) ** 2
  z = u / temperature
  inside = np.broadcast_to(np.arange(raw.shape[-1]) < real, raw.shape).copy()
  if support == "ids":
    listed = (np.arange(raw.shape[-1]) == id_sets[..., None]).any(axis=2)
    inside &= listed | (np.arange(raw.shape[-1]) == targets[..., None])
  z_in = np.where(inside, z, -np.inf)
  top = z_in.max(axis=-1, keepdims=True)
  logp = z_in - top - np.log(np.exp(z_in - top).sum(axis=-1, keepdims=True))
  p = np.exp(logp)
  finite = np.where(inside, logp, 0)
  entropy = -(p * finite).sum(axis=-1)
  hot = np.arange(raw.shape[-1]) == targets[..., None]
  d_z = np.where(hot, g[..., None], 0)
  total = g.copy()
  logp_ids = np.full(id_sets.shape, logits.FLOOR)
  if ids:
    used = id_sets >= 0
    at = np.where(used, id_sets, 0)
    logp_ids = np.where(used, np.take_along_axis(logp, at, -1), logits.FLOOR)
    for k in range(K):
      d_z += np.where((np.arange(raw.shape[-1]) == at[..., k:k + 1]) &
                      used[..., k:k + 1], c[..., k:k + 1], 0)
    total += (c * used).sum(axis=-1)
  d_z -= p * total[..., None]
  if return_entropy:
    d_z -= h[..., None] * p * (finite + entropy[..., None])
  d_raw = d_z * slope / temperature
  out = (np.take_along_axis(logp, targets[..., None], -1)[..., 0],
         entropy if return_entropy else None, logp_ids if ids else None)
  return out, (d_raw @ unembed.T, np.einsum("btd,btv->dv", hidden, d_raw),
               -(d_z * z).sum() / temperature)


def close(got, want, tol=1e-5):
  """Within tol, of the array's largest entry where that is above 1."""
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    live = np.asarray(y) > -1e29
    np.testing.assert_array_equal(np.asarray(x) > -1e29, live)
    y = np.where(live, y, 0)
    scale = max(1., np.abs(y).max())
    np.testing.assert_allclose(np.where(live, x, 0), y, rtol=0,
                               atol=tol * scale)


# ---- the numbers


@pytest.mark.parametrize("impl", TILED)
def test_literal(impl):
  # z = [1, 0, 0] and [2, 0, 1]: see test_logprob.test_literal. With target 0,
  # d logp / d z = [1 - p0, -p1, -p2]: of the first, p = [e, 1, 1] / (e + 2).
  z = np.float32([[[1, 0, 0], [2, 0, 1]]])
  fn = lambda z: logprob.token_logprob(
      z, np.eye(3, dtype=np.float32), np.int32([[0, 0]]), temperature=1.,
      vocab_size=3, return_entropy=True, impl=impl)
  e = np.e
  a, c = e + 2, e ** 2 + 1 + e
  got = jax.jit(fn)(z)
  np.testing.assert_allclose(got.logp, [[1 - np.log(a), 2 - np.log(c)]],
                             rtol=1e-6)
  np.testing.assert_allclose(
      got.entropy, [[np.log(a) - e / a, np.log(c) - (2 * e ** 2 + e) / c]],
      rtol=1e-6)
  grad = jax.jit(jax.grad(lambda z: jnp.sum(fn(z).logp)))(z)
  np.testing.assert_allclose(
      grad, [[[2 / a, -1 / a, -1 / a],
              [1 - e ** 2 / c, -1 / c, -e / c]]], rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", ("reference", *TILED))
def test_twin(impl, variant):
  kwargs = VARIANTS[variant]
  data = batch(1)
  tiles = dict(chunk=7, token_chunk=2) if impl == "chunked" else {}
  close(run(data, impl=impl, **kwargs, **tiles), twin(data, **kwargs))


@pytest.mark.parametrize("variant", ["capped", "kept"])
def test_float64_stays(variant):
  data = batch(2)
  with jax.enable_x64(True):
    got = run(data, np.float64, impl="chunked", chunk=7, token_chunk=2,
              **VARIANTS[variant])
    assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(np.float64)}
    with pytest.raises(ValueError, match="float64; 'chunked' takes it"):
      run(data, np.float64, impl="pallas")
  close(got, twin(data, **VARIANTS[variant]), 1e-13)


@pytest.mark.parametrize("chunk", [
    1, 7, 11, 12, 22, 23, 24, *(
        pytest.param(c, marks=pytest.mark.slow)
        for c in (*range(2, 7), *range(8, 11), *range(13, 22)))])
def test_every_chunk(chunk):
  data = batch(3)
  got = run(data, impl="chunked", chunk=chunk, token_chunk=1 + chunk % T,
            return_entropy=True)
  close(got, twin(data))


@pytest.mark.parametrize("size", [1, 2, T + 1, *(
    pytest.param(c, marks=pytest.mark.slow) for c in range(3, T + 1))])
def test_every_token_chunk(size):
  data = batch(3)
  close(run(data, impl="chunked", token_chunk=size, return_entropy=True),
        twin(data))


@pytest.mark.parametrize("chunk,token_chunk,real", [
    (128, 16, 290), (256, None, 150), *(
        pytest.param(*x, marks=pytest.mark.slow) for x in (
            (128, 16, 150), (256, 32, 290), (384, None, 290), (None, 16, 290),
            (None, None, 150)))])
def test_every_block_of_the_kernels(chunk, token_chunk, real):
  """Two blocks and a piece of one, both ways."""
  data = batch(4, length=21, width=301, real=real)
  got = run(data, impl="pallas", chunk=chunk, token_chunk=token_chunk,
            vocab_size=real, return_entropy=True, logit_softcap=3.)
  close(got, twin(data, real=real, logit_softcap=3.))


@pytest.mark.parametrize("impl", TILED)
@pytest.mark.parametrize("scale", [30., 1e3, 1e20])
def test_extreme_logits(impl, scale):
  """On given logits, so that no matrix product rounds before the softmax."""
  hidden = scale * np.random.default_rng(5).permuted(
      np.tile(np.linspace(-1, 1, V), (B, T, 1)), axis=-1)
  data = (hidden, np.eye(V), *batch(5)[2:])
  got = run(data, impl=impl, return_entropy=True)
  want = run(data, impl="reference", return_entropy=True)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
  for (x, y) in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0])):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  # Of the unembedding and the temperature the gradient is as large as z.
  for x, y, of in zip(got[1], want[1], (1., scale, scale)):
    np.testing.assert_allclose(x / of, y / of, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ("reference", *TILED))
def test_a_large_maximum_rounds_no_small_difference(impl):
  """Of [1e6, 1e6, 0] either has log 1/2; 1e6 + log 2 is 1e6 + 0.6875."""
  z = np.float32([[[1e6, 1e6, 0]]])
  got = logprob.token_logprob(
      z, np.eye(3, dtype=np.float32), np.int32([[1]]), temperature=1.,
      vocab_size=3, return_entropy=True, impl=impl)
  np.testing.assert_allclose(got.logp, [[-np.log(2)]], rtol=1e-6)
  np.testing.assert_allclose(got.entropy, [[np.log(2)]], rtol=1e-6)


@pytest.mark.parametrize("impl", TILED)
def test_junk_has_no_influence(impl):
  """In padded columns, and in tokens that nothing is asked about."""
  hidden, unembed, targets, ids, cotangents = batch(6)
  for g in cotangents:
    g[0, 2] = g[1, 4] = 0
  want_out, want = run((hidden, unembed, targets, ids, cotangents), impl=impl,
                       return_entropy=True)
  live = np.ones((B, T), bool)
  live[0, 2] = live[1, 4] = False
  for junk in (1e30, np.inf, np.nan):
    dirty_h, dirty_w = hidden.copy(), unembed.copy()
    dirty_h[~live], dirty_w[:, REAL:] = junk, junk
    out, got = run((dirty_h, dirty_w, targets, ids, cotangents), impl=impl,
                   return_entropy=True)
    for x, y in zip(out, want_out):
      np.testing.assert_array_equal(x[live], y[live])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert (got[0][~live] == 0).all() and (got[1][:, REAL:] == 0).all()
  # A live token's NaN shows: the step is refused, not silently trained on.
  dirty_h = hidden.copy()
  dirty_h[0, 0, 0] = np.nan
  out, _ = run((dirty_h, unembed, targets, ids, cotangents), impl=impl,
               return_entropy=True)
  assert np.isnan(out.logp[0, 0]) and np.isfinite(out.logp[live][1:]).all()


@pytest.mark.parametrize("impl", TILED)
def test_targets_outside_the_table_are_nan(impl):
  hidden, unembed, targets, ids, cotangents = batch(6)
  targets[0, 0], targets[1, 0], ids[1, 2, 0] = -1, V, V
  out, _ = run((hidden, unembed, targets, ids, cotangents), impl=impl)
  assert np.isnan(out.logp[:, 0]).all() and np.isnan(out.logp_ids[1, 2, 0])
  assert np.isfinite(out.logp[:, 1:]).all()


@pytest.mark.parametrize("impl", ("reference", *TILED))
def test_bfloat16_inputs_cost_less_than_a_ten_thousandth(impl):
  """Against float64 of the same bf16 numbers, over many columns."""
  r = np.random.default_rng(7)
  narrow = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16))
  hidden = narrow(r.normal(size=(1, 6, 64)))
  unembed = narrow(.3 * r.normal(size=(64, 8000)))
  targets = r.integers(0, 8000, (1, 6)).astype(np.int32)
  z = np.float64(hidden) @ np.float64(unembed)
  p = np.exp(z - z.max(axis=-1, keepdims=True))
  p /= p.sum(axis=-1, keepdims=True)
  logp = np.take_along_axis(np.log(p), targets[..., None], -1)[..., 0]
  entropy = -(p * np.log(p)).sum(axis=-1)
  hot = np.arange(8000) == targets[..., None]
  for precision in ("highest", "bf16"):
    def fn(h, w):
      out = logprob.token_logprob(
          h, w, targets, temperature=1., vocab_size=8000, impl=impl,
          return_entropy=True, head_precision=precision)
      return jnp.sum(out.logp), out
    (d_h, d_w), out = jax.jit(jax.grad(fn, (0, 1), has_aux=True))(
        hidden, unembed)
    assert out.logp.dtype == jnp.float32 and d_w.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.logp, logp, rtol=0, atol=1e-5)
    np.testing.assert_allclose(out.entropy, entropy, rtol=0, atol=1e-5)
    # Rounded once to bf16; with bf16 operands the slopes were rounded too.
    for got, want in ((d_h, (hot - p) @ np.float64(unembed).T),
                      (d_w, np.einsum("btd,btv->dv", np.float64(hidden),
                                      hot - p))):
      error = np.linalg.norm(np.float64(got) - want) / np.linalg.norm(want)
      assert error < (2e-3 if precision == "highest" else 4e-3)


@pytest.mark.parametrize("impl", TILED)
def test_bf16_operands_agree(impl):
  data = batch(8)
  kwargs = dict(head_precision="bf16", return_entropy=True)
  (out, grads), (want_out, want) = (
      run(data, impl=x, **kwargs) for x in (impl, "reference"))
  close(out, want_out)
  for x, y in zip(grads, want):
    assert np.linalg.norm(x - y) < 4e-3 * np.linalg.norm(y)


@pytest.mark.parametrize("impl", TILED)
def test_an_axis_of_temperatures(impl):
  data = batch(9)
  many = jax.vmap(lambda t: evaluate(
      *(np.float32(x) for x in data[:2]), *data[2:4],
      [np.float32(g) for g in data[4]], t, impl=impl, vocab_size=REAL))(
          jnp.float32([.5, 2]))
  for i, t in enumerate((.5, 2)):
    close(jax.tree.map(lambda x: np.asarray(x)[i], many),
          twin(data, temperature=t, return_entropy=False))


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 0, -1])
def test_case_C09_chunks_change_neither_value_nor_gradient(chunk):
  """T = 7, V = 11, by columns and by positions; what is not positive is refused."""
  data = batch(14, length=7, width=11, real=11)
  kwargs = dict(vocab_size=11, return_entropy=True)
  tiles = dict(chunk=chunk), dict(token_chunk=chunk)
  if chunk < 1:
    for one in tiles:
      with pytest.raises(ValueError, match=f"expected >= 1, got {chunk}"):
        run(data, impl="chunked", **one, **kwargs)
    return
  want = run(data, impl="reference", **kwargs)
  for one in tiles:
    close(run(data, impl="chunked", **one, **kwargs), want, 1e-6)


# ---- memory


def _largest(jaxpr):
  """The most numbers that any value in the program has."""
  sizes = [0]
  for eqn in jaxpr.eqns:
    sizes += [v.aval.size for v in eqn.outvars if hasattr(v.aval, "size")]
    sizes += [_largest(j) for j in jaxprs_in_params(eqn.params)]
  return max(sizes)


def test_the_logits_never_exist():
  rows, length, embed, width = 2, 64, 8, 4096
  arrays = (jnp.zeros((rows, length, embed)), jnp.zeros((embed, width)))
  targets, ids = (jnp.zeros(x, jnp.int32) for x in (
      (rows, length), (rows, length, 2)))
  def largest(impl, **kwargs):
    def loss(h, w):
      out = logprob.token_logprob(
          h, w, targets, ids=ids, temperature=1., vocab_size=width,
          return_entropy=True, impl=impl, **kwargs)
      return sum(map(jnp.sum, out))
    return _largest(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays).jaxpr)
  every = rows * length * width
  assert largest("reference") == every
  assert largest("chunked", chunk=128, token_chunk=16) == embed * width
  assert largest("chunked", chunk=128) == embed * width
  assert largest("pallas", chunk=128, token_chunk=16) == embed * width
  assert largest("chunked", support="ids") == embed * width


def test_tiles_follow_the_shape():
  """(tokens, columns, bytes): within the budget, or as small as they go."""
  for embed in (64, 1024, 4096, 8192):
    for width in (2, 4):
      for sums in ("none", "hidden", "unembed"):
        n, v, need = logprob_pallas.sizes(
            2**16, embed, 2**17, width, width, sums=sums)
        assert n % 16 == v % 128 == 0
        assert need <= logprob_pallas.BUDGET or (n, v) == (128, 128)
  assert logprob_pallas.sizes(5, 8, 23, 4, 4)[:2] == (16, 23)


# ---- several devices


@pytest.mark.parametrize("variant", ["capped", "kept", "log-prob alone"])
@pytest.mark.parametrize("impl", TILED)
def test_the_vocabulary_on_several_devices(impl, variant):
  """24 columns of 40 are real: of four shares one is padding, one half so."""
  mesh = mesh_lib.make(dict(data=1, fsdp=2, tensor=4))
  data = batch(10, rows=4, width=40, real=24)
  tiles = dict(chunk=3, token_chunk=2) if impl == "chunked" else {}
  kwargs = dict(vocab_size=24) | VARIANTS[variant]
  got = run(data, impl=impl, mesh=mesh, **kwargs, **tiles)
  kwargs.pop("vocab_size")
  close(got, twin(data, real=24, **kwargs))


def test_a_kernel_sees_no_column_of_the_next_device():
  """Shares of 160 columns in blocks of 128: the second reaches 96 too far."""
  mesh = mesh_lib.make(dict(data=2, fsdp=1, tensor=4))
  data = batch(15, rows=2, width=640, real=600)
  got = run(data, impl="pallas", mesh=mesh, chunk=128, vocab_size=600,
            return_entropy=True)
  close(got, twin(data, real=600))


def test_chunked_may_be_left_to_the_partitioner():
  mesh = mesh_lib.make(dict(data=2, fsdp=1, tensor=4))
  data = batch(11, rows=4, width=40, real=24)
  place = lambda x, *spec: jax.device_put(
      np.float32(x), jax.sharding.NamedSharding(mesh, PartitionSpec(*spec)))
  got = evaluate(place(data[0], "data"), place(data[1], None, "tensor"),
                 *data[2:4], [np.float32(g) for g in data[4]], np.float32(.7),
                 impl="chunked", chunk=8, vocab_size=24, return_entropy=True)
  close(jax.device_get(got), twin(data, real=24))


# ---- choice and errors


def test_auto():
  unembed = jax.ShapeDtypeStruct((8, 152_000), jnp.float32)
  fake = lambda platform, count: AbstractMesh(
      (count,), ("data",), abstract_device=jax.sharding.AbstractDevice(
          "one", 1, platform=platform))
  choose = lambda tokens, mesh, dtype=jnp.float32: logprob.choose(
      tokens, dtype, unembed, mesh)
  assert choose(4, None) == "reference"
  assert choose(2048, None) == "chunked"
  assert choose(2048, fake("tpu", 4)) == "pallas"
  assert choose(20, fake("tpu", 4)) == "reference"
  assert choose(2048, fake("tpu", 4), jnp.float16) == "chunked"
  assert choose(2048, fake("gpu", 4)) == "chunked"
  data = batch(12)
  want = run(data, impl="reference", return_entropy=True)
  jax.tree.map(np.testing.assert_array_equal,
               run(data, impl="auto", return_entropy=True), want)


@pytest.mark.parametrize("change,message", [
    (dict(chunk=0), "chunk: expected >= 1, got 0; nearest valid: 1"),
    (dict(token_chunk=-3), "token_chunk: expected >= 1, got -3"),
    (dict(impl="pallas", chunk=100, wide=True),
     "chunk = 100 is not divisible .*128; nearest valid: 128"),
    (dict(impl="pallas", token_chunk=24),
     "token_chunk = 24 .*16; nearest valid: 16 or 32"),
    (dict(impl="pallas", hidden=np.zeros((B, T, D), np.float16)), "float16"),
    (dict(vocab_size=V + 1), "vocab_size: expected 1 to 23"),
    (dict(temperature=np.ones((B, T, 1), "f")), "expected a scalar, got"),
    (dict(hidden=np.zeros((B, T, V), "f")), "logits or hidden states"),
    (dict(mesh=dict(data=8, fsdp=1, tensor=1)),
     "rows = 2 is not divisible by mesh data x fsdp = 8; nearest valid: 8"),
    (dict(mesh=dict(data=1, fsdp=1, tensor=8)),
     "vocabulary = 23 .*mesh tensor = 8; nearest valid: 16 or 24")])
def test_errors_name_the_numbers(change, message):
  data = batch(13, width=301 if change.pop("wide", False) else V)
  good = dict(zip(("hidden", "unembed"), map(np.float32, data[:2])))
  good |= dict(targets=data[2], impl="chunked", **PLAIN)
  if "mesh" in change:
    change = dict(mesh=mesh_lib.make(change["mesh"]))
  with pytest.raises(ValueError, match=message) as e:
    logprob.token_logprob(**good | change)
  assert "\n" not in str(e.value)


def test_split_tokens_is_undone():
  x = np.arange(2 * 5 * 3.).reshape(2, 5, 3)
  for size in range(1, 7):
    blocks = logprob_parts.split_tokens(x, size)
    assert blocks.shape == (-(-5 // size), 2, size, 3)
    np.testing.assert_array_equal(logprob_parts.join_tokens(blocks, 5), x)
  assert logprob_chunked.TILE > logprob.FEW_LOGITS
