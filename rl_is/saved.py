"""What a finished or running run left in its workdir. Floor 4."""

import json
from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict

from rl_is import build as build_lib
from rl_is.build import Parts
from rl_is.infra.checkpoint import Checkpoints
from rl_is.learner.state import State
from rl_is.objective import spec as spec_lib


class Run(NamedTuple):
  config: ConfigDict
  parts: Parts
  state: State
  step: int


def config_of(workdir: str) -> ConfigDict:
  file = epath.Path(workdir) / "config.json"
  if not file.exists():
    raise FileNotFoundError(f"{workdir}: no run there (no config.json)")
  return ConfigDict(json.loads(file.read_text()))


def newest(workdir: str, config: ConfigDict | None = None, devices=None) -> Run:
  """The newest checkpoint; config: the run's own, changed where it may be."""
  config = config_of(workdir) if config is None else config
  parts = build_lib.build(config, corrections=_unknown_corrections(config),
                          devices=devices)
  checkpoints = Checkpoints(workdir)
  found = checkpoints.restore_newest(build_lib.abstract_state(config, parts))
  checkpoints.close()
  if found is None:
    raise FileNotFoundError(f"{workdir}: no checkpoint there yet")
  return Run(config, parts, found.state["learner"], found.position["step"])


def _unknown_corrections(config: ConfigDict) -> dict:
  """Stand-ins for a user's own corrections: nothing here calls them."""
  text = config.objective.corrections
  names = [c.row for c in spec_lib.parse_corrections(text or "none")]
  return {name: build_lib.stand_in for name in names
          if name not in spec_lib.corrections_table({})}
