"""The numbers that define a transformer. Floor 2."""

import dataclasses

from rl_is.core import checks
from rl_is.kernels import logprob

ACTIVATIONS = ("silu", "gelu")
ATTENTIONS = ("xla", "splash")
REMATS = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Static structure of a decoder-only transformer.

  Qwen3-like; with other values Llama 3 (`qk_norm` off) or Gemma 3 (`post_norms`,
  `embed_scale`, "gelu", a `window` on all but every `global_every`th layer).
  """

  vocab_size: int  # real entries: the tokenizer's
  vocab_multiple: int = 8  # the table is padded to a multiple of it
  embed: int = 64  # D
  layers: int = 2
  heads: int = 4  # H
  kv_heads: int = 4
  head_dim: int = 16
  mlp: int = 256  # F; of one expert, where there are experts
  experts: int = 0  # 0: a dense MLP
  experts_per_token: int = 0
  activation: str = "silu"
  rope_theta: float = 10_000.0
  # Local layers see the last `window` tokens and rotate by `local_rope_theta`.
  window: int = 0  # 0: every layer sees everything
  global_every: int = 1
  local_rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  qk_norm: bool = True
  post_norms: bool = False  # also behind attention and MLP
  embed_scale: bool = False  # embeddings times sqrt(D)
  tie_embeddings: bool = False
  logit_softcap: float | None = None
  dtype: str = "float32"  # activations
  param_dtype: str = "float32"
  head_precision: str = "highest"
  attention: str = "xla"  # or "splash", the Pallas kernel for TPU
  # What the backward pass computes again: nothing; all but products with
  # weights; all of a layer.
  remat: str = "none"
  scan_layers: bool = False  # one layer's program, looped: big models
  logprob_impl: str = "auto"  # see kernels.logprob
  logprob_chunk: int = 0  # columns of the vocabulary at a time; 0: by shape

  def __post_init__(self):
    for name in ("vocab_size", "vocab_multiple", "embed", "layers", "heads",
                 "kv_heads", "head_dim", "mlp", "global_every"):
      if getattr(self, name) < 1:
        raise ValueError(f"model.{name}: expected >= 1, got "
                         f"{getattr(self, name)}")
    for name in ("dtype", "param_dtype"):
      checks.choice(f"model.{name}", getattr(self, name),
                    ("float32", "bfloat16", "float16", "float64"))
    for name, known in (("head_precision", ("highest", "bf16")),
                        ("logprob_impl", logprob.CHOICES),
                        ("activation", ACTIVATIONS), ("remat", REMATS),
                        ("attention", ATTENTIONS)):
      checks.choice(f"model.{name}", getattr(self, name), known)
    if self.logprob_chunk < 0:
      raise ValueError("model.logprob_chunk: expected >= 0, got "
                       f"{self.logprob_chunk}; 0 chooses it by shape")
    checks.divisible("model.heads", self.heads, "model.kv_heads", self.kv_heads)
    checks.divisible("model.head_dim", self.head_dim, "rotary pairs", 2)
    if self.experts < 0 or not (0 < self.experts_per_token <= self.experts or
                                self.experts == self.experts_per_token == 0):
      raise ValueError(
          "model.experts_per_token: expected 1 to model.experts, or 0 with 0, "
          f"got {self.experts_per_token} of {self.experts}")
    if self.window < 0 or (self.window and self.global_every < 2):
      raise ValueError(
          "model.window: expected >= 0, and a global_every of 2 or more with it,"
          f" got {self.window} and {self.global_every}")

  @property
  def padded_vocab(self) -> int:
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  def is_global(self, layer: int) -> bool:
    """Whether a layer sees everything before it."""
    return not self.window or (layer + 1) % self.global_every == 0
