"""Log-probs of the tokens of a batch under the learner's parameters. Floor 2."""

import jax.numpy as jnp

from rl_is.core.types import Array, Batch, Params, PolicyOutputs
from rl_is.kernels import logprob
from rl_is.models.transformer import Model


def score(params: Params, batch: Batch, *, model: Model,
          temperature: Array | float, return_entropy: bool = False,
          impl: str = "reference") -> PolicyOutputs:
  """Differentiable log-prob of every token, in the sampler's distribution.

  Position t speaks of token t: its logits are those of position t - 1, and the
  first token, which nothing predicts, gets 0. Where the batch carries the
  sampler's kept ids the softmax is over them.
  """
  hidden = model.hidden(params, batch.tokens, batch.valid)
  kept = batch.kept_ids is not None
  out = logprob.token_logprob(
      hidden[:, :-1], model.unembed(params), batch.tokens[:, 1:],
      ids=batch.kept_ids[:, 1:] if kept else None,
      support="ids" if kept else "all", temperature=temperature,
      vocab_size=model.config.vocab_size,
      logit_softcap=model.config.logit_softcap, return_entropy=return_entropy,
      head_precision=model.config.head_precision, impl=impl)
  first = lambda x: None if x is None else jnp.pad(x, ((0, 0), (1, 0)))
  return PolicyOutputs(first(out.logp), first(out.entropy))
