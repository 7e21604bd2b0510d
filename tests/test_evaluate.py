"""pass@k and the summary of held-out answers."""

import itertools

import numpy as np
import pytest

from rl_is.evaluate import pass_at_k, summarize


def test_pass_at_k_by_hand():
  """Case H13: n = 4, c = 1: 1/4, 1 - C(3,2)/C(4,2) = 1/2, 1."""
  assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
  assert pass_at_k(3, 0, 2) == 0


@pytest.mark.parametrize("n,c,k", [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 4, 2)])
def test_pass_at_k_equals_enumeration(n, c, k):
  draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
  assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(d) for d in draws]))


@pytest.mark.parametrize("n,c,k", [(1, 1, 2), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_what_cannot_be_estimated_is_refused(n, c, k):
  with pytest.raises(ValueError, match="pass_at_k"):
    pass_at_k(n, c, k)


def test_summary_leaves_unscorable_answers_out_and_counts_them():
  """Case J11. Rows [1 0], [NaN 1], [0.5 0]: 2 right of 5 scorable."""
  out = summarize(np.array([[1, 0], [np.nan, 1], [0.5, 0]]),
                  np.array([[1, 2], [3, 4], [5, 6]]))
  assert out["eval/accuracy"] == pytest.approx(2 / 5)
  assert out["eval/reward_mean"] == pytest.approx(2.5 / 5)
  assert out["eval/unscorable"] == 1 and out["eval/prompts"] == 3
  assert out["eval/length_mean"] == 3.5
  # pass@1: 1/2, 1/1, 0; pass@2 needs two scorable samples: 1 and 0.
  assert out["eval/pass@1"] == pytest.approx((0.5 + 1 + 0) / 3)
  assert out["eval/pass@2"] == pytest.approx(0.5)
  assert "eval/pass@4" not in out
