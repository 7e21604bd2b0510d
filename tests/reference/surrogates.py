"""Float64 twins of the levels and of the soft and trust-region surrogates.

Written from the papers' equations; imports numpy only. A surrogate's twin
returns (loss [B, T], d sum(out * loss) / d logp); at a bound the gradient
passes whole. Loops over rows and tokens on purpose, as in `losses`.
"""

import math

import numpy as np


def tokens_of(row):
  return [t for t, m in enumerate(row) if m]


def runs_of(row):
  """Contiguous runs of the mask: [[0, 1], [3, 4]]."""
  runs = []
  for t in tokens_of(row):
    if runs and runs[-1][-1] == t - 1:
      runs[-1].append(t)
    else:
      runs.append([t])
  return runs


def spread(row, level):
  """W[t, u]: how much of token u's log ratio is in token t's."""
  W = np.zeros((len(row), len(row)))
  at = tokens_of(row)
  for t in at:
    if level == "token":
      over, share = [t], 1
    elif level in ("sequence_mean", "sequence_mean_token"):
      over, share = at, 1 / len(at)
    elif level == "sequence_sum":
      over, share = at, 1
    elif level == "prefix":
      over, share = [u for u in at if u <= t], 1
    elif level == "suffix":
      over, share = [u for u in at if u >= t], 1
    else:
      over, = (run for run in runs_of(row) if t in run)
      share = 1 / len(over)
    W[t, over] = share
  return W


def log_ratio(logp, anchor, mask, level="token"):
  out = np.zeros(np.shape(mask))
  for i, row in enumerate(np.asarray(mask)):
    diff = np.where(row, np.float64(logp[i]) - np.float64(anchor[i]), 0)
    out[i] = spread(row, level) @ diff
  return out


def to_logp(slope, mask, level):
  """d/d logp from d/d l, l the log ratio at the level."""
  out = np.zeros(np.shape(mask))
  for i, row in enumerate(np.asarray(mask)):
    own = level == "sequence_mean_token"  # GSPO eq. 14
    out[i] = spread(row, "token" if own else level).T @ slope[i]
  return out


def _each(token, logp, anchor, adv, mask, level, out):
  """token(i, t, l, A) -> (loss, d loss / d l, d loss / d logp by itself)."""
  l = log_ratio(logp, anchor, mask, level)
  loss, slope, direct = (np.zeros(np.shape(mask)) for _ in range(3))
  for i, row in enumerate(np.asarray(mask)):
    for t in tokens_of(row):
      o = 1 if out is None else out[i, t]
      loss[i, t], d_l, d_logp = token(i, t, l[i, t], float(adv[i, t]))
      slope[i, t], direct[i, t] = o * d_l, o * d_logp
  return loss, to_logp(slope, mask, level) + direct


def _clamp(l, limit):
  return max(-limit, min(limit, l)), float(-limit <= l <= limit)


def _exp(l, limit):
  l, passes = _clamp(l, limit)
  return math.exp(l), passes


def two_sided(logp, anchor, adv, mask, *, eps_low, eps_high, delta,
              level="token", limit=20., out=None):
  """INTELLECT-2: -min(min(r, delta) A, clip(r) A)."""
  def token(i, t, l, a):
    r, passes = _exp(l, limit)
    capped, clipped = min(r, delta), max(1 - eps_low, min(1 + eps_high, r))
    loss = -min(capped * a, clipped * a)
    moves = capped == r if capped * a <= clipped * a else clipped == r
    return loss, -a * r * passes * moves, 0.
  return _each(token, logp, anchor, adv, mask, level, out)


def sapo(logp, anchor, adv, mask, *, tau_pos, tau_neg, level="token", limit=20.,
         out=None):
  def token(i, t, l, a):
    r, passes = _exp(l, limit)
    tau = tau_pos if a > 0 else tau_neg
    h = 1 / (1 + math.exp(-tau * (r - 1)))
    return -a * 4 / tau * h, -a * 4 * h * (1 - h) * r * passes, 0.
  return _each(token, logp, anchor, adv, mask, level, out)


