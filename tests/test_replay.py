"""Replays of stored rollouts: factors, sketched gradients, what is missing."""

import dataclasses
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import addition
from rl_is import build, replay, saved
from rl_is.core.types import Weights
from rl_is.exact import policies
from rl_is.learner import sketch
from rl_is.learner import state as state_lib
from rl_is.models import scoring
from rl_is.objective import settings
from rl_is.objective.compose import Objective
from rl_is.rollout import batching, generator
from rl_is.rollout import store as store_lib
from rl_is.rollout.store import Store

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def learner():
  """A run's newest checkpoint, as `saved.newest` gives it: nothing is trained."""
  config = addition.get_config("lag=0,tiny")
  parts = build.build(config, devices=jax.devices()[:1])
  state = state_lib.init(jax.random.key(0), parts.model, parts.tx, parts.objective)
  return saved.Run(config, parts, dataclasses.replace(state, version=jnp.int32(9)), 9)


@pytest.fixture(scope="module")
def run(learner, tmp_path_factory):
  """Stored rollouts of four steps from other weights, rewards by lot."""
  workdir = str(tmp_path_factory.mktemp("replay"))
  config, parts = learner.config, learner.parts
  other = policies.noisy(learner.state.params, jax.random.key(1), 0.2)
  other = jax.tree.map(lambda x: x.astype(jnp.float32), other)
  store = Store(workdir, every=1, max_gb=1.0, tokenizer=parts.task.tokenizer, meta={})
  score = jax.jit(lambda batch: scoring.score(
      learner.state.params, batch, model=parts.model, temperature=1.0).logp)
  size = config.rollout.batch_size // config.rollout.group_size
  for n in range(4):
    cursors = range(n * size, (n + 1) * size)
    rollout, scores = generator.sample(
        other, parts.verifier, [parts.task.train[c] for c in cursors], cursors,
        jax.random.key(2), 5 + n // 2, group_size=config.rollout.group_size,
        prompt_width=parts.task.max_prompt_tokens, model=parts.model,
        sampling=parts.sampling, mesh=parts.mesh)
    batch = batching.assemble(rollout, scores, config.rollout.group_size)
    lot = np.random.default_rng(n).random(len(batch.reward)) < 0.4
    batch = batch.replace(reward=lot.astype(np.float32))
    store.write(n + 1, batch, [batch.replace(
        logp_prox=score(batch), version_now=np.full(len(lot), 8, np.int32))])
  return workdir


@pytest.fixture(scope="module")
def data(run, learner):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(saved, "newest", lambda *args, **kwargs: learner)
    return replay.load(run, "its run")


def rows_of(rows):
  return {(r["objective"], r.get("cap")): r for r in rows}


def test_factors_are_those_of_a_loop(data):
  """Dropped and changed shares, ESS, weight left of token TIS and PPO by numpy."""
  got = rows_of(replay.table(data, ["token_mis", "ppo", "none"], sweep=dict(cap=[1.1])))
  f_mis, f_ppo, signs = [], [], []
  for batch in data.batches:
    logp = batch.logp_prox
    for g in np.unique(batch.group):
      rows = batch.group == g
      adv = batch.reward[rows] - np.nanmean(batch.reward[rows])
      for A, l, q, m in zip(adv, logp[rows], batch.logp_behaviour[rows],
                            batch.mask[rows]):
        if A == 0 or np.isnan(A):
          continue
        w = np.exp(np.float64(l[m]) - q[m])
        f_mis += list(np.where(w <= 1.1, w, 0))
        f_ppo += list(np.where((w > 1.2) if A > 0 else (w < 0.8), 0, w))
        signs += [A > 0] * int(m.sum())
  f_mis, f_ppo, signs = map(np.array, (f_mis, f_ppo, signs))
  mis, ppo, none = got["token_mis", 1.1], got["ppo", None], got["none", None]
  assert mis["dropped"] == pytest.approx(np.mean(f_mis == 0)) and mis["dropped"] > 0
  assert mis["dropped_positive"] == pytest.approx(np.mean(f_mis[signs] == 0))
  assert mis["weight_left"] == pytest.approx(f_mis.mean(), rel=0.05)
  for row, f in ((mis, f_mis), (ppo, f_ppo)):
    assert row["ess"] == pytest.approx(f.sum()**2 / len(f) / np.sum(f**2), rel=1e-4)
  assert ppo["dropped"] == pytest.approx(np.mean(f_ppo == 0))
  assert (none["changed"], none["dropped"], none["ess"]) == (0, 0, pytest.approx(1))


