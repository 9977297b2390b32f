"""The length reward, the overlong penalty and the share of repetition, against numbers worked by hand."""

import pytest

from shoal.algos.reward_shaping import length_penalty, overlong, repeated_share


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
