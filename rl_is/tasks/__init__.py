"""Tasks and rewards: text problems with a verifier. Floor 2.

`make_task("addition", digits=2)`, `make_task("gym:leg_counting", size=500)`.
"""

import inspect

from rl_is.core import checks
from rl_is.tasks.base import Problem, Task, reward, split
from rl_is.tasks.gym import reasoning_gym_task
from rl_is.tasks.tokenizer import ByteTokenizer, CharTokenizer
from rl_is.tasks.toy import addition, spell_backward

TASKS = {
    "addition": addition,
    "spell_backward": spell_backward,
}

_GYM = "gym:"


def make_task(name: str, **kwargs) -> Task:
  """A task of TASKS, or "gym:<data set of reasoning-gym>"."""
  if name.startswith(_GYM):
    return reasoning_gym_task(name.removeprefix(_GYM), **kwargs)
  if name not in TASKS:
    raise ValueError(checks.unknown("task", name, TASKS)
                     + f"; or {_GYM}<data set of reasoning-gym>")
  accepted = tuple(inspect.signature(TASKS[name]).parameters)
  unknown = [key for key in kwargs if key not in accepted]
  if unknown:
    raise ValueError(f"task {name!r}: unknown arguments {', '.join(unknown)}; "
                     f"accepted: {', '.join(accepted)}")
  return TASKS[name](**kwargs)
