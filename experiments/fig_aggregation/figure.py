"""What a token weighs under each aggregation, by the length of its answer. Floor 5."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments import sweep_figures
from rl_is import plots
from rl_is.ops import aggregate

KIND = "analytic"
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # of the batch's answers
MEANS = {
    "token_mean": aggregate.token_mean,
    "sequence_mean_token_mean": aggregate.sequence_mean_token_mean,
    "sequence_mean_token_sum": aggregate.sequence_mean_token_sum,
    "constant_length": lambda loss, mask: aggregate.constant_length(
        loss, mask, length=float(max(LENGTHS))),
    # Two prompts: the four short answers, and the four long ones.
    "prompt_mean": lambda loss, mask: aggregate.prompt_mean(
        loss, mask, group=jnp.arange(len(LENGTHS)) // 4),
}


def numbers(tiny: bool):
  """weight: d loss / d (a token's loss); share: a whole answer's, of all."""
  del tiny
  mask = np.arange(max(LENGTHS))[None] < np.array(LENGTHS)[:, None]
  rows = []
  for name, fn in MEANS.items():
    weight = np.asarray(jax.grad(lambda x: fn(x, mask).value())(jnp.zeros(mask.shape)))
    for length, row in zip(LENGTHS, weight):
      rows.append(dict(name=name, length=length, weight=float(row[0]),
                       answer=float(row.sum()), share=float(row.sum() / weight.sum())))
  return dict(data=rows)


def draw(tables, stem, made_by):
  with plots.style():
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(10, 3.9), sharex=True,
                                               layout="constrained")
    for i, ((name,), rows) in enumerate(sweep_figures.by(
        tables["data"], "name").items()):
      T = [r["length"] for r in rows]
      style = dict(color=plots.COLORS[i], linestyle="--" if i == 3 else "-", marker=".")
      left.plot(T, [r["weight"] for r in rows], label=name, **style)
      right.plot(T, [r["share"] for r in rows], **style)
    for ax in (left, right):
      ax.set_xscale("log", base=2)
      ax.set_yscale("log")
      ax.set_xlabel("length of the answer, tokens")
    left.set_ylabel("weight of one of its tokens")
    right.set_ylabel("the answer's share of the loss")
    left.legend(fontsize=7.5)
    figure.suptitle("The aggregation decides who pays for length: a token of a long "
                    "answer, or a short answer", fontweight="bold", fontsize=11,
                    x=0.01, ha="left")
    return plots.save(figure, stem, made_by)
