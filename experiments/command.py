"""What the commands of all experiments share: stops, verdicts. Floor 5."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

from rl_is.infra.preemption import Stopped


@contextlib.contextmanager
def runs() -> Iterator[None]:
  """Around the runs: a stopped one ends the command, not as a PASS would."""
  try:
    yield
  except Stopped as stopped:
    print(stopped, file=sys.stderr)
    sys.exit(128 + stopped.signum)


def judge(claims: Sequence[tuple[bool, str]], figure: Sequence[str]) -> None:
  """Prints each claim with PASS or FAIL; the exit code is 1 if one fails."""
  for holds, sentence in claims:
    print("PASS" if holds else "FAIL", sentence)
  print("figure:", " ".join(figure))
  sys.exit(0 if all(holds for holds, _ in claims) else 1)
