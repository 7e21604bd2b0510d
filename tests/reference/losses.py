"""Float64 numpy twins, written from the papers' equations. Imports numpy only.

Loops over rows and tokens on purpose: these are to be read next to a paper.
Every `[B, T]` result is 0 off the mask. `grad` is the derivative of
sum(out * loss) with respect to `logp`; `out` is all ones unless given. At a
clip bound a gradient passes whole.
"""

import math

import numpy as np

from reference.surrogates import log_ratio, to_logp  # all levels


def cells(mask):
  """Positions (row, token) that the mask leaves."""
  return [(i, t) for i, row in enumerate(np.asarray(mask))
          for t, m in enumerate(row) if m]


def zeros(mask):
  return np.zeros(np.shape(mask), np.float64)


# Ratios.


def _clamped_exp(l, limit):
  """(exp of the clamped log ratio, whether a gradient passes the clamp)."""
  return math.exp(max(-limit, min(limit, l))), -limit <= l <= limit


# Surrogates: (loss [B, T], grad [B, T]).


def pg(logp, adv, mask, out=None):
  """REINFORCE: -A logp."""
  loss, grad = zeros(mask), zeros(mask)
  for i, t in cells(mask):
    loss[i, t] = -adv[i, t] * logp[i, t]
    grad[i, t] = -adv[i, t] * (1 if out is None else out[i, t])
  return loss, grad


def _of_ratio(token, logp, anchor, adv, mask, level, limit, out):
  """`token(r, A) -> (loss, d loss / d r)` applied to every token."""
  l = log_ratio(logp, anchor, mask, level)
  loss, slope = zeros(mask), zeros(mask)
  for i, t in cells(mask):
    r, passes = _clamped_exp(l[i, t], limit)
    loss[i, t], d_r = token(r, float(adv[i, t]))
    slope[i, t] = d_r * r * passes * (1 if out is None else out[i, t])
  return loss, to_logp(slope, mask, level)


def _ppo(r, a, low, high):
  """PPO eq. 7 with DAPO's two bounds: -min(r A, clip(r) A)."""
  plain, clipped = r * a, max(low, min(high, r)) * a
  return -min(plain, clipped), (-a if plain <= clipped else 0.0)


def ppo_clip(logp, anchor, adv, mask, *, eps_low, eps_high, level="token",
             max_log_ratio=20.0, out=None):
  def token(r, a):
    return _ppo(r, a, 1 - eps_low, 1 + eps_high)
  return _of_ratio(token, logp, anchor, adv, mask, level, max_log_ratio, out)


def dual_clip(logp, anchor, adv, mask, *, eps_low, eps_high, clip_c,
              level="token", max_log_ratio=20.0, out=None):
  """Ye et al. 2020: max(min(r A, clip(r) A), c A) where A < 0."""
  def token(r, a):
    loss, d_r = _ppo(r, a, 1 - eps_low, 1 + eps_high)
    if a < 0 and -loss < clip_c * a:
      return -clip_c * a, 0.0
    return loss, d_r
  return _of_ratio(token, logp, anchor, adv, mask, level, max_log_ratio, out)


def cispo(logp, anchor, adv, mask, *, cap, floor=0.0, level="token",
          max_log_ratio=20.0, out=None):
  """MiniMax-M1: -sg(clip(r, floor, cap)) A logp."""
  l = log_ratio(logp, anchor, mask, level)
  loss, grad = zeros(mask), zeros(mask)
  for i, t in cells(mask):
    r, _ = _clamped_exp(l[i, t], max_log_ratio)
    w = max(floor, min(cap, r))
    loss[i, t] = -w * adv[i, t] * logp[i, t]
    grad[i, t] = -w * adv[i, t] * (1 if out is None else out[i, t])
  return loss, grad


# Corrections: (weight [B, T], keep [B, T]).


def _weights(token, num, behaviour, mask, level, limit):
  l = log_ratio(num, behaviour, mask, level)
  weight, keep = zeros(mask), np.zeros(np.shape(mask), bool)
  for i, t in cells(mask):
    weight[i, t], keep[i, t] = token(
        l[i, t], math.exp(max(-limit, min(limit, l[i, t]))))
  return weight, keep


def tis(num, behaviour, mask, *, cap, level="token", max_log_ratio=20.0):
  def token(l, w):
    return min(w, cap), True
  return _weights(token, num, behaviour, mask, level, max_log_ratio)


