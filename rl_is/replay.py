"""What other objectives would have done with stored rollouts. Floor 4.

  python -m rl_is.replay runs/gspo --objectives=none,token_tis,gspo,ppo \\
    --sweep='cap=1,2,5,inf' --checkpoint=runs/gspo

Reads the rollouts that a run wrote (`store.every`), and puts each objective and
point of the sweep to them: loss, what it changes and drops by sign, lag and
length, effective sample size, and with a checkpoint (whose log-probs and scores
are then taken) gradient norms, cosines and variances. Writes `replay.csv`, how
large the weights are as `weights.csv`, and a figure of each.
"""

import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from rl_is import histogram, plots, saved, tables
from rl_is.core import checks
from rl_is.core.types import Array, Batch
from rl_is.infra import progress
from rl_is.learner import counterfactual, sketch
from rl_is.learner.counterfactual import Replayed
from rl_is.models import scoring
from rl_is.objective import constants as constants_lib
from rl_is.objective import presets, settings
from rl_is.objective.compose import Objective
from rl_is.objective.settings import Corrections
from rl_is.ops import diagnostics
from rl_is.rollout import store

REFERENCE = "seq_is"  # unbiased, if of a high variance
SKETCHED = 2000  # sequences at most that gradients are of
_LISTED = 5


class Data(NamedTuple):
  """Stored batches as one learner meets them."""

  steps: list[int]
  batches: list[Batch]  # logp_prox: of that learner
  scores: list[Array | None]  # [B, T, K]; None: not sketched
  lengths: tuple[float, float]  # thirds of the answers
  source: str


def load(rollouts: str, checkpoint: str | None = None, *, newest: int = 0,
         drop_nonfinite: bool = False) -> Data:
  """Stored rollouts under the learner that trained on them, or a later one.

  Args:
    rollouts: of `store.read`.
    checkpoint: a run's workdir: its newest parameters score the rollouts anew.
    newest: how many batches, the last ones; 0: all.
    drop_nonfinite: leave out answers with a NaN or infinite log-prob.

  Raises:
    ValueError: nothing there, log-probs that are missing or not finite.
  """
  records = list(store.read(rollouts))[-newest:]
  shapes = {r.batch.tokens.shape for r in records}
  if len(shapes) > 1:
    raise ValueError(f"replay: {rollouts}: expected batches of one shape, got "
                     f"{sorted(shapes)}")
  if records[0].batch.logp_behaviour is None:
    raise ValueError(f"replay: {rollouts}: no logp_behaviour: the run did not "
                     "record the sampler's log-probs (rollout.record_logp)")
  batches = [r.batch for r in records]
  if checkpoint is None:
    if batches[0].logp_prox is None:
      raise ValueError(
          f"replay: {rollouts}: no logp_prox (the learner's log-probs), as the "
          "run's own objective did not need it: give --checkpoint=RUN to score "
          "the answers anew")
    source = "the learner of each step"
    scores = [None] * len(batches)
  else:
    run = saved.newest(checkpoint, devices=jax.devices()[:1])
    batches, scores = _scored(batches, run)
    source = f"{checkpoint} at step {run.step}"
  batches = _finite(records, batches, drop_nonfinite)
  length = np.concatenate([b.mask.sum(axis=1) for b in batches])
  if not length.any():
    raise ValueError(f"replay: {rollouts}: no answer is left")
  cut = np.quantile(length[length > 0], [1 / 3, 2 / 3], method="lower")
  return Data([r.step for r in records], batches, scores,
              (float(cut[0]), float(cut[1])), source)


