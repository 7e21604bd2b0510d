"""The numbers that define a transformer. Floor 2."""

import dataclasses

from rl_is.core import checks
from rl_is.kernels import logprob


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Static structure of a decoder-only transformer (Qwen3-like)."""

  vocab_size: int  # real entries: the tokenizer's
  vocab_multiple: int = 8  # the table is padded to a multiple of it
  embed: int = 64  # D
  layers: int = 2
  heads: int = 4  # H
  kv_heads: int = 4
  head_dim: int = 16
  mlp: int = 256  # F
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  qk_norm: bool = True
  tie_embeddings: bool = False
  logit_softcap: float | None = None
  dtype: str = "float32"  # activations
  param_dtype: str = "float32"
  head_precision: str = "highest"
  logprob_impl: str = "auto"  # see kernels.logprob
  logprob_chunk: int = 0  # columns of the vocabulary at a time; 0: by shape

  def __post_init__(self):
    for name in ("vocab_size", "vocab_multiple", "embed", "layers", "heads",
                 "kv_heads", "head_dim", "mlp"):
      if getattr(self, name) < 1:
        raise ValueError(f"model.{name}: expected >= 1, got "
                         f"{getattr(self, name)}")
    for name in ("dtype", "param_dtype"):
      checks.choice(f"model.{name}", getattr(self, name),
                    ("float32", "bfloat16", "float16", "float64"))
    checks.choice("model.head_precision", self.head_precision,
                  ("highest", "bf16"))
    checks.choice("model.logprob_impl", self.logprob_impl, logprob.CHOICES)
    if self.logprob_chunk < 0:
      raise ValueError("model.logprob_chunk: expected >= 0, got "
                       f"{self.logprob_chunk}; 0 chooses it by shape")
    checks.divisible("model.heads", self.heads, "model.kv_heads", self.kv_heads)
    checks.divisible("model.head_dim", self.head_dim, "rotary pairs", 2)

  @property
  def padded_vocab(self) -> int:
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