def mis(num, behaviour, mask, *, cap, level="token", max_log_ratio=20.0):
  def token(l, w):
    keep = l <= math.log(cap)
    return (w if keep else 0.0), keep
  return _weights(token, num, behaviour, mask, level, max_log_ratio)


def icepop(num, behaviour, mask, *, low, high, level="token",
           max_log_ratio=20.0):
  def token(l, w):
    keep = math.log(low) <= l <= math.log(high)
    return (w if keep else 0.0), keep
  return _weights(token, num, behaviour, mask, level, max_log_ratio)


# Advantages: [B]; NaN rewards count nowhere and get 0.


def _per_group(one_of, reward, group):
  reward = np.asarray(reward, np.float64)
  out = np.zeros(len(reward))
  for i, r in enumerate(reward):
    mates = [reward[j] for j in range(len(reward))
             if group[j] == group[i] and not math.isnan(reward[j])]
    if not math.isnan(r):
      out[i] = one_of(r, mates)
  return out


def grpo(reward, group, *, std_eps=1e-6):
  def one(r, mates):
    if max(mates) == min(mates):
      return 0.0
    mean = sum(mates) / len(mates)
    var = sum((m - mean) ** 2 for m in mates) / (len(mates) - 1)
    return (r - mean) / (math.sqrt(var) + std_eps)
  return _per_group(one, reward, group)


def dr_grpo(reward, group):
  def one(r, mates):
    return r - sum(mates) / len(mates)
  return _per_group(one, reward, group)


def rloo(reward, group):
  def one(r, mates):
    others = sum(mates) - r
    return r - others / (len(mates) - 1) if len(mates) > 1 else 0.0
  return _per_group(one, reward, group)


def reward(reward, group):
  return _per_group(lambda r, mates: r, reward, group)


# Aggregations: (total, count); the mean is total / count.


def token_mean(loss, mask):
  """DAPO eq. 8: over all tokens of the batch."""
  return sum(loss[i, t] for i, t in cells(mask)), len(cells(mask))


def _over_rows(of_row, loss, mask):
  rows = [[loss[i, t] for t, m in enumerate(row) if m]
          for i, row in enumerate(np.asarray(mask))]
  rows = [row for row in rows if row]
  return sum(of_row(row) for row in rows), len(rows)


def sequence_mean_token_mean(loss, mask):
  """GRPO eq. 3: over the sequences, of the mean over each one's tokens."""
  return _over_rows(lambda row: sum(row) / len(row), loss, mask)


def constant_length(loss, mask, *, length):
  """Dr. GRPO: over the sequences, of the sum over a constant."""
  return _over_rows(lambda row: sum(row) / length, loss, mask)


# KL estimators: (value [B, T], grad [B, T]).


def _kl(token, logp, ref, mask):
  value, grad = zeros(mask), zeros(mask)
  for i, t in cells(mask):
    value[i, t], grad[i, t] = token(float(logp[i, t]) - float(ref[i, t]))
  return value, grad


def k1(logp, ref, mask):
  return _kl(lambda x: (x, 1.0), logp, ref, mask)


def k2(logp, ref, mask):
  return _kl(lambda x: (x * x / 2, x), logp, ref, mask)


def k3(logp, ref, mask, *, max_log_ratio=20.0):
  """e^d - 1 - d with d = ref - logp; d/d logp = 1 - e^d within the clamp."""
  def token(x):
    d = max(-max_log_ratio, min(max_log_ratio, -x))
    return math.expm1(d) - d, -math.expm1(d) * (d == -x)
  return _kl(token, logp, ref, mask)


# Diagnostics and scoring.


def ess(weights):
  """Kong: (sum w)^2 / (n sum w^2)."""
  w = [float(x) for x in weights]
  return sum(w) ** 2 / (len(w) * sum(x * x for x in w))


def score(logits, target, *, temperature=1.0, vocab_size=None, kept=None,
          softcap=None):
  """One position: (log-prob of the target, entropy, {id: log-prob}).

  `kept`: the softmax is over these ids (-1 is no id) and the target.
  """
  real = range(len(logits) if vocab_size is None else vocab_size)
  z = {}
  for v in real:
    if kept is None or v in kept or v == target:
      x = float(logits[v])
      if softcap is not None:
        x = softcap * math.tanh(x / softcap)
      z[v] = x / temperature
  top = max(z.values())
  norm = top + math.log(sum(math.exp(x - top) for x in z.values()))
  logp = {v: x - norm for v, x in z.items()}
  entropy = -sum(math.exp(x) * x for x in logp.values())
  return logp[target], entropy, logp
