"""Sampling with a key-value cache, recording what was really drawn. Floor 2."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core.types import Array, Params, Prompts, Rollout, pytree, static
from rl_is.kernels import logits as logits_lib
from rl_is.models import cache as cache_lib
from rl_is.models.transformer import Model

State = dict[str, Array | cache_lib.Cache]  # of a decode: begin, decode, finish


@pytree
class Sampling:
  """How to draw. Structure is static, temperature and top_p are data."""

  temperature: Array | float
  top_p: Array | float = 1.0
  max_new_tokens: int = static(1)
  top_k: int = static(0)  # 0: the whole vocabulary
  record_top_k: int = static(0)  # most likely tokens to write down; 0: none
  record_routes: bool = static(False)  # the experts that each token took
  eos_ids: tuple[int, ...] = static(())
  pad_id: int = static(0)
  greedy: bool = static(False)  # evaluation only: the most likely token
  # A pytree, (logits [B, V], keys [B]) -> logits: what the learner is not told.
  disturb: Any = None


def check(sampling: Sampling) -> None:
  """Refuses what the learner could not account for, before tracing."""
  if sampling.max_new_tokens < 1:
    raise ValueError("sampling.max_new_tokens: expected >= 1, got "
                     f"{sampling.max_new_tokens}")
  if sampling.top_k < 0:
    raise ValueError(f"sampling.top_k: expected >= 0, got {sampling.top_k}")
  if sampling.record_top_k < 0:
    raise ValueError("sampling.record_top_k: expected >= 0, got "
                     f"{sampling.record_top_k}")
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
  """One token a row: token [B], logp [B] float32, and what else is recorded.

  That is, by field of `Rollout`: kept_ids [B, K] with a top_k, head_ids and
  head_logp_behaviour [B, K] with a record_top_k.
  """
  c = model.config
  greedy = sampling.greedy
  logits_BV = logits_lib.transform(
      logits_lib.head_logits(hidden_BD, unembed_DV, c.head_precision),
      temperature=1.0 if greedy else sampling.temperature,
      vocab_size=c.vocab_size, logit_softcap=c.logit_softcap)
  if sampling.disturb is not None:
    logits_BV = sampling.disturb(logits_BV, keys)
  ids_BK = None
  if sampling.top_k:
    logits_BV, ids_BK = logits_lib.kept_set(
        logits_BV, top_k=min(sampling.top_k, c.vocab_size),
        top_p=sampling.top_p)
  logp_BV = logits_lib.log_normalise(logits_BV)
  pick = (jnp.argmax(logp_BV, axis=-1) if greedy else
          jax.vmap(jax.random.categorical)(keys, logp_BV))[:, None]
  logp = jnp.take_along_axis(logp_BV, pick, axis=1)[:, 0].astype(jnp.float32)
  token, more = pick, {}
  if ids_BK is not None:
    token = jnp.take_along_axis(ids_BK, pick, axis=1)
    more["kept_ids"] = ids_BK
  if sampling.record_top_k:
    more |= _head(logp_BV, ids_BK, _head_size(sampling, c.vocab_size))
  return token[:, 0].astype(jnp.int32), logp, more


def _head_size(sampling: Sampling, vocab_size: int) -> int:
  """How many tokens are written down: no more than can be drawn."""
  return min(sampling.record_top_k, sampling.top_k or vocab_size, vocab_size)


def _head(logp_BV: Array, ids_BK: Array | None, size: int) -> dict[str, Array]:
  """The most likely tokens of what is drawn from; its kept set is sorted."""
  logp, ids = (lax.top_k(logp_BV, size) if ids_BK is None else
               (logp_BV[:, :size], ids_BK[:, :size]))
  drawn = ~(logp < logits_lib.FLOOR / 2)  # a one-sided top-p may leave fewer
  return dict(head_ids=jnp.where(drawn, ids, -1),
              head_logp_behaviour=jnp.where(drawn, logp, 0))


def sample(params: Params, prompts: Prompts, key: Array, version: Array | int,
           *, model: Model, sampling: Sampling) -> Rollout:
  """Draws one answer a row.

  Each row stops at the first EOS id, which belongs to the answer, or after
  max_new_tokens; nothing after it is sampled, attended to or counted. The draw
  of a token derives from (key, prompt cursor, sample, token index) alone.
  """
  state = begin(params, prompts, key, model=model, sampling=sampling)
  return finish(decode(params, state, version, sampling.max_new_tokens,
                       model=model, sampling=sampling))


def begin(params: Params, prompts: Prompts, key: Array, *, model: Model,
          sampling: Sampling) -> State:
  """The prompts, read; `decode` goes on from there, in one go or in several."""
  B, P = prompts.tokens.shape
  N, V = sampling.max_new_tokens, model.config.vocab_size
  shape = (B, P + N)
  wide = lambda x, fill: jnp.pad(x, ((0, 0), (0, N)), constant_values=fill)
  state = dict(
      t=jnp.zeros((), jnp.int32), keys=row_keys(key, prompts),
      done=jnp.zeros(B, bool), stop_token=jnp.full(B, -1, jnp.int32),
      tokens=wide(prompts.tokens, sampling.pad_id),
      valid=wide(prompts.valid, False), mask=jnp.zeros(shape, bool),
      logp_behaviour=jnp.zeros(shape, jnp.float32),
      version=jnp.full(shape, -1, jnp.int32),
      cache=cache_lib.empty(model.config, *shape, sampling.record_routes))
  if sampling.top_k:
    kept = (*shape, min(sampling.top_k, V))
    state["kept_ids"] = jnp.full(kept, -1, jnp.int32)
  if sampling.record_top_k:
    head = (*shape, _head_size(sampling, V))
    state["head_ids"] = jnp.full(head, -1, jnp.int32)
    state["head_logp_behaviour"] = jnp.zeros(head, jnp.float32)
  if P > 1:  # the last prompt token is the first one that `decode` feeds
    _, state["cache"] = model.extend(
        params, prompts.tokens[:, :-1], state["valid"], state["cache"], 0)
  return state


def decode(params: Params, state: State, version: Array | int,
           steps: Array | int, *, model: Model, sampling: Sampling) -> State:
  """Up to `steps` more tokens a row, each marked with `version`.

  The weights may be other ones than before: what was drawn stays, and so does
  the cache of its keys and values, unless `read_again` makes it anew.
  """
  N = sampling.max_new_tokens
  P = state["tokens"].shape[1] - N
  unembed = model.unembed(params)
  eos = jnp.asarray(sampling.eos_ids, jnp.int32)
  last = jnp.minimum(state["t"] + steps, N)

  def step(s):
    column = P + s["t"]
    fed = lax.dynamic_slice_in_dim(s["tokens"], column - 1, 1, axis=1)
    hidden, cache = model.extend(params, fed, s["valid"], s["cache"], column - 1)
    token, logp, more = draw(
        hidden[:, 0], unembed, jax.vmap(jax.random.fold_in, (0, None))(
            s["keys"], s["t"]), model=model, sampling=sampling)
    live = ~s["done"]
    is_eos = live & (token[:, None] == eos[None]).any(axis=1)
    put = lambda x, new: lax.dynamic_update_slice_in_dim(
        x, new[:, None].astype(x.dtype), column, axis=1)
    new = dict(
        s, t=s["t"] + 1, done=s["done"] | is_eos, cache=cache,
        stop_token=jnp.where(is_eos, token, s["stop_token"]),
        tokens=put(s["tokens"], jnp.where(live, token, sampling.pad_id)),
        valid=put(s["valid"], live), mask=put(s["mask"], live),
        logp_behaviour=put(s["logp_behaviour"], jnp.where(live, logp, 0)),
        version=put(s["version"], jnp.where(live, version, -1)))
    for name, x in more.items():
      unused = -1 if name.endswith("_ids") else 0
      new[name] = put(s[name], jnp.where(live[:, None], x, unused))
    return new

  return lax.while_loop(
      lambda s: (s["t"] < last) & ~s["done"].all(), step, state)


def read_again(params: Params, state: State, *, model: Model) -> State:
  """The keys and values of everything so far, as `params` make them.

  The experts stay those under which the tokens were drawn.
  """
  old = state["cache"]
  empty = jax.tree.map(jnp.zeros_like, old)
  cache = model.extend(params, state["tokens"], state["valid"], empty, 0)[1]
  return dict(state, cache=dataclasses.replace(
      cache, routes=old.routes))


def finish(state: State) -> Rollout:
  """What was drawn and recorded."""
  fields = {f.name for f in dataclasses.fields(Rollout)}
  routes = state["cache"].routes
  return Rollout(
      **{k: x for k, x in state.items() if k in fields},
      routes=None if routes is None else jnp.moveaxis(routes, 0, 2))
