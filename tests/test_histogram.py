"""Histograms of importance weights: counts by hand, parts by lag, caps."""

import numpy as np
import pytest

from rl_is import histogram
from rl_is.core.types import Batch


def batch(log_weight, mask, version, now=10):
  log_weight, mask = np.array(log_weight, np.float32), np.array(mask, bool)
  rows = len(mask)
  behaviour = np.where(mask, np.float32(-1), np.nan)
  return Batch(
      tokens=np.zeros(mask.shape, np.int32), valid=mask, mask=mask,
      logp_behaviour=behaviour,
      logp_prox=np.where(mask, log_weight - 1, np.inf),
      version=np.array(version, np.int32), version_now=np.full(rows, now, np.int32),
      reward=np.zeros(rows, np.float32), group=np.zeros(rows, np.int32))


def of(rows, level, lag):
  return [r for r in rows if r["level"] == level and r["lag"] == lag]


def test_counts_by_hand():
  """ln w of tokens: 0, ln 2 (lag 1), -ln 2 (lag 3); of answers: ln 2 and -ln 2."""
  two = np.log(2.0)
  rows = histogram.rows([
      batch([[0, two, 9]], [[1, 1, 0]], [[9, 9, 0]]),
      batch([[-two, 5, 5], [1, 1, 1]], [[1, 0, 0], [0, 0, 0]], [[7] * 3] * 2)])
  assert {(r["level"], r["lag"]) for r in rows} == {
      ("token", "1"), ("token", "3"), ("sequence", "1"), ("sequence", "3")}
  one = of(rows, "token", "1")
  assert len(one) == histogram.BINS
  assert one[0]["low"] == pytest.approx(0.5) and one[-1]["high"] == pytest.approx(2)
  filled = [(i, r["count"], r["share"]) for i, r in enumerate(one) if r["count"]]
  assert filled == [(histogram.BINS // 2, 1, 0.5), (histogram.BINS - 1, 1, 0.5)]
  assert of(rows, "token", "3")[0]["count"] == 1
  assert of(rows, "sequence", "1")[-1]["share"] == 1
  assert of(rows, "sequence", "3")[0]["share"] == 1


def test_the_share_beyond_a_cap():
  """Of 1000 log-normal weights as counted one by one, to a bin's share."""
  draw = np.random.default_rng(0).normal(0, 0.5, (100, 10))
  rows = histogram.rows([batch(draw, np.ones_like(draw), np.full(draw.shape, 9))])
  tokens = of(rows, "token", "1")
  assert sum(r["count"] for r in tokens) == 1000
  for cap in (0.5, 1.0, 2.0, 100.0):
    assert histogram.beyond(tokens, cap) == pytest.approx(
        np.mean(np.exp(draw) > cap), abs=0.015)


def test_many_lags_are_put_together_and_the_oldest_token_counts():
  version = np.arange(10)[:, None] + np.array([0, 1])  # lags 10 - v, and one less
  rows = histogram.rows([batch(np.zeros((10, 2)), np.ones((10, 2)), version)])
  lags = list(dict.fromkeys(r["lag"] for r in rows if r["level"] == "sequence"))
  assert lags == ["1 to 2", "3 to 4", "5 to 6", "7 to 8", "9 to 10"]
  for lag in lags:
    assert sum(r["count"] for r in of(rows, "sequence", lag)) == 2


def test_where_the_learner_is_the_sampler_and_where_nothing_is():
  same = batch(np.zeros((2, 3)), np.ones((2, 3)), np.full((2, 3), 10))
  token = of(histogram.rows([same]), "token", "0")
  assert sum(r["count"] for r in token) == 6 and token[0]["low"] < 1 < token[-1]["high"]
  with pytest.raises(ValueError, match="at least 1 token"):
    histogram.rows([batch([[1.0]], [[0]], [[1]])])


def test_the_picture(tmp_path):
  draw = np.random.default_rng(0).normal(0, 0.5, (100, 10))
  rows = histogram.rows([batch(draw, np.ones_like(draw), np.full(draw.shape, 9))])
  svg, png = histogram.draw(rows, [2.0, np.inf, 1e9], "a title", str(tmp_path / "w"),
                            "the command")
  text = open(svg).read()
  assert "a title" in text and "the command" in text and "lag 1" in text
  assert f"2: {histogram.beyond(of(rows, 'token', '1'), 2.0):.1%}" in text
  assert "inf:" not in text and "1e+09" not in text
