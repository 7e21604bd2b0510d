"""One number a token: returns, value targets, whitening, value loss. Floor 1.

Recursions run backwards over the tokens of one row by one `lax.scan`, and pass
over masked positions: the token before a hole is followed by the one after it
(`carry`, as verl, NeMo-RL and Tunix), and a row's last token by nothing (value
0, no bootstrap). Weights and targets are detached where they are made; only
`value_loss` is differentiable, in `value`. `advantages` is one number a row.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rl_is.core import checks, masked
from rl_is.core.types import Array, TokenLoss, pytree

MASK_RULES = ("carry", "ignore")
HOLES = ("carry", "restart")


@pytree
class Estimate:
  """What a recursion over a row gives: [B, T], detached, 0 off the mask."""

  adv: Array  # what multiplies the score in a policy gradient
  target: Array  # what the value (or q) is regressed on
  q: Array | None = None  # estimate of the value of the action taken


def _backward(step, mask: Array, *xs: Array):
  """step((B-shaped carry), x_t) from the last unmasked token to the first.

  The carry starts as zeros, one for each element that `step` returns.
  """
  x_t = tuple(jax.ShapeDtypeStruct(x.shape[:1], x.dtype) for x in xs)
  carry, _ = jax.eval_shape(step, (0., 0.), x_t)
  start = jax.tree.map(lambda c: jnp.zeros(c.shape, c.dtype), carry)

  def body(carry, at):
    m, x = at
    new, out = step(carry, x)
    keep = lambda a, b: jnp.where(m, a, b)
    return (jax.tree.map(keep, new, carry),
            jax.tree.map(lambda o: masked.fill(o, m), out))

  _, out = lax.scan(body, start, (mask.T, jax.tree.map(jnp.transpose, xs)),
                    reverse=True)
  return jax.tree.map(jnp.transpose, out)


def _inputs(fn, mask, **arrays):
  """Checked, widened to one dtype, detached and 0 off the mask."""
  (name, x), *others = arrays.items()
  checks.like(fn, {name: x}, **dict(others))
  mask = checks.as_mask(fn, mask, jnp.shape(x))
  dtype = jnp.result_type(*(masked.wide(x).dtype for x in arrays.values()))
  return mask, *(lax.stop_gradient(masked.fill(
      jnp.asarray(x, dtype), mask)) for x in arrays.values())


def _saturate(acc, max_log_ratio):
  """A product of ratios may grow over a row without bound: hold it finite."""
  bound = jnp.exp(2.0 * max_log_ratio)
  return masked.clamp(acc, -bound, bound)


@checks.ranged(gamma=checks.UNIT, lam=checks.UNIT)
def gae(reward_tok: Array, value: Array, mask: Array, *, gamma: Array | float,
        lam: Array | float, mask_rule: str = "carry") -> Estimate:
  """Generalised advantage estimation, per token.

    A_t = d_t + gamma lam A_{t+1},  d_t = r_t + gamma V_{t+1} - V_t

  **Source**: Schulman et al., "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", 2015, https://arxiv.org/abs/1506.02438,
    eq. 16 (number unverified).
  **Departs**: not whitened (see `whiten`: verl, Tunix and SkyRL always do).
    "ignore" is SkyRL's: the recursion runs over masked positions as given.

  Args:
    reward_tok, value: [B, T] float.
    mask: [B, T] bool or 0/1.
    gamma, lam: in [0, 1].
    mask_rule: "carry" or "ignore".

  Returns:
    Estimate: adv; target = adv + value.

  Raises:
    ValueError: on another shape, an integer dtype, an unknown rule.

  Limits: under "ignore" what stands off the mask counts.
  """
  checks.choice("gae: mask_rule", mask_rule, MASK_RULES)
  checks.like("gae", dict(reward_tok=reward_tok))
  mask = checks.as_mask("gae", mask, jnp.shape(reward_tok))
  seen, r, v = _inputs(
      "gae", mask if mask_rule == "carry" else jnp.ones_like(mask),
      reward_tok=reward_tok, value=value)

  def step(carry, x):
    v_next, acc = carry
    r, v = x
    acc = r + gamma * v_next - v + gamma * lam * acc
    return (v, acc), acc

  adv = masked.fill(_backward(step, seen, r, v), mask)
  return Estimate(adv, masked.fill(adv + v, mask))


@checks.ranged(gamma=checks.UNIT)
def returns(reward_tok: Array, mask: Array, *, gamma: Array | float = 1.0,
            holes: str = "carry") -> Array:
  """Discounted sum of the rewards from each token on: [B, T], detached.

    G_t = r_t + gamma G_{t+1}

  holes: over masked positions it is carried on, or starts anew ("restart").
  """
  checks.choice("returns: holes", holes, HOLES)
  mask, r = _inputs("returns", mask, reward_tok=reward_tok)

  def step(carry, x):
    r, live = x
    acc = jnp.where(live, r + gamma * carry[0], 0)
    return (acc, acc), acc

  seen = mask if holes == "carry" else jnp.ones_like(mask)
  return _backward(step, seen, r, mask)


def rows_mask(fn: str, reward: Array, mask: Array) -> Array:
  """The mask as bool, checked to have one row for each reward."""
  checks.vector(fn, reward=reward)
  if jnp.ndim(mask) != 2 or jnp.shape(mask)[0] != jnp.shape(reward)[0]:
    raise ValueError(f"{fn}: mask: expected shape [B, T] with B = "
                     f"{jnp.shape(reward)[0]}, got {jnp.shape(mask)}")
  return jnp.asarray(mask) != 0


def at_last(reward: Array, mask: Array) -> Array:
  """A row's reward at its last token, as a token reward: [B, T]."""
  mask = rows_mask("at_last", reward, mask)
  seen = jnp.cumsum(mask, axis=1)
  return jnp.where(mask & (seen == seen[:, -1:]),
                   masked.wide(reward)[:, None], 0)


