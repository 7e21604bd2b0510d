"""Matrix products of a transformer, counted from its structure. Floor 2."""

from rl_is.models.config import TransformerConfig


def per_token(c: TransformerConfig, length: int) -> dict[str, float]:
  """FLOPs of one token's forward pass in a sequence of `length`, by part.

  A product of [m, k] and [k, n] is 2 m k n. Attention is causal: a query sees
  half of the keys on average, or its window.
  """
  width = c.heads * c.head_dim
  projections = c.embed * (2 * width + 2 * c.kv_heads * c.head_dim)
  mlp = 3 * c.embed * c.mlp * max(c.experts_per_token, 1) + c.embed * c.experts
  seen = [_mean_keys(length, 0 if c.is_global(i) else c.window)
          for i in range(c.layers)]
  return dict(layers=2 * c.layers * (projections + mlp),
              attention=4 * width * sum(seen),
              head=2 * c.embed * c.padded_vocab)


def _mean_keys(length: int, window: int) -> float:
  """Keys that a query sees, itself among them, on average over its position."""
  if not window or window >= length:
    return (length + 1) / 2
  return (window * (window + 1) / 2 + (length - window) * window) / length


def of_step(c: TransformerConfig, rows: int, length: int, *, scored: int,
            tiled_head: bool) -> dict[str, float]:
  """FLOPs of one batch: what the model needs, and what is made again.

  A backward pass is two forward ones. scored: passes of scoring before the
  update. Again: a whole forward pass of the layers where all of a layer is
  rematerialised, and the logits where the head works in tiles.
  """
  part = per_token(c, length)
  forward, tokens = sum(part.values()), rows * length
  body = part["layers"] + part["attention"]
  again = (body if c.remat == "full" else
           part["attention"] if c.remat == "dots" else 0.0)
  again += part["head"] if tiled_head else 0.0
  return dict(update=3 * forward * tokens, scoring=scored * forward * tokens,
              recomputed=again * tokens)
