"""How the best cap moves with the batch. Floor 5."""

import numpy as np

from experiments import sweep_figures

BATCHES = [2**i for i in range(0, 17, 2)]


def errors(rows, batch: int):
  """(caps, relative mean squared error of a batch's estimate)."""
  rows = sorted(rows, key=lambda r: r["cap"])
  return (np.array([r["cap"] for r in rows]),
          np.array([r["bias"]**2 + r["variance"] / batch for r in rows]))


def rule(row, batch) -> float:
  """N^(1/4) sqrt(2 (1 + chi2)); sqrt(2 (1 + chi2)) is its N = 1."""
  return batch**0.25 * np.sqrt(2 * (1 + row["chi2"]))


def best(rows):
  """Medians over policies at each batch: the best cap, the rule's, and the
  rule's with N / V, V the relative variance of one sequence on-policy."""
  found, plain, scaled = [], [], []
  for one in sweep_figures.by(rows, "seed").values():
    curves = [errors(one, n) for n in BATCHES]
    # Where a cap beyond the largest weight is as good, the smallest such.
    found.append([caps[np.argmax(mse <= mse.min() * (1 + 1e-9))]
                  for caps, mse in curves])
    plain.append([rule(one[0], n) for n in BATCHES])
    scaled.append([rule(one[0], n / one[0]["on_policy"]) for n in BATCHES])
  return tuple(np.median(x, axis=0) for x in (found, plain, scaled))


def claims(data):
  by_noise = {noise: best(rows) for (noise,), rows in
              sweep_figures.by(data, "noise").items()}
  far = max(by_noise)
  found, plain, scaled = by_noise[far]
  grow = all((np.diff(f) >= 0).all() and f[-1] > 2 * f[0]
             for f, _, _ in by_noise.values())
  late = [i for i, n in enumerate(BATCHES) if n >= 256]  # several V and more
  slope = np.polyfit(np.log(np.array(BATCHES)[late]), np.log(found[late]), 1)[0]
  below = max(float((f / p).max()) for f, p, _ in by_noise.values())
  ratio = found[late] / scaled[late]
  regret = []
  for one in sweep_figures.by([r for r in data if r["noise"] == far],
                              "seed").values():
    for n in np.array(BATCHES)[late]:
      caps, mse = errors(one, n)
      regret.append(np.interp(rule(one[0], n / one[0]["on_policy"]), caps, mse)
                    / mse.min())
  show = lambda xs: ", ".join(f"{x:.2g}" for x in xs)
  return [
      (grow, "the best cap never falls as the batch grows, at any mismatch: "
       f"{show(found)} for N = {BATCHES[0]} to {BATCHES[-1]}"),
      (0.2 <= slope <= 0.6, f"it grows as N^{slope:.2f}, between N^(1/4) and the "
       "N^(1/2) of Ionides (in [0.2, 0.6]) for N >= 256"),
      (below < 1, "N^(1/4) sqrt(2 (1 + chi2)) is too loose for a gradient: the best "
       f"is at most {below:.2f} of it"),
      (ratio.max() < 2.5 and ratio.min() > 0.4, "with N / V in place of N, V the "
       f"relative variance on-policy, it is within a factor 2.5: {show(ratio)}"),
      (np.median(regret) < 1.15, "and then costs little: its error is "
       f"{np.median(regret):.2f} of the least in the median, {max(regret):.2f} at "
       "worst")]