def _ratio(logp, behaviour, mask, max_log_ratio):
  return jnp.exp(masked.clamp(masked.fill(logp - behaviour, mask),
                              -max_log_ratio, max_log_ratio))


@checks.ranged(gamma=checks.UNIT, lam=checks.UNIT, leak=checks.UNIT,
               rho_bar=checks.POSITIVE, c_bar=checks.POSITIVE,
               pg_bar=checks.POSITIVE, max_log_ratio=checks.POSITIVE)
def vtrace(logp: Array, logp_behaviour: Array, reward_tok: Array, value: Array,
           mask: Array, value_next: Array | None = None, *,
           gamma: Array | float = 1.0, lam: Array | float = 1.0,
           rho_bar: Array | float = 1.0, c_bar: Array | float = 1.0,
           pg_bar: Array | float = 1.0, leak: Array | float = 0.0,
           max_log_ratio: Array | float = 20.0) -> Estimate:
  """V-trace: off-policy value targets and advantages, per token.

    e_t = rho_t (r_t + gamma V_{t+1} - V_t) + gamma lam c_t e_{t+1}
    q_t = r_t + gamma (V_{t+1} + lam e_{t+1}),  A_t = min(pg_bar, k_t)(q_t-V_t)
    rho = min(rho_bar, k), c = min(c_bar, k), k = e^{logp - behaviour}

  **Source**: Espeholt et al., "IMPALA", 2018, https://arxiv.org/abs/1802.01561,
    eq. 1 and section 4.1; leak: Zahavy et al., "A Self-Tuning Actor-Critic",
    2020, https://arxiv.org/abs/2002.12928 (unverified): every clipped ratio
    becomes (1 - leak) min(., k) + leak k. rlax's alpha is 1 - leak.
  **Departs**: lam in q as rlax; TorchRL: lam = 1, pg_bar = rho_bar. Log ratios
    clamped; errors saturate at e^(2 max_log_ratio).

  Args:
    logp, logp_behaviour: [B, T] float, nats.
    reward_tok, value: [B, T] float.
    mask: [B, T] bool or 0/1.
    value_next: [B, T] float or None: V_{t+1}, if it is not the value of the
      next unmasked token (a bootstrap; rlax reads the next position's).
    gamma, lam, leak: in [0, 1].
    rho_bar, c_bar, pg_bar: > 0, absolute, may be inf.
    max_log_ratio: nats, > 0.

  Returns:
    Estimate: adv; target = value + e; q.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: with gamma = lam = 1, a constant value b and a reward R at the end,
    A_t = prod_{i >= t} min(1, k_i) (R - b): it vanishes in long rows.
  """
  given = {} if value_next is None else dict(value_next=value_next)
  mask, logp, behaviour, r, v, *given = _inputs(
      "vtrace", mask, logp=logp, logp_behaviour=logp_behaviour,
      reward_tok=reward_tok, value=value, **given)
  k = _ratio(logp, behaviour, mask, max_log_ratio)
  leaked = leak * jnp.where(jnp.asarray(leak) > 0, k, 0)
  cut = lambda bar: (1 - leak) * masked.clamp(k, high=bar) + leaked

  def step(carry, x):
    v_next, error = carry
    r, v, rho, c, pg, *given = x
    v_next = given[0] if given else v_next
    q = r + gamma * (v_next + lam * error)
    error = _saturate(rho * (r + gamma * v_next - v) + gamma * lam * c * error,
                      max_log_ratio)
    return (v, error), (pg * (q - v), v + error, q)

  return Estimate(*_backward(step, mask, r, v, cut(rho_bar), cut(c_bar),
                             cut(pg_bar), *given))


