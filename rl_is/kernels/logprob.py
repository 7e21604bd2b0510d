"""Log-probs of given tokens from hidden states: checks and dispatch. Floor 1."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from rl_is.core import checks
from rl_is.core.types import Array
from rl_is.kernels import logprob_chunked, logprob_pallas, logprob_reference

IMPLEMENTATIONS = {"reference": logprob_reference.token_logprob,
                   "chunked": logprob_chunked.token_logprob,
                   "pallas": logprob_pallas.token_logprob}
CHOICES = (*IMPLEMENTATIONS, "auto")
# "auto" takes the definition up to so many logits a device: 4 MiB of them.
FEW_LOGITS = 2**20


class TokenLogprob(NamedTuple):
  logp: Array  # [B, T] float32 or wider, nats, <= 0
  entropy: Array | None  # [B, T] nats
  logp_ids: Array | None  # [B, T, K] nats; -1e30 where ids is -1


def token_logprob(
    hidden: Array, unembed: Array, targets: Array, *,
    ids: Array | None = None, support: str = "all",
    temperature: Array | float, vocab_size: int,
    logit_softcap: float | None = None, return_entropy: bool = False,
    head_precision: str = "highest", impl: str = "reference",
    chunk: int | None = None, token_chunk: int | None = None,
    mesh: Mesh | AbstractMesh | None = None) -> TokenLogprob:
  """Log-prob of each target under softmax of the transformed logits.

    z = transform(hidden @ unembed); logp = z_target - logsumexp_{v in S} z_v
    S = the vocabulary, or `ids` and the target when support is "ids"

  **Source**: definition; the transform is `kernels.logits`.
  **Departs**: hidden[:, t] scores targets[:, t]: the caller shifts.

  Args:
    hidden: [B, T, D] float.
    unembed: [D, V] float, V >= vocab_size.
    targets: [B, T] int in [0, vocab_size).
    ids: [B, T, K] int, distinct, -1 marks an unused slot: the kept set of the
      sampler, or the ids whose log-probs are wanted.
    support: "all" or "ids" (needs `ids`): what the softmax is over.
    temperature: > 0, may be traced.
    vocab_size: real entries; the rest of V is padding with probability 0.
    logit_softcap: c -> c tanh(z / c), before the temperature.
    return_entropy: also the exact entropy of that softmax.
    head_precision: see `logits.head_logits`.
    impl: a key of `IMPLEMENTATIONS`, or "auto": see `choose`. All but
      "reference" make the logits in tiles, twice if differentiated.
    chunk: columns of the vocabulary in a tile, token_chunk: positions of T
      ("pallas": of B x T); None: by shape. Not for "reference".
    mesh: with axes data, fsdp and tensor: rows are split over the first two,
      the vocabulary over the last, by shard_map. "reference", and "chunked"
      without it, are left to XLA's partitioner, which cannot split "pallas".

  Returns:
    TokenLogprob, differentiable (all but "reference": in reverse mode, once) in
    hidden, unembed and temperature.

  Raises:
    ValueError: on another shape, an unknown support or impl, a chunk that is
      not positive, or ("pallas") does not fill registers.

  Limits: mass that the learner puts outside `ids` is neither seen nor trained.
  With head_precision "bf16" the gradients' operands are bf16 too, except in
  "reference" on a CPU. In tiles and with support "all", a token whose outputs
  have no cotangent has no influence on any gradient, whatever its hidden state
  holds, and a target outside of [0, V) gives NaN.
  """
  if jnp.ndim(hidden) != 3 or jnp.ndim(unembed) != 2:
    raise ValueError(
        "token_logprob: hidden: expected [B, T, D] with unembed [D, V], got "
        f"{jnp.shape(hidden)} and {jnp.shape(unembed)}")
  if hidden.shape[-1] != unembed.shape[0]:
    raise ValueError(
        f"token_logprob: unembed: expected [D = {hidden.shape[-1]}, V], got "
        f"{unembed.shape} (are these logits or hidden states?)")
  if targets.shape != hidden.shape[:2]:
    raise ValueError(f"token_logprob: targets: expected {hidden.shape[:2]}, got "
                     f"{targets.shape}")
  if not jnp.issubdtype(targets.dtype, jnp.integer):
    raise ValueError("token_logprob: targets: expected an integer dtype, got "
                     f"{targets.dtype}")
  checks.choice("token_logprob: support", support, ("all", "ids"))
  checks.choice("token_logprob: impl", impl, CHOICES)
  if support == "ids" and ids is None:
    raise ValueError("token_logprob: ids: support='ids' needs them, got None")
  if ids is not None and (ids.ndim != 3 or ids.shape[:2] != targets.shape):
    raise ValueError(f"token_logprob: ids: expected [*{targets.shape}, K], got "
                     f"{ids.shape}")
  if jnp.ndim(temperature):
    raise ValueError("token_logprob: temperature: expected a scalar, got shape "
                     f"{jnp.shape(temperature)}")
  for name, size in (("chunk", chunk), ("token_chunk", token_chunk)):
    if size is not None and size < 1:
      raise ValueError(f"token_logprob: {name}: expected >= 1, got {size}; "
                       "nearest valid: 1, or None to choose it by shape")
  if impl == "auto":
    impl = choose(targets.size, hidden.dtype, unembed, mesh)
  tiles = {} if impl == "reference" else dict(
      chunk=chunk, token_chunk=token_chunk, mesh=mesh)
  return TokenLogprob(*IMPLEMENTATIONS[impl](
      hidden, unembed, targets, ids=ids, support=support,
      temperature=temperature, vocab_size=vocab_size,
      logit_softcap=logit_softcap, return_entropy=return_entropy,
      head_precision=head_precision, **tiles))


def choose(tokens: int, dtype, unembed: Array, mesh: Mesh | AbstractMesh | None) -> str:
  """What "auto" means: "reference" where it is cheap, else tiles.

  "pallas" on a TPU: that of the mesh, which may be one that is only compiled
  for, else of this process, if it has one device.
  """
  if mesh is None:
    count, platform = jax.device_count(), jax.default_backend()
  else:
    count, platform = mesh.size, mesh.abstract_mesh.abstract_device.platform
  if tokens * unembed.shape[1] <= FEW_LOGITS * count:
    return "reference"
  alone = mesh is not None or count == 1
  narrow = all(x in (jnp.float32, jnp.bfloat16) for x in (dtype, unembed.dtype))
  return "pallas" if platform == "tpu" and alone and narrow else "chunked"
