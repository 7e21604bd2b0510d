"""Log-probs of the tokens of a batch under the learner's parameters. Floor 2."""

import jax
import jax.numpy as jnp

from rl_is.core.types import Array, Batch, Params, PolicyOutputs
from rl_is.kernels import logprob
from rl_is.models.transformer import Model


def score(params: Params, batch: Batch, *, model: Model,
          temperature: Array | float, return_entropy: bool = False,
          return_head: bool = False, impl: str | None = None
          ) -> PolicyOutputs:
  """Differentiable log-prob of every token, in the sampler's distribution.

  Position t speaks of token t: its logits are those of position t - 1, and the
  first token, which nothing predicts, gets 0. Where the batch carries the
  sampler's kept ids the softmax is over them; where it carries the experts that
  the sampler's tokens took, they take the same. `return_head`: also `logp_ids`,
  of the batch's `head_ids`; -1e30 in an unused slot. `impl`: see
  `logprob.token_logprob`; the model's own by default. Rows and vocabulary are
  split over the mesh that is set.
  """
  mesh = jax.sharding.get_abstract_mesh()
  hidden = model.hidden(params, batch.tokens, batch.valid, batch.routes)
  kept = batch.kept_ids is not None
  if return_head and batch.head_ids is None:
    raise ValueError("score: return_head: the batch has no head_ids")
  ids = batch.kept_ids if kept else batch.head_ids if return_head else None
  out = logprob.token_logprob(
      hidden[:, :-1], model.unembed(params), batch.tokens[:, 1:],
      ids=None if ids is None else ids[:, 1:],
      support="ids" if kept else "all", temperature=temperature,
      vocab_size=model.config.vocab_size,
      logit_softcap=model.config.logit_softcap, return_entropy=return_entropy,
      head_precision=model.config.head_precision,
      impl=impl or model.config.logprob_impl,
      chunk=model.config.logprob_chunk or None,
      mesh=None if mesh.empty else mesh)
  first = lambda x: None if x is None else jnp.pad(
      x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))
  # The head is the first of the kept set, so the slots agree.
  head = (out.logp_ids[..., :batch.head_ids.shape[-1]] if return_head else None)
  return PolicyOutputs(first(out.logp), first(out.entropy),
                       logp_ids=first(head))
