"""Published faults of metrics and plots: a case and its arithmetic."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from rl_is import plots
from rl_is.core.types import Batch, PolicyOutputs
from rl_is.evaluate import summarize
from rl_is.infra import metrics
from rl_is.objective import constants as constants_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Spec
from rl_is.ops import diagnostics


def finished(logp, adv, mask, **outputs):
  """Metrics of ppo_clip on behaviour 0, eps .2, over rows of one token."""
  spec = Spec("ppo_clip", "behaviour", advantage="given")
  values = constants_lib.resolve(spec, {}, dict(eps_low=.2, eps_high=.2))
  column = lambda x: jnp.asarray(x, jnp.float32)[:, None]
  mask = jnp.asarray(mask, bool)[:, None]
  n = mask.shape[0]
  batch = Batch(jnp.zeros((n, 1), int), mask, mask, jnp.zeros(n),
                jnp.zeros(n, int), logp_behaviour=jnp.zeros((n, 1)),
                adv=column(adv))
  objective = Objective(spec)
  outputs = {name: column(x) for name, x in outputs.items()}
  return diagnostics.finish(objective.loss(
      PolicyOutputs(column(logp), **outputs), objective.prepare(batch, values),
      values)[1])


@pytest.mark.parametrize("hidden", [.7, 1.3, np.nan])
def test_J01_a_masked_token_is_in_no_clip_fraction(hidden):
  """Ratios .7 .7 1.3 1.3, A + - + -: two of four bind, one each side."""
  got = finished(np.log([.7, .7, 1.3, 1.3, hidden]), [1, -1, 1, -1, -1],
                 [1, 1, 1, 1, 0])
  assert (got["clip/frac"], got["clip/frac_low"], got["clip/frac_high"]) == (
      .5, .25, .25)
  assert got["clip/positive_frac"] == got["clip/negative_frac"] == .5


@pytest.mark.parametrize("pad", [0.0, 1.0, -1e30, np.nan])
def test_J04_a_pad_value_is_in_neither_mean(pad):
  """Log-probs -1 -2 and a pad: -1.5; exact entropies .5 1.5 and a pad: 1."""
  got = finished([-1, -2, pad], [1, 1, 1], [1, 1, 0], entropy=[.5, 1.5, pad])
  assert got["policy/logp"] == -1.5 and got["policy/entropy"] == 1.0


def test_J02_a_metric_without_a_count_is_null_in_the_file(tmp_path):
  """Nothing under the mask: every mean is absent, none is 0."""
  got = finished([-1, -2], [1, 1], [0, 0], entropy=[1, 1])
  writer = metrics.MetricsWriter(str(tmp_path))
  writer.write(1, got)
  writer.close()
  row = json.loads((tmp_path / "metrics.jsonl").read_text())
  for name in ("clip/frac", "policy/entropy", "is/kl_k1", "is/ess",
               "is/log_ratio_max"):
    assert row[name] is None, name


def test_J05_what_comes_again_replaces_what_was_there(tmp_path):
  """Written to 212, resumed from 200, to 220: 1 to 220, each once, the new."""
  for after, last, value in ((0, 212, 1.0), (200, 220, 2.0)):
    writer = metrics.MetricsWriter(str(tmp_path), after_step=after)
    for step in range(after + 1, last + 1):
      writer.write(step, {"a": value})
    writer.close()
  rows = metrics.read(str(tmp_path))
  assert [row["step"] for row in rows] == list(range(1, 221))
  assert [row["a"] for row in rows] == [1.0] * 200 + [2.0] * 20


def test_J07_seeds_are_aligned_on_the_step():
  """A has steps 0 to 9, B 0 2 .. 18, value = step: the mean is the step itself.

  By place in the log it would be 1.5 times the place.
  """
  a, b = np.arange(10), np.arange(0, 20, 2)
  steps, curves = plots.align([a, b], [a, b])
  np.testing.assert_array_equal(steps, [*range(10), 10, 12, 14, 16, 18])
  mean, error = plots.band(curves)
  np.testing.assert_array_equal(mean, steps)
  np.testing.assert_array_equal(
      plots.counts(curves), [2, 1] * 5 + [1] * 5)
  np.testing.assert_array_equal(np.isnan(error), plots.counts(curves) < 2)


def test_J07_a_shorter_seed_cuts_nothing_off():
  """1 2 3 and 3 (step 2 missing): means 2, 2, 3; error of 1 and 3 is 1."""
  steps, curves = plots.align([[1, 2, 3], [1, 2]], [[1., 2., 3.], [3., None]])
  mean, error = plots.band(curves)
  np.testing.assert_array_equal(steps, [1, 2, 3])
  np.testing.assert_array_equal(mean, [2, 2, 3])
  np.testing.assert_allclose(error, [1, np.nan, np.nan])


@pytest.mark.parametrize("values,error", [
    ((.5, .6, .7), .1 / np.sqrt(3)), ((.5, .7), .1), ((.5, np.nan, .7), .1),
    ((.5,), None), ((.5, np.nan), None)])
def test_J08_the_error_is_of_n_minus_1_and_of_seeds_there_are(values, error):
  """Deviation of .5 .6 .7: .1, not .0816; of .5 .7: .1414, / sqrt 2 = .1."""
  mean, got = plots.band([np.array([x]) for x in values])
  np.testing.assert_allclose(mean, np.nanmean(values))
  if error is None:
    assert got is None
  else:
    np.testing.assert_allclose(got, error)


@pytest.mark.parametrize("failed,right", [(4, 5), (0, 5), (9, 1), (10, 0)])
def test_J11_answers_that_failed_are_counted_beside_the_accuracy(failed, right):
  """Of 10, 4 failed and 5 right: 5 / 6 of those scored, and 4 unscorable."""
  rewards = np.array([1.] * right + [0.] * (10 - right - failed)
                     + [np.nan] * failed)[:, None]
  out = summarize(rewards, np.ones((10, 1)))
  assert (out["eval/unscorable"], out["eval/prompts"]) == (failed, 10)
  np.testing.assert_allclose(
      out["eval/accuracy"], right / (10 - failed) if failed < 10 else np.nan)
