"""Dials that set the sampler apart from the learner. Floor 3.

`weights` changes the parameters, once a published version; a `Disturbance` the
logits at every draw. The recorded log-prob stays that of the distribution drawn
from, so the ratio tells the whole mismatch. What is turned on is structure, how
far is data: a sweep over bits or over a standard deviation compiles once.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rl_is.core import checks
from rl_is.core.types import Array, Params, pytree
from rl_is.infra import rng
from rl_is.kernels import logits as logits_lib

WEIGHTS = ("none", "bf16", "f16", "int", "mantissa")
BITS = {"int": (2, 16), "mantissa": (1, 23)}  # of the kinds that take a number
# The matrices of the linear layers, and the axes that each sums over.
# `int` leaves the others whole (embedding, head, norms), as weight-only
# quantisation of served models does; the other kinds change every parameter.
_LINEAR = dict(q=(-3,), k=(-3,), v=(-3,), o=(-3, -2), gate=(-2,), up=(-2,),
               down=(-2,))
# Dial of the distribution -> (off, what else tells of it).
_DIALS = dict(temperature=(1, ()), top_p=(1, ()), logit_sd=(0, ("logit_seed",)),
              spike_rate=(0, ("spike_nats", "spike_below")))


def check_weights(where: str, kind: str, bits: int | None) -> None:
  """`bits` where the kind takes them, in range, and nowhere else."""
  checks.choice(f"{where}.weights", kind, WEIGHTS)
  low, high = BITS.get(kind, (None, None))
  if low is None and bits is not None:
    raise ValueError(f"{where}.bits: expected none with weights = {kind!r}, "
                     f"got {bits}")
  if low is not None and (bits is None or not low <= bits <= high):
    raise ValueError(f"{where}.bits: expected {low} to {high} with weights = "
                     f"{kind!r}, got {bits}")


def sampler_weights(kind: str, bits: int | None
                    ) -> Callable[[Params], Params] | None:
  """`weights` of one dial, for the publisher; None where it changes nothing."""
  return None if kind == "none" else lambda params: weights(params, kind, bits)


@functools.partial(jax.jit, static_argnames="kind")
def weights(params: Params, kind: str, bits: Array | int | None = None
            ) -> Params:
  """The parameters as the sampler has them, in the dtypes of the learner's."""
  def leaf(path, w):
    name = path[-1].key
    if kind == "int":
      return quantise(w, bits, _LINEAR[name]) if name in _LINEAR else w
    if kind in ("bf16", "mantissa"):  # bit by bit: no pair of casts to be lost
      return round_mantissa(w, 7 if kind == "bf16" else bits)
    return w if kind == "none" else _through_f16(w)

  return jax.tree_util.tree_map_with_path(leaf, params)


def _through_f16(w: Array) -> Array:
  """Cast and back: its range is narrower too, so bits alone would not do.

  XLA may drop a pair of casts, but not across a barrier.
  """
  return lax.optimization_barrier(w.astype(jnp.float16)).astype(w.dtype)


def quantise(w: Array, bits: Array | int, axes: tuple[int, ...]) -> Array:
  """Symmetric integers of `bits` bits, one scale for each output channel.

    q = s round(w / s),  s = max |w| / (2^(bits - 1) - 1) over `axes`

  Ties go to the even integer; a channel of zeros stays.
  """
  wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
  levels = jnp.left_shift(1, bits - 1) - 1
  scale = jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / levels
  scale = jnp.where(scale == 0, 1, scale)
  return (jnp.round(wide / scale) * scale).astype(w.dtype)


def round_mantissa(w: Array, bits: Array | int) -> Array:
  """To `bits` mantissa bits of a float32 (of 23), ties to even."""
  word = lax.bitcast_convert_type(w.astype(jnp.float32), jnp.uint32)
  drop = jnp.asarray(23 - bits, jnp.uint32)
  one = jnp.uint32(1)
  odd = (word >> drop) & one  # the last bit that stays
  # Just under half of what is dropped, or half where that makes it even.
  half = ((one << drop) >> one) + odd - one
  rounded = ((word + half) >> drop) << drop
  out = lax.bitcast_convert_type(
      jnp.where(drop > 0, rounded, word), jnp.float32)
  return jnp.where(jnp.isfinite(w), out.astype(w.dtype), w)