def test_gradients_are_those_of_the_model(learner, data):
  """Each projection is that of the true gradient; norm and cosine within errors."""
  state = learner
  batch = data.batches[-1]
  model, t = state.parts.model, state.parts.constants["temperature"]

  def gradient(name):
    spec, defaults, extra = settings.named(name)
    objective = Objective(spec)
    constants = settings.points(spec, defaults, {}, extra)[0]
    prepared = objective.prepare(batch, constants)
    loss = lambda p: objective.loss(scoring.score(p, prepared, model=model,
                                                  temperature=t), prepared, constants)[0]
    return jax.tree.map(jnp.negative, jax.jit(jax.grad(loss))(state.state.params))

  one = data._replace(
      steps=data.steps[-1:], batches=[batch], scores=data.scores[-1:])
  got = rows_of(replay.table(one, ["ppo", "token_tis"], reference="none"))
  along = gradient("none")
  for name in ("ppo", "token_tis"):
    g, row = gradient(name), next(r for (n, _), r in got.items() if n == name)
    norm, size = float(_norm(g)), float(_norm(along))
    cosine = float(_dot(g, along)) / norm / size
    assert abs(row["grad_norm"] - norm) < 4 * row["grad_norm_se"]
    assert row["grad_norm_se"] < 0.3 * norm
    assert abs(row["cosine"] - cosine) < 4 * max(row["cosine_se"], 1e-3)
  # Exactly: u . gradient from the scores, for the first direction.
  S = sketch.token_scores(state.state.params, batch, jax.random.key(0), model=model,
                          temperature=t, directions=3)
  key = jax.random.split(jax.random.key(0), 3)[1]
  leaves, tree = jax.tree.flatten(state.state.params)
  u = tree.unflatten([jax.random.normal(k, x.shape) for k, x in zip(
      jax.random.split(key, len(leaves)), leaves)])
  total = lambda p: jnp.sum(jnp.where(batch.mask, scoring.score(
      p, batch, model=model, temperature=t).logp, 0))
  assert float(_dot(jax.grad(total)(state.state.params), u)) == pytest.approx(
      float(S[..., 1].sum()), rel=1e-3)


def _dot(a, b):
  return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def _norm(a):
  return jnp.sqrt(_dot(a, a))


def test_many_settings_are_those_one_by_one(data):
  both = replay.table(data, ["tis"], sweep=dict(cap=[1.2, 2.0]))
  for row in both:
    alone, = replay.table(data, ["tis"], sweep=dict(cap=[row["cap"]]))
    for k in set(row) - {"objective"}:
      assert row[k] == pytest.approx(alone[k], rel=1e-5, nan_ok=True), k


def test_on_policy_nothing_acts(data):
  """A learner that is the sampler: all factors are 1 whatever the correction."""
  same = data._replace(batches=[
      b.replace(logp_prox=b.logp_behaviour) for b in data.batches])
  for row in replay.table(same, ["seq_is", "ppo", "gspo", "icepop", "seq_mis"]):
    assert row["changed"] == row["dropped"] == 0 and row["ess"] == pytest.approx(1)
  assert replay.apart(same)["is/kl_k1"] == 0


def test_of_the_reference_with_itself_the_cosine_is_one(data):
  rows = replay.table(data, ["seq_is", "token_tis"], reference="seq_is",
                      sweep=dict(cap=[1.0, math.inf]))
  row = rows_of(rows)["seq_is", math.inf]
  assert row["cosine"] == pytest.approx(1) and row["cosine_se"] < 1e-6


def test_without_a_checkpoint_no_gradients(run):
  rows = replay.table(run, ["ppo", "seq_tis"])
  assert "grad_norm" not in rows[0] and 0 <= rows[0]["dropped"] <= 1


