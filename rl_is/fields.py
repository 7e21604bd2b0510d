"""The fields of a config: none unknown, none missing, numbers in range. Floor 4."""

import math

from ml_collections import ConfigDict

from rl_is.core import checks
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import workdir as workdir_lib

# Field -> (low, high, is low allowed). int or float follows the config's type.
_RANGES = {
    "seed": (0, 2**32 - 1, True),
    **{f"model.{name}": (1, math.inf, True) for name in (
        "embed", "layers", "heads", "kv_heads", "head_dim", "mlp",
        "vocab_multiple")},
    **{f"model.{name}": (0, math.inf, True) for name in (
        "experts", "experts_per_token", "window")},
    "model.vocab_size": (1, math.inf, True),
    "model.global_every": (1, math.inf, True),
    "model.rope_theta": (0, math.inf, False),
    "model.local_rope_theta": (0, math.inf, False),
    "model.norm_eps": (0, 1, False),
    "model.logit_softcap": (0, math.inf, False),
    "model.logprob_chunk": (0, math.inf, True),
    **{f"mesh.{axis}": (-1, math.inf, True) for axis in mesh_lib.AXES},
    "rollout.lag": (0, math.inf, True),
    "rollout.max_lag": (0, math.inf, True),
    "rollout.sampler_devices": (1, math.inf, True),
    "rollout.rows_per_call": (1, math.inf, True),
    "rollout.swap_tokens": (0, math.inf, True),
    "rollout.batch_size": (1, math.inf, True),
    "rollout.group_size": (1, math.inf, True),
    "rollout.rescore_share": (0, 1, True),
    "rollout.top_k": (0, math.inf, True),
    "rollout.record_top_k": (0, math.inf, True),
    "rollout.top_p": (0, 1, False),
    "rollout.temperature": (-math.inf, math.inf, False),  # sampler.check
    "rollout.max_new_tokens": (1, math.inf, True),
    "mismatch.bits": (1, 23, True),  # mismatch.check_weights
    "mismatch.temperature": (0, 1e3, False),
    "mismatch.top_p": (0, 1, False),
    "mismatch.logit_sd": (0, 1e3, True),
    "mismatch.logit_seed": (0, 2**32 - 1, True),
    "mismatch.spike_rate": (0, 1, True),
    "mismatch.spike_nats": (-1e3, 1e3, True),
    "mismatch.spike_below": (0, 1, False),
    "verify.seconds": (0, 1e6, False),
    "optimizer.learning_rate": (0, 1e9, True),
    "optimizer.warmup_updates": (0, math.inf, True),
    "optimizer.b1": (0, 1 - 1e-9, True),
    "optimizer.b2": (0, 1 - 1e-9, True),
    "optimizer.eps": (0, math.inf, False),
    "optimizer.weight_decay": (0, 1e9, True),
    "optimizer.grad_clip": (0, math.inf, True),
    "train.steps": (1, math.inf, True),
    "train.updates_per_batch": (1, math.inf, True),
    "train.microbatches": (1, math.inf, True),
    "warm_start.steps": (0, math.inf, True),
    "warm_start.batch": (1, math.inf, True),
    "warm_start.learning_rate": (0, 1e9, True),
    "warm_start.target": (0, 1, True),
    "evaluate.every": (0, math.inf, True),
    "evaluate.prompts": (0, math.inf, True),
    "evaluate.samples": (1, math.inf, True),
    "evaluate.temperature": (0, math.inf, True),
    "checkpoint.every": (1, math.inf, True),
    "checkpoint.keep": (1, math.inf, True),
    "store.every": (0, math.inf, True),
    "store.max_gb": (0, math.inf, False),
}
# The other fields; what hangs on a prefix is checked by who reads it.
_OTHERS = {
    "task.name",
    *(f"model.{name}" for name in (
        "activation", "qk_norm", "post_norms", "embed_scale", "tie_embeddings",
        "dtype", "param_dtype", "head_precision", "attention", "remat",
        "scan_layers", "logprob_impl")),
    "rollout.mode", "rollout.order", "rollout.swap_cache",
    "rollout.record_logp", "rollout.replay_routes",
    "verify.on_failure", "mismatch.weights", "optimizer.name",
    "train.full_diagnostics", "train.psis", "warm_start.path",
    "warm_start.weights", "track.tensorboard"}
_PREFIXES = ("objective.", "task.kwargs")


def check(config: ConfigDict) -> None:
  """Every number is one, and in its range. ConfigDict lets True and NaN pass."""
  flat = workdir_lib.flatten(config.to_dict())
  known = set(_RANGES) | _OTHERS
  for name in flat:
    if name not in known and not name.startswith(_PREFIXES):
      raise ValueError(checks.unknown("config", name, known))
  missing = sorted(known - set(flat))
  if missing:
    raise ValueError(f"config.{missing[0]}: missing; begin from common.base()")
  for name, (low, high, closed) in _RANGES.items():
    if flat[name] is not None:
      checks.in_range(f"config.{name}", flat[name], low, high, closed)
  for name, value in flat.items():
    if isinstance(value, float) and math.isnan(value):
      raise ValueError(f"config.{name}: expected a number, got NaN")
