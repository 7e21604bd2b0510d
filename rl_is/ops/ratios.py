"""Log ratios of two policies at each level, and made-up anchors. Floor 1.

Everything is `[B, T]` float32 (or wider), nats; a row is one sequence. What a
ratio is *over* is its level:

  token                 l_t = logp_t - anchor_t
  sequence_mean         mean of l_t over the row's mask, on every token (GSPO)
  sequence_mean_token   the same value, but its gradient is the token's own
                        (GSPO-token)
  sequence_sum          sum over the row, on every token: the product of ratios
  prefix                sum over the row's tokens up to and with t
  suffix                sum over the row's tokens from t on
  segment               mean over the token's own contiguous run of the mask (a
                        turn), on every token of it

The anchor is always detached: the gradient flows through `logp` alone. Two
anchors are computed rather than scored: a log-linear mixture of the current
policy and the behaviour (A-3PO), and the policy at averaged weights (PPO-EWMA).
"""

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, Params


def _token(diff: Array, mask: Array) -> Array:
  return diff


def _sequence_mean(diff: Array, mask: Array) -> Array:
  return masked.fill(
      jnp.broadcast_to(masked.row_mean(diff, mask), diff.shape), mask)


def _sequence_mean_token(diff: Array, mask: Array) -> Array:
  mean = lax.stop_gradient(_sequence_mean(diff, mask))
  return diff - lax.stop_gradient(diff) + mean


def _sequence_sum(diff: Array, mask: Array) -> Array:
  row = jnp.sum(diff, axis=1, keepdims=True)
  return masked.fill(jnp.broadcast_to(row, diff.shape), mask)


def _prefix(diff: Array, mask: Array) -> Array:
  return masked.fill(lax.cumsum(diff, axis=1), mask)


def _suffix(diff: Array, mask: Array) -> Array:
  return masked.fill(lax.cumsum(diff, axis=1, reverse=True), mask)


def _segment(diff: Array, mask: Array) -> Array:
  # A difference of prefix sums would carry one run's inf or NaN to the next.
  before = jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]
  run = jnp.cumsum(mask & ~before, axis=1)  # 1, 2, ... along the row
  runs = diff.shape[1] + 1
  per_run = jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, runs))
  count = per_run(mask.astype(diff.dtype), run)
  mean = per_run(diff, run) / jnp.maximum(count, 1)
  return masked.fill(jnp.take_along_axis(mean, run, axis=1), mask)


LEVELS = {
    "token": _token,
    "sequence_mean": _sequence_mean,
    "sequence_mean_token": _sequence_mean_token,
    "sequence_sum": _sequence_sum,
    "prefix": _prefix,
    "suffix": _suffix,
    "segment": _segment,
}


def log_ratio(logp: Array, logp_anchor: Array, mask: Array, *,
              level: str = "token") -> Array:
  """Log ratio of `logp` to the anchor at a level, per token.

    token: l_t = logp_t - sg(anchor_t)
    sequence_mean: (1/|y|) sum_t l_t, repeated over the row
    sequence_mean_token: l_t - sg(l_t) + sg((1/|y|) sum_t l_t)
    sequence_sum: sum_u l_u; prefix: sum_{u <= t} l_u; suffix: sum_{u >= t} l_u
    segment: the mean of l over the contiguous run of the mask that holds t

  **Source**: Zheng et al., "Group Sequence Policy Optimization", 2025,
    https://arxiv.org/abs/2507.18071, eq. 7 (sequence) and 14 (token variant);
    prefix: Precup et al., "Eligibility Traces for Off-Policy Policy
    Evaluation", 2000, per-decision weights (unverified); segment: ROLL's.
  **Departs**: no clamp here; verl and SkyRL clamp the GSPO log ratio at 10. The
    sums have no length normalisation: their spread grows with the row.

  Args:
    logp: [B, T] float, nats.
    logp_anchor: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    level: a key of `LEVELS`.

  Returns:
    [B, T] float32 or wider, nats; 0 off the mask. Differentiable in `logp`.

  Raises:
    ValueError: on another shape, an integer log-prob, an unknown level.

  Limits: a row without tokens gives 0. A non-finite unmasked input stays
    non-finite, here and in every mean or sum that holds it. bf16 inputs are
    subtracted in float32: they have already lost about 1e-2 nats each.
  """
  checks.like("log_ratio", dict(logp=logp), logp_anchor=logp_anchor)
  mask = checks.as_mask("log_ratio", mask, jnp.shape(logp))
  checks.choice("log_ratio: level", level, LEVELS)
  logp = masked.fill(masked.wide(logp), mask)
  anchor = masked.fill(masked.wide(logp_anchor), mask)
  return LEVELS[level](logp - lax.stop_gradient(anchor), mask)


def ratio(log_ratio_: Array, max_log_ratio: Array | float) -> Array:
  """exp of the log ratio clamped to +-max_log_ratio.

  Beyond the clamp the value stays and the gradient is zero.
  """
  return jnp.exp(masked.clamp(log_ratio_, -max_log_ratio, max_log_ratio))


