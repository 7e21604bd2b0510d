"""What a compiled program sends between devices, from its HLO text. Floor 2."""

import collections
import math
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all",
         "collective-permute", "ragged-all-to-all")
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
          "s32": 4, "u32": 4, "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "f32": 4,
          "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OP = re.compile(rf"= (.*?)\b({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\])")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def collectives(text: str) -> dict:
  """Per device and call of the program, by kind: count, bytes of the results,
  bytes that go out of the device on a ring; and loops of unknown length.

  What stands in a loop counts as often as the loop goes round, which is read from
  its condition (a counter from 0 below a constant); in another loop, once. A
  channel counts once in each body: a fused one is written in several stages.
  """
  bodies, entry = _computations(text)
  counts, sizes, wires = (collections.Counter() for _ in range(3))
  unknown = 0

  def visit(name: str, times: float, channels: set[str]) -> None:
    nonlocal unknown
    for line in bodies.get(name, ()):
      found = _OP.search(line)
      channel = _CHANNEL.search(line)
      if found and not (channel and channel[1] in channels):
        channels |= {channel[1]} if channel else set()
        kind, size = found[2], _largest(found[1])
        counts[kind] += times
        sizes[kind] += times * size
        wires[kind] += times * _wire(kind, size, _group(line))
      inner, own = times, channels
      if " while(" in line:
        trips = _trips(line, bodies)
        inner, own = times * (trips or 1), set()
        unknown += trips is None
      called = _CALLED.findall(line)
      for branches in _BRANCHES.findall(line):
        called += [b.strip().lstrip("%") for b in branches.split(",")]
      for other in called:
        visit(other, inner, own)

  visit(entry, 1, set())
  return dict(
      kinds={k: dict(count=counts[k], bytes=sizes[k], wire_bytes=wires[k])
             for k in KINDS if counts[k]},
      wire_bytes=sum(wires.values()), loops_of_unknown_length=unknown)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  bodies, entry, lines = {}, "", []
  for line in text.splitlines():
    head = None if line.startswith(" ") else _HEAD.match(line)
    if head:
      lines = bodies[head[2]] = []
      entry = head[2] if head[1] else entry
    elif line.startswith(" "):
      lines.append(line)
  return bodies, entry


def _largest(shapes: str) -> float:
  """Bytes of the largest array: an asynchronous start names its input too."""
  return max((_BYTES.get(dtype, 4) * math.prod(
      int(n) for n in dims.split(",") if n)
              for dtype, dims in _SHAPE.findall(shapes)), default=0)


def _trips(line: str, bodies: dict[str, list[str]]) -> int | None:
  known = _TRIPS.search(line)
  if known:
    return int(known[1])
  lines = bodies.get(_CONDITION.search(line)[1], ())
  constants = [int(x) for one in lines for x in _CONSTANT.findall(one)]
  counts_up = any("compare(" in one and "direction=LT" in one for one in lines)
  return constants[0] if counts_up and len(constants) == 1 and (
      len(lines) <= 4) else None


def _group(line: str) -> int:
  """Devices that take part together; 2 where the text does not say."""
  found = _MESH_GROUPS.search(line)
  if found:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
  found = _GROUPS.search(line)
  if not found:
    return 2
  return len(found[1].split(",")) if found[1] else int(found[3])


def _wire(kind: str, size: float, group: int) -> float:
  """Bytes out of a device on a ring of `group`; `size` of the whole."""
  if kind == "collective-permute":
    return size
  if kind == "reduce-scatter":
    size *= group  # the result is a part
  return size * (group - 1) / group * (2 if kind == "all-reduce" else 1)
