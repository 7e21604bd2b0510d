"""A module imports only from floors below its own."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FLOORS = {
    "core": 0, "ops": 1, "kernels": 1, "objective": 2, "models": 2, "tasks": 2,
    "infra": 2, "learner": 3, "rollout": 3, "exact": 3}
COMMANDS = 4  # the modules in rl_is/ itself
# On floor 4: shared by all, and what one command may take from another.
SHARED = {"build", "command", "fields", "histogram", "idle", "overrides", "plots",
          "population", "saved", "tables"}
ALLOWED = {"main": None, "train": {"evaluate", "psis", "warm_start"},
           "sweep": {"evaluate", "psis", "warm_start"}}
# What each floor may import from outside, besides the standard library.
BARE = {"jax", "numpy"}
CONFIG_READERS = 4


def package(path):
  parts = path.relative_to(ROOT / "rl_is").parts
  return parts[0] if len(parts) > 1 else None


def imports(path):
  """Dotted names of everything imported, wherever in the file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(path):
  mine = package(path)
  floor = FLOORS[mine] if mine else COMMANDS
  for name in imports(path):
    top, *rest = name.split(".")
    if top in ("configs", "experiments", "benchmarks", "tests"):
      yield f"imports {name}, a script"
    if top == "ml_collections" and floor < CONFIG_READERS:
      yield f"imports {name}: only floor 4 reads a ConfigDict"
    if floor <= 1 and top in ("flax", "optax", "orbax", "absl", "matplotlib"):
      yield f"imports {name}: floors 0 and 1 are maths on arrays"
    if top != "rl_is" or not rest:
      continue
    other = rest[0]
    if other in FLOORS:
      if other != mine and FLOORS[other] >= floor:
        yield f"imports {name} of floor {FLOORS[other]}"
    elif floor < COMMANDS:
      if other != "__version__":
        yield f"imports {name}, a command"
    elif other not in SHARED:
      allowed = ALLOWED.get(path.stem, set())
      if allowed is not None and other not in allowed:
        yield f"imports {name}, another command"


def modules():
  return sorted((ROOT / "rl_is").rglob("*.py"))


@pytest.mark.parametrize(
    "path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_from_below(path):
  assert not list(violations(path))


def test_every_package_has_a_floor():
  found = {package(p) for p in modules()} - {None}
  assert found <= set(FLOORS)


def test_configs_import_only_ml_collections_and_each_other():
  for path in (ROOT / "configs").rglob("*.py"):
    for name in imports(path):
      assert name.split(".")[0] in ("ml_collections", "configs"), (
          path, name)


def test_a_violation_is_found(tmp_path, monkeypatch):
  """The test itself: a file that breaks each rule is caught."""
  bad = ROOT / "rl_is" / "ops" / "bad.py"
  text = ("import optax\nfrom rl_is.objective import spec\n"
          "from rl_is import train\nfrom ml_collections import ConfigDict\n"
          "from configs import common\n")
  monkeypatch.setattr(pathlib.Path, "read_text", lambda self: text)
  assert len(list(violations(bad))) == 5


def test_files_and_functions_stay_small():
  """Upper ends, not targets: beyond them a file is more than one topic."""
  for path in modules():
    source = path.read_text()
    assert source.count("\n") <= 450, path
    assert ast.get_docstring(ast.parse(source)), f"{path}: no docstring"
