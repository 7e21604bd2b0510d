"""A population: its members are the runs of the main loop."""

import contextlib
import json
import signal

import jax
import numpy as np
import pytest
from test_train import equal, tiny

from rl_is import build, overrides, population, sweep, train
from rl_is.infra import metrics
from rl_is.infra.checkpoint import Checkpoints, Saved
from rl_is.infra.preemption import Stopped

SHARED = dict(objective__preset="ppo_tis", train__steps=20,
              train__updates_per_batch=2, evaluate__every=10,
              evaluate__prompts=4, rollout__temperature=0.9,
              mismatch__weights="mantissa", mismatch__bits=6,
              checkpoint__every=10, optimizer__learning_rate=3e-3)
# By name: what each one has of its own.
POINTS = dict(
    a=dict(), b=dict(rollout__lag=4, objective__constants__cap=1.2),
    c=dict(rollout__lag=10, objective__constants__eps_high=0.4, seed=1,
           mismatch__bits=3, optimizer__learning_rate=1e-3))
NOT_OF_A_POPULATION = ("time/", "rollout/sampled_tokens")


def config_of(warm, **changes):
  config = tiny(warm, **(SHARED | changes))
  if "seed" in changes:  # the warm start is of a seed
    overrides.apply(config, "warm_start.path", "")
  return config


def configs_of(warm, names="abc"):
  return {name: config_of(warm, **POINTS[name]) for name in names}


def rows_of(path):
  return [{k: x for k, x in row.items() if not k.startswith(NOT_OF_A_POPULATION)}
          for row in metrics.read(str(path))]


@pytest.fixture(scope="module")
def whole(warm, tmp_path_factory, one_device):
  """Each by itself, in the main loop: name -> (rows, parameters)."""
  out = {}
  for name, config in configs_of(warm).items():
    path = tmp_path_factory.mktemp("whole") / name
    params = train.run(config, str(path), devices=one_device).params
    out[name] = rows_of(path), jax.device_get(params)
  return out


@pytest.fixture(scope="module")
def mapped(warm, tmp_path_factory):
  path = tmp_path_factory.mktemp("mapped")
  before = population._advance._cache_size()
  results = sweep.run(configs_of(warm), str(path))
  return path, results, population._advance._cache_size() - before


def test_members_are_runs_of_the_main_loop_bit_for_bit(mapped, whole):
  """20 steps of 2 updates, lags 0, 4, 10, other caps, bounds, seeds, bits, rates:
  every number of every row, held-out accuracy among them."""
  path, results, compiled = mapped
  assert compiled == 1
  for name, (rows, _) in whole.items():
    got = rows_of(path / name)
    assert [r["step"] for r in got] == list(range(1, 21))
    for row, want in zip(got, rows, strict=True):
      assert row == want, (name, row["step"])
    assert results[name].rows == 20 and results[name].failed is None
    assert "eval/accuracy" in rows[9] and "eval/accuracy" in rows[19]


@pytest.mark.parametrize("placement,devices", [
    pytest.param("map", 1, marks=pytest.mark.slow),
    pytest.param("vmap", 1, marks=pytest.mark.slow),
    pytest.param("map", 2, marks=pytest.mark.slow), ("vmap", 2)])
def test_parameters_however_the_members_lie(warm, whole, placement, devices,
                                            tmp_path, one_device):
  """vmap and devices: in norm; 3 members on 2 devices, in another order."""
  configs = configs_of(warm, "cab")
  parts = [build.build(c, devices=one_device) for c in configs.values()]
  starts = sweep._starts(list(configs.values()), parts, str(tmp_path),
                         lambda: None)
  them = population.Population(
      list(configs.values()), parts, starts, placement=placement,
      devices=jax.devices()[:devices])
  for n in range(them.begin, 20, them.how.chunk):
    them.advance(n)
  assert int(them.carry.state.version[0]) == 40
  for i, name in enumerate(configs):
    got = jax.device_get(them.params(i))
    if placement == "map" and devices == 1:
      equal(got, whole[name][1])
    jax.tree.map(lambda a, b: np.testing.assert_array_less(
        np.linalg.norm(a - b), 1e-5 * np.linalg.norm(b)), got, whole[name][1])
  sizes = them.memory()
  assert sizes["carried"] > 3 * sum(
      x.nbytes for x in jax.tree.leaves(whole["a"][1]))
  assert sizes["temporary"] > 0


