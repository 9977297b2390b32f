"""Signs of reward hacking against numbers worked by hand."""

import numpy as np
import pytest

from shoal.algos.reward_shaping import loop_share, rank_correlation


def test_repeated_share_by_hand():
    assert loop_share([1, 2, 3, 4, 5, 6]) == 0.0
    assert loop_share([7] * 10) == pytest.approx(6 / 7)  # seven 4-grams, all alike
    assert loop_share([1, 2, 1, 2, 1, 2]) == pytest.approx(1 / 3)  # 1212 2121 1212
    assert loop_share([1, 2, 3, 4]) == loop_share([]) == 0.0


def test_rank_correlation_by_hand():
    assert rank_correlation([1, 2, 3], [10, 20, 900]) == pytest.approx(1.0)
    assert rank_correlation([3, 2, 1], [1, 2, 3]) == pytest.approx(-1.0)
    assert rank_correlation([0, 0, 1, 1], [5, 6, 7, 8]) == pytest.approx(np.sqrt(0.8))  # ranks 1.5 1.5 3.5 3.5
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None and rank_correlation([1, 2], [4, 4]) is None
