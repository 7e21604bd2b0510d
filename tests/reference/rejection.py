"""Float64 numpy twins of the masks, the further KL terms and aggregations, and
score centring. Imports numpy only.

Loops over rows and tokens on purpose: these are to be read next to a paper.
Every `[B, T]` result is 0 (or False) off the mask; `l` is num - behaviour.
"""

import math

import numpy as np


def rows(mask):
  """(row, its unmasked positions)."""
  return [(i, [t for t, m in enumerate(row) if m])
          for i, row in enumerate(np.asarray(mask))]


def _l(num, behaviour, i, t):
  return float(num[i, t]) - float(behaviour[i, t])


def _keep(mask, of_row):
  """keep from `of_row(i, positions) -> {position: keep}`."""
  keep = np.zeros(np.shape(mask), bool)
  for i, at in rows(mask):
    for t, k in of_row(i, at).items():
      keep[i, t] = k
  return keep


def geometric_mask(num, behaviour, mask, *, low, high):
  def of_row(i, at):
    k = math.exp(sum(_l(num, behaviour, i, t) for t in at) / max(len(at), 1))
    return {t: low <= k <= high for t in at}
  return _keep(mask, of_row)


def ratio_mask(num, behaviour, mask, *, low, high):
  def of_row(i, at):
    return {t: low <= math.exp(_l(num, behaviour, i, t)) <= high for t in at}
  return _keep(mask, of_row)


def token_veto(num, behaviour, mask, *, low, high):
  def of_row(i, at):
    bad = [t for t in at
           if not low <= math.exp(_l(num, behaviour, i, t)) <= high]
    return {t: not bad for t in at}
  return _keep(mask, of_row)


def k_rejection(num, behaviour, mask, *, upper, lower=-math.inf, estimator,
                statistic, direction, max_log_ratio=20.0):
  """Schulman: k1, k2, k3 of KL(first || second), tokens of the first."""
  def k(x):
    if estimator == "k1":
      return x
    if estimator == "k2":
      return x * x / 2
    x = max(-max_log_ratio, min(max_log_ratio, x))
    return math.exp(-x) - 1 + x
  def of_row(i, at):
    sign = {"behaviour_to_num": -1, "num_to_behaviour": 1}[direction]
    ks = {t: k(sign * _l(num, behaviour, i, t)) for t in at}
    if statistic == "token" or not at:
      return {t: lower <= x <= upper for t, x in ks.items()}
    of = {"mean": lambda x: sum(x) / len(x), "sum": sum, "max": max}[statistic]
    return {t: lower <= of(list(ks.values())) <= upper for t in at}
  return _keep(mask, of_row)


def m2po(num, behaviour, mask, *, tau):
  """Drop the largest squared log ratio while the mean of the rest is >= tau."""
  left = {(i, t): _l(num, behaviour, i, t) ** 2
          for i, at in rows(mask) for t in at}
  while left and sum(left.values()) / len(left) >= tau:
    del left[max(left, key=lambda it: (left[it], [-j for j in it]))]
  return _keep(mask, lambda i, at: {t: (i, t) in left for t in at})


def opsm(num, behaviour, mask, *, adv, delta):
  def of_row(i, at):
    kl = sum(-_l(num, behaviour, i, t) for t in at) / max(len(at), 1)
    return {t: not (adv[i, t] < 0 and kl > delta) for t in at}
  return _keep(mask, of_row)


def vaco_tv(num, behaviour, mask, *, adv, high, low=0.0):
  def of_row(i, at):
    l = {t: _l(num, behaviour, i, t) for t in at}
    tv = sum(abs(math.exp(x) - 1) for x in l.values()) / max(len(at), 1)
    return {t: low <= tv <= high or adv[i, t] * l[t] <= 0 for t in at}
  return _keep(mask, of_row)


def version_mask(version, now, mask, *, max_lag, level="token"):
  def of_row(i, at):
    fresh = {t: version[i, t] >= 0 and 0 <= now - version[i, t] <= max_lag
             for t in at}
    return fresh if level == "token" else {
        t: all(fresh.values()) for t in at}
  return _keep(mask, of_row)


def self_normalise(weight, mask, *, level):
  at = [(i, t) for i, ts in rows(mask) for t in ts]
  if level == "token":
    mean = sum(weight[i, t] for i, t in at) / len(at)
  else:
    means = [sum(weight[i, t] for t in ts) / len(ts)
             for i, ts in rows(mask) if ts]
    mean = sum(means) / len(means)
  out = np.zeros(np.shape(mask))
  for i, t in at:
    out[i, t] = weight[i, t] / mean
  return out


# KL terms: (value, d sum / d logp), [B, T]; x = logp - ref.


def kl(name, logp, ref, mask, *, anchor=None, max_kl=math.inf):
  value, grad = np.zeros(np.shape(mask)), np.zeros(np.shape(mask))
  for i, at in rows(mask):
    for t in at:
      x = float(logp[i, t]) - float(ref[i, t])
      of = {"k1": (x, 1.0), "k2": (x * x / 2, x),
            "k3": (math.exp(-x) - 1 + x, 1 - math.exp(-x)),
            "abs_kl": (abs(x), float(np.sign(x)))}
      v, g = of.get(name.split("_")[0]) or of[name]
      if name.endswith("straight"):
        # The value of kX, within max_kl, and the gradient of k2.
        value[i, t], grad[i, t] = max(-max_kl, min(max_kl, v)), x
        continue
      if name.endswith("unbiased"):  # d(r k) = r (k + dk)
        r = math.exp(float(logp[i, t]) - float(anchor[i, t]))
        v, g = r * v, r * (v + g)
      if name.endswith("score"):
        v, g = v, v + g
      if abs(v) > max_kl:
        v, g = math.copysign(max_kl, v), 0.0
      value[i, t], grad[i, t] = v, g
  return value, grad


# Aggregations: (total, count).


def _means(of_rows, empty):
  """Of lists of token losses: the sum of `f(list)` and how many there are."""
  counted = [r for r in of_rows if r or empty == "count"]
  return counted, len(counted)


def aggregate(name, loss, mask, *, empty="exclude", group=None, length=None):
  per_row = [[float(loss[i, t]) for t in at] for i, at in rows(mask)]
  if name == "token_sum":
    return sum(map(sum, per_row)), 1
  if name == "prompt_mean":
    prompts = {}
    for g, row in zip(group, per_row):
      prompts.setdefault(int(g), []).extend(row)
    per_row = list(prompts.values())
  counted, n = _means(per_row, empty)
  of = {"sequence_mean_token_mean": lambda r: sum(r) / max(len(r), 1),
        "prompt_mean": lambda r: sum(r) / max(len(r), 1),
        "sequence_mean_token_sum": sum,
        "constant_length": lambda r: sum(r) / (length or 1)}[name]
  return sum(of(r) for r in counted), n


# Score centring.


def weight(name, ratio, low=0.0, high=math.inf):
  if name == "none":
    return 1.0
  if name == "tis":
    return min(max(ratio, low), high)
  return ratio if low <= ratio <= high else 0.0


def expected_score(p, q, name, **bounds):
  """sum_v q_v f(p_v / q_v) d log p_v / d logits, over the whole vocabulary."""
  p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
  out = np.zeros(len(p))
  for v in range(len(p)):
    score = -p.copy()
    score[v] += 1
    out += q[v] * weight(name, p[v] / q[v], **bounds) * score
  return out
