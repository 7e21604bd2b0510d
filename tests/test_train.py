"""The loop: exact lag, equality with a plain loop, resume, learning."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from configs import addition
from rl_is import build, evaluate, overrides, train, warm_start
from rl_is.core.types import Weights
from rl_is.infra import mesh as mesh_lib, metrics, rng, workdir
from rl_is.infra.checkpoint import Checkpoints
from rl_is.learner import state as state_lib, step
from rl_is.rollout import generator, verify
from rl_is.rollout.batching import assemble, problem_index
from rl_is.tasks import reward

logging.set_verbosity(logging.WARNING)
ROOT = pathlib.Path(__file__).parents[1]


def tiny(warm, arg="lag=0", **changes):
  config = addition.get_config(f"{arg},tiny")
  config.warm_start.path = warm
  for path, value in changes.items():
    overrides.apply(config, path.replace("__", "."), value)
  return config


def equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def plain_loop(config, warm_dir, device):
  """No publisher, buffer, checkpoint or thread: what lag(0) must equal."""
  parts = build.build(config, devices=device)
  params = warm_start.params(config, parts, warm_dir)
  state = state_lib.create(jax.tree.map(jnp.copy, params), parts.tx)
  for n in range(config.train.steps):
    size = config.rollout.batch_size // config.rollout.group_size
    cursors = range(n * size, (n + 1) * size)
    problems = [parts.task.train[problem_index(
        config.seed, c, len(parts.task.train))] for c in cursors]
    rollout, scores = generator.sample(
        state.params, parts.verifier, problems, cursors, rng.key(0, "sample"), n,
        group_size=config.rollout.group_size, model=parts.model,
        prompt_width=parts.task.max_prompt_tokens, sampling=parts.sampling,
        mesh=parts.mesh)
    batch = assemble(rollout, scores, config.rollout.group_size)
    minibatch, = step.jit_prepare_batch(
        state.params, None, jax.device_put(batch, mesh_lib.rows(parts.mesh)),
        parts.constants, objective=parts.objective, model=parts.model)
    state, _ = step.jit_train_step(
        state, minibatch, parts.constants, objective=parts.objective,
        model=parts.model, tx=parts.tx)
  return state.params


def test_lag_0_equals_a_plain_loop_bit_for_bit(warm, tmp_path, one_device):
  config = tiny(warm, objective__preset="ppo")
  ours = train.run(config, str(tmp_path / "run"), devices=one_device)
  equal(ours.params, plain_loop(config, str(tmp_path), one_device))


@pytest.mark.parametrize("lag,U", [(3, 1), (4, 2)])
def test_every_batch_is_exactly_lag_updates_old(warm, tmp_path, one_device,
                                                lag, U):
  config = tiny(warm, f"lag={lag}", train__updates_per_batch=U,
                objective__preset="ppo_tis")
  train.run(config, str(tmp_path), devices=one_device)
  rows = metrics.read(str(tmp_path))
  assert [r["step"] for r in rows] == list(range(1, 7))
  for n, row in enumerate(rows):
    age = n * U - max(0, n * U - lag)  # the first batches are younger
    assert row["rollout/staleness_mean"] == row["rollout/staleness_max"] == age
    assert row["time/learner_tokens_per_s"] == pytest.approx(
        row["rollout/tokens"] / row["time/learner_s"])
    idle = row["rollout/sampled_tokens"] == 0  # the end: all is sampled
    assert idle or row["time/generator_tokens_per_s"] > 0


def test_unchanged_weights_give_ratio_one(warm, tmp_path, one_device):
  """Case J10: learning rate 0, temperature 0.6: no mismatch at any lag."""
  config = tiny(warm, "lag=2", rollout__temperature=0.6, objective__preset="tis",
                optimizer__learning_rate=0.0, warm_start__path="",
                rollout__top_k=5)
  train.run(config, str(tmp_path), devices=one_device)
  for row in metrics.read(str(tmp_path)):
    assert row["is/log_ratio_max"] < 1e-5
    assert row["is/ess"] == pytest.approx(1, abs=1e-5)


def test_resumed_equals_uninterrupted(warm, tmp_path, one_device):
  """Stopped after step 4 of 6 (a checkpoint at 4), with KL and a queue."""
  changes = dict(objective__preset="ppo_tis", objective__regularizer="k3",
                 objective__constants__kl_coef=0.1, train__updates_per_batch=2)
  whole = train.run(tiny(warm, "lag=4", **changes), str(tmp_path / "whole"),
                    devices=one_device)
  cut = str(tmp_path / "cut")
  real = metrics.MetricsWriter.write

  class Stop(Exception):
    pass

  def stop_at_5(self, step, values):
    real(self, step, values)
    if step == 5:
      raise Stop

  config = tiny(warm, "lag=4", **changes)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(metrics.MetricsWriter, "write", stop_at_5)
    with pytest.raises(Stop):
      train.run(config, cut, devices=one_device)
  assert len(metrics.read(cut)) == 5
  again = train.run(config, cut, devices=one_device)
  equal(whole.params, again.params)
  keep = lambda rows: [{k: v for k, v in row.items()
                        if not k.startswith("time/")} for row in rows]
  assert keep(metrics.read(cut)) == keep(metrics.read(str(tmp_path / "whole")))


def test_a_finished_run_says_so(warm, tmp_path, one_device, capfd):
  config = tiny(warm)
  first = train.run(config, str(tmp_path), devices=one_device)
  second = train.run(config, str(tmp_path), devices=one_device)
  assert "already complete" in capfd.readouterr().err
  equal(first.params, second.params)
  assert len(metrics.read(str(tmp_path))) == 6


def test_a_run_is_evaluated_from_its_directory(warm, tmp_path, one_device):
  """With the learner's newest weights; the run's own numbers, if asked alike."""
  with pytest.raises(FileNotFoundError, match="no run there"):
    evaluate.of_run(str(tmp_path))
  result = train.run(tiny(warm), str(tmp_path))
  again = evaluate.of_run(str(tmp_path))
  assert again["step"] == 6
  for name in ("eval/accuracy", "eval/pass@2", "eval/length_mean"):
    assert again[name] == result.last[name]
  more = evaluate.of_run(str(tmp_path), prompts=3, samples=5)
  assert more["eval/prompts"] == 3 and "eval/pass@4" in more
  # Greedy answers to one prompt are all the same: no pass@k of them.
  assert "eval/pass@2" not in evaluate.of_run(str(tmp_path), temperature=0.0)


@pytest.mark.parametrize("preset", ["ppo_ewma", "a3po", "m2po", "deepseek_v32",
                                    "tis_score_centering"])
def test_objectives_that_need_more_of_the_loop_run_and_resume(
    warm, tmp_path, one_device, preset):
  """An average of the parameters, versions, batch masks, a KL reference, the
  sampler's most likely tokens and its kept set (in the queue of a checkpoint)."""
  changes = dict(objective__preset=preset, train__updates_per_batch=2,
                 evaluate__prompts=0)
  if preset == "tis_score_centering":
    changes |= dict(rollout__record_top_k=4, rollout__top_k=6,
                    rollout__top_p=0.9)
  whole = train.run(tiny(warm, "lag=4", **changes), str(tmp_path / "whole"),
                    devices=one_device)
  cut = tmp_path / "cut"
  train.run(tiny(warm, "lag=4", **changes), str(cut), devices=one_device)
  shutil.rmtree(cut / "checkpoints" / "6")  # as if stopped after step 4
  again = train.run(tiny(warm, "lag=4", **changes), str(cut), devices=one_device)
  equal(whole.params, again.params)
  told = [[{k: v for k, v in row.items() if not k.startswith("time/")}
           for row in metrics.read(str(x))] for x in (tmp_path / "whole", cut)]
  assert told[0] == told[1] and len(told[0]) == 6