@checks.ranged(steps=checks.POSITIVE, fresh=checks.UNIT)
def behaviour_share(version: Array, version_now: Array | int, *,
                    steps: Array | float = 1.0,
                    fresh: Array | float = 0.0) -> Array:
  """How much of a log-linear anchor is the behaviour's, per token.

    alpha = min(steps / d, 1) for d = version_now - version > 0, else `fresh`

  **Source**: Li et al., "A-3PO", 2025, https://arxiv.org/abs/2512.06547 (alpha
    = 1/d, 0 at d = 0; author and number unverified).
  **Departs**: AReaL writes the current policy's share, (v_prox - v) / (v_now -
    v) = 1 - steps/d with steps = v_now - v_prox; at d = 0 its anchor is the
    behaviour (`fresh` = 1), the paper's the current policy (`fresh` = 0).

  Args:
    version: integer, any shape: updates behind the weights that drew a token.
    version_now: integer, a scalar or that shape: updates behind `logp`.
    steps: updates since the proximal policy, > 0.
    fresh: the share where nothing is stale, in [0, 1].

  Returns:
    float32 in [0, 1], of the shape of `version`.

  Raises:
    ValueError: if a version is not an integer.

  Limits: a version of -1 (off the mask) is taken as it stands: mask later.
  """
  for name, x in dict(version=version, version_now=version_now).items():
    if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
      raise ValueError(f"behaviour_share: {name}: expected an integer dtype, "
                       f"got {jnp.result_type(x)}")
  gap = (version_now - jnp.asarray(version)).astype(jnp.float32)
  share = jnp.minimum(steps / jnp.maximum(gap, 1), 1)
  return jnp.where(gap > 0, share, fresh)


@checks.ranged(alpha=checks.UNIT)
def log_linear_anchor(logp: Array, logp_behaviour: Array, mask: Array, *,
                      alpha: Array | float) -> Array:
  """A proximal policy without a forward pass: between behaviour and current.

    log p_prox = sg(alpha log q + (1 - alpha) log p)

  **Source**: Li et al., "A-3PO", 2025, https://arxiv.org/abs/2512.06547 (author
    and number unverified); AReaL's `prox_logp_method: loglinear`.
  **Departs**: not normalised over the vocabulary, as in the source. `alpha` is
    given (see `behaviour_share`): a number or one a token.

  Args:
    logp: [B, T] float, nats; detached.
    logp_behaviour: [B, T] float, nats; detached.
    mask: [B, T] bool or 0/1.
    alpha: the behaviour's share in [0, 1]; a scalar or [B, T].

  Returns:
    [B, T] float32 or wider, nats; detached, 0 off the mask.

  Raises:
    ValueError: on another shape or an integer log-prob.

  Limits: the surrogate's ratio is then (p/q)^alpha: alpha = 0 never clips.
  """
  fn = "log_linear_anchor"
  checks.like(fn, dict(logp=logp), logp_behaviour=logp_behaviour)
  if jnp.ndim(alpha):
    checks.like(fn, dict(logp=logp), alpha=alpha)
  mask = checks.as_mask(fn, mask, jnp.shape(logp))
  current = masked.fill(masked.wide(logp), mask)
  behaviour = masked.fill(masked.wide(logp_behaviour), mask)
  if jnp.ndim(alpha):
    alpha = masked.fill(alpha, mask)
  return lax.stop_gradient(alpha * behaviour + (1 - alpha) * current)


@checks.ranged(decay=checks.UNIT)
def ewma(params_ema: Params, params: Params, decay: Array | float) -> Params:
  """Averaged weights, whose policy is PPO-EWMA's proximal one. Any pytree.

    ema <- decay ema + (1 - decay) params

  **Source**: Hilton, Cobbe and Schulman, "Batch size-invariance for policy
    optimization", 2021, https://arxiv.org/abs/2110.00641, section 3.2 (number
    unverified).
  **Departs**: start it at the first params; the authors' code also keeps a
    total weight, so that young averages forget faster.

  Args:
    params_ema, params: the same pytree of arrays.
    decay: in [0, 1).

  Returns:
    The pytree, detached, in the dtypes of `params_ema`; computed in float32.

  Raises:
    ValueError: from jax, if the trees differ.

  Limits: in bf16 a step below 2^-8 of a weight is lost: keep it in float32.
  """
  def step(ema, x):
    new = decay * masked.wide(ema) + (1 - decay) * masked.wide(x)
    return lax.stop_gradient(new).astype(jnp.asarray(ema).dtype)
  return jax.tree.map(step, params_ema, params)


def ewma_age(decay: Array | float) -> Array | float:
  """Mean age of what `ewma` averages, in updates: 1 / (1 - decay) - 1."""
  return 1 / (1 - decay) - 1


def ewma_batch_rule(
    divide_by: Array | float, *, decay: Array | float,
    learning_rate: Array | float
) -> tuple[Array | float, Array | float]:
  """(decay, learning rate) after the batch is divided by a number.

  The age, counted in samples, stays: age' = divide_by * age; and for Adam
  learning_rate' = learning_rate / sqrt(divide_by).

  **Source**: Hilton et al., 2021, https://arxiv.org/abs/2110.00641, section 4.1
    (number unverified). It needs one epoch a batch, and an advantage
    normaliser whose span is also `divide_by` times as many updates.
  """
  age = divide_by * ewma_age(decay)
  return 1 - 1 / (1 + age), learning_rate / divide_by ** 0.5