def test_ones_own_correction(data):
  def zero(num, den, mask, *, level="token"):
    return Weights(jnp.zeros_like(num), mask, num - den)
  row, = replay.table(data, ["zero"], corrections=dict(zero=zero))
  assert row["dropped"] == 1 and row["grad_norm"] == 0 and math.isnan(row["cosine"])


def test_parts_by_lag_and_length_add_up(data):
  row, = replay.table(data, ["token_mis"], sweep=dict(cap=[1.05]))
  lags = [k for k in row if k.startswith("dropped_lag")]
  assert lags and min(row[k] for k in lags) <= row["dropped"] <= max(
      row[k] for k in lags)
  assert {"dropped_short", "dropped_positive"} <= set(row)


@pytest.mark.parametrize("name,says", [
    ("pppo", "did you mean ppo"), ("score_centering", "were not drawn"),
    ("ppo_ewma", "an average over a run"),
    ("reference_kl", "reference_kl: objective: needs logp_ref")])
def test_what_cannot_be_replayed(data, monkeypatch, name, says):
  spec, defaults, _ = settings.named("ppo")
  monkeypatch.setitem(settings.PLAIN, "reference_kl", (dataclasses.replace(
      spec, regularizer="k3"), dict(defaults, kl_coef=0.1)))
  with pytest.raises(ValueError, match=says):
    replay.table(data, [name])


def test_an_unknown_constant(data):
  with pytest.raises(ValueError, match="did you mean cap"):
    replay.table(data, ["tis"], sweep=dict(capp=[1.0]))


def test_what_is_not_finite_is_counted_and_listed(run, monkeypatch):
  records = list(store_lib.read(run))
  t = int(np.argmax(records[1].batch.mask[3]))
  logp = records[1].batch.logp_behaviour.copy()
  logp[3, t] = np.nan
  logp[0, :t] = np.nan  # off the mask: of no one's concern
  records[1] = dataclasses.replace(
      records[1], batch=records[1].batch.replace(logp_behaviour=logp))
  monkeypatch.setattr(store_lib, "read", lambda path: iter(records))
  with pytest.raises(ValueError, match="1 log-probs are not finite: logp_behaviour "
                     f"at step 2, row 3, token {t} "):
    replay.load(run)
  kept = replay.load(run, drop_nonfinite=True)
  assert not kept.batches[1].mask[3].any() and kept.batches[0].mask[3].any()
  assert np.isfinite(replay.table(kept, ["tis"])[0]["loss"])


def test_missing_log_probs_are_named(run, monkeypatch):
  records = list(store_lib.read(run))
  without = lambda **fields: monkeypatch.setattr(store_lib, "read", lambda path: iter([
      dataclasses.replace(r, batch=r.batch.replace(**fields)) for r in records]))
  without(logp_prox=None)
  with pytest.raises(ValueError, match="no logp_prox.*--checkpoint"):
    replay.load(run)
  without(logp_behaviour=None)
  with pytest.raises(ValueError, match="no logp_behaviour.*record_logp"):
    replay.load(run)


def test_the_newest_alone(run):
  assert replay.load(run, newest=1).steps == [4]


def test_the_command(run, tmp_path):
  import pandas as pd
  out = subprocess.run(
      [sys.executable, "-m", "rl_is.replay", run, "--objectives=none,token_tis",
       "--sweep=cap=1,2,inf", f"--out={tmp_path}"],
      text=True, capture_output=True)
  assert out.returncode == 0, out.stderr[-2000:]
  assert len(pd.read_csv(tmp_path / "replay.csv")) == 4
  assert (tmp_path / "replay.png").stat().st_size > 10_000
  weights = pd.read_csv(tmp_path / "weights.csv")
  assert weights.groupby(["level", "lag"]).share.sum().round(6).eq(1).all()
  assert 'cap' in (tmp_path / "weights.svg").read_text()  # in the command
  out = subprocess.run([sys.executable, "-m", "rl_is.replay", str(tmp_path)],
                       text=True, capture_output=True)
  assert out.returncode == 1 and "no rollouts" in out.stderr
  assert "Traceback" not in out.stderr


def test_bars_where_nothing_is_swept(data, tmp_path):
  rows = replay.table(data, ["none", "ppo"])
  for path in replay.draw(rows, {}, "a test", str(tmp_path / "x"), "a test"):
    assert (tmp_path / path).stat().st_size > 5_000
