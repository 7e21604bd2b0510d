"""Whole runs whose generator works beside the learner."""

import collections
import gc
import hashlib
import os
import pathlib
import threading

import jax
import numpy as np
import pytest
from test_train import equal, tiny

from rl_is import train
from rl_is.infra import metrics
from rl_is.rollout import asynchronous, generator, mismatch, verify
from rl_is.rollout.publisher import Publisher

ASYNC = dict(objective__preset="tis", rollout__mode="async",
             evaluate__prompts=0)


def test_D02_max_lag_0_equals_lag_0_bit_for_bit(warm, tmp_path, one_device):
  sync = train.run(tiny(warm, objective__preset="tis", evaluate__prompts=0),
                   str(tmp_path / "sync"), devices=one_device)
  beside = train.run(tiny(warm, **ASYNC), str(tmp_path / "async"),
                     devices=one_device)
  equal(sync.params, beside.params)


def test_D02_on_disjoint_devices_max_lag_0_equals_lag_0_in_norm(
    warm, tmp_path, one_device):
  sync = train.run(tiny(warm, objective__preset="tis", evaluate__prompts=0),
                   str(tmp_path / "sync"), devices=one_device)
  beside = train.run(tiny(warm, rollout__sampler_devices=4, **ASYNC),
                     str(tmp_path / "async"))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=1e-5 * np.abs(a).max()), sync.params, beside.params)


def test_lag_is_bounded_and_told(warm, tmp_path, one_device):
  train.run(tiny(warm, rollout__max_lag=3, train__steps=12, **ASYNC),
            str(tmp_path), devices=one_device)
  rows = metrics.read(str(tmp_path))
  assert max(row["rollout/staleness_max"] for row in rows) <= 3
  for row in rows:
    shares = [row[f"rollout/lag{k}_frac"] for k in range(9)]
    assert sum(shares) == pytest.approx(1) and sum(shares[4:]) == 0
    assert row["rollout/version_span_max"] == 0
    assert row["time/learner_wait_s"] >= 0 and row["rollout/buffer_depth"] >= 1


@pytest.mark.parametrize("order", asynchronous.ORDERS)
def test_a_resumed_run_trains_every_prompt_once(warm, tmp_path, one_device,
                                                monkeypatch, order):
  """The multiset of trained prompts is that of an uninterrupted run."""
  config = tiny(warm, rollout__max_lag=4, rollout__order=order, train__steps=8,
                checkpoint__every=3, **ASYNC)
  cursors = {}  # the bytes of a group -> its cursor
  trained = collections.defaultdict(list)  # step -> cursors; redone ones replace
  sample, batch_of = generator.Generator.groups, asynchronous.Asynchronous.batch
  size = config.rollout.group_size
  key = lambda tokens: tokens.tobytes()

  def groups(self, asked, *weights):
    batch = sample(self, asked, *weights)
    for i, cursor in enumerate(asked):
      cursors[key(batch.tokens[i * size:(i + 1) * size])] = cursor
    return batch

  def batch(self, n):
    if n == stop:
      raise KeyboardInterrupt
    out = batch_of(self, n)
    trained[n] = [cursors[key(out.tokens[i:i + size])]
                  for i in range(0, len(out.tokens), size)]
    return out

  monkeypatch.setattr(generator.Generator, "groups", groups)
  monkeypatch.setattr(asynchronous.Asynchronous, "batch", batch)
  for stop in (5, None):
    try:
      train.run(config, str(tmp_path), devices=one_device)
    except KeyboardInterrupt:
      pass
  assert len(metrics.read(str(tmp_path))) == 8
  per_batch = config.rollout.batch_size // size
  assert sorted(sum(trained.values(), [])) == list(range(8 * per_batch))


def test_a_dead_generator_ends_the_run_and_says_why(warm, tmp_path, one_device,
                                                    monkeypatch):
  def broken(self, *args):
    raise MemoryError("no room for the cache")

  monkeypatch.setattr(generator.Generator, "groups", broken)
  with pytest.raises(RuntimeError, match="generator.*no room for the cache"):
    train.run(tiny(warm, **ASYNC), str(tmp_path), devices=one_device)


def test_a_failed_push_stops_the_run(warm, tmp_path, one_device, monkeypatch):
  real = Publisher.publish

  def publish(self, version, params):
    if version == 2:
      raise OSError("link down")
    real(self, version, params)

  monkeypatch.setattr(Publisher, "publish", publish)
  with pytest.raises(OSError, match="link down"):
    train.run(tiny(warm, rollout__max_lag=2, **ASYNC), str(tmp_path),
              devices=one_device)
  assert len(metrics.read(str(tmp_path))) == 2


