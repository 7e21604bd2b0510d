"""Structures of published models, as their configuration files have them.

Each function gives the fields of `config.model`; keywords replace some. The
weights come through `config.warm_start.weights`.
"""

# All of the structure, so that nothing of another model stays behind; and what a
# real size needs on an accelerator: bf16 activations, float32 parameters, one
# layer's program, activations made again in the backward pass.
_LARGE = dict(
    experts=0, experts_per_token=0, activation="silu", window=0, global_every=1,
    local_rope_theta=1e4, post_norms=False, embed_scale=False,
    tie_embeddings=False, logit_softcap=None, dtype="bfloat16",
    param_dtype="float32", scan_layers=True, remat="full", attention="splash",
    vocab_multiple=128)
# Qwen team, "Qwen3 Technical Report", 2025, https://arxiv.org/abs/2505.09388.
_QWEN3 = _LARGE | dict(vocab_size=151_936, kv_heads=8, head_dim=128,
                       rope_theta=1e6, norm_eps=1e-6, qk_norm=True)
# Gemma team, "Gemma 3 Technical Report", 2025, https://arxiv.org/abs/2503.19786.
_GEMMA3 = _LARGE | dict(
    vocab_size=262_144, heads=4, kv_heads=1, head_dim=256, rope_theta=1e6,
    window=512, global_every=6, norm_eps=1e-6, activation="gelu", qk_norm=True,
    post_norms=True, embed_scale=True, tie_embeddings=True)


def qwen3_0p6b(**changes) -> dict:
  """https://huggingface.co/Qwen/Qwen3-0.6B"""
  return _QWEN3 | dict(embed=1024, layers=28, heads=16, mlp=3072,
                       tie_embeddings=True) | changes


def qwen3_1p7b(**changes) -> dict:
  """https://huggingface.co/Qwen/Qwen3-1.7B"""
  return _QWEN3 | dict(embed=2048, layers=28, heads=16, mlp=6144,
                       tie_embeddings=True) | changes


def qwen3_8b(**changes) -> dict:
  """https://huggingface.co/Qwen/Qwen3-8B"""
  return _QWEN3 | dict(embed=4096, layers=36, heads=32, mlp=12_288) | changes


def qwen3_30b_a3b(**changes) -> dict:
  """https://huggingface.co/Qwen/Qwen3-30B-A3B"""
  return _QWEN3 | dict(embed=2048, layers=48, heads=32, kv_heads=4, mlp=768,
                       experts=128, experts_per_token=8) | changes


def llama3_8b(**changes) -> dict:
  """Llama team, 2024, https://arxiv.org/abs/2407.21783; without the rescaled
  rotary frequencies of 3.1. https://huggingface.co/meta-llama/Meta-Llama-3-8B
  """
  return _LARGE | dict(vocab_size=128_256, embed=4096, layers=32, heads=32,
                       kv_heads=8, head_dim=128, mlp=14_336, rope_theta=5e5,
                       norm_eps=1e-5, qk_norm=False) | changes


def gemma3_270m(**changes) -> dict:
  """https://huggingface.co/google/gemma-3-270m"""
  return _GEMMA3 | dict(embed=640, layers=18, mlp=2048) | changes


def gemma3_1b(**changes) -> dict:
  """https://huggingface.co/google/gemma-3-1b-it"""
  return _GEMMA3 | dict(embed=1152, layers=26, mlp=6912) | changes


MODELS = {fn.__name__: fn for fn in (
    qwen3_0p6b, qwen3_1p7b, qwen3_8b, qwen3_30b_a3b, llama3_8b, gemma3_270m,
    gemma3_1b)}
