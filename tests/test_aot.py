"""What a config costs on a slice: counted by hand, read from HLO, compiled."""

import dataclasses
import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest

from configs import addition, models, qwen3_0p6b, qwen3_8b, qwen3_30b_a3b
from rl_is import aot, build
from rl_is.infra import chips, hlo
from rl_is.infra import mesh as mesh_lib
from rl_is.infra import sharding
from rl_is.models import flops
from rl_is.models.config import TransformerConfig
from rl_is.models.transformer import Model

GOLDEN = pathlib.Path(__file__).parent / "golden"
has_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install -e '.[tpu]'")


@pytest.fixture
def compiling():
  """What jax's cache has, XLA does not look at again."""
  jax.config.update("jax_enable_compilation_cache", False)
  yield
  jax.config.update("jax_enable_compilation_cache", True)


# ---- FLOPs by hand.


def test_flops_of_a_dense_model():
  c = TransformerConfig(vocab_size=10, vocab_multiple=4, embed=4, layers=2,
                        heads=3, kv_heads=1, head_dim=2, mlp=5)
  got = flops.per_token(c, 7)
  # q and o: 4 x 6 each; k and v: 4 x 2 each; MLP: 3 x 4 x 5. 124 a layer.
  assert got["layers"] == 2 * 2 * (24 + 24 + 8 + 8 + 60)
  # 7 queries see 1 + ... + 7 = 28 keys, 4 on average; q k and p v: 2 x 2 x 6
  # FLOPs a key, in 2 layers.
  assert got["attention"] == 2 * (4 * 6 * 4)
  assert got["head"] == 2 * 4 * 12  # 10 ids, padded to 12
  step = flops.of_step(c, rows=3, length=7, scored=1, tiled_head=True)
  forward = 496 + 192 + 96
  assert step == dict(update=3 * forward * 21, scoring=forward * 21,
                      recomputed=96 * 21)
  full = dataclasses.replace(c, remat="full")
  again = flops.of_step(full, 3, 7, scored=0, tiled_head=False)["recomputed"]
  assert again == (496 + 192) * 21


def test_flops_of_experts_and_windows():
  c = TransformerConfig(vocab_size=8, embed=4, layers=2, heads=3, kv_heads=3,
                        head_dim=2, mlp=5, experts=6, experts_per_token=2,
                        window=2, global_every=2)
  got = flops.per_token(c, 4)
  # Attention 4 x 24; two of six experts 2 x 60; the router 4 x 6.
  assert got["layers"] == 2 * 2 * (96 + 120 + 24)
  # Local layer: 1, 2, 2, 2 keys, 1.75 on average; global: 1 .. 4, 2.5.
  assert got["attention"] == 4 * 6 * (1.75 + 2.5)


def test_flops_are_six_for_each_parameter_and_token():
  """The usual estimate, for a model whose embedding is its head."""
  c = TransformerConfig(**models.qwen3_1p7b())
  shapes = jax.eval_shape(Model(c).init, jax.random.key(0))
  count = sum(x.size for x in jax.tree.leaves(shapes))
  step = flops.of_step(c, 1, 1, scored=0, tiled_head=False)["update"]
  assert step == pytest.approx(6 * count, rel=0.01)


# ---- Collectives from text.

HLO = """HloModule jit_f, entry_computation_layout={()->f32[]}

%cond (p: (s32[], f32[8])) -> pred[] {
  %c = s32[]{:T(128)} constant(5)
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}

%stage (x: f32[8]) -> f32[32] {
  ROOT %g = f32[32]{0} all-gather(%x), channel_id=7, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = f32[32] fusion(%x), kind=kCustom, calls=%stage
  %t = f32[32] fusion(%x), kind=kCustom, calls=%stage
  %r = f32[8]{0} all-reduce(%x), channel_id=8, replica_groups={{0,1},{2,3}}, to_apply=%sum
}

ENTRY %main (x: f32[8]) -> f32[] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %p = (bf16[4]{0}, bf16[4]{0}) collective-permute-start(%x), channel_id=9, source_target_pairs={{0,1}}
  %u = (s32[], f32[8]) while(%t), condition=%other, body=%body
  %q = f32[3]{0} reduce-scatter(%x), channel_id=10, replica_groups=[2,4]<=[8], dimensions={0}
}
"""