def gmpo(logp, anchor, adv, mask, *, log_low, log_high, level="token",
         limit=20., out=None):
  """exp of the row's mean of one-sidedly clipped log ratios, times -A."""
  l = log_ratio(logp, anchor, mask, level)
  loss, slope = np.zeros(np.shape(mask)), np.zeros(np.shape(mask))
  for i, row in enumerate(np.asarray(mask)):
    at = tokens_of(row)
    d, moves = {}, {}
    for t in at:
      a = adv[i, t]
      d[t] = 0. if a == 0 else (
          min(l[i, t], log_high) if a > 0 else max(l[i, t], -log_low))
      moves[t] = a != 0 and d[t] == l[i, t]
    if not at:
      continue
    R, passes = _exp(sum(d.values()) / len(at), limit)
    o = np.ones_like(adv[i]) if out is None else out[i]
    pull = sum(-o[t] * adv[i, t] for t in at) * R * passes / len(at)
    for t in at:
      loss[i, t], slope[i, t] = -adv[i, t] * R, pull * moves[t]
  return loss, to_logp(slope, mask, level)


def topr(logp, anchor, adv, mask, *, cap=1., level="sequence_sum", limit=20.,
         out=None):
  def token(i, t, l, a):
    w = min(_exp(l, limit)[0], cap) if a < 0 else 1.
    return -w * a * logp[i, t], 0., -w * a
  return _each(token, logp, anchor, adv, mask, level, out)


def vespo(logp, anchor, adv, mask, *, k_pos, lambda_pos, k_neg, lambda_neg,
          level="sequence_sum", limit=20., out=None):
  def token(i, t, l, a):
    W, _ = _exp(l, limit)
    k, lam = (k_neg, lambda_neg) if a < 0 else (k_pos, lambda_pos)
    phi = W ** k * math.exp(max(-700., lam * (1 - W)))
    return -phi * a * logp[i, t], 0., -phi * a
  return _each(token, logp, anchor, adv, mask, level, out)


def aspo(logp, anchor, adv, mask, *, eps_low, eps_high, clip_c=3., cap=3.,
         level="token", limit=20., out=None):
  def token(i, t, l, a):
    r, passes = _exp(l, limit)
    if a > 0:
      if r > 1 + eps_high:
        return -a / (1 + eps_high), 0., 0.
      w = min(1 / r, cap)
      return -a * w, -a * w, 0.  # w r/sg(r): the gradient never stops here
    bounded = max(1 - eps_low, min(clip_c, r))
    return -a * bounded, -a * r * passes * (bounded == r), 0.
  return _each(token, logp, anchor, adv, mask, level, out)


def dro(logp, anchor, adv, mask, *, beta, level="token", limit=20., out=None):
  def token(i, t, l, a):
    x, passes = _clamp(l, limit)
    return -(a * logp[i, t] - beta / 2 * x * x), beta * x * passes, -a
  return _each(token, logp, anchor, adv, mask, level, out)


def opmd(logp, anchor, adv, mask, *, tau, level="sequence_sum", limit=20.,
         out=None):
  def token(i, t, l, a):
    (x, passes), n = _clamp(l, limit), len(tokens_of(np.asarray(mask)[i]))
    return (-a * logp[i, t] + tau / 2 * x * x / n, tau * x * passes / n, -a)
  return _each(token, logp, anchor, adv, mask, level, out)


def _dppo(far, logp, anchor, adv, mask, cap, form, level, limit, out,
          kl_tau=0.):
  def token(i, t, l, a):
    p, q = (math.exp(float(x[i, t])) for x in (logp, anchor))
    r, passes = _exp(l, limit)
    w, moves = min(r, cap), float(r <= cap)
    loss = slope = direct = 0.
    if not far(p, q, a):
      if form == "score":
        loss, direct = -a * w * logp[i, t], -a * w
      else:
        loss, slope = -a * w, -a * r * passes * moves
    x, free = _clamp(float(logp[i, t]) - float(anchor[i, t]), limit)
    return loss + kl_tau * x * x, slope, direct + 2 * kl_tau * x * free
  return _each(token, logp, anchor, adv, mask, level, out)


