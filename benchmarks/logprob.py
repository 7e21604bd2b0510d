"""Time and memory of the three log-probs, with their gradients.

  python -m benchmarks.logprob         # one JSON object on standard output

On this machine every side runs in a process of its own, so that its peak is its
own: log-prob and entropy of each token, and the gradients of hidden and unembed.
"pallas" is interpreted on a CPU, where every step copies whole arrays: in few
large blocks, and its time and memory there say nothing about a TPU. For a TPU
all three are compiled, not run, where libtpu is installed (extra `tpu`).

memory, in bytes: `temp` is what the program needs beside its inputs and
outputs, as XLA reports it; `peak` is measured: the process's largest size less
that before the first call, so temp and the two gradients.
"""

import concurrent.futures
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from rl_is.kernels import logprob

_TOKENS = flags.DEFINE_integer("tokens", 2048, "B x T, in one row")
_EMBED = flags.DEFINE_integer("embed", 1024, "D")
_VOCABS = flags.DEFINE_list("vocabs", ["32768", "151936"], "V, each in turn")
_REPEATS = flags.DEFINE_integer("repeats", 3, "timed calls, after a warm-up")
_TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "the TPU compiled for")

IMPLEMENTATIONS = tuple(logprob.IMPLEMENTATIONS)


def program(impl: str, vocab: int, **tiles: int):
  """f(hidden, unembed, targets) -> (gradients of a sum of outputs, outputs)."""
  def loss(hidden, unembed, targets):
    out = logprob.token_logprob(
        hidden, unembed, targets, temperature=0.9, vocab_size=vocab - 3,
        return_entropy=True, impl=impl, **tiles)
    return jnp.sum(out.logp) + 0.1 * jnp.sum(out.entropy), out
  return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


def arrays(tokens: int, embed: int, vocab: int):
  r = np.random.default_rng(0)
  normal = lambda *shape: r.standard_normal(shape, np.float32)
  return (normal(1, tokens, embed), normal(embed, vocab) / embed**.5,
          r.integers(0, vocab - 3, (1, tokens)).astype(np.int32))


def blocks(impl: str, tokens: int) -> dict[str, int]:
  """By shape, but few where they are interpreted."""
  if impl != "pallas" or jax.default_backend() == "tpu":
    return {}
  return dict(chunk=8192, token_chunk=-(-tokens // 16) * 16)


def measure(impl: str, tokens: int, embed: int, vocab: int, repeats: int
            ) -> dict:
  """Seconds and bytes on this machine; runs alone in its process."""
  args = jax.device_put(arrays(tokens, embed, vocab))
  compiled = program(impl, vocab, **blocks(impl, tokens)).lower(*args).compile()
  before, seconds = _rss("VmRSS"), []
  _reset_peak()
  for _ in range(repeats + 1):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    seconds.append(time.perf_counter() - start)
  return dict(seconds=statistics.median(seconds[1:]),
              temp=compiled.memory_analysis().temp_size_in_bytes,
              peak=_rss("VmHWM") - before)


def _rss(field: str) -> int:
  with open("/proc/self/status") as f:
    return next(1024 * int(line.split()[1]) for line in f
                if line.startswith(field))


def _reset_peak() -> None:
  with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # man 5 proc: the peak becomes the present size


def on_tpu(topology: str, tokens: int, embed: int, vocab: int) -> dict:
  """Temp bytes of each, compiled for one chip that is not there; bf16 inputs."""
  # No TPU machine to ask about itself, no chip that two processes could take.
  os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
  chip = SingleDeviceSharding(topologies.get_topology_desc(
      platform="tpu", topology_name=topology).devices[0])
  shape = lambda x, dtype: jax.ShapeDtypeStruct(x, dtype, sharding=chip)
  args = (shape((1, tokens, embed), jnp.bfloat16),
          shape((embed, vocab), jnp.bfloat16), shape((1, tokens), jnp.int32))
  return {impl: program(impl, vocab).lower(*args).compile().memory_analysis()
          .temp_size_in_bytes for impl in IMPLEMENTATIONS}


def bf16_difference(embed: int, vocab: int) -> dict:
  """What bf16 costs in nats, the largest of 16 tokens: of the sums, of inputs.

  `sums`: against float64 of the same bf16 numbers; `inputs`: between float64 of
  the bf16 numbers and float64 of the float32 ones that they were rounded from.
  """
  hidden, unembed, targets = arrays(16, embed, vocab)
  def exact(h, w):
    z = np.float64(h) @ np.float64(w)
    z = z[..., :vocab - 3] / 0.9
    top = z.max(axis=-1, keepdims=True)
    norm = top + np.log(np.exp(z - top).sum(axis=-1, keepdims=True))
    return np.take_along_axis(z - norm, targets[..., None], -1)[..., 0]
  narrow = [np.asarray(jnp.bfloat16(x)) for x in (hidden, unembed)]
  want = exact(*narrow)
  gap = lambda x, y: float(np.abs(np.float64(x) - y).max())
  out = dict(inputs=gap(want, exact(hidden, unembed)))
  for impl in IMPLEMENTATIONS:
    _, got = program(impl, vocab, **blocks(impl, 16))(*narrow, targets)
    out[f"sums_{impl}"] = gap(got.logp, want)
  return out


def report() -> dict:
  tokens, embed = _TOKENS.value, _EMBED.value
  vocabs = [int(v) for v in _VOCABS.value]
  fresh = multiprocessing.get_context("spawn")
  out = dict(tokens=tokens, embed=embed, repeats=_REPEATS.value,
             device=jax.devices()[0].device_kind, cpu={}, tpu={})
  for vocab in vocabs:
    sides = {}
    for impl in IMPLEMENTATIONS:
      with concurrent.futures.ProcessPoolExecutor(1, fresh) as alone:
        sides[impl] = alone.submit(
            measure, impl, tokens, embed, vocab, _REPEATS.value).result()
      print(f"V = {vocab}, {impl}: {sides[impl]}", file=sys.stderr)
    over = lambda key: sides["chunked"][key] / sides["reference"][key]
    out["cpu"][vocab] = sides | {
        f"chunked_over_reference_{x}": over(x)
        for x in ("seconds", "temp", "peak")}
  out["bf16_nats"] = bf16_difference(embed, vocabs[0])
  if importlib.util.find_spec("libtpu") is None:
    out["tpu"] = "not compiled: pip install -e '.[tpu]'"
  else:
    out["tpu"] = dict(topology=_TOPOLOGY.value, temp={
        v: on_tpu(_TOPOLOGY.value, tokens, embed, v) for v in vocabs})
  return out


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  sizes = (_TOKENS.value, _EMBED.value, _REPEATS.value)
  if min(sizes) < 1 or any(int(v) < 4 for v in _VOCABS.value):
    sys.exit("error: expected sizes and --repeats >= 1 and --vocabs >= 4")
  print(json.dumps(report()))


if __name__ == "__main__":
  app.run(main)
