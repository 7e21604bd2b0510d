"""`token_logprob` as TPU kernels: no logit leaves the core's memory. Floor 1.

Three kernels, each over tiles [n, v] of the logits: the forward pass (v inner),
the gradient of hidden (v inner) and that of the unembedding (n inner). What
belongs to a token is a column of an [N, 128] array: TPU memory comes in rows of
128. On a CPU the kernels are interpreted, for tests. float32 and bf16 only.

Limits: each of the K ids costs about five vector operations a logit; with many
tens of them that, and not the matrix product, is the time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rl_is.core import checks
from rl_is.core.types import Array
from rl_is.kernels import logits as logits_lib
from rl_is.kernels import logprob_parts as parts
from rl_is.kernels import logprob_streamed

LANES, SUBLANES = 128, 16  # of a register of bf16
# What the blocks may take of the memory next to the cores: 16 MiB on the oldest.
BUDGET = 10 * 2**20
TOP, TOTAL, MOMENT = range(3)  # columns of a token, forward
_, LOG_TOTAL, FLAT, TILT = range(4)  # and backward


# ---- inside a tile


def _logits(o, scalars, h_nD, w_Dv, j):
  """(raw logits, z with FLOOR where not real, column of each [n, v])."""
  temperature, limit = scalars
  raw = _dot(o, h_nD, w_Dv, 1, 0)
  z = logits_lib.temper(raw, temperature[0], o.logit_softcap)
  column = (j * w_Dv.shape[1]
            + lax.broadcasted_iota(jnp.int32, z.shape, 1))
  return raw, jnp.where(column < limit[0], z, logits_lib.FLOOR), column


def _dot(o, x, y, at_x, at_y):
  # Products of bf16 are exact in one pass; Mosaic refuses to be asked for more.
  exact = x.dtype == y.dtype == jnp.bfloat16
  return logits_lib.head_dot(x, y, ((at_x,), (at_y,)),
                             "bf16" if exact else o.head_precision)


def _row_sum(x):
  return jnp.sum(x, axis=1, keepdims=True)


def _forward_tile(o, count, temperature, limit, h_ref, w_ref, picks_ref,
                  sums_ref, picked_ref):
  j = pl.program_id(1)
  lane = lax.broadcasted_iota(jnp.int32, sums_ref.shape, 1)

  @pl.when(j == 0)
  def _():
    sums_ref[...] = jnp.where(lane == TOP, logits_lib.FLOOR, 0.0)
    picked_ref[...] = jnp.zeros_like(picked_ref)

  _, z, column = _logits(o, (temperature, limit), h_ref[...], w_ref[...], j)
  sums = sums_ref[...]
  before, total, moment = (sums[:, k:k + 1] for k in (TOP, TOTAL, MOMENT))
  top = jnp.maximum(before, jnp.max(z, axis=1, keepdims=True))
  above, down = z - top, before - top
  p, scale = jnp.exp(above), jnp.exp(down)
  if o.entropy:
    # Where nothing was seen before, total and scale make this 0.
    moment = (moment + total * down) * scale + _row_sum(p * above)
  total = total * scale + _row_sum(p)
  sums_ref[...] = jnp.where(
      lane == TOP, top, jnp.where(lane == TOTAL, total, moment))
  picked = picked_ref[...]
  lane = lax.broadcasted_iota(jnp.int32, picked.shape, 1)
  for k in range(count):
    hit = column == picks_ref[:, k:k + 1]
    picked += jnp.where(lane == k, _row_sum(jnp.where(hit, z, 0.0)), 0.0)
  picked_ref[...] = picked


def _d_logits(o, count, scalars, h_nD, w_Dv, picks_ref, slopes_ref, d_picked_ref,
              j):
  """(gradient of the raw logits, that of z times z - top)."""
  raw, z, column = _logits(o, scalars, h_nD, w_Dv, j)
  real = column < scalars[1][0]
  slopes = slopes_ref[...]
  at = lambda k: slopes[:, k:k + 1]
  above = z - at(TOP)
  weight = at(FLAT)
  if o.entropy:
    weight = weight + at(TILT) * above
  d_z = -jnp.exp(above - at(LOG_TOTAL)) * weight
  for k in range(count):
    hit = column == picks_ref[:, k:k + 1]
    d_z = d_z + jnp.where(hit, d_picked_ref[:, k:k + 1], 0.0)
  d_raw = d_z * logits_lib.temper_slope(raw, scalars[0][0], o.logit_softcap)
  # A tile may reach past the table, into what is not even a number.
  return jnp.where(real, d_raw, 0.0), jnp.where(real, d_z * above, 0.0)


def _d_hidden_tile(o, count, temperature, limit, h_ref, w_ref, picks_ref,
                   slopes_ref, d_picked_ref, d_h_ref, d_z_z_ref):
  j = pl.program_id(1)

  @pl.when(j == 0)
  def _():
    d_h_ref[...] = jnp.zeros_like(d_h_ref)
    d_z_z_ref[...] = jnp.zeros_like(d_z_z_ref)

  h_nD, w_Dv = h_ref[...], w_ref[...]
  d_raw, d_z_z = _d_logits(o, count, (temperature, limit), h_nD, w_Dv, picks_ref,
                           slopes_ref, d_picked_ref, j)
  d_z_z_ref[...] += jnp.broadcast_to(_row_sum(d_z_z), d_z_z_ref.shape)
  past = (j + 1) * w_Dv.shape[1] > limit[0]

  @pl.when(jnp.logical_not(past))
  def _():
    d_h_ref[...] += _dot(o, d_raw, w_Dv, 1, 1)

  @pl.when(past)  # 0 * inf in padded columns; a select for the last tiles alone
  def _():
    column = j * w_Dv.shape[1] + lax.broadcasted_iota(jnp.int32, w_Dv.shape, 1)
    real_Dv = jnp.where(column < limit[0], w_Dv, 0)
    d_h_ref[...] += _dot(o, d_raw, real_Dv, 1, 1)


def _d_unembed_tile(o, count, temperature, limit, h_ref, w_ref, picks_ref,
                    slopes_ref, d_picked_ref, d_w_ref, sum_ref):
  j, i = pl.program_id(0), pl.program_id(1)

  @pl.when(i == 0)
  def _():
    sum_ref[...] = jnp.zeros_like(sum_ref)

  h_nD = h_ref[...]
  d_raw, _ = _d_logits(o, count, (temperature, limit), h_nD, w_ref[...],
                       picks_ref, slopes_ref, d_picked_ref, j)
  sum_ref[...] += _dot(o, h_nD, d_raw, 0, 0)

  @pl.when(i == pl.num_programs(1) - 1)
  def _():
    d_w_ref[...] = sum_ref[...].astype(d_w_ref.dtype)


# ---- sizes and calls


def sizes(tokens: int, embed: int, vocab: int, bytes_h: int, bytes_w: int, *,
          chunk: int | None = None, token_chunk: int | None = None,
          sums: str = "none") -> tuple[int, int, int]:
  """(tokens, columns, bytes) of a tile: the largest whose blocks fit the budget.

  sums: "none", "hidden" or "unembed": which gradient is added up in float32.
  Blocks from outside are there twice: the next is fetched meanwhile.
  """
  column = embed * 2 * bytes_w
  token = embed * 2 * bytes_h + 8 * 4 * LANES
  if sums == "hidden":  # the block, and what is being added
    token += embed * 3 * 4
  elif sums == "unembed":
    column += embed * (2 * 4 + 2 * bytes_w)
  n, v = token_chunk or 512, chunk or 512
  n, v = min(n, _up(tokens, SUBLANES)), min(v, _up(vocab, LANES))
  need = lambda: n * token + v * column + 6 * 4 * n * v
  while need() > BUDGET:
    # The inner loop reads the other operand again for every outer block, so the
    # outer block is the last to shrink.
    shrink_v = chunk is None and v > LANES
    shrink_n = token_chunk is None and n > LANES
    if shrink_v and (sums != "unembed" or v > n or not shrink_n):
      v = _up(v // 2, LANES)
    elif shrink_n:
      n = _up(n // 2, SUBLANES)
    else:
      break
  return n, vocab if vocab <= v else v, need()


def _up(x: int, by: int) -> int:
  return -(-x // by) * by


def _call(o, kernel, inputs, scalars, outputs, sums):
  """One kernel over all tiles. Blocks are named by what they follow.

  inputs, outputs: (array or shape, "n" rows of tokens or "v" columns).
  """
  h_ND, w_DV = inputs[0][0], inputs[1][0]
  (tokens, embed), vocab = h_ND.shape, w_DV.shape[1]
  n, v, need = sizes(
      tokens, embed, vocab, h_ND.dtype.itemsize, w_DV.dtype.itemsize,
      chunk=o.chunk, token_chunk=o.token_chunk, sums=sums)
  # Zeros score and earn nothing; the last columns are cut inside.
  padded = _up(tokens, n)
  pad = lambda x: jnp.pad(x, ((0, padded - tokens), (0, 0)))
  arrays = [pad(x) if along == "n" else x for x, along in inputs]
  grid = (padded // n, pl.cdiv(vocab, v))
  swap = sums == "unembed"

  def spec(width, along):
    if along == "n":
      index = (lambda j, i: (i, 0)) if swap else (lambda i, j: (i, 0))
      return pl.BlockSpec((n, width), index)
    index = (lambda j, i: (0, j)) if swap else (lambda i, j: (0, j))
    return pl.BlockSpec((embed, v), index)

  run = lambda interpret: lambda *args: pl.pallas_call(
      functools.partial(kernel, o),
      out_shape=[jax.ShapeDtypeStruct(
          (padded, *x.shape[1:]) if along == "n" else x.shape, x.dtype)
          for x, along in outputs],
      grid=grid[::-1] if swap else grid,
      in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * 2 + [
          spec(x.shape[1], along) for x, along in inputs],
      out_specs=[spec(x.shape[1], along) for x, along in outputs],
      scratch_shapes=[pltpu.VMEM((embed, v), jnp.float32)] if swap else [],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary"),
          # 16 MiB is the default; more only for very wide models.
          vmem_limit_bytes=max(16 * 2**20, 2 * need)),
      interpret=interpret)(*args)
  # Which of the two is known when it is compiled, not here: a laptop compiles
  # for a pod too.
  out = lax.platform_dependent(*scalars, *arrays, tpu=run(False), cpu=run(True))
  return [x[:tokens] if along == "n" else x
          for x, (_, along) in zip(out, outputs)]


def _tokens(hidden, unembed, picks, temperature, limit):
  """Arrays as the kernels take them: [N, ...], and two scalars."""
  flat = lambda x: x.reshape(-1, x.shape[-1])
  width = _up(picks.shape[-1], LANES)
  # A pick of another device could meet a column that the last tile makes up.
  picks = flat(jnp.where(picks < unembed.shape[1], picks, -1))
  picks = jnp.pad(picks.astype(jnp.int32),
                  ((0, 0), (0, width - picks.shape[1])), constant_values=-1)
  limit = jnp.minimum(limit, unembed.shape[1])
  return flat(hidden), picks, (jnp.reshape(temperature, 1),
                               jnp.reshape(limit, 1).astype(jnp.int32))


def partials(o, hidden, unembed, picks, temperature, limit):
  """See `parts.Options`."""
  _check(o, hidden, unembed)
  shape, count = picks.shape, picks.shape[-1]
  h_ND, picks_NP, scalars = _tokens(hidden, unembed, picks, temperature, limit)
  rows = lambda width: (
      jax.ShapeDtypeStruct((len(h_ND), width), jnp.float32), "n")
  sums, picked = _call(
      o, functools.partial(_bound, _forward_tile, count),
      [(h_ND, "n"), (unembed, "v"), (picks_NP, "n")], scalars,
      [rows(LANES), rows(picks_NP.shape[1])], "none")
  column = lambda k: sums[:, k].reshape(shape[:2])
  return parts.Partials(column(TOP), column(TOTAL), column(MOMENT),
                           picked[:, :count].reshape(shape))


def gradients(o, hidden, unembed, picks, temperature, limit, slopes):
  """See `parts.Options`."""
  count = picks.shape[-1]
  h_ND, picks_NP, scalars = _tokens(hidden, unembed, picks, temperature, limit)
  lanes = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
  slopes_NL = lanes(jnp.stack([x.reshape(-1) for x in slopes[:4]], axis=1))
  d_picked_NP = lanes(slopes.picked.reshape(-1, count))
  inputs = [(h_ND, "n"), (unembed, "v"), (picks_NP, "n"), (slopes_NL, "n"),
            (d_picked_NP, "n")]
  rows = lambda width: (
      jax.ShapeDtypeStruct((len(h_ND), width), jnp.float32), "n")
  d_h, d_z_z = _call(
      o, functools.partial(_bound, _d_hidden_tile, count), inputs, scalars,
      [rows(h_ND.shape[1]), rows(LANES)], "hidden")
  d_w, = _call(
      o, functools.partial(_bound, _d_unembed_tile, count), inputs, scalars,
      [(jax.ShapeDtypeStruct(unembed.shape, o.unembed_grad), "v")], "unembed")
  return (d_h.reshape(hidden.shape), d_w,
          d_z_z[:, 0].reshape(hidden.shape[:2]))


def _bound(kernel, count, o, *refs):
  kernel(o, count, *refs)


def _check(o: parts.Options, hidden: Array, unembed: Array) -> None:
  for x in (hidden, unembed):
    if x.dtype not in (jnp.float32, jnp.bfloat16):
      raise ValueError("token_logprob: impl 'pallas': expected float32 or "
                       f"bfloat16, got {x.dtype}; 'chunked' takes it")
  if o.chunk is not None and o.chunk < unembed.shape[1]:
    checks.divisible("token_logprob: chunk", o.chunk, "lanes of a TPU", LANES)
  if o.token_chunk is not None:
    checks.divisible("token_logprob: token_chunk", o.token_chunk,
                     "rows of a TPU's tile", SUBLANES)


token_logprob = functools.partial(
    logprob_streamed.token_logprob, (partials, gradients))
