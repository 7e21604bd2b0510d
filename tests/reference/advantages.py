"""Float64 twins of the advantages, written from the equations. numpy only.

Loops over rows on purpose. A NaN reward is left out of everything and gets 0.
"""

import math

import numpy as np


def _others(reward, group, i):
  return [float(r) for j, r in enumerate(reward)
          if j != i and group[j] == group[i] and not math.isnan(r)]


def _members(reward, group, i):
  return [j for j, r in enumerate(reward)
          if group[j] == group[i] and not math.isnan(r)]


def _each(reward, group, fn):
  """fn(i, R_i, rewards of its group), 0 where the reward is NaN."""
  out = np.zeros(len(reward))
  for i, r in enumerate(reward):
    if not math.isnan(r):
      own = [float(reward[j]) for j in _members(reward, group, i)]
      out[i] = fn(i, float(r), own)
  return out


def _scaled(x, values, ddof, eps):
  if len(values) <= ddof or np.var(values, ddof=ddof) == 0:
    return 0.
  return x / (np.std(values, ddof=ddof) + eps)


def grpo(reward, group, std="unbiased", eps=1e-6):
  every = [float(r) for r in reward if not math.isnan(r)]

  def one(i, r, own):
    if std == "leave_one_out":
      rest = _others(reward, group, i)
      if not rest:
        return 0.
      centred = r - np.mean(rest)
      spread = len(rest) > 1 and min(rest) != max(rest)
      return centred / (np.std(rest, ddof=1) + eps) if spread else centred
    values = every if std == "batch" else own
    return _scaled(r - np.mean(own), values, std != "biased", eps)

  return _each(reward, group, one)


def remax(reward, group, baseline):
  return np.nan_to_num(np.float64(reward) - np.float64(baseline))


def weighted(reward, group, weight):
  """Reward minus the group's mean under `weight`: OPO with the lengths."""

  def one(i, r, own):
    w = [float(weight[j]) for j in _members(reward, group, i)]
    return r - (np.dot(w, own) / sum(w) if sum(w) else np.mean(own))

  return _each(reward, group, one)


def gpg(reward, group):
  scorable = [float(r) for r in reward if not math.isnan(r)]
  alpha = len(scorable) / max(sum(r != 0 for r in scorable), 1)
  return _each(reward, group, lambda i, r, own: alpha * (r - np.mean(own)))


def pass_at_k(reward, group, std="none", eps=1e-6):

  def one(i, r, own):
    rest = _others(reward, group, i)
    lead = max(r - max(rest), 0) if rest else 0.
    return lead if std == "none" else _scaled(lead, own, 1, eps)

  return _each(reward, group, one)


def max_rl(reward, group, eps=1e-6):
  return _each(reward, group, lambda i, r, own:
               (r - np.mean(own)) / (np.mean(own) + eps))


def whiten(x, mask, ddof=1, eps=1e-8):
  at = np.asarray(mask, bool)
  values = np.float64(x)[at]
  out = np.zeros(at.shape)
  if values.size:
    var = np.sum((values - values.mean())**2) / max(values.size - ddof, 1)
    out[at] = (values - values.mean()) / math.sqrt(var + eps)
  return out


def reinforce_pp(reward, mask, gamma=1., penalty=None, ddof=1):
  """The return to go over the row's tokens, whitened over the batch."""
  returns = np.zeros(np.shape(mask))
  seen = np.asarray(mask, bool) & ~np.isnan(reward)[:, None]
  for i, row in enumerate(seen):
    following, last = 0., True
    for t in reversed(np.flatnonzero(row)):
      r = float(reward[i]) if last else 0.
      if penalty is not None:
        r -= float(penalty[i, t])
      following = returns[i, t] = r + gamma * following
      last = False
  return whiten(returns, seen, ddof)


def optimal_token_baseline(reward, group, mask, logp, sum_prob_sq, weight=None,
                           lone="zero"):
  seen = np.asarray(mask, bool) & ~np.isnan(reward)[:, None]
  energy, out = np.zeros(seen.shape), np.zeros(seen.shape)
  for i, row in enumerate(seen):
    running = 0.
    for t in np.flatnonzero(row):
      w = 1. if weight is None else float(weight[i, t])
      running += w**2 * (1 - 2 * math.exp(logp[i, t]) + float(sum_prob_sq[i, t]))
      energy[i, t] = running
  for i, t in zip(*np.nonzero(seen)):
    rows = [j for j in range(len(reward)) if group[j] == group[i] and seen[j, t]]
    own = energy[rows, t]
    if len(rows) == 1:
      out[i, t] = float(reward[i]) if lone == "reward" else 0.
    else:
      out[i, t] = reward[i] - np.dot(own, np.float64(reward)[rows]) / own.sum()
  return out