def test_collectives_by_hand():
  got = hlo.collectives(HLO)
  # In a loop of 5 and one of unknown length: 6 times each. The gather's two
  # stages have one channel. 32 float32 from 4 devices: 3/4 of 128 bytes go out.
  assert got["kinds"]["all-gather"] == dict(count=6, bytes=6 * 128,
                                            wire_bytes=6 * 96)
  # 8 float32 between 2: twice a half.
  assert got["kinds"]["all-reduce"] == dict(count=6, bytes=6 * 32,
                                            wire_bytes=6 * 32)
  # Input and output are named: 4 bf16.
  assert got["kinds"]["collective-permute"] == dict(count=1, bytes=8,
                                                    wire_bytes=8)
  # The result, 12 bytes, is one of 4 parts.
  assert got["kinds"]["reduce-scatter"] == dict(count=1, bytes=12,
                                                wire_bytes=36)
  assert got["loops_of_unknown_length"] == 1
  assert got["wire_bytes"] == 6 * 96 + 6 * 32 + 8 + 36


@pytest.mark.parametrize("sizes,kinds", [
    (dict(data=4, fsdp=1, tensor=1), {"all-reduce"}),
    (dict(data=1, fsdp=1, tensor=1), set())])
def test_collectives_of_a_real_program(sizes, kinds):
  """A sum over rows that lie on 4 devices: 6 float32, 3/4 of them twice."""
  mesh = mesh_lib.make(sizes, jax.devices()[:np.prod(list(sizes.values()))])
  x = jax.ShapeDtypeStruct((8, 6), np.float32, sharding=mesh_lib.rows(mesh))
  text = jax.jit(lambda x: x.sum(axis=0), out_shardings=mesh_lib.replicated(
      mesh)).lower(x).compile().as_text()
  got = hlo.collectives(text)
  assert set(got["kinds"]) == kinds
  assert got["wire_bytes"] == (36 if kinds else 0)


# ---- Chips, and what is refused.


def test_a_device_of_two_a_chip_has_half_of_it():
  assert chips.of("v5e:4x4").flops == 197e12
  assert chips.of("tpu7x:2x2x1").flops == 2307e12 / 2
  assert chips.of("v4:2x2x1").hbm == 16 * 2**30
  assert all(c.source.startswith("https://") for c in chips.CHIPS.values())
  with pytest.raises(ValueError, match="chip: unknown name 'v5'; did you mean v5"):
    chips.of("v5:2x2")


@has_libtpu
@pytest.mark.parametrize("topology,word", [
    ("v5e", "sides of its slice"), ("v5e:4xfour", "sides of its slice"),
    ("v5e:3x5", "libtpu does not know")])
def test_an_impossible_topology_is_refused(topology, word):
  with pytest.raises(ValueError, match=word):
    aot.devices_of(topology)


@has_libtpu
@pytest.mark.parametrize("changes,word", [
    (dict(mesh=dict(fsdp=3, data=1)), "multiplies to 3, but there are 4"),
    (dict(mesh=dict(fsdp=1, tensor=4, data=1), model=dict(kv_heads=2)),
     "tensor = 4 does not divide"),
    (dict(rollout=dict(batch_size=6, group_size=2)), "nearest valid: 4 or 8")])
def test_a_config_that_cannot_run_is_refused_before_compiling(changes, word):
  config = addition.get_config("tiny").unlock()
  config.update(changes)
  with pytest.raises(ValueError, match=word):
    aot.report(config, "v5e:2x2", smoke=True)


# ---- Sharding, as it was decided.


@pytest.mark.parametrize("name", ["qwen3_0p6b", "qwen3_30b_a3b", "gemma3_270m"])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_the_places_of_all_parameters(name, sizes):
  """golden/sharding.json: written by `json.dump(places(...))` and looked at."""
  if name == "gemma3_270m" and sizes[2] > 1:
    pytest.skip("it has one kv head")
  model = Model(TransformerConfig(**models.MODELS[name](layers=2)))
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, sizes)))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  got = {jax.tree_util.keystr(path, simple=True, separator="/"):
         [*map(str, where.spec), *where.shard_shape(x.shape)]
         for (path, x), where in zip(
             jax.tree_util.tree_leaves_with_path(shapes),
             jax.tree.leaves(sharding.place(shapes, model.rules, mesh)))}
  want = json.loads((GOLDEN / "sharding.json").read_text())
  assert got == want[f"{name} {sizes}"]