@pytree
class Spikes:
  """Rare tokens that the sampler takes for far more, or less, likely.

  What inference engines do to the tail: a token of probability 1e-5 under the
  learner gets 1e-2. At a share `rate` of the draws, the logit of every token
  less likely than `below` is raised by `nats` (lowered, where they are < 0).
  """

  rate: Array | float
  nats: Array | float
  below: Array | float

  def __call__(self, logits_BV: Array, keys_B: Array) -> Array:
    # Of the draw's key, but not the draw's own bits.
    hit = jax.vmap(lambda key: jax.random.bernoulli(
        jax.random.fold_in(key, 1), self.rate))(keys_B)
    rare = logits_lib.log_normalise(logits_BV) < jnp.log(self.below)
    return logits_BV + jnp.where(hit[:, None] & rare, self.nats, 0.0)


@pytree
class Disturbance:
  """`sampler.Sampling.disturb`: the sampler's logits, not the learner's.

  On logits after the temperature, so all is in nats. None: that dial is off.
  """

  pattern: Array | None = None  # [V], the same at every step
  spikes: Spikes | None = None
  top_p: Array | float | None = None  # its kept set is not recorded

  def __call__(self, logits_BV: Array, keys_B: Array) -> Array:
    if self.pattern is not None:
      logits_BV = logits_BV + self.pattern[None]
    if self.spikes is not None:
      logits_BV = self.spikes(logits_BV, keys_B)
    if self.top_p is not None:
      logits_BV = nucleus(logits_BV, self.top_p)
    return logits_BV


def disturbance(dials: Mapping[str, float], *, vocab_size: int, width: int
                ) -> Disturbance | None:
  """Of the dials that are on; None where none is. `width`: of the logits.

  The temperature is not among them: the sampler has its own anyway.
  """
  d, on = dials, {}
  if d["logit_sd"]:
    on["pattern"] = pattern(d["logit_seed"], d["logit_sd"],
                            vocab_size=vocab_size, width=width)
  if d["spike_rate"]:
    on["spikes"] = Spikes(d["spike_rate"], d["spike_nats"], d["spike_below"])
  if d["top_p"] < 1:
    on["top_p"] = d["top_p"]
  return Disturbance(**on) if on else None


def pattern(seed: int, sd: float, *, vocab_size: int, width: int) -> np.ndarray:
  """Normal, of mean 0 and standard deviation `sd` over the real vocabulary.

  numpy, so that it follows the sampler to any devices.
  """
  x = np.asarray(jax.random.normal(
      rng.key(seed, "mismatch"), (vocab_size,), jnp.float32))
  x = sd * (x - x.mean()) / x.std()
  return np.pad(x, (0, width - vocab_size)).astype(np.float32)


def nucleus(logits_V: Array, top_p: Array | float) -> Array:
  """Logits of the smallest set of mass `top_p`, FLOOR elsewhere, `[..., V]`.

  A tie with the last one in stays too.
  """
  kept, _ = logits_lib.kept_set(
      logits_V, top_k=logits_V.shape[-1], top_p=top_p)
  least = jnp.min(jnp.where(kept > logits_lib.FLOOR, kept, jnp.inf), axis=-1,
                  keepdims=True)
  return jnp.where(logits_V < least, logits_lib.FLOOR, logits_V)  # a NaN stays


def describe(dials: Mapping) -> dict[str, float]:
  """The dials in use, as metrics: constant numbers in every row of a run."""
  kind, bits = dials["weights"], dials["bits"]
  used = {}
  if kind == "int":
    used["int_bits"] = bits
  elif kind != "none":
    used["mantissa_bits"] = dict(bf16=7, f16=10, mantissa=bits)[kind]
  for name, (off, more) in _DIALS.items():
    if dials[name] != off:
      used |= {field: dials[field] for field in (name, *more)}
  return {f"mismatch/{name}": float(value) for name, value in used.items()}
