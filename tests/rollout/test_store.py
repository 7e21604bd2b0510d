"""Rollouts on disk: every bit comes back, oldest out, and objectives recomputed."""

import dataclasses
import importlib.util
import resource

import jax
import numpy as np
import pytest
from test_train import tiny

from rl_is import build, train, warm_start
from rl_is.core.types import Batch
from rl_is.infra import metrics, mesh as mesh_lib
from rl_is.models import scoring
from rl_is.rollout import store as store_lib
from rl_is.rollout.store import Store
from rl_is.tasks.tokenizer import CharTokenizer

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
TOKENIZER = CharTokenizer("ab")


def some_batch(seed, *, more=()):
  """Every float of any bits, half of them a NaN of its own, or an inf.

  more: which of the optional fields are there.
  """
  r = np.random.default_rng(seed)

  def bits(*shape):
    x = r.integers(0, 2**32, shape, np.uint32)
    return np.where(r.random(shape) < 0.5, x, x | 0x7F800000).view(np.float32)

  optional = dict(
      logp_behaviour=bits(4, 3), version=r.integers(-1, 9, (4, 3), np.int32),
      logp_version=bits(4, 3), kept_ids=r.integers(-1, 9, (4, 3, 2), np.int32),
      head_ids=r.integers(-1, 9, (4, 3, 1), np.int32),
      head_logp_behaviour=bits(4, 3, 1),
      routes=r.integers(-1, 9, (4, 3, 2, 2), np.int16),
      stop_token=r.integers(-1, 9, 4, np.int32), failed=r.random(4) < 0.5)
  return Batch(
      tokens=r.integers(0, 5, (4, 3), np.int32), valid=r.random((4, 3)) < 0.8,
      mask=r.random((4, 3)) < 0.5,
      reward=np.array([np.nan, -0.0, 1, -np.inf], np.float32),
      group=np.arange(4, dtype=np.int32) // 2,
      **{name: optional[name] for name in more})


OPTIONAL = ("logp_behaviour", "version", "logp_version", "kept_ids", "head_ids",
            "head_logp_behaviour", "routes", "stop_token", "failed")


def same_bits(got, want):
  for field in dataclasses.fields(Batch):
    x, y = getattr(got, field.name), getattr(want, field.name)
    assert (x is None) == (y is None), field.name
    if y is not None:
      y = np.asarray(y)
      assert (x.dtype, x.shape) == (y.dtype, y.shape), field.name
      assert x.tobytes() == np.ascontiguousarray(y).tobytes(), field.name


def a_store(path, **changes):
  return Store(str(path), **{**dict(every=1, max_gb=1.0, tokenizer=TOKENIZER,
                                    meta=dict(who="me")), **changes})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("more", [(), OPTIONAL, *((x,) for x in OPTIONAL)])
def test_every_bit_comes_back(tmp_path, more, seed):
  batch = some_batch(seed, more=more)
  a_store(tmp_path).write(7, batch, [batch])
  record, = store_lib.read(str(tmp_path))
  same_bits(record.batch, batch)
  assert record.step == 7 and record.meta["who"] == "me"


def test_the_texts_stand_beside_it(tmp_path):
  """A prompt of a chat format has an end of turn in it, which is an EOS."""
  tokenizer = CharTokenizer("ab|", eos_ids=(5, 2))
  batch = Batch(
      tokens=np.array([[0, 1, 3, 5, 4, 3, 0, 4, 2],
                       [1, 3, 4, 5, 3, 3, 4, 5, 3]], np.int32),
      valid=np.array([[0] + [1] * 8, [1] * 8 + [0]], bool),
      mask=np.array([[0] * 5 + [1] * 4, [0] * 5 + [1] * 3 + [0]], bool),
      reward=np.zeros(2, np.float32), group=np.zeros(2, np.int32))
  a_store(tmp_path, tokenizer=tokenizer).write(1, batch, [batch])
  record, = store_lib.read(str(tmp_path))
  assert (record.prompt, record.answer) == (["ab", "aba"], ["ab", "ab"])


def test_what_the_learner_scored_stands_beside_it(tmp_path):
  batch = some_batch(0, more=OPTIONAL)
  halves = [jax.tree.map(lambda x: x[rows], batch).replace(
      adv=np.full((2, 3), i, np.float32), version_now=np.full(2, 5, np.int32))
            for i, rows in enumerate((slice(0, 2), slice(2, 4)))]
  a_store(tmp_path).write(1, batch, halves)
  record, = store_lib.read(str(tmp_path))
  same_bits(record.batch, batch.replace(
      adv=np.float32([[0] * 3] * 2 + [[1] * 3] * 2),
      version_now=np.full(4, 5, np.int32)))


def test_pandas_reads_it(tmp_path):
  pandas = pytest.importorskip("pandas")
  batch = some_batch(0, more=OPTIONAL)
  a_store(tmp_path).write(1, batch, [batch])
  frame = pandas.read_parquet(tmp_path / "rollouts" / "00000001.parquet")
  assert len(frame) == 4 and frame.reward[2] == 1
  np.testing.assert_array_equal(np.stack(frame["tokens"]), batch.tokens)


