"""One stored case of a peer, and what our code makes of it.

A case is known by its `function` and `config`, never by its name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl_is import ops
from rl_is.core.types import Batch, PolicyOutputs
from rl_is.objective import constants as constants_lib, dialects
from rl_is.objective.compose import Objective
from rl_is.ops import regularizers, values


@dataclasses.dataclass
class Case:
  """A variant on one set of inputs."""

  config: dict[str, Any]
  function: str | None
  arrays: list[str]  # what is stored of it
  adv: str | None  # "tok", "seq" or None
  x: dict[str, np.ndarray]  # the inputs
  is_nonfinite: bool = False  # the peer's own numbers are not finite
  scale: float = 1.0  # what stands outside of our objective
  replace: dict[str, Any] = dataclasses.field(default_factory=dict)  # in Spec

  @property
  def mask(self) -> np.ndarray:
    return self.x["mask"] != 0

  @property
  def token_adv(self) -> np.ndarray:
    """The advantages that the case names, [B, T]."""
    if self.adv == "seq":
      return np.broadcast_to(self.x["adv_seq"][:, None], self.x["adv"].shape)
    return self.x["adv"]

  def __getitem__(self, name: str) -> jax.Array:
    return jnp.asarray(self.x[name])


@dataclasses.dataclass(frozen=True)
class Rule:
  """A departure on purpose: the numbers must differ, or the config be refused."""

  why: str
  when: Callable[[Case], bool]


@dataclasses.dataclass(frozen=True)
class Helper:
  """A function of a peer called alone -> ours: arrays by their stored names."""

  when: Callable[[Case], bool]
  call: Callable[[Case], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Peer:
  """What is particular to the stored numbers of one peer."""

  system: str | None  # its dialect; None: it has no configuration
  # Keys of the harness, which are not the peer's: what they do to the case.
  harness: dict[str, Callable[[Case, Any], None]] = dataclasses.field(
      default_factory=dict)
  always: Callable[[Case], None] = lambda case: None  # and without any key
  helpers: tuple[Helper, ...] = ()
  rules: tuple[Rule, ...] = ()
  # Arrays of a loss: name -> f(case, prepared batch).
  arrays: dict[str, Callable[[Case, Batch], Any]] = dataclasses.field(
      default_factory=dict)
  # Stored arrays that are not compared, each with a reason.
  skipped: dict[str, str] = dataclasses.field(default_factory=dict)


def ignored(case: Case, value: Any) -> None:
  """A key of the harness that changes nothing here."""


def apply_harness(peer: Peer, case: Case) -> None:
  peer.always(case)
  for key in list(case.config):
    if key in peer.harness:
      peer.harness[key](case, case.config.pop(key))


def batch_of(case: Case) -> Batch:
  x, mask = case.x, jnp.asarray(case.mask)
  return Batch(
      tokens=jnp.zeros(mask.shape, jnp.int32), valid=mask, mask=mask,
      reward=case["rewards"], group=first_rows(x["group"]),
      logp_behaviour=case["behav"], logp_prox=case["old"], logp_ref=case["ref"],
      baseline=case["baseline"], value=case["values"], adv=jnp.asarray(case.token_adv))


def first_rows(group: np.ndarray) -> jax.Array:
  """Any prompt ids -> ids in [0, B)."""
  return jnp.asarray(np.unique(group, return_inverse=True)[1], jnp.int32)


def objective_of(peer: Peer, case: Case) -> tuple[Objective, dict]:
  dialect = dialects.translate(peer.system, case.config)
  name, options = dialect.spec.advantage, dialect.spec.options
  if name != "given":  # its options go with it
    its = ops.ADVANTAGES[name].options
    options = tuple(o for o in options if o[0] not in its)
  changes = {"advantage": "given", "advantage_norm": "none", "options": options,
             **case.replace}
  spec = dataclasses.replace(dialect.spec, **changes)
  return (Objective(spec, full_diagnostics=False),
          constants_lib.resolve(spec, dialect.constants, {}))


def loss_of(peer: Peer, case: Case) -> dict[str, Any]:
  """config -> dialect -> objective -> loss, gradient, and arrays."""
  objective, constants = objective_of(peer, case)
  prepared = objective.prepare(batch_of(case), constants)
  entropy = case["entropy"] if constants["entropy_coef"] else None

  def loss(logp):
    return case.scale * objective.loss(
        PolicyOutputs(logp, entropy), prepared, constants,
        jax.random.key(0))[0]

  value, grad = jax.value_and_grad(loss)(case["logp"])
  out = {name: fn(case, prepared) for name, fn in peer.arrays.items()
         if name in case.arrays}
  return {"loss": value, "grad": grad, **out}


def advantages_of(peer: Peer, case: Case) -> jax.Array:
  """config -> dialect -> objective -> advantages [B, T]; 0 off the mask."""
  return prepared(peer.system, case.config, batch_of(case)).adv


def prepared(system: str, config: dict[str, Any], batch: Batch) -> Batch:
  """The batch as the config's objective prepares it."""
  dialect = dialects.translate(system, config)
  constants = constants_lib.resolve(dialect.spec, {}, dialect.constants)
  return Objective(dialect.spec, full_diagnostics=False).prepare(
      batch, constants)


def kl(case: Case, name: str, **limits: float) -> dict[str, Any]:
  """A regularizer on the case's reference, as `summed`."""
  fn = getattr(regularizers, name)
  return summed(case, lambda logp: fn(
      logp, case["ref"], case["mask"] != 0, **limits))


def value_loss(case: Case, clip: float | None, mean: Callable) -> dict[str, Any]:
  """`mean(loss, mask)` of the clipped value loss, and its gradient."""
  mask = case["mask"] != 0

  def total(value):
    token = values.value_loss(value, case["values"], case["returns"], mask,
                              clip=jnp.inf if clip is None else clip).loss
    return mean(token, mask)

  loss, grad = jax.value_and_grad(total)(case["vpred"])
  return {"loss": loss, "grad_vpred": grad, "grad": jnp.zeros_like(grad)}


def summed(case: Case, per_token: Callable) -> dict[str, Any]:
  """A KL helper: `per_token(logp)`, its sum over the mask, the sum's gradient."""
  mask = jnp.asarray(case.mask)
  total = lambda logp: jnp.sum(jnp.where(mask, per_token(logp), 0.0))
  value, grad = jax.value_and_grad(total)(case["logp"])
  return {"kl": per_token(case["logp"]), "loss": value, "grad": grad}


def compare(case: Case, got: dict[str, Any], want: dict[str, np.ndarray],
            skipped) -> list[str]:
  """The names that disagree, by the tolerances of golden/README.md."""
  wrong = []
  for name, w in want.items():
    if name in ("loss64", "metrics") or name in skipped:
      continue
    assert name in got, f"nothing to compare {name} with"
    w, g = np.asarray(w, np.float64), np.asarray(got[name], np.float64)
    assert g.shape == w.shape, (name, g.shape, w.shape)
    if name == "loss":
      same = abs(g - w) <= 1e-4 * max(abs(w), 1e-3)
    else:
      if not name.startswith("grad") and w.shape == case.mask.shape:
        g, w = g[case.mask], w[case.mask]
      largest = np.abs(w).max(initial=0.0)
      same = np.all(np.abs(g - w) <= 1e-5 * largest + 1e-8)
    if not same:
      wrong.append(name)
  return wrong


def evaluate(peer: Peer, case: Case) -> dict[str, Any]:
  apply_harness(peer, case)
  for helper in peer.helpers:
    if helper.when(case):
      return helper.call(case)
  return loss_of(peer, case)