@pytest.mark.parametrize("preset,more", [
    ("score_centering", dict(rollout__record_top_k=3)),
    ("tis_score_centering", dict(rollout__record_top_k=99, rollout__top_k=5,
                                 rollout__top_p=0.9, rollout__temperature=0.8))])
def test_a_stale_run_is_centred(warm, tmp_path, one_device, monkeypatch, preset,
                                more):
  # The tiny model is hardly ever right: something that it does by chance.
  monkeypatch.setattr(verify, "reward",
                      lambda task, problem, text: float(len(text) > 1))
  if "rollout__temperature" in more:
    more = dict(more, warm_start__path="")  # a warm start is of one temperature
  result = train.run(
      tiny(warm, "lag=3", objective__preset=preset, train__steps=4, **more),
      str(tmp_path), devices=one_device)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.params))
  rows = metrics.read(str(tmp_path))
  assert len(rows) == 4 and rows[-1]["rollout/staleness_max"] == 3
  for row in rows:
    for name in ("centering/head_mass", "centering/head_mass_behaviour"):
      whole = more["rollout__record_top_k"] == 99  # all that could be drawn
      assert row[name] == pytest.approx(1, abs=1e-5) if whole else (
          0.2 < row[name] < 1)
    assert np.isfinite(row["loss"]) and 0 < row["grad/norm"] < np.inf
  same = abs(rows[0]["centering/head_mass"]
             - rows[0]["centering/head_mass_behaviour"])
  assert same < 1e-5  # the first batch is of these very weights