@pytest.mark.parametrize("experts", [0, 4])
def test_nothing_is_replicated_to_be_split_again(experts, capfd, compiling):
  """XLA would say so: "involuntary full rematerialization"."""
  config = addition.get_config("tiny").unlock()
  config.mesh.update(dict(data=2, fsdp=2, tensor=2))
  config.model.update(dict(
      scan_layers=True, remat="full", logprob_impl="chunked", experts=experts,
      experts_per_token=min(experts, 2), embed=32, mlp=32))
  config.train.microbatches = 2
  parts = build.build(config)
  for name, (program, args) in aot.programs(parts, config, 4, 4).items():
    aot.compile_(name, program, args, parts.mesh)
  told = capfd.readouterr().err
  assert "compiling" in told and "rematerialization" not in told.lower()


# ---- The compiler for TPU.


@has_libtpu
@pytest.mark.parametrize("topology,devices", [("v5e:2x2", 4), ("v5p:2x2x1", 4)])
def test_smoke(topology, devices):
  config = qwen3_0p6b.get_config()
  found = aot.report(config, topology, smoke=True)
  assert found["devices"] == devices == found["mesh"]["fsdp"]
  assert found["fits"] and found["hbm"] == chips.of(topology).hbm
  program, = found["programs"].values()
  # Parameters and two moments in float32, a quarter of each on a device.
  state = 3 * 4 * found["parameters"] / 4
  assert state <= program["arguments"] <= 1.01 * state + 2e6
  assert program["donated"] >= 0.99 * state
  assert program["collectives"]["loops_of_unknown_length"] == 0
  assert {"all-reduce"} <= set(program["collectives"]["kinds"])
  assert "FITS: peak" in aot.verdict(found)
  assert json.loads(json.dumps(found)) == found


@has_libtpu
@pytest.mark.parametrize("sizes", [(2, 4, 1), (-1, 2, 1), (4, 1, 2)])
def test_slices_lie_along_data(sizes):
  """Between them the network is slow: only gradients are summed over it."""
  devices = aot.devices_of("v5e:2x2", slices=2)
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, sizes)), devices)
  half = mesh.shape["data"] // 2
  for i, part in enumerate((mesh.devices[:half], mesh.devices[half:])):
    assert {d.slice_index for d in part.flat} == {i}
  with pytest.raises(ValueError, match="mesh data = 1 .* slices = 2; .* valid: 2"):
    mesh_lib.make(dict(data=1, fsdp=8, tensor=1), devices)


@has_libtpu
@pytest.mark.slow
def test_smoke_of_two_slices():
  """State as on one; the gradients of 1/4 of the parameters are summed over both."""
  config = qwen3_0p6b.get_config()
  one = aot.report(config, "v5e:2x2", smoke=True)
  config.mesh.data = 2
  two = aot.report(config, "v5e:2x2", slices=2, smoke=True)
  assert two["devices"] == 8 and two["mesh"] == dict(data=2, fsdp=4, tensor=1)
  assert two["programs"]["train_step"]["arguments"] == pytest.approx(
      one["programs"]["train_step"]["arguments"], rel=0.01)
  summed = two["programs"]["train_step"]["collectives"]["kinds"]["all-reduce"]
  assert summed["bytes"] >= 4 * two["parameters"] / 4


def test_the_pod_configs_are_whole():
  for module in (qwen3_0p6b, qwen3_8b, qwen3_30b_a3b):
    config = module.get_config("lag=8")
    assert config.rollout.lag == 8
    assert TransformerConfig(**config.model.to_dict()).scan_layers


def test_a_result_is_kept_by_what_made_it(tmp_path, capsys):
  made = []
  make = lambda: made.append(1) or dict(n=len(made))
  kept = lambda fresh=False, **identity: aot._cached(
      str(tmp_path), identity, fresh, make)
  assert kept(a=1) == kept(a=1) == dict(n=1)
  assert "--fresh compiles again" in capsys.readouterr().err
  assert kept(a=2) == dict(n=2) and kept(True, a=1) == dict(n=3)
