"""Sampling with a key-value cache, recording what was really drawn. Floor 2."""

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core.types import Array, Params, Prompts, Rollout, pytree, static
from rl_is.kernels import logits as logits_lib
from rl_is.models import cache as cache_lib
from rl_is.models.transformer import Model


@pytree
class Sampling:
  """How to draw. Structure is static, temperature and top_p are data."""

  temperature: Array | float
  top_p: Array | float = 1.0
  max_new_tokens: int = static(1)
  top_k: int = static(0)  # 0: the whole vocabulary
  eos_ids: tuple[int, ...] = static(())
  pad_id: int = static(0)
  greedy: bool = static(False)  # evaluation only: the most likely token


def check(sampling: Sampling) -> None:
  """Refuses what the learner could not account for, before tracing."""
  if sampling.max_new_tokens < 1:
    raise ValueError("sampling.max_new_tokens: expected >= 1, got "
                     f"{sampling.max_new_tokens}")
  if sampling.top_k < 0:
    raise ValueError(f"sampling.top_k: expected >= 0, got {sampling.top_k}")
  if not sampling.greedy and not 0 < sampling.temperature < float("inf"):
    raise ValueError("sampling.temperature: expected > 0 (greedy decoding has "
                     "no log-probs to correct with), got "
                     f"{sampling.temperature}")
  if not 0 < sampling.top_p <= 1:
    raise ValueError(f"sampling.top_p: expected in (0, 1], got {sampling.top_p}")
  if sampling.top_p < 1 and not sampling.top_k:
    raise ValueError(
        f"sampling.top_p = {sampling.top_p} needs a bound on the kept set that "
        "travels with the rollout: set sampling.top_k > 0")


def row_keys(key: Array, prompts: Prompts) -> Array:
  """One key a row, from counters alone: slots, hosts, resume do not matter."""
  return jax.vmap(lambda c, s: jax.random.fold_in(jax.random.fold_in(key, c), s)
                  )(prompts.cursor, prompts.sample)


def draw(hidden_BD: Array, unembed_DV: Array, keys: Array, *, model: Model,
         sampling: Sampling):
  """One token a row: (token [B], logp [B] float32, kept_ids [B, K] or None)."""
  c = model.config
  greedy = sampling.greedy
  logits_BV = logits_lib.transform(
      logits_lib.head_logits(hidden_BD, unembed_DV, c.head_precision),
      temperature=1.0 if greedy else sampling.temperature,
      vocab_size=c.vocab_size, logit_softcap=c.logit_softcap)
  ids_BK = None
  if sampling.top_k:
    logits_BV, ids_BK = logits_lib.kept_set(
        logits_BV, top_k=min(sampling.top_k, c.vocab_size),
        top_p=sampling.top_p)
  logp_BV = logits_lib.log_normalise(logits_BV)
  pick = (jnp.argmax(logp_BV, axis=-1) if greedy else
          jax.vmap(jax.random.categorical)(keys, logp_BV))[:, None]
  logp = jnp.take_along_axis(logp_BV, pick, axis=1)[:, 0].astype(jnp.float32)
  token = pick if ids_BK is None else jnp.take_along_axis(ids_BK, pick, axis=1)
  return token[:, 0].astype(jnp.int32), logp, ids_BK


def sample(params: Params, prompts: Prompts, key: Array, version: Array | int,
           *, model: Model, sampling: Sampling) -> Rollout:
  """Draws one answer a row.

  Each row stops at the first EOS id, which belongs to the answer, or after
  max_new_tokens; nothing after it is sampled, attended to or counted. The draw
  of a token derives from (key, prompt cursor, sample, token index) alone.
  """
  B, P = prompts.tokens.shape
  N = sampling.max_new_tokens
  T = P + N
  keys = row_keys(key, prompts)
  unembed = model.unembed(params)
  eos = jnp.asarray(sampling.eos_ids, jnp.int32)
  wide = lambda x, fill: jnp.pad(x, ((0, 0), (0, N)), constant_values=fill)
  state = dict(
      t=0, done=jnp.zeros(B, bool), stop_token=jnp.full(B, -1, jnp.int32),
      tokens=wide(prompts.tokens, sampling.pad_id),
      valid=wide(prompts.valid, False), mask=jnp.zeros((B, T), bool),
      logp=jnp.zeros((B, T), jnp.float32),
      cache=cache_lib.empty(model.config, B, T))
  if sampling.top_k:
    K = min(sampling.top_k, model.config.vocab_size)
    state["kept_ids"] = jnp.full((B, T, K), -1, jnp.int32)
  if P > 1:  # the last prompt token is the first one that `step` feeds
    _, state["cache"] = model.extend(
        params, prompts.tokens[:, :-1], state["valid"], state["cache"], 0)

  def step(s):
    column = P + s["t"]
    fed = lax.dynamic_slice_in_dim(s["tokens"], column - 1, 1, axis=1)
    hidden, cache = model.extend(params, fed, s["valid"], s["cache"], column - 1)
    token, logp, ids = draw(
        hidden[:, 0], unembed, jax.vmap(jax.random.fold_in, (0, None))(
            keys, s["t"]), model=model, sampling=sampling)
    live = ~s["done"]
    is_eos = live & (token[:, None] == eos[None]).any(axis=1)
    put = lambda x, new: lax.dynamic_update_slice_in_dim(
        x, new[:, None].astype(x.dtype), column, axis=1)
    new = dict(
        s, t=s["t"] + 1, done=s["done"] | is_eos, cache=cache,
        stop_token=jnp.where(is_eos, token, s["stop_token"]),
        tokens=put(s["tokens"], jnp.where(live, token, sampling.pad_id)),
        valid=put(s["valid"], live), mask=put(s["mask"], live),
        logp=put(s["logp"], jnp.where(live, logp, 0)))
    if ids is not None:
      new["kept_ids"] = put(s["kept_ids"], jnp.where(live[:, None], ids, -1))
    return new

  s = lax.while_loop(lambda s: (s["t"] < N) & ~s["done"].all(), step, state)
  return Rollout(
      tokens=s["tokens"], valid=s["valid"], mask=s["mask"],
      logp_behaviour=s["logp"],
      version=jnp.where(s["mask"], jnp.asarray(version, jnp.int32), -1),
      stop_token=s["stop_token"], kept_ids=s.get("kept_ids"))
