"""Every test runs on CPU with 8 forced devices and strict rank promotion."""

import atexit
import os
import pathlib
import shutil
import sys
import tempfile

# Before jax is imported. Entry points never set these; tests do.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") +
                           " --xla_force_host_platform_device_count=8")

# Most of a test's time is XLA's. The processes of one session (xdist's workers,
# the commands that tests start) compile each program once between them; every
# session begins with an empty cache.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  cache = tempfile.mkdtemp(prefix="rl_is_test_cache_")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
  atexit.register(shutil.rmtree, cache, ignore_errors=True)

ROOT = pathlib.Path(__file__).parents[1]
# `from configs import ...` as when run from the repository, and
# `from reference import ...` for the float64 twins.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def one_device():
  """What a run on one device uses; the session has eight."""
  return jax.devices()[:1]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
  """Where the runs of a test file have their one warm start."""
  return str(tmp_path_factory.mktemp("warm") / "start")


_ran = 0


def pytest_runtest_teardown():
  """Thousands of small programs in one process: gigabytes, unless let go."""
  global _ran
  _ran += 1
  if _ran % 300 == 0:
    jax.clear_caches()