def dppo_tv(logp, anchor, adv, mask, *, delta_low, delta_high, cap=math.inf,
            kl_tau=0., form="score", sides="advantage", level="token",
            limit=20., out=None):
  def far(p, q, a):
    up, down = p - q > delta_high, q - p > delta_low
    return (up or down) if sides == "both" else (up if a > 0 else down)
  return _dppo(far, logp, anchor, adv, mask, cap, form, level, limit, out,
               kl_tau)


def dppo_kl(logp, anchor, adv, mask, *, delta_low, delta_high, cap=math.inf,
            form="score", level="token", limit=20., out=None):
  def far(p, q, a):
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return (kl > delta_high and p > q) if a > 0 else (kl > delta_low and p < q)
  return _dppo(far, logp, anchor, adv, mask, cap, form, level, limit, out)


def _ppo(r, a, low, high):
  """(-min(r A, clip(r) A), whether r moves it)."""
  clipped = max(low, min(high, r)) * a
  return -min(r * a, clipped), r * a <= clipped


def bapo_bounds(logp, anchor, adv, mask, *, low=.6, low_max=.8, low_step=.05,
                high=1.2, high_max=2., high_step=.05, target=.5, level="token",
                limit=20.):
  """(low, high, share) of the positive part of sum |bounded r A|."""
  l = log_ratio(logp, anchor, mask, level)
  cells = [(_exp(l[i, t], limit)[0], float(adv[i, t]))
           for i, row in enumerate(np.asarray(mask)) for t in tokens_of(row)]
  def share():
    up = sum(min(r, high) * a for r, a in cells if a > 0)
    down = sum(max(r, low) * -a for r, a in cells if a < 0)
    return up / (up + down) if up + down else 0.
  while share() < target and low < low_max:
    low = min(low + low_step, low_max)
  while share() < target and high < high_max:
    high = min(high + high_step, high_max)
  return low, high, share()


def bapo(logp, anchor, adv, mask, *, level="token", limit=20., out=None, **kw):
  low, high, _ = bapo_bounds(logp, anchor, adv, mask, level=level, limit=limit,
                             **kw)
  def token(i, t, l, a):
    r, passes = _exp(l, limit)
    loss, moves = _ppo(r, a, low, high)
    return loss, -a * r * passes * moves, 0.
  return _each(token, logp, anchor, adv, mask, level, out)


def covariance(logp, adv, mask):
  """{(i, t): (A - mean A)(logp - mean logp)}."""
  at = [(i, t) for i, row in enumerate(np.asarray(mask))
        for t in tokens_of(row)]
  mean_a = sum(float(adv[c]) for c in at) / max(len(at), 1)
  mean_l = sum(float(logp[c]) for c in at) / max(len(at), 1)
  return {c: (adv[c] - mean_a) * (logp[c] - mean_l) for c in at}


def clip_cov(logp, anchor, adv, mask, *, eps_low, eps_high, cov_low, cov_high,
             level="token", limit=20., out=None):
  """With a cov_ratio of 1: every candidate is silenced, so nothing is drawn."""
  cov = covariance(logp, adv, mask)
  def token(i, t, l, a):
    r, passes = _exp(l, limit)
    loss, moves = _ppo(r, a, 1 - eps_low, 1 + eps_high)
    if moves and cov_low < cov[i, t] < cov_high:
      return 0., 0., 0.
    return loss, -a * r * passes * moves, 0.
  return _each(token, logp, anchor, adv, mask, level, out)


def kl_cov(logp, anchor, adv, mask, *, cov_ratio, kl_coef, level="token",
           limit=20., out=None):
  cov = covariance(logp, adv, mask)
  count = max(int(cov_ratio * len(cov)), 1)
  top = sorted(cov, key=cov.get, reverse=True)[:count]
  def token(i, t, l, a):
    r, passes = _exp(l, limit)
    x, free = _clamp(l, limit)
    coef = kl_coef * ((i, t) in top)
    return (-a * r + coef * abs(x),
            -a * r * passes + coef * float(np.sign(x)) * free, 0.)
  return _each(token, logp, anchor, adv, mask, level, out)
