"""Float64 twins of the value recursions, from the papers' sums. numpy only.

The recursions of the code are sums of products here, so that the two do not
share a mistake. A row is the list of its unmasked tokens.
"""

import math

import numpy as np


def _rows(mask):
  for i, row in enumerate(np.asarray(mask, bool)):
    yield i, list(np.flatnonzero(row))


def _next(x, i, at, s):
  return float(x[i, at[s + 1]]) if s + 1 < len(at) else 0.


def gae(r, v, mask, gamma, lam):
  """GAE eq. 16: sum over l of (gamma lam)^l d_{t+l}."""
  out = np.zeros(np.shape(mask))
  for i, at in _rows(mask):
    d = [r[i, t] + gamma * _next(v, i, at, s) - v[i, t]
         for s, t in enumerate(at)]
    for s, t in enumerate(at):
      out[i, t] = sum((gamma * lam)**l * d[s + l] for l in range(len(at) - s))
  return out


def _ratio(logp, behaviour, i, t, limit=20.):
  return math.exp(max(-limit, min(limit, logp[i, t] - behaviour[i, t])))


def vtrace(logp, behaviour, r, v, mask, gamma=1., lam=1., rho_bar=1., c_bar=1.,
           pg_bar=1., leak=0.):
  """IMPALA eq. 1 -> (adv, target, q)."""
  cut = lambda k, bar: (1 - leak) * min(bar, k) + leak * k
  out = [np.zeros(np.shape(mask)) for _ in range(3)]
  for i, at in _rows(mask):
    k = [_ratio(logp, behaviour, i, t) for t in at]
    d = [cut(k[s], rho_bar) * (r[i, t] + gamma * _next(v, i, at, s) - v[i, t])
         for s, t in enumerate(at)]
    error = [0.] * (len(at) + 1)
    for s in range(len(at)):
      for u in range(s, len(at)):
        trace = math.prod(lam * cut(k[j], c_bar) for j in range(s, u))
        error[s] += gamma**(u - s) * trace * d[u]
    for s, t in enumerate(at):
      q = r[i, t] + gamma * (_next(v, i, at, s) + lam * error[s + 1])
      out[0][i, t] = cut(k[s], pg_bar) * (q - v[i, t])
      out[1][i, t], out[2][i, t] = v[i, t] + error[s], q
  return out


def retrace(logp, behaviour, r, q, v, mask, gamma, lam):
  """Retrace eq. 3 -> target of q."""
  out = np.zeros(np.shape(mask))
  for i, at in _rows(mask):
    c = [lam * min(1, _ratio(logp, behaviour, i, t)) for t in at]
    d = [r[i, t] + gamma * _next(v, i, at, s) - q[i, t]
         for s, t in enumerate(at)]
    for s, t in enumerate(at):
      out[i, t] = q[i, t] + sum(
          gamma**(u - s) * math.prod(c[s + 1:u + 1]) * d[u]
          for u in range(s, len(at)))
  return out


def td_errors(logp, behaviour, r, v, mask, gamma, lam):
  """Per-decision importance sampling: sum of (gamma lam)^l prod(k) d."""
  out = np.zeros(np.shape(mask))
  for i, at in _rows(mask):
    k = [_ratio(logp, behaviour, i, t) for t in at]
    d = [r[i, t] + gamma * _next(v, i, at, s) - v[i, t]
         for s, t in enumerate(at)]
    for s, t in enumerate(at):
      out[i, t] = sum((gamma * lam)**(u - s) * math.prod(k[s:u + 1]) * d[u]
                      for u in range(s, len(at)))
  return out


def value_loss(v, old, target, mask, clip):
  """(loss, d loss / d v, where the bound binds)."""
  loss, grad, binds = (np.zeros(np.shape(mask)) for _ in range(3))
  for i, at in _rows(mask):
    for t in at:
      near = max(old[i, t] - clip, min(old[i, t] + clip, v[i, t]))
      free, bound = (v[i, t] - target[i, t])**2, (near - target[i, t])**2
      loss[i, t] = max(free, bound) / 2
      binds[i, t] = bound > free
      grad[i, t] = 0 if bound > free else v[i, t] - target[i, t]
  return loss, grad, binds