def _scored(batches: Sequence[Batch], run: saved.Run):
  """The batches as that run's learner meets them; scores of the newest ones."""
  model, temperature = run.parts.model, run.parts.constants["temperature"]
  score = jax.jit(lambda params, batch: scoring.score(
      params, batch, model=model, temperature=temperature).logp)
  rows = batches[0].tokens.shape[0]
  first = max(len(batches) - max(SKETCHED // rows, 1), 0)
  version = int(run.state.version)
  if any(int(b.version.max()) > version for b in batches):
    raise ValueError(f"replay: the rollouts are of newer weights than the "
                     f"checkpoint at version {version}")
  out, scores = [], []
  with progress.Steps("scores", len(batches)) as bar:
    for i, batch in enumerate(batches):
      out.append(batch.replace(
          logp_prox=np.asarray(score(run.state.params, batch)),
          version_now=np.full(rows, version, np.int32)))
      # The same directions for all: their projections are of one parameter space.
      scores.append(None if i < first else np.asarray(sketch.token_scores(
          run.state.params, batch, jax.random.key(0), model=model,
          temperature=temperature)))
      bar.update(i + 1, "")
  return out, scores


def _finite(records, batches: Sequence[Batch], drop: bool) -> list[Batch]:
  """Counts and lists what is not finite; refuses it, or masks its answers."""
  places, out = [], []
  for record, batch in zip(records, batches):
    bad = {name: batch.mask & ~np.isfinite(getattr(batch, name))
           for name in ("logp_behaviour", "logp_prox")}
    places += [f"{name} at step {record.step}, row {b}, token {t}"
               for name, where in bad.items() for b, t in np.argwhere(where)]
    rows = np.any([x.any(axis=1) for x in bad.values()], axis=0)
    out.append(batch.replace(
        mask=batch.mask & ~rows[:, None],
        reward=np.where(rows, np.float32(np.nan), batch.reward)))
  if not places:
    return list(batches)
  told = (f"{len(places)} log-probs are not finite: "
          + "; ".join(places[:_LISTED]) + ("; ..." if len(places) > _LISTED else ""))
  if not drop:
    raise ValueError(f"replay: {told} (--drop_nonfinite leaves their answers out)")
  logging.warning("replay: left out: %s", told)
  return out


def table(rollouts: str | Data, names: Sequence[str], *,
          sweep: Mapping[str, Sequence[float]] = {}, reference: str = REFERENCE,
          checkpoint: str | None = None, corrections: Corrections = {}
          ) -> list[dict]:
  """A row an objective and point of the sweep.

  Args:
    rollouts: a run's workdir (`store.read`), or what `load` gave.
    names: of `settings.named`.
    sweep: constant -> values; each objective takes those that it has.
    reference: the objective that cosines are taken with.
    checkpoint: as in `load`.
    corrections: one's own, by name, as `train.run` takes them.

  Raises:
    ValueError: an unknown name or constant; a field that an objective needs and
      the rollouts do not have.
  """
  if not names:
    raise ValueError("replay: names: expected at least 1 objective, got none")
  data = rollouts if isinstance(rollouts, Data) else load(rollouts, checkpoint)
  asked = {name: _objective(name, data, corrections)
           for name in dict.fromkeys([*names, reference])}
  names = list(dict.fromkeys(names))
  settings.check_swept(sweep, (objective for objective, _ in asked.values()))
  points = {name: settings.points(objective.spec, defaults, sweep,
                                  dict(objective.extra))
            for name, (objective, defaults) in asked.items() if name in names}
  found, batches = {}, len(data.batches)
  with progress.Steps("replay", (len(names) + 1) * batches) as bar:
    # At its own constants, whatever is swept.
    objective, defaults = asked[reference]
    along = _mean_gradient(_replayed(
        reference, objective, settings.points(objective.spec, defaults, {}, dict(
            objective.extra)), data, bar, 0)[0])
    for name in names:
      found[name] = _replayed(name, asked[name][0], points[name], data, bar,
                              (len(found) + 1) * batches)
  return [dict(objective=name, **{k: p.get(k) for k in sweep},
               **_row(one, along))
          for name in names for p, one in zip(points[name], found[name])]


def _objective(name: str, data: Data, corrections: Corrections
               ) -> tuple[Objective, settings.Point]:
  spec, defaults, extra = settings.named(name, corrections)
  if spec.centering != "none":
    raise ValueError(f"replay: {name}: centres the scores of tokens that were not "
                     "drawn, of which no rollouts tell")
  if spec.proximal == "ewma":
    raise ValueError(f"replay: {name}: its proximal policy is an average over a "
                     "run, which rollouts do not have")
  taken = constants_lib.taken(spec, extra)
  if "length" in taken:  # the longest answer that could be sampled
    defaults = dict(length=float(max(b.mask.sum(axis=1).max()
                                     for b in data.batches)), **defaults)
  return Objective(spec, extra=tuple(extra.items())), defaults


def _replayed(name, objective, points, data, bar, done) -> list[list[Replayed]]:
  """[point][batch], numpy."""
  constants = settings.stacked(points)
  key, out = jax.random.key(0), []
  for i, batch in enumerate(data.batches):
    scores = data.scores[i]
    if scores is None:
      scores = np.zeros((*batch.tokens.shape, 0), np.float32)
    try:
      found = counterfactual.replay(
          batch, scores, data.lengths, constants, key,
          objective=objective, groups=int(batch.group.max()) + 1)
    except ValueError as error:
      raise ValueError(f"replay: {name}: {error}") from None
    out.append(jax.tree.map(np.asarray, found))
    bar.update(done + i + 1, name)
  return [[jax.tree.map(lambda x, m=m: x[m], one) for one in out]
          for m in range(len(points))]


def _mean_gradient(batches: Sequence[Replayed]) -> np.ndarray | None:
  """[K] projections of the mean over the sketched batches."""
  sketched = [one.gradient.sum(axis=0) for one in batches if one.gradient.shape[1]]
  return np.mean(sketched, axis=0) if sketched else None


def _row(batches: Sequence[Replayed], along: np.ndarray | None) -> dict:
  totals = {name: np.sum([np.float64(one.totals[name]) for one in batches], axis=0)
            for name in batches[0].totals}
  n, _, _, first, second = totals["all"]
  tokens, low, high, cut = np.sum([np.float64(one.clipped) for one in batches], axis=0)
  row = dict(
      loss=float(np.mean([one.loss for one in batches])),
      ess=float(first**2 / (n * second)) if second > 0 else math.nan,
      weight_left=_mean_known([one.weight_left for one in batches]),
      tokens_effective=_mean_known([one.tokens_effective for one in batches]),
      clip_low=low / tokens, clip_high=high / tokens, capped=cut / tokens)
  if along is not None:
    row |= _gradients(batches, along)
  for name, (count, changed, dropped, _, _) in totals.items():
    if not count:
      continue
    end = "" if name == "all" else f"_{name}"
    row |= {f"changed{end}": changed / count, f"dropped{end}": dropped / count}
  return row


def _mean_known(values: Sequence[np.ndarray]) -> float:
  """NaN where no batch has it, as for a correction that does not report it."""
  known = np.asarray(values)[~np.isnan(values)]
  return float(np.mean(known)) if known.size else math.nan


def _gradients(batches: Sequence[Replayed], along: np.ndarray) -> dict:
  """Norm of a batch's gradient, cosine of the mean one, variance over groups."""
  parts = [one.gradient for one in batches if one.gradient.shape[1]]
  norm = sketch.norm(np.stack([g.sum(axis=0) for g in parts]))
  cosine = sketch.cosine(_mean_gradient(batches), along)
  # Of a sum of independent parts: n times the variance of one.
  spread = [len(g) * np.mean(np.var(g, axis=0, ddof=1)) for g in parts if len(g) > 1]
  return dict(grad_norm=norm.value, grad_norm_se=norm.se, cosine=cosine.value,
              cosine_se=cosine.se,
              grad_variance=float(np.mean(spread)) if spread else math.nan)


def apart(data: Data) -> dict[str, float]:
  """How far the learner is from the sampler; the same for every objective."""
  total = {}
  for batch in data.batches:
    one = diagnostics.mismatch(jnp.asarray(batch.logp_prox), batch.logp_behaviour,
                               batch.mask)
    total = {k: total[k] + v if total else v for k, v in one.items()}
  lag = np.concatenate([(b.version_now[:, None] - b.version)[b.mask]
                        for b in data.batches])
  return dict(
      {k: v for k, v in diagnostics.finish(total).items() if k in (
          "is/kl_k1", "is/kl_k3", "is/ess", "is/sequence_ess", "is/log_ratio_max")},
      lag_mean=float(lag.mean()), lag_max=float(lag.max()),
      answers=sum(len(b.reward) for b in data.batches),
      short=data.lengths[0], long=data.lengths[1] + 1)


def draw(rows: Sequence[Mapping], sweep: Mapping[str, Sequence[float]], title: str,
         stem: str, made_by: str) -> list[str]:
  """Against the first swept constant, a line an objective; else a bar a row."""
  panels = [p for p in (
      ("ess", "ESS / n of the factors"), ("changed", "share of tokens changed"),
      ("dropped", "share of tokens dropped"), ("cosine", "cosine with the reference"),
      ("grad_norm", "norm of a batch's gradient")) if p[0] in rows[0]]
  swept = next((k for k in sweep if len(sweep[k]) > 2), None)
  names = list(dict.fromkeys(r["objective"] for r in rows))
  colors = {n: plots.COLORS[i % len(plots.COLORS)] for i, n in enumerate(names)}
  height = 3.4 if swept else 1 + 0.22 * len(rows)
  with plots.style():
    figure, axes = plots.plt.subplots(1, len(panels), figsize=(
        2.6 * len(panels) + 1.5, height), layout="constrained", squeeze=False)
    for ax, (what, label) in zip(axes[0], panels):
      ax.set_title(label)
      if swept:
        _lines(ax, rows, what, swept, colors)
      else:
        at = np.arange(len(rows))[::-1]
        ax.errorbar([r[what] for r in rows], at, xerr=[
            r.get(f"{what}_se", 0) for r in rows], fmt="o", color=plots.COLORS[2])
        ax.set_yticks(at, [_label(r, sweep) for r in rows] if ax is axes[0, 0]
                      else [""] * len(rows))
    if swept:
      axes[0, 0].legend(fontsize=7.5)
    figure.suptitle(title, fontweight="bold", fontsize=11, x=0.01, ha="left")
    return plots.save(figure, stem, made_by)


def _lines(ax, rows, what, swept, colors):
  finite = sorted({r[swept] for r in rows if r[swept] is not None
                   and math.isfinite(r[swept])})
  place = lambda x: x if math.isfinite(x) else finite[-1] * 2.5 if finite else 1
  for name, color in colors.items():
    ours = [r for r in rows if r["objective"] == name]
    if ours[0][swept] is None:  # it does not take the constant
      ax.axhline(ours[0][what], color=color, linestyle=":", label=name)
      continue
    ours = sorted(ours, key=lambda r: r[swept])
    ax.errorbar([place(r[swept]) for r in ours], [r[what] for r in ours], yerr=[
        r.get(f"{what}_se", 0) for r in ours], color=color, marker=".", label=name)
  if finite and finite[0] > 0:
    ax.set_xscale("log")
  infinite = any(r[swept] == math.inf for r in rows)
  ax.set_xticks(finite + [place(math.inf)] * infinite,
                [f"{x:g}" for x in finite] + ["inf"] * infinite)
  ax.minorticks_off()
  ax.set_xlabel(swept)


def _label(row: Mapping, sweep: Mapping) -> str:
  values = [f"{k}={row[k]:g}" for k in sweep if row[k] is not None]
  return " ".join([row["objective"], *values])


def main() -> None:
  flags.DEFINE_list("objectives", ["none", "token_tis", "ppo", "gspo"],
                    "Names: " + ", ".join([*settings.PLAIN, *presets.PRESETS]))
  flags.DEFINE_string("sweep", "", "'cap=1,2,inf;eps_high=0.1,0.2'.")
  flags.DEFINE_string("checkpoint", None, "A run's workdir: its newest parameters "
                      "are the learner, and gradients are measured.")
  flags.DEFINE_string("reference", REFERENCE, "Whose gradient cosines are with.")
  flags.DEFINE_integer("newest", 0, "How many batches, the last ones; 0: all.",
                       lower_bound=0)
  flags.DEFINE_bool("drop_nonfinite", False, "Leave out answers with a log-prob "
                    "that is not finite.")
  flags.DEFINE_string("out", None, "Folder; unset: `replay` beside the rollouts.")
  try:
    app.run(_main)
  except (ValueError, OSError, ImportError) as error:
    sys.exit(f"error: {error}")


def _main(argv) -> None:
  if len(argv) != 2:
    raise ValueError("expected one path: a run's workdir, or its rollouts")
  f = flags.FLAGS
  logging.set_verbosity(logging.WARNING)
  checks.choice("--reference", f.reference, [*settings.PLAIN, *presets.PRESETS])
  sweep = settings.parse_sweep(f.sweep)
  data = load(argv[1], f.checkpoint, newest=f.newest,
              drop_nonfinite=f.drop_nonfinite)
  rows = table(data, f.objectives, sweep=sweep, reference=f.reference)
  at = pathlib.Path(argv[1])
  out = pathlib.Path(f.out or (at.parent if at.is_file() else at) / "replay")
  out.mkdir(parents=True, exist_ok=True)
  tables.write_csv(rows, str(out / "replay.csv"))
  far = apart(data)
  shown = ["_lag", "_short", "_middle", "_long", "_positive", "_negative"]
  tables.show(rows, f"{far['answers']} answers under {data.source}", hidden=[
      name for name in rows[0] if any(x in name for x in shown)])
  print("  ".join(f"{k} {v:.4g}" for k, v in far.items()))
  title = (f"{far['answers']} answers, {far['lag_mean']:.3g} updates old, KL "
           f"{far['is/kl_k1']:.2g} nats a token, sequence ESS "
           f"{far['is/sequence_ess']:.2g}")
  made_by = "python -m rl_is.replay " + " ".join(sys.argv[1:])
  paths = draw(rows, sweep, title, str(out / "replay"), made_by)
  print("table:", out / "replay.csv", " figure:", *paths)
  weights = histogram.rows(data.batches)
  tables.write_csv(weights, str(out / "weights.csv"))
  paths = histogram.draw(weights, sweep.get("cap", ()), title, str(out / "weights"),
                         made_by)
  print("weights:", out / "weights.csv", " figure:", *paths)


if __name__ == "__main__":
  main()