def test_another_config_is_refused_in_the_same_directory(warm, tmp_path,
                                                         one_device):
  train.run(tiny(warm), str(tmp_path), devices=one_device)
  with pytest.raises(ValueError, match="optimizer.learning_rate"):
    train.run(tiny(warm, optimizer__learning_rate=1e-3), str(tmp_path),
              devices=one_device)


def test_a_half_written_checkpoint_is_ignored(warm, tmp_path, one_device):
  """Case E10: a directory that a kill left behind is not the newest."""
  config = tiny(warm)
  train.run(config, str(tmp_path), devices=one_device)
  partial = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"
  partial.mkdir()
  (partial / "state").mkdir()
  checkpoints = Checkpoints(str(tmp_path))
  parts = build.build(config, devices=one_device)
  newest = checkpoints.restore_newest(build.abstract_state(config, parts))
  assert newest.position["step"] == 6
  checkpoints.close()


def test_non_finite_stops_the_run_and_names_the_place(warm, tmp_path, one_device,
                                                      monkeypatch):
  real = generator.Generator.groups

  def poisoned(self, cursors, weights):
    batch = real(self, cursors, weights)
    if weights.version == 2:
      logp = batch.logp_behaviour.copy()
      row, token = np.argwhere(batch.mask)[7]
      logp[row, token] = np.nan
      poisoned.place = f"sample {row}, token {token}"
      batch = batch.replace(logp_behaviour=logp)
    return batch

  monkeypatch.setattr(generator.Generator, "groups", poisoned)
  with pytest.raises(FloatingPointError) as error:
    train.run(tiny(warm, objective__preset="tis"), str(tmp_path),
              devices=one_device)
  assert "step 3: non-finite logp_behaviour" in str(error.value)
  assert poisoned.place in str(error.value)
  assert len(metrics.read(str(tmp_path))) == 2  # what was learned is kept


def test_equal_rewards_are_an_update_without_signal(warm, tmp_path, one_device,
                                                    monkeypatch):
  monkeypatch.setattr(verify, "reward", lambda *args: 1.0)
  config = tiny(warm, optimizer__weight_decay=0.1)
  parts = build.build(config, devices=one_device)
  result = train.run(config, str(tmp_path), devices=one_device)
  equal(result.params, warm_start.params(config, parts, str(tmp_path)))
  rows = metrics.read(str(tmp_path))
  assert all(r["update/without_signal"] == 1 for r in rows)
  assert all(r["reward/groups_with_signal"] == 0 for r in rows)


def test_abstaining_verifier_is_counted(warm, tmp_path, one_device, monkeypatch):
  """Case A20 in the loop: every other answer cannot be scored."""
  calls = iter(range(10**6))
  monkeypatch.setattr(
      verify, "reward",
      lambda task, problem, text: float("nan") if next(calls) % 2 else
      reward(task, problem, text))
  train.run(tiny(warm, evaluate__prompts=0), str(tmp_path), devices=one_device)
  for row in metrics.read(str(tmp_path)):
    assert row["reward/unscorable"] == 8 and row["loss"] is not None


def test_a_users_own_correction_runs(warm, tmp_path, one_device):
  def clipped_half(num, behaviour, mask, *, level="token"):
    return Weights(jnp.where(mask, 0.5, 0.0), mask, num - behaviour)

  config = tiny(warm, "lag=2", objective__corrections="half:current")
  train.run(config, str(tmp_path), devices=one_device,
            corrections=dict(half=clipped_half))
  assert metrics.read(str(tmp_path))[-1]["half/weight_mean"] == 0.5


