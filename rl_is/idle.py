"""Constants that a user set and that did nothing. Floor 4."""

from collections.abc import Mapping

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from rl_is.build import Parts
from rl_is.objective import constants as constants_lib


class Idle:
  """Finds constants that a user set and that never touched a token.

  A sweep over such a constant is one run repeated: better said than drawn.
  """

  def __init__(self, config: ConfigDict, parts: Parts):
    spec, extra = parts.objective.spec, dict(parts.objective.extra)
    given = {k for k, v in config.objective.constants.items() if v is not None}
    pieces = {spec.surrogate: ("clip/frac",)} | {
        c.name: (f"{c.name}/changed_frac", f"{c.name}/masked_frac")
        for c in spec.corrections}
    self._watched = {name: pieces[piece] for (piece, kw), name in constants_lib.names(
        spec, extra).items() if piece in pieces and kw not in constants_lib.SHARED
        and given & {name, f"{piece}_{kw}"}}
    self._acted = {name: 0.0 for name in self._watched}
    self._is_blank = True

  def see(self, row: Mapping[str, float]) -> None:
    self._is_blank = False
    for name, metrics in list(self._watched.items()):
      if not any(m in row for m in metrics):  # a gate, a penalty: it has no bound
        del self._watched[name], self._acted[name]
        continue
      self._acted[name] += sum(np.nan_to_num(row.get(m, 0.0)) for m in metrics)

  def never(self) -> list[str]:
    return [] if self._is_blank else sorted(
        name for name, acted in self._acted.items() if not acted)

  def warn(self) -> None:
    if self.never():
      logging.warning(
          "config.objective.constants: %s set, but acted on no token in the "
          "steps of this call: other values may give the same run",
          ", ".join(self.never()))