def test_what_is_kept_knows_nothing_of_devices(warm, tmp_path, one_device):
  """3 members stand on 2 devices as 4; 3 are kept, for any number of devices."""
  configs = configs_of(warm)
  parts = [build.build(c, devices=one_device) for c in configs.values()]
  starts = sweep._starts(list(configs.values()), parts, str(tmp_path),
                         lambda: None)
  on = {n: population.Population(list(configs.values()), parts, starts,
                                 placement="map", devices=jax.devices()[:n])
        for n in (1, 2, 3)}
  on[2].resume(jax.tree.map(lambda x: x + 1, on[2].members()))
  kept = jax.device_get(on[2].members())
  assert len(on[2].carry.failed) == 4 and len(kept.failed) == 3
  with contextlib.closing(Checkpoints(str(tmp_path), keep=1)) as checkpoints:
    checkpoints.save(Saved(on[2].members(), [], dict(step=1)))
    for them in on.values():
      them.resume(checkpoints.restore_newest(them.abstract()).state)
      equal(jax.device_get(them.members()), kept)
      # The one that stands twice is the last.
      every = jax.device_get(them.carry.state.params)
      jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[-1], y[-1]),
                   every, kept.state.params)


def test_stopped_and_resumed_it_is_the_same(warm, mapped, tmp_path, monkeypatch):
  configs = configs_of(warm)
  advance, calls = population.Population.advance, []

  def signalled(self, n):
    calls.append(n)
    if len(calls) == 3:
      signal.raise_signal(signal.SIGTERM)
    return advance(self, n)

  monkeypatch.setattr(population.Population, "advance", signalled)
  with pytest.raises(Stopped, match="after step 20|after step 10"):
    sweep.run(configs, str(tmp_path))
  assert len(metrics.read(str(tmp_path / "a"))) < 20 or calls[-1] == 10
  sweep.run(configs, str(tmp_path))
  for name in configs:
    assert rows_of(tmp_path / name) == rows_of(mapped[0] / name)
  again = sweep.run(configs, str(tmp_path))  # complete: nothing is done
  assert again == sweep.run(configs, str(tmp_path))
  assert calls.count(calls[0]) == 1


def test_a_last_chunk_that_goes_beyond_the_last_step(warm, tmp_path):
  """6 steps in a chunk of 20: complete, and called again, it is as it was."""
  configs = {"a": config_of(warm, train__steps=6, evaluate__every=0,
                            evaluate__prompts=0)}
  for _ in range(2):
    assert sweep.run(configs, str(tmp_path))["a"].rows == 6
    assert len(metrics.read(str(tmp_path / "a"))) == 6


def test_a_member_that_breaks_is_frozen_and_the_others_go_on(
    warm, mapped, tmp_path):
  """A rate of 1e9 with a decay of 1e9 makes parameters that are not finite."""
  configs = configs_of(warm, "ac")
  configs["broken"] = config_of(warm, optimizer__learning_rate=1e9,
                                 optimizer__weight_decay=1e9)
  results = sweep.run(configs, str(tmp_path))
  assert results["broken"].rows < 20
  assert "step " in results["broken"].failed
  assert f"step {results['broken'].rows + 1}: non-finite" in (
      results["broken"].failed)
  for name in "ac":
    assert rows_of(tmp_path / name) == rows_of(mapped[0] / name)
  again = sweep.run(configs, str(tmp_path))  # it is not tried once more
  assert {k: (r.rows, r.failed) for k, r in again.items()} == {
      k: (r.rows, r.failed) for k, r in results.items()}


@pytest.mark.parametrize("changes,words", [
    (dict(objective__preset="grpo"), "structure"),
    (dict(rollout__batch_size=32), "rollout.batch_size is structure"),
    (dict(mismatch__logit_sd=1.0), "mismatch is structure"),
    (dict(train__steps=7), "train.steps is structure: 20 in a, 7 in other")])
def test_another_structure_is_refused_by_name(warm, tmp_path, changes, words):
  configs = configs_of(warm, "a") | dict(other=config_of(warm, **changes))
  with pytest.raises(ValueError, match=words):
    sweep.run(configs, str(tmp_path))


@pytest.mark.parametrize("changes,words", [
    (dict(rollout__mode="async", rollout__lag=0), "rollout.mode"),
    (dict(rollout__rescore_share=0.5), "rescore_share"),
    (dict(store__every=1), "store.every")])
def test_what_no_population_has_is_refused(warm, tmp_path, changes, words):
  with pytest.raises(ValueError, match=f"{words}.*run it by itself"):
    sweep.run(dict(a=config_of(warm, **changes)), str(tmp_path))


def test_a_directory_is_of_one_population(warm, tmp_path):
  configs = configs_of(warm, "a")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sweep, "_starts", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      sweep.run(configs, str(tmp_path))
  assert json.loads((tmp_path / "population.json").read_text()).keys() == {"a"}
  with pytest.raises(ValueError, match="learning_rate: 0.003 there, 0.1 now"):
    sweep.run(dict(a=config_of(warm, optimizer__learning_rate=0.1)),
              str(tmp_path))
