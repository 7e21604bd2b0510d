"""A run's directory: whose it is, and what made it. Floor 2."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
from typing import Any

from etils import epath

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"a": {"b": 1}} -> {"a.b": 1}."""
  out = {}
  for key, value in tree.items():
    name = f"{prefix}{key}"
    out |= flatten(value, name + ".") if isinstance(value, dict) else {
        name: value}
  return out


def claim(path: str, identity: dict[str, Any], name: str = "config.json"
          ) -> None:
  """Makes the directory this run's, or finds that it is.

  The same identity may come again (it resumes); another is refused with the
  keys that differ, so that two runs never mix in one directory.
  """
  directory = epath.Path(path)
  if directory.exists() and not directory.is_dir():
    raise ValueError(f"{path}: expected a directory, found a file")
  file = directory / name
  identity = json.loads(json.dumps(identity))  # as it will be read back
  if file.exists():
    old, new = flatten(json.loads(file.read_text())), flatten(identity)
    differ = sorted(k for k in old.keys() | new.keys()
                    if old.get(k) != new.get(k))
    if differ:
      shown = "; ".join(f"{k}: {old.get(k)!r} there, {new.get(k)!r} now"
                        for k in differ)
      raise ValueError(f"{file} is of a run with another config ({shown}); "
                       "give another workdir, or the old values")
    return
  directory.mkdir(parents=True, exist_ok=True)
  write_json(file, identity)


@contextlib.contextmanager
def lock(path: str):
  """Holds the directory for this process; a second one is refused by name.

  The lock goes with the process, however it ends. On gs:// there is none.
  """
  if "://" in str(path):
    yield
    return
  os.makedirs(path, exist_ok=True)
  with open(os.path.join(path, ".lock"), "a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise ValueError(f"{path}: in use by process {file.read().strip()}"
                       ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    yield


def write_json(file: os.PathLike, value: Any) -> None:
  write_text(file, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_text(file: os.PathLike, text: str) -> None:
  """Whole or not at all."""
  with replacing(file) as temporary:
    temporary.write_text(text)


@contextlib.contextmanager
def replacing(file: os.PathLike, what: str = "it"):
  """Yields a path beside the file, which takes its place or is removed."""
  file = epath.Path(file)
  # The dot: who reads the whole folder, as pandas does, passes it over.
  temporary = file.parent / f".{file.name}.tmp"
  with writing(file, what):
    try:
      yield temporary
      temporary.replace(file)
    except OSError:
      temporary.unlink(missing_ok=True)
      raise


@contextlib.contextmanager
def writing(file: os.PathLike, what: str = "it"):
  """Names the file when it cannot be written: a full disk's error does not."""
  try:
    yield
  except OSError as error:
    raise OSError(f"{file}: cannot write {what}: {error}") from None


def provenance() -> dict[str, str]:
  """Git commit and versions of what computes."""
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return dict(python=platform.python_version(), git=_commit(), **versions)


def _commit() -> str:
  """The checkout's commit, "+changes" if it is not clean; or "unknown"."""
  here = os.path.dirname(os.path.abspath(__file__))
  git = lambda *args: subprocess.run(
      ["git", "-C", here, *args], capture_output=True, text=True, check=True
  ).stdout.strip()
  try:
    dirty = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+changes" if dirty else "")
  except (OSError, subprocess.CalledProcessError):
    return "unknown"  # installed without its repository
