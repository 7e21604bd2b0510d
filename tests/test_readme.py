"""What the README says exists and runs."""

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
# Small enough to run here; everything else as the README has it.
SHRINK = ["--config.train.steps=2", "--config.warm_start.steps=1",
          "--config.warm_start.batch=8", "--config.rollout.batch_size=16",
          "--config.rollout.group_size=4", "--config.rollout.max_new_tokens=3",
          "--config.model.embed=16", "--config.model.mlp=16",
          "--config.model.layers=1", "--config.evaluate.prompts=4"]


def blocks(language):
  return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def shell_commands():
  text = "\n".join(blocks("bash")).replace("\\\n", " ")
  lines = [line.partition("#")[0].strip() for line in text.splitlines()]
  return [line for line in lines if line]


def test_make_targets_exist():
  targets = {c.split()[1] for c in shell_commands() if c.startswith("make ")}
  assert targets == {"run", "test"}
  for target in targets | {"slow"}:
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True,
                   capture_output=True)


def test_every_command_is_run_here():
  """Nothing in a bash block escapes the two tests below and above."""
  for command in shell_commands():
    assert command.startswith(("make ", "python -m rl_is.")), command


def test_python_commands_run(tmp_path):
  for command in shell_commands():
    if not command.startswith("python ") or (
        "rl_is.aot" in command and not importlib.util.find_spec("libtpu")):
      continue
    words = [w.replace("=runs/", f"={tmp_path}/") for w in shlex.split(command)]
    words += [f"--cache_dir={tmp_path}"] if "rl_is.aot" in words else []
    if "rl_is.main" in words and "--list_presets" not in words:
      words += SHRINK
    out = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, text=True, capture_output=True,
        env=dict(os.environ, XLA_FLAGS=""))
    assert out.returncode == 0, f"{command}\n{out.stderr[-2000:]}"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  """The README's first run, shrunk, with its rollouts."""
  path = tmp_path_factory.mktemp("stored") / "gspo"
  command = next(c for c in shell_commands() if "runs/gspo" in c)
  words = command.replace("runs/gspo", str(path)).split()
  subprocess.run([sys.executable, *words[1:], *SHRINK, "--config.store.every=1"],
                 cwd=ROOT, check=True, env=dict(os.environ, XLA_FLAGS=""))
  return path


@pytest.mark.parametrize("code", blocks("python"), ids=["store", "sweep", "own", "import"])
def test_python_blocks_run(code, tmp_path, request):
  """As written, except that the run is shrunk and put aside."""
  if "runs/gspo" in code:
    code = code.replace("runs/gspo", str(request.getfixturevalue("stored")))
  shrunk = "".join(
      f"overrides.apply(config, {s.split('=')[0].removeprefix('--config.')!r}, "
      f"{s.split('=')[1]!r})\n" for s in SHRINK)
  code = code.replace('train.run(config, "runs/', "from rl_is import overrides\n"
                      + shrunk + 'train.run(config, "runs/')
  code = code.replace('"runs/', f'"{tmp_path}/')
  out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True,
                       capture_output=True, env=dict(os.environ, XLA_FLAGS=""))
  assert out.returncode == 0, out.stderr[-2000:]


def gke_loop():
  loop, = [b for b in blocks("console") if "xpk workload" in b]
  return loop


def test_the_workloads_of_gke_are_named_and_told_as_xpk_takes_them():
  """In the shell as written; a function in the place of xpk shows its words."""
  out = subprocess.run(
      ["bash", "-ec", "xpk() { printf '%s\\n' \"$@\"; }\n" + gke_loop()],
      text=True, capture_output=True, check=True)
  names = re.findall("--workload=(.*)", out.stdout)
  assert names == ["eps-0p1", "eps-0p2", "eps-0p3"]
  # xpk's own rule; it refused a dot.
  assert all(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names)
  told = re.findall("--command=(.*)", out.stdout)
  assert [re.search("eps_high=(\\S+)", words)[1] for words in told] == [
      "0.1", "0.2", "0.3"]
  assert all(words.endswith("--coordinator=auto") for words in told)


# Not among the extras: its requirements are those of a cloud's tools.
@pytest.mark.skipif(shutil.which("xpk") is None,
                    reason="xpk is not installed: pip install xpk")
def test_the_workloads_of_gke_pass_a_dry_run(tmp_path):
  loop = gke_loop()
  loop = loop.replace("xpk workload create", "xpk workload create --dry-run "
                      "--skip-validation --project=P --zone=us-west4-a")
  out = subprocess.run(["bash", "-ec", loop], cwd=tmp_path, text=True,
                       capture_output=True)
  assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
  for eps in ("0.1", "0.2", "0.3"):
    assert f"--config.objective.constants.eps_high={eps} " in out.stdout
    assert f"name: eps-{eps.replace('.', 'p')}" in out.stdout


def test_the_sweep_file_is_one():
  from experiments import run_sweep
  found = {}
  exec(next(b for b in blocks("python") if "def sweep" in b), found)
  points = run_sweep.points_of(found["sweep"], found["get_config"]())
  groups, alone = run_sweep.grouped(points)
  assert [len(g) for g in groups] == [16] and not alone


def test_paths_exist():
  """Every path in backticks, links and the tree that is not made by a run."""
  named = set(re.findall(r"`((?:rl_is|configs|experiments|tests)/[\w./]*)`", TEXT))
  named |= set(re.findall(r"\]\((?!http)([\w./]+)\)", TEXT))
  tree, = blocks("text")
  named |= {line.split()[0] for line in tree.splitlines()}
  assert len(named) > 10
  for path in named:
    assert (ROOT / path).exists(), path


def test_flags_of_the_text_exist():
  """`objective.surrogate`, `rollout.lag` and their like are real fields."""
  from configs import common
  from rl_is import overrides
  fields = set(overrides.leaves(common.base()))
  for name in re.findall(r"`((?:objective|rollout|train)\.\w+)`", TEXT):
    assert name in fields, name


def test_the_table_of_methods_is_the_table_of_presets():
  from rl_is.objective import presets
  rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", TEXT, re.M))
  listed = {name: rows[name] for name in presets.PRESETS if name in rows}
  assert listed == {name: preset.source
                    for name, preset in presets.PRESETS.items()}