def test_a_constant_that_never_acted_is_said(warm, tmp_path, one_device, caplog):
  """eps_low = 0.9 at lag 2 of a tiny run clips nothing; eps_high tiny does."""
  config = tiny(warm, "lag=2", objective__preset="ppo", evaluate__prompts=0,
                objective__constants__eps_low=0.9,
                objective__constants__eps_high=50.0)
  train.run(config, str(tmp_path / "a"), devices=one_device)
  assert "eps_high, eps_low set, but acted on no token" in caplog.text
  caplog.clear()
  config = tiny(warm, "lag=2", objective__preset="tis", evaluate__prompts=0,
                objective__constants__cap=0.5)
  train.run(config, str(tmp_path / "b"), devices=one_device)
  assert "acted on no token" not in caplog.text


def test_an_inert_clip_is_said_at_start(warm, one_device, caplog):
  build.build(tiny(warm, objective__preset="ppo_tis"), devices=one_device)
  assert "eps_high, eps_low cannot act" in caplog.text


@pytest.mark.parametrize("more", [{}, dict(
    objective__preset="score_centering", rollout__record_top_k=4,
    rollout__lag=2, train__steps=3)])  # on stale data, or the term is 0
def test_eight_devices_equal_one(warm, tmp_path, one_device, monkeypatch, more):
  """Data-parallel over 8 forced devices: the same parameters, in norm."""
  monkeypatch.setattr(verify, "reward",
                      lambda task, problem, text: float(len(text) > 1))
  changes = dict(dict(evaluate__prompts=0, train__steps=2,
                      optimizer__name="sgd", optimizer__learning_rate=0.1), **more)
  one = train.run(tiny(warm, **changes), str(tmp_path / "1"), devices=one_device)
  eight = train.run(tiny(warm, **changes), str(tmp_path / "8"))
  assert one.last["grad/norm"] > 0
  for a, b in zip(*(jax.tree.leaves(jax.tree.map(np.asarray, run.params))
                    for run in (one, eight))):
    assert np.linalg.norm(a - b) <= 1e-5 * max(np.linalg.norm(a), 1e-3)


def test_a_checkpoint_restores_on_another_number_of_devices(warm, tmp_path,
                                                            one_device):
  """Case F01: saved on 8, resumed on 1."""
  config = tiny(warm)
  eight = train.run(config, str(tmp_path))
  one = train.run(config, str(tmp_path), devices=one_device)
  equal(eight.params, one.params)


def test_a_warm_start_of_another_model_is_refused(warm, tmp_path, one_device):
  train.run(tiny(warm, train__steps=1), str(tmp_path / "a"), devices=one_device)
  with pytest.raises(ValueError, match="model.embed"):
    train.run(tiny(warm, train__steps=1, model__embed=32), str(tmp_path / "b"),
              devices=one_device)


def test_a_half_made_warm_start_is_made_again(tmp_path, one_device):
  path = tmp_path / "start"
  config = tiny(str(path), train__steps=1)
  workdir.claim(str(path), warm_start.identity(config), name="warm_start.json")
  (path / "params").mkdir()  # a kill before done.json
  train.run(config, str(tmp_path / "run"), devices=one_device)
  assert json.loads((path / "done.json").read_text())["steps"] == 4


def test_a_directory_of_something_else_is_left_alone(tmp_path, one_device):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.txt").write_text("three years")
  with pytest.raises(ValueError, match="not a warm start"):
    train.run(tiny(str(tmp_path / "mine")), str(tmp_path / "run"),
              devices=one_device)
  assert (tmp_path / "mine" / "thesis.txt").read_text() == "three years"


def test_a_damaged_newest_checkpoint_is_passed_over(warm, tmp_path, one_device,
                                                    caplog):
  """Case E10: the one before is used, and said; the end is the same."""
  config = tiny(warm)
  whole = train.run(config, str(tmp_path), devices=one_device)
  newest = tmp_path / "checkpoints" / "6"
  for path in newest.rglob("*"):
    if path.is_file() and "state" in path.parts:
      path.write_bytes(path.read_bytes()[:3])
  again = train.run(config, str(tmp_path), devices=one_device)
  assert "checkpoint 6" in caplog.text
  equal(whole.params, again.params)
  assert [r["step"] for r in metrics.read(str(tmp_path))] == list(range(1, 7))


def test_checkpoints_without_a_config_are_nobodys(warm, tmp_path, one_device):
  config = tiny(warm)
  train.run(config, str(tmp_path), devices=one_device)
  (tmp_path / "config.json").unlink()
  with pytest.raises(ValueError, match="no config.json"):
    train.run(config, str(tmp_path), devices=one_device)


