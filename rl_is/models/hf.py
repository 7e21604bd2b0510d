"""Weights and structures in Hugging Face's names and files (extra `hf`). Floor 2.

A directory as `save_pretrained` leaves it: config.json and *.safetensors. Of the
model families Qwen3, Qwen3-MoE, Llama and Gemma 3 (text).
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from rl_is.core import checks
from rl_is.core.types import Params
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model

_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


def _safetensors():
  try:
    import safetensors  # an extra: who asks for it pays
    import safetensors.numpy
  except ImportError as error:
    raise ImportError("weights in Hugging Face's files need safetensors: "
                      "pip install 'rl_is[hf]'") from error
  return safetensors


def structure(directory: str) -> dict[str, Any]:
  """What `TransformerConfig` takes, from a directory's config.json.

  Raises:
    ValueError: a family or a feature that our transformer does not have.
  """
  path = epath.Path(directory) / "config.json"
  h = json.loads(path.read_text())
  family = h.get("model_type")
  checks.choice(f"{path}: model_type", family, _ARCHITECTURES)
  is_gemma = family == "gemma3_text"
  activation = h.get("hidden_activation" if is_gemma else "hidden_act")
  checks.choice(f"{path}: activation", activation, _ACTIVATIONS)
  wide, local = _rotary(path, h)
  heads = h["num_attention_heads"]
  head_dim = h.get("head_dim") or h["hidden_size"] // heads
  is_mixed = family == "qwen3_moe"
  experts = h.get("num_experts", h.get("num_local_experts", 0))
  _refuse(path, h, dict(
      attention_bias=False, mlp_bias=False, use_sliding_window=False,
      use_bidirectional_attention=False, attn_logit_softcapping=None,
      mlp_only_layers=[], decoder_sparse_step=1, norm_topk_prob=True,
      query_pre_attn_scalar=head_dim))
  out = dict(
      vocab_size=h["vocab_size"], embed=h["hidden_size"],
      layers=h["num_hidden_layers"], heads=heads,
      kv_heads=h["num_key_value_heads"], head_dim=head_dim,
      mlp=h["moe_intermediate_size" if is_mixed else "intermediate_size"],
      experts=experts if is_mixed else 0,
      experts_per_token=h["num_experts_per_tok"] if is_mixed else 0,
      activation=_ACTIVATIONS[activation], rope_theta=wide,
      norm_eps=h["rms_norm_eps"], qk_norm=family != "llama",
      post_norms=is_gemma, embed_scale=is_gemma,
      tie_embeddings=h.get("tie_word_embeddings", is_gemma),
      logit_softcap=h.get("final_logit_softcapping"))
  if is_gemma:
    out |= dict(window=h["sliding_window"], local_rope_theta=local,
                global_every=_global_every(path, h))
  return out


def _refuse(path, h: dict, known: dict) -> None:
  for name, value in known.items():
    if h.get(name, value) != value:
      raise ValueError(f"{path}: {name}: our transformer has only {value!r}, got "
                       f"{h[name]!r}")


def _rotary(path, h: dict) -> tuple[float, float]:
  """theta of the layers that see everything, and of the local ones."""
  rope = h.get("rope_parameters") or {}
  wide = rope.get("full_attention", rope)
  local = rope.get("sliding_attention", {})
  for part in (wide, local, h.get("rope_scaling") or {}):
    kind = part.get("rope_type", part.get("type", "default"))
    if kind != "default":
      raise ValueError(f"{path}: rope_type: our transformer has only 'default', "
                       f"got {kind!r}")
  return (wide.get("rope_theta", h.get("rope_theta", 10_000.0)),
          local.get("rope_theta", h.get("rope_local_base_freq", 10_000.0)))


def _global_every(path, h: dict) -> int:
  layers = h["num_hidden_layers"]
  kinds = h.get("layer_types")
  if kinds is None:
    return h.get("sliding_window_pattern", 6)
  every = (kinds.index("full_attention") if "full_attention" in kinds
           else layers) + 1
  want = ["full_attention" if (i + 1) % every == 0 else "sliding_attention"
          for i in range(layers)]
  if kinds != want:
    raise ValueError(f"{path}: layer_types: expected every {every}th to see "
                     f"everything, got {kinds}")
  return every


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """One of our leaves in their files: as many tensors as it has layers."""

  name: str  # {0} is the layer, {1} the expert
  ours: Callable[[np.ndarray], np.ndarray]  # theirs -> ours
  theirs: Callable[[np.ndarray], np.ndarray]  # and back

  @property
  def lead(self) -> int:
    """How many of our first axes are in the name."""
    return self.name.count("{")


def _table(c: TransformerConfig) -> dict[str, _Tensor]:
  """Our path -> theirs. A linear layer of theirs is [out, in]."""
  flip = (lambda w: w.T, lambda w: w.T)
  heads = (lambda w: w.T.reshape(c.embed, -1, c.head_dim),
           lambda w: w.reshape(c.embed, -1).T)
  out = (lambda w: w.T.reshape(c.heads, c.head_dim, c.embed),
         lambda w: w.reshape(-1, c.embed).T)
  # Gemma's norms multiply by 1 + scale.
  norm = ((lambda w: w + 1, lambda w: w - 1) if c.post_norms else
          (lambda w: w, lambda w: w))
  padding = ((0, c.padded_vocab - c.vocab_size), (0, 0))
  rows = lambda w: np.pad(w, padding), lambda w: w[:c.vocab_size]
  layer = {
      "attention_norm/scale": ("input_layernorm", norm),
      "mlp_norm/scale": ("pre_feedforward_layernorm" if c.post_norms else
                         "post_attention_layernorm", norm),
      "attention/o": ("self_attn.o_proj", out),
      **{f"attention/{x}": (f"self_attn.{x}_proj", heads) for x in "qkv"}}
  if c.qk_norm:
    layer |= {f"attention/{x}_norm/scale": (f"self_attn.{x}_norm", norm)
              for x in "qk"}
  if c.post_norms:
    layer |= {
        "attention_post_norm/scale": ("post_attention_layernorm", norm),
        "mlp_post_norm/scale": ("post_feedforward_layernorm", norm)}
  if c.experts:
    layer |= {"experts/router": ("mlp.gate", flip)} | {
        f"experts/{x}": (f"mlp.experts.{{1}}.{x}_proj", flip)
        for x in ("gate", "up", "down")}
  else:
    layer |= {f"mlp/{x}": (f"mlp.{x}_proj", flip) for x in ("gate", "up", "down")}
  table = {
      "embed": _Tensor("model.embed_tokens.weight", *rows),
      "final_norm/scale": _Tensor("model.norm.weight", *norm),
      **{f"blocks/{path}": _Tensor(f"model.layers.{{0}}.{name}.weight", *how)
         for path, (name, how) in layer.items()}}
  if not c.tie_embeddings:
    table["head"] = _Tensor("lm_head.weight", lambda w: rows[0](w).T,
                            lambda w: rows[1](w.T))
  return table


def _name(path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def load(directory: str, model: Model, placed: Params) -> Params:
  """Parameters from *.safetensors; each device's part is read where it lies.

  Args:
    directory: as `structure` takes.
    placed: shapes with shardings, as `infra.sharding.shaped` gives.

  Raises:
    ValueError: a tensor that is missing, left over or of another shape.
  """
  files = _Files(directory)
  table = _table(model.config)

  def leaf(path, x):
    tensor = table[_name(path)]
    sizes, shape = x.shape[:tensor.lead], x.shape[tensor.lead:]

    def part(index):
      numbers = [range(*at.indices(n)) for at, n in zip(index, sizes)]
      read = lambda at: files.read(tensor.name.format(*at), tensor.ours, shape)[
          index[tensor.lead:]]
      parts = [read(at) for at in itertools.product(*numbers)]
      return np.stack(parts).reshape(
          *map(len, numbers), *parts[0].shape).astype(x.dtype)

    return jax.make_array_from_callback(x.shape, x.sharding, part)

  params = jax.tree_util.tree_map_with_path(leaf, placed)
  files.check_all_known({
      tensor.name.format(*at) for path, x in
      jax.tree_util.tree_leaves_with_path(placed)
      for tensor in [table[_name(path)]]
      for at in itertools.product(*map(range, x.shape[:tensor.lead]))})
  return params


class _Files:
  """The tensors of a directory, by name."""

  def __init__(self, directory: str):
    self._directory, open_ = directory, _safetensors().safe_open
    self._opened = [open_(file, "numpy") for file in
                    sorted(epath.Path(directory).glob("*.safetensors"))]
    self._of = {name: file for file in self._opened for name in file.keys()}
    if not self._of:
      raise ValueError(f"{directory}: no *.safetensors with weights in it")

  def read(self, name: str, ours: Callable, shape: tuple[int, ...]
           ) -> np.ndarray:
    if name not in self._of:
      raise ValueError(f"{self._directory}: {checks.unknown('tensor', name, self._of)}")
    theirs = self._of[name].get_tensor(name)
    try:
      tensor = ours(theirs)
    except ValueError:  # it cannot even be reshaped
      tensor = theirs
    if tensor.shape != shape:
      raise ValueError(f"{self._directory}: {name}: expected what makes {shape}, "
                       f"got {theirs.shape}")
    return tensor

  def check_all_known(self, known: set[str]) -> None:
    # A tied head is stored by some, and says nothing more.
    left = sorted(set(self._of) - known - {"lm_head.weight"})
    if left:
      raise ValueError(f"{self._directory}: {len(left)} tensors that the model "
                       f"does not have: {', '.join(left[:3])}")


def save(directory: str, model: Model, params: Params) -> None:
  """Writes what `load` and `from_pretrained` read, of parameters on this host."""
  tensors = {}
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    tensor = _table(model.config)[_name(path)]
    whole = np.asarray(x)
    for at in itertools.product(*map(range, whole.shape[:tensor.lead])):
      tensors[tensor.name.format(*at)] = np.ascontiguousarray(
          tensor.theirs(whole[at]))
  folder = epath.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  _safetensors().numpy.save_file(tensors, folder / "model.safetensors",
                                 metadata=dict(format="pt"))
  (folder / "config.json").write_text(
      json.dumps(_config_json(model.config), indent=1) + "\n")


def _config_json(c: TransformerConfig) -> dict[str, Any]:
  """The inverse of `structure`."""
  family = ("gemma3_text" if c.post_norms else "qwen3_moe" if c.experts else
            "qwen3" if c.qk_norm else "llama")
  theirs = {ours: name for name, ours in _ACTIVATIONS.items()}[c.activation]
  out = dict(
      model_type=family, architectures=[_ARCHITECTURES[family]],
      vocab_size=c.vocab_size, hidden_size=c.embed, num_hidden_layers=c.layers,
      num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
      head_dim=c.head_dim, intermediate_size=c.mlp, rms_norm_eps=c.norm_eps,
      tie_word_embeddings=c.tie_embeddings, hidden_act=theirs,
      rope_theta=c.rope_theta, dtype=c.param_dtype, torch_dtype=c.param_dtype)
  if c.experts:
    out |= dict(num_experts=c.experts, num_experts_per_tok=c.experts_per_token,
                moe_intermediate_size=c.mlp, norm_topk_prob=True)
  if family == "gemma3_text":
    every = c.global_every
    out |= dict(
        hidden_activation=theirs, sliding_window=c.window,
        rope_local_base_freq=c.local_rope_theta, query_pre_attn_scalar=c.head_dim,
        final_logit_softcapping=c.logit_softcap, layer_types=[
            "full_attention" if c.is_global(i) else "sliding_attention"
            for i in range(c.layers)], sliding_window_pattern=every)
  return out
