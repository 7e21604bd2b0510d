"""The log-prob compiled for a TPU that is not there, by libtpu on the CPU."""

import base64
import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from rl_is.infra import mesh as mesh_lib
from rl_is.kernels import logprob

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install -e '.[tpu]'")


@pytest.fixture(scope="module")
def devices():
  # No TPU machine to ask about itself, no chip that two processes could take.
  os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
  # What is compiled for it cannot be read back from jax's cache on a CPU.
  name = "jax_persistent_cache_min_compile_time_secs"
  before = getattr(jax.config, name)
  jax.config.update(name, 1e9)
  yield topologies.get_topology_desc(
      platform="tpu", topology_name="v5e:2x2").devices
  jax.config.update(name, before)


def compiled(devices, tokens, embed, width, dtype, *, sizes=None, ids=0, rows=1,
             **kwargs):
  """Outputs and gradients, on one device or split as `sizes` says."""
  mesh = mesh_lib.make(sizes or dict(data=1, fsdp=1, tensor=1),
                       devices if sizes else devices[:1])
  batch, vocab = ("data", "fsdp"), PartitionSpec(None, "tensor")
  shape = lambda x, dtype, spec: jax.ShapeDtypeStruct(
      x, dtype, sharding=NamedSharding(mesh, spec))
  row = PartitionSpec(batch)
  args = (shape((rows, tokens, embed), dtype, row),
          shape((embed, width), dtype, vocab),
          shape((rows, tokens), jnp.int32, row),
          shape((rows, tokens, ids), jnp.int32, row) if ids else None,
          shape((), jnp.float32, PartitionSpec()))

  def loss(hidden, unembed, targets, ids, temperature):
    out = logprob.token_logprob(
        hidden, unembed, targets, ids=ids, temperature=temperature,
        vocab_size=width - 3, return_entropy=True,
        mesh=mesh if sizes else None, **kwargs)
    return sum(jnp.sum(x) for x in out if x is not None)
  return jax.jit(jax.value_and_grad(loss, (0, 1, 4))).lower(*args).compile()


def products(text):
  """(operand types, precision) of each matrix product that XLA makes."""
  types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
  out = []
  for line in text.splitlines():
    if found := re.search(r" convolution\((.*?)\)", line):
      operands = tuple(types[x.split()[-1]] for x in found[1].split(", "))
      precision = re.search(r"operand_precision=\{(.*?)\}", line)
      out.append((operands, precision[1] if precision else "default"))
  return out


def kernels(text):
  """Of each kernel, in order, whether its products take all passes."""
  bodies = re.findall(r'"body": ?"([A-Za-z0-9+/=]+)"', text)
  return [b"contract_precision<fp32>" in base64.b64decode(x) for x in bodies]


FLOAT32, BF16 = jnp.float32, jnp.bfloat16


@pytest.mark.parametrize("impl,count", [("reference", 3), ("chunked", 4)])
def test_head_precision_of_xla(devices, impl, count):
  """Logits, both gradients and, of tiles, the logits again."""
  of = lambda dtype, precision: products(compiled(
      devices, 256, 128, 1024, dtype, impl=impl,
      head_precision=precision).as_text())
  highest = of(FLOAT32, "highest")
  assert len(highest) == count
  assert set(highest) == {(("f32", "f32"), "highest,highest")}
  narrow = of(FLOAT32, "bf16")
  assert len(narrow) == count
  if impl == "chunked":
    assert set(narrow) == {(("bf16", "bf16"), "default")}
  else:  # XLA rounds the float32 slopes on their way in
    assert all("bf16" in types and p == "default" for types, p in narrow)
  # bf16 numbers are multiplied exactly as they are; their slopes are float32.
  exact = of(BF16, "highest")
  assert {p for _, p in exact} == {"highest,highest"}
  assert sorted(types.count("bf16") for types, _ in exact) == (
      [1, 1] + [2] * (count - 2))


@pytest.mark.parametrize("dtype,precision,want", [
    (FLOAT32, "highest", [True] * 3), (FLOAT32, "bf16", [False] * 3),
    # Forward, the product of bf16 numbers is exact in one pass.
    (BF16, "highest", [False, True, True]), (BF16, "bf16", [False] * 3)])
def test_head_precision_of_the_kernels(devices, dtype, precision, want):
  text = compiled(devices, 256, 128, 1024, dtype, impl="pallas",
                  head_precision=precision).as_text()
  assert sorted(kernels(text)) == sorted(want)
  assert not products(text)  # no product is left to XLA


@pytest.mark.parametrize("tokens,embed,width,dtype,kwargs", [
    (37, 5, 301, FLOAT32, {}), (37, 200, 301, BF16, dict(ids=5)),
    (512, 256, 1024, FLOAT32, dict(ids=8, logit_softcap=30.)),
    (2047, 4096, 151936, BF16, {}),
    pytest.param(2048, 4096, 151936, FLOAT32, {}, marks=pytest.mark.slow),
    pytest.param(2047, 8192, 128256, BF16, dict(ids=20), marks=pytest.mark.slow),
    pytest.param(2048, 8192, 128256, FLOAT32, {}, marks=pytest.mark.slow)])
def test_the_kernels_compile(devices, tokens, embed, width, dtype, kwargs):
  got = compiled(devices, tokens, embed, width, dtype, impl="pallas", **kwargs)
  assert len(kernels(got.as_text())) == 3
  logits = 4 * tokens * width
  assert got.memory_analysis().temp_size_in_bytes < max(2**19, logits // 10)


@pytest.mark.parametrize("impl", ["chunked", "pallas"])
def test_the_vocabulary_on_four_chips(devices, impl):
  """Per token a few numbers are exchanged, and d hidden; never the table."""
  text = compiled(devices, 64, 128, 4096, BF16, impl=impl, rows=2,
                  sizes=dict(data=2, fsdp=1, tensor=2)).as_text()
  assert "all-reduce" in text and "all-gather" not in text
  sizes = [int(np.prod([int(n) for n in x.split(",")] if x else [1]))
           for x in re.findall(r"\w+\[([\d,]*)\][^=]*? all-reduce(?:-start)?\(",
                               text)]
  # d unembed is summed over the two halves of the rows, as ever.
  assert max(sizes) <= 128 * 2048