@checks.ranged(rho_bar=checks.POSITIVE)
def vtrace_policy(logits: Array, logits_behaviour: Array, *,
                  rho_bar: Array | float) -> Array:
  """Log of the policy whose value V-trace converges to, [..., V], nats.

    pi_rho(a) = min(rho_bar mu(a), pi(a)) / sum_b min(rho_bar mu(b), pi(b))

  **Source**: Espeholt et al., 2018, https://arxiv.org/abs/1802.01561, eq. 3.
  """
  pi, mu = (jax.nn.log_softmax(masked.wide(x), axis=-1)
            for x in (logits, logits_behaviour))
  return jax.nn.log_softmax(jnp.minimum(jnp.log(rho_bar) + mu, pi), axis=-1)


@checks.ranged(gamma=checks.UNIT, lam=checks.UNIT,
               max_log_ratio=checks.POSITIVE)
def retrace(logp: Array, logp_behaviour: Array, reward_tok: Array, q: Array,
            value: Array, mask: Array, *, gamma: Array | float = 1.0,
            lam: Array | float = 1.0, max_log_ratio: Array | float = 20.0
            ) -> Estimate:
  """Retrace(lambda): off-policy targets of action values, per token.

    e_t = r_t + gamma V_{t+1} - q_t + gamma c_{t+1} e_{t+1},  c = lam min(1, k)

  **Source**: Munos et al., "Safe and Efficient Off-Policy Reinforcement
    Learning", 2016, https://arxiv.org/abs/1606.02647, eq. 3 and 4.
  **Departs**: nothing; V_t = E_policy q(x_t, .) is given, as only sampled
    tokens are here. The first ratio is not used: q_t is of the action taken.

  Args: as `vtrace`, and q: [B, T] float.

  Returns:
    Estimate: adv = target - value; target = q + e.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: the trace only shrinks: it is short where the policies differ.
  """
  mask, logp, behaviour, r, q, v = _inputs(
      "retrace", mask, logp=logp, logp_behaviour=logp_behaviour,
      reward_tok=reward_tok, q=q, value=value)
  c = lam * masked.clamp(_ratio(logp, behaviour, mask, max_log_ratio), high=1.0)

  def step(carry, x):
    v_next, trace = carry
    r, q, v, c = x
    target = r + gamma * (v_next + trace)
    return (v, c * (target - q)), (target - v, target)

  return Estimate(*_backward(step, mask, r, q, v, c))


@checks.ranged(gamma=checks.UNIT, lam=checks.UNIT,
               max_log_ratio=checks.POSITIVE)