def test_lost_metrics_are_said(warm, tmp_path, one_device):
  config = tiny(warm)
  train.run(config, str(tmp_path), devices=one_device)
  (tmp_path / "metrics.jsonl").write_text("")
  with pytest.raises(ValueError, match="steps 1 to 6"):
    train.run(config, str(tmp_path), devices=one_device)


def test_a_directory_is_used_by_one_process_at_a_time(tmp_path):
  with workdir.lock(str(tmp_path)):
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
      with workdir.lock(str(tmp_path)):
        pass
  with workdir.lock(str(tmp_path)):
    pass


def test_another_text_of_a_users_own_piece_is_another_run(warm, tmp_path,
                                                          one_device):
  def half(num, behaviour, mask, *, level="token"):
    return Weights(jnp.where(mask, 0.5, 0.0), mask, num - behaviour)

  def third(num, behaviour, mask, *, level="token"):
    return Weights(jnp.where(mask, 0.3, 0.0), mask, num - behaviour)

  config = tiny(warm, "lag=2", objective__corrections="mine:current",
                evaluate__prompts=0)
  train.run(config, str(tmp_path), devices=one_device,
            corrections=dict(mine=half))
  with pytest.raises(ValueError, match="mine"):
    train.run(config, str(tmp_path), devices=one_device,
              corrections=dict(mine=third))
  assert evaluate.of_run(str(tmp_path), prompts=4)["step"] == 6


@pytest.mark.parametrize("fn,word", [
    (lambda num, behaviour, mask: None, "level"),
    (lambda num, behaviour, mask, *, level: num, "Weights"),
    (lambda num, behaviour, mask, *, level: Weights(
        num[:, :1], mask, num), r"\(2, 1\)")])
def test_a_users_own_correction_is_tried_out_first(warm, one_device, fn, word):
  config = tiny(warm, objective__corrections="mine:current")
  with pytest.raises(ValueError, match=f"mine.*{word}"):
    build.build(config, devices=one_device, corrections=dict(mine=fn))


def command(directory, *more):
  return [sys.executable, "-m", "rl_is.main",
          "--config=configs/addition.py:lag=3,tiny", f"--workdir={directory}",
          "--config.objective.preset=gspo", "--config.train.steps=40",
          "--config.evaluate.prompts=0", "--config.checkpoint.every=7", *more]


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [3, 16, 33])
def test_killed_and_restarted_equals_uninterrupted(tmp_path, kill_at):
  """SIGKILL between checkpoints; the same command goes on, bit for bit."""
  environment = dict(os.environ, XLA_FLAGS="")
  run = lambda d: subprocess.run(command(d), cwd=ROOT, env=environment,
                                 check=True, capture_output=True)
  run(tmp_path / "whole")
  process = subprocess.Popen(command(tmp_path / "cut"), cwd=ROOT,
                             env=environment, stderr=subprocess.DEVNULL)
  deadline = time.monotonic() + 120
  while len(metrics.read(str(tmp_path / "cut"))) < kill_at:
    assert time.monotonic() < deadline and process.poll() is None
    time.sleep(0.002)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert len(metrics.read(str(tmp_path / "cut"))) < 40
  run(tmp_path / "cut")
  params = []
  for name in ("whole", "cut"):
    rows = metrics.read(str(tmp_path / name))
    assert [r["step"] for r in rows] == list(range(1, 41))
    config = addition.get_config("lag=3,tiny")
    for text in command("")[4:]:
      path, _, value = text.removeprefix("--config.").partition("=")
      if text.startswith("--config."):
        overrides.apply(config, path, value)
    parts = build.build(config, devices=jax.devices()[:1])
    checkpoints = Checkpoints(str(tmp_path / name))
    params.append(checkpoints.restore(
        40, build.abstract_state(config, parts)).state["learner"].params)
    checkpoints.close()
  equal(*params)


@pytest.mark.slow
def test_a_toy_run_learns(tmp_path, one_device):
  """One-digit addition on-policy: from 0.3 to well above it in 60 steps."""
  config = addition.get_config()
  for path, value in {
      "task.kwargs.digits": 1, "train.steps": 60, "model.embed": 32,
      "warm_start.steps": 150, "warm_start.learning_rate": 1e-3,
      "model.mlp": 64, "optimizer.learning_rate": 1e-3}.items():
    overrides.apply(config, path, value)
  train.run(config, str(tmp_path), devices=one_device)
  rewards = [r["reward/mean"] for r in metrics.read(str(tmp_path))]
  assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.15
