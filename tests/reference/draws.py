"""Random `[B, T]` batches and junk for the tests of the ops. numpy only."""

import numpy as np

B, T = 4, 5  # one shape nearly everywhere: fewer compilations
JUNK = (np.inf, -np.inf, np.nan, 1e30, -1e30)


def mask(full=False):
  """Ragged rows with a hole, a single token and an empty row. [B, T] bool."""
  m = np.ones((B, T), bool)
  if not full:
    m[0, 2] = False
    m[1, 3:] = False
    m[2, 1:] = False
    m[3] = False
  return m


def tokens(seed=0, scale=0.5, dtype=np.float32):
  """(logp, anchor, adv), `[B, T]`; some advantages are zero."""
  rng = np.random.default_rng(seed)
  logp = -np.exp(rng.normal(size=(B, T)))
  anchor = logp + scale * rng.normal(size=(B, T))
  adv = rng.normal(size=(B, T))
  adv[rng.random((B, T)) < 0.1] = 0
  return tuple(x.astype(dtype) for x in (logp, anchor, adv))


def fill(x, mask_, value):
  """x with `value` (a number, or several in turn) where the mask is off."""
  x = np.array(x)
  off = np.flatnonzero(~np.asarray(mask_, bool))
  values = np.resize(np.asarray(value, np.float64), off.shape)
  x.reshape(-1)[off] = values.astype(x.dtype)
  return x


def group(sizes):
  """Ragged group numbers, shuffled. [B] int32."""
  g = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
  return np.random.default_rng(1).permutation(g)


def put(values, dtype=np.float32):
  """Values in a `[B, T]` of zeros, down the columns: up to B are one a row."""
  x = np.zeros(B * T, dtype)
  x[:np.size(values)] = values
  return x.reshape(T, B).T.copy()


def take(x, n):
  """The n values that `put` placed."""
  return np.asarray(x).T.reshape(-1)[:n]


def pad(x):
  """A hand-worked 2 x 3 case inside a `[B, T]` of zeros (or False)."""
  x = np.asarray(x)
  x = x.astype(np.float32) if x.dtype.kind in "if" else x
  return np.pad(x, [(0, n - m) for m, n in zip(x.shape, (B, T))])