def importance_corrected_td_errors(
    logp: Array, logp_behaviour: Array, reward_tok: Array, value: Array,
    mask: Array, *, gamma: Array | float = 1.0, lam: Array | float = 1.0,
    max_log_ratio: Array | float = 20.0) -> Array:
  """Lambda-return errors with per-decision importance sampling, per token.

    e_t = k_t (d_t + gamma lam e_{t+1}),  d_t = r_t + gamma V_{t+1} - V_t

  **Source**: Precup et al., "Eligibility Traces for Off-Policy Policy
    Evaluation", 2000 (no stable address); as rlax, which cites Sutton and
    Barto, chapter 12 (unverified).
  **Departs**: log ratios clamped; errors saturate at e^(2 max_log_ratio), where
    rlax overflows (pass inf).

  Args: as `vtrace`.

  Returns:
    [B, T] float32 or wider, detached: target = value + it; 0 off the mask.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: unbiased; its variance grows exponentially with the length.
  """
  mask, logp, behaviour, r, v = _inputs(
      "importance_corrected_td_errors", mask, logp=logp,
      logp_behaviour=logp_behaviour, reward_tok=reward_tok, value=value)

  def step(carry, x):
    v_next, error = carry
    r, v, k = x
    error = _saturate(k * (r + gamma * v_next - v + gamma * lam * error),
                      max_log_ratio)
    return (v, error), error

  return _backward(step, mask, r, v,
                   _ratio(logp, behaviour, mask, max_log_ratio))


@checks.ranged()
def whiten(x: Array, mask: Array, *, ddof: Array | float = 1.0,
           var_eps: Array | float = 1e-8) -> Array:
  """Mean 0 and variance 1 over all unmasked elements of the batch.

    (x_t - mean) / sqrt(var + var_eps),  var with n - ddof; two-pass

  **Source**: practice of PPO (Andrychowicz et al., "What Matters in On-Policy
    Reinforcement Learning", 2020, https://arxiv.org/abs/2006.05990).
  **Departs**: ddof 1 as verl and Tunix; NeMo-RL: 0 and max(var, var_eps).
    Equal elements give exactly 0. Off the mask 0 (Tunix, verl's GAE: junk).

  Args:
    x: [B, T] float; detached.
    mask: [B, T] bool or 0/1.
    ddof: 0 or 1.
    var_eps: >= 0; 0 is safe.

  Returns:
    [B, T] float32 or wider, 0 off the mask.

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: over global arrays, before any split. Fewer than two elements: 0.
  """
  mask, x = _inputs("whiten", mask, x=x)
  count = jnp.sum(mask, dtype=x.dtype)
  smallest = jnp.min(masked.fill(x, mask, jnp.inf), initial=jnp.inf)
  above = jnp.where(mask, x - smallest, 0)
  x = jnp.where(mask, above - jnp.sum(above) / jnp.maximum(count, 1), 0)
  # Large values are made small first, so that no square is too large.
  unit = jnp.maximum(masked.power_of_two(x), 1)
  x = x / unit
  var = jnp.sum(jnp.square(x)) / jnp.maximum(count - ddof, 1)
  scale = lax.rsqrt(jnp.where(var == 0, 1, var + var_eps / unit / unit))
  return jnp.where(mask, x * scale, 0)


@checks.ranged(clip=checks.POSITIVE)
def value_loss(value: Array, value_old: Array, target: Array, mask: Array, *,
               clip: Array | float) -> TokenLoss:
  """Squared error of the value, kept close to the old value, per token.

    L_t = max((V - G)^2, (C - G)^2) / 2,  C = V within V_old +- clip

  **Source**: the PPO code of Schulman et al. (openai/baselines, 2017); not in
    the paper. The half as verl and TRL.
  **Departs**: nothing; clip = inf is the plain squared error. At a bound the
    gradient passes whole.

  Args:
    value, value_old, target: [B, T] float; only `value` is differentiable.
    mask: [B, T] bool or 0/1.
    clip: > 0, in units of the value.

  Returns:
    TokenLoss: loss [B, T]; aux `clip_value` (bool, where the bound binds: the
    token has no gradient).

  Raises:
    ValueError: on another shape or an integer dtype.

  Limits: with rewards on another scale the clip is another one.
  """
  checks.like("value_loss", dict(value=value), value_old=value_old,
              target=target)
  mask = checks.as_mask("value_loss", mask, jnp.shape(value))
  v = masked.fill(masked.wide(value), mask)
  old, target = (lax.stop_gradient(masked.fill(masked.wide(x), mask))
                 for x in (value_old, target))
  free = jnp.square(v - target)
  bound = jnp.square(masked.clamp(lax.stop_gradient(v), old - clip, old + clip)
                     - target)
  binds = mask & (bound > lax.stop_gradient(free))
  return TokenLoss(masked.fill(0.5 * jnp.where(binds, bound, free), mask),
                   dict(clip_value=binds))