# What a run's sampler samples with, whatever else is asked of the run.
SWAPS = dict(rollout__swap_tokens=1, rollout__rows_per_call=8)
INT4 = dict(mismatch__weights="int", mismatch__bits=4)
KEPT = dict(rollout__top_k=5, rollout__record_top_k=3)


@pytest.mark.parametrize("mode,shared,changes", [
    ("lag", True, {}), ("lag", False, KEPT), ("lag", True, INT4),
    ("async", True, {}), ("async", False, {}), ("async", False, INT4),
    ("async", True, SWAPS), ("async", False, SWAPS | KEPT),
    ("async", True, dict(SWAPS, rollout__swap_cache="read_again", **INT4)),
    ("async", True, dict(rollout__order="freshest", rollout__rescore_share=1.0)),
    ("async", True, dict(rollout__record_logp=False, objective__preset="pg")),
])
def test_D08_the_samplers_weights_are_the_learners_of_that_version(
    warm, tmp_path, monkeypatch, mode, shared, changes):
  """By checksum, at each call into the sampler; never two of one version.

  With a dial they are what it makes of the learner's. Not shared: in async
  mode the sampler has the last 4 of 8 devices.
  """
  def digest(params):
    return hashlib.sha256(b"".join(
        np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()

  dial = mismatch.sampler_weights("int", 4) if "mismatch__bits" in changes else (
      lambda params: params)
  published, sampled = {}, []
  publish = Publisher.publish

  def recorded_publish(self, version, params):
    published[version] = digest(dial(params))
    publish(self, version, params)

  def recorded(name, version_at):
    real = getattr(generator, name)
    def call(params, *args, **how):
      sampled.append((int(args[version_at]), digest(params)))
      devices = {d for x in jax.tree.leaves(params) for d in x.devices()}
      assert devices == set(own)
      return real(params, *args, **how)
    monkeypatch.setattr(generator, name, call)

  own = jax.devices()[:1] if shared else (
      jax.devices()[4:] if mode == "async" else jax.devices())
  monkeypatch.setattr(Publisher, "publish", recorded_publish)
  recorded("_sample", 2)
  recorded("_decode", 1)
  config = tiny(warm, **(ASYNC | changes | dict(rollout__mode=mode)))
  config.rollout.max_lag = 1 if mode == "async" else 0
  # Every update moves the weights: rewards by chance, as hardly any is right.
  monkeypatch.setattr(verify, "reward",
                      lambda task, problem, text: float(len(text) % 2))
  train.run(config, str(tmp_path), devices=own if shared else None)
  assert len(set(published.values())) >= 4
  assert len({version for version, _ in sampled}) >= 2
  assert set(sampled) <= set(published.items())


@pytest.mark.slow
def test_2000_steps_grow_neither_memory_nor_threads(warm, tmp_path, one_device,
                                                    monkeypatch):
  resident, threads = {}, {}
  write = metrics.MetricsWriter.write

  def watched(self, step, row):
    write(self, step, row)
    if step in (200, 2000):
      gc.collect()
      resident[step] = _resident_bytes()
      threads[step] = threading.active_count()

  monkeypatch.setattr(metrics.MetricsWriter, "write", watched)
  train.run(tiny(warm, rollout__max_lag=4, train__steps=2000,
                 rollout__swap_tokens=2, checkpoint__every=500, **ASYNC),
            str(tmp_path), devices=one_device)
  print(f"resident: {resident}, threads: {threads}")
  # A leaked batch a step would be 16 rows x 8 tokens x 9 fields, 40 MB in all;
  # 1800 copies of the parameters far more.
  assert resident[2000] - resident[200] < 20e6
  assert threads[2000] <= threads[200]


def _resident_bytes() -> int:
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


def test_engine_and_staleness_are_told_apart(warm, tmp_path, one_device):
  """Quantised weights alone: all engine, nothing stale; lag alone: the reverse."""
  def last(name, **changes):
    train.run(tiny(warm, objective__preset="tis", evaluate__prompts=0,
                   rollout__rescore_share=0.6, optimizer__learning_rate=0.01,
                   **changes), str(tmp_path / name), devices=one_device)
    return metrics.read(str(tmp_path / name))[-1]

  quantised = last("int4", mismatch__weights="int", mismatch__bits=4)
  assert quantised["engine/kl_k3"] > 1e-4 and quantised["stale/kl_k3"] < 1e-9
  assert 0.5 < quantised["engine/token_frac"] < 0.8
  old = last("old", rollout__lag=4)
  assert old["stale/kl_k3"] > 1e-4 and old["engine/kl_k3"] < 1e-9