def test_the_oldest_go_when_it_is_full(tmp_path):
  batch = some_batch(0, more=OPTIONAL)
  store = a_store(tmp_path)
  store.write(1, batch, [batch])
  size = (tmp_path / "rollouts" / "00000001.parquet").stat().st_size
  store = a_store(tmp_path, every=2, max_gb=2.5 * size / 1e9, after_step=1)
  for step in range(2, 10):
    store.write(step, batch, [batch])
  assert [r.step for r in store_lib.read(str(tmp_path))] == [6, 8]
  a_store(tmp_path, max_gb=1e-9, after_step=8).write(9, batch, [batch])
  assert [r.step for r in store_lib.read(str(tmp_path))] == [9]


def test_a_resumed_run_drops_what_comes_again(tmp_path):
  batch = some_batch(0)
  store = a_store(tmp_path)
  for step in (1, 2, 3):
    store.write(step, batch, [batch])
  (tmp_path / "rollouts" / ".00000004.parquet.tmp").write_bytes(b"half")
  a_store(tmp_path, after_step=2)
  assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [
      "00000001.parquet", "00000002.parquet"]


def test_files_that_are_no_records_are_named(tmp_path):
  with pytest.raises(ValueError, match="no rollouts.*store.every=1"):
    next(store_lib.read(str(tmp_path)))
  batch = some_batch(0)
  a_store(tmp_path).write(1, batch, [batch])
  file = tmp_path / "rollouts" / "00000001.parquet"
  raw = file.read_bytes()
  for size in (0, len(raw) // 2, len(raw) - 1):
    file.write_bytes(raw[:size])
    with pytest.raises(ValueError, match="1.parquet: cannot read") as error:
      next(store_lib.read(str(tmp_path)))
    assert "\n" not in str(error.value)
  parquet.write_table(pyarrow.table({"a": [1]}), file)
  with pytest.raises(ValueError, match="format: expected 2, got None"):
    next(store_lib.read(str(file)))


def test_a_flipped_bit_is_never_read_as_data(tmp_path):
  """It is named, or lies where nothing of the record is."""
  batch = some_batch(0, more=OPTIONAL)
  a_store(tmp_path).write(1, batch, [batch])
  file = tmp_path / "rollouts" / "00000001.parquet"
  want, = store_lib.read(str(file))
  raw, refused = file.read_bytes(), 0
  r = np.random.default_rng(0)
  for place in r.integers(len(raw), size=300):
    damaged = bytearray(raw)
    damaged[place] ^= 1 << r.integers(8)
    file.write_bytes(damaged)
    try:
      record, = store_lib.read(str(file))
    except ValueError as error:
      assert str(error).startswith(f"{file}: cannot read rollouts: ")
      refused += 1
    else:
      same_bits(record.batch, want.batch)
      assert (record.step, record.prompt, record.answer, record.meta) == (
          want.step, want.prompt, want.answer, want.meta)
  assert refused > 100


def test_all_is_read_while_the_next_is_being_written(tmp_path, monkeypatch):
  pandas = pytest.importorskip("pandas")
  batch, real, seen = some_batch(0), parquet.write_table, []
  store = a_store(tmp_path)
  store.write(1, batch, [batch])

  def slow(table, file, **how):
    file.write(b"PAR1")
    file.flush()
    seen.append(([r.step for r in store_lib.read(str(tmp_path))],
                 len(pandas.read_parquet(tmp_path / "rollouts"))))
    file.seek(0)
    real(table, file, **how)

  monkeypatch.setattr(parquet, "write_table", slow)
  store.write(2, batch, [batch])
  store.write(3, batch, [batch])
  assert seen == [([1], 4), ([1, 2], 8)]


def test_what_else_lies_there_stays(tmp_path):
  folder = tmp_path / "rollouts"
  folder.mkdir()
  for name in ("best.parquet", "00000001.parquet.bak"):
    (folder / name).write_bytes(b"theirs")
  batch = some_batch(0)
  store = a_store(tmp_path, max_gb=1e-9)
  for step in (1, 2):
    store.write(step, batch, [batch])
  assert [r.step for r in store_lib.read(str(folder))] == [2]
  assert sorted(p.name for p in folder.iterdir()) == [
      "00000001.parquet.bak", "00000002.parquet", "best.parquet"]


def test_without_pyarrow_nothing_begins(warm, tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"pyarrow: pip install 'rl_is\[data\]'"):
    train.run(tiny(warm, store__every=1), str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()


def test_a_file_that_goes_while_one_reads(tmp_path, caplog):
  batch = some_batch(0)
  store = a_store(tmp_path)
  for step in (1, 2, 3):
    store.write(step, batch, [batch])
  records = store_lib.read(str(tmp_path))
  assert next(records).step == 1
  (tmp_path / "rollouts" / "00000002.parquet").unlink()
  assert [r.step for r in records] == [3]
  assert "00000002.parquet is gone" in caplog.text


def test_a_full_disk_is_said_and_leaves_no_half_file(tmp_path):
  batch = some_batch(0)
  store = a_store(tmp_path)
  store.write(1, batch, [batch])
  old = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
  try:
    with pytest.raises(OSError, match="00000002.parquet: cannot write rollouts"):
      store.write(2, batch, [batch])
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
  assert [p.name for p in (tmp_path / "rollouts").iterdir()] == [
      "00000001.parquet"]


def test_a_write_that_fails_ends_the_run_in_one_line(warm, tmp_path, one_device,
                                                     monkeypatch):
  """The same run goes on from its checkpoint, without the files after that."""
  config = lambda: tiny(warm, store__every=1, evaluate__prompts=0)
  steps = lambda: [r.step for r in store_lib.read(str(tmp_path))]
  real = parquet.write_table
  for step, left in ((4, [1, 2, 3]), (3, [1, 2])):  # the checkpoint is of 2

    def full(table, file, **how):
      if f"{step:08d}" in str(file.name):
        raise OSError(28, "No space left on device")
      real(table, file, **how)

    with monkeypatch.context() as patch:
      patch.setattr(parquet, "write_table", full)
      with pytest.raises(OSError, match=f"{step}.parquet: cannot write") as error:
        train.run(config(), str(tmp_path), devices=one_device)
    assert "\n" not in str(error.value)
    assert steps() == left
  train.run(config(), str(tmp_path), devices=one_device)
  assert steps() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("mode,more", [
    ("lag", dict(rollout__lag=2)), ("async", dict(rollout__max_lag=4)),
    ("lag", dict(rollout__top_k=6, rollout__top_p=0.9,
                 rollout__record_top_k=3))])
def test_what_is_stored_is_what_was_trained_on(warm, tmp_path, one_device,
                                               monkeypatch, mode, more):
  seen, learn = [], train._learn

  def watched(state, ref, batch, *args):
    seen.append(batch)
    return learn(state, ref, batch, *args)

  monkeypatch.setattr(train, "_learn", watched)
  config = tiny(warm, rollout__mode=mode, store__every=1, evaluate__prompts=0,
                objective__preset="ppo_tis", train__updates_per_batch=2, **more)
  train.run(config, str(tmp_path), devices=one_device)
  records = list(store_lib.read(str(tmp_path)))
  assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
  for record, batch in zip(records, seen, strict=True):
    assert record.batch.logp_prox is not None and record.batch.adv is not None
    same_bits(record.batch.replace(**dict.fromkeys(store_lib.PREPARED)), batch)


def test_a_cut_run_leaves_the_files_of_a_whole_one(warm, tmp_path, one_device,
                                                   monkeypatch):
  config = lambda: tiny(warm, "lag=2", store__every=1, evaluate__prompts=0,
                        objective__preset="ppo")
  train.run(config(), str(tmp_path / "whole"), devices=one_device)
  write = metrics.MetricsWriter.write

  def cut(self, step, row):
    if step == 4:  # its file is written; the checkpoint is of step 2
      raise KeyboardInterrupt
    write(self, step, row)

  with monkeypatch.context() as patch:
    patch.setattr(metrics.MetricsWriter, "write", cut)
    with pytest.raises(KeyboardInterrupt):
      train.run(config(), str(tmp_path / "cut"), devices=one_device)
  train.run(config(), str(tmp_path / "cut"), devices=one_device)
  for got, want in zip(*(store_lib.read(str(tmp_path / name))
                         for name in ("cut", "whole")), strict=True):
    assert got.step == want.step
    same_bits(got.batch, want.batch)


def test_an_objective_is_recomputed_from_the_file_alone(warm, tmp_path,
                                                        one_device):
  """The loss of step 1, under the parameters that it was trained from."""
  config = tiny(warm, store__every=1, evaluate__prompts=0, train__steps=1,
                objective__preset="ppo_tis", objective__regularizer="k3",
                objective__constants__kl_coef=0.1)
  train.run(config, str(tmp_path), devices=one_device)
  row, = metrics.read(str(tmp_path))
  record, = store_lib.read(str(tmp_path))
  parts = build.build(config, devices=one_device)
  with mesh_lib.use(parts.mesh):
    params = warm_start.params(config, parts, str(tmp_path))
    batch = record.batch.replace(adv=None)
    prepared = parts.objective.prepare(batch, record.meta["constants"])
    outputs = scoring.score(
        params, batch, model=parts.model, return_entropy=True,
        temperature=record.meta["constants"]["temperature"])
    loss, _ = parts.objective.loss(outputs, prepared, record.meta["constants"])
  np.testing.assert_allclose(loss, row["loss"], rtol=1e-5, atol=1e-7)
  np.testing.assert_array_equal(prepared.adv, record.batch.adv)
  assert row["loss"] != 0
