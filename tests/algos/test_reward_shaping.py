"""Length rewards, the overlong penalty, repetition, and signs of reward hacking, against numbers worked by hand."""

import numpy as np
import pytest

from shoal.algos.reward_shaping import length_penalty, loop_share, overlong, rank_correlation, repeated_share


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


def test_each_token_off_the_target_costs_alpha_on_both_sides() -> None:
    # INTELLECT-2: 0.0003 * |2000 - 1500| = 0.15
    assert length_penalty(1500, 2000) == pytest.approx(-0.15) == length_penalty(2500, 2000)
    assert length_penalty(2000, 2000) == 0.0


def test_a_bounded_distance_loses_no_more_beyond_the_bound() -> None:
    assert [length_penalty(length, 10, 0.1, most=5) for length in (10, 14, 15, 90)] == pytest.approx(
        [0, -0.4, -0.5, -0.5]
    )


def test_the_overlong_penalty_falls_over_the_buffer() -> None:
    # L_max = 100, L_cache = 20: 0 up to 80; (80 - 85) / 20 = -0.25; (80 - 95) / 20 = -0.75; -1 from 100
    found = [overlong(length, 100, 20) for length in (0, 80, 85, 95, 100, 101)]
    assert found == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert [overlong(length, 100, 0) for length in (100, 101)] == [0.0, -1.0]


def test_repetition_is_the_share_of_sequences_that_came_before() -> None:
    # 1 2 1 2 1: pairs 12 21 12 21, two of four are new
    assert repeated_share([[1, 2, 1, 2, 1]], 2) == 0.5
    assert repeated_share([[7] * 101], 1) == pytest.approx(1 - 1 / 101)
    assert repeated_share([[1, 2, 3, 4]], 2) == 0.0 == repeated_share([[1]], 2) == repeated_share([], 2)


def test_turns_repeat_each_other_but_no_sequence_crosses_their_border() -> None:
    assert repeated_share([[1, 2], [1, 2]], 2) == 0.5  # 12 12; across the border there would be 21
    assert repeated_share([[1, 2], [1, 2]], 3) == 0.0
