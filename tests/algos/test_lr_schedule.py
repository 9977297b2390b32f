"""Learning rates against numbers worked by hand."""

import pytest

from shoal.algos.lr_schedule import learning_rate


def rates(shape, ts, warmup_steps=4, steps=15):
    return [learning_rate(t, peak=2.0, shape=shape, warmup_steps=warmup_steps, steps=steps) for t in ts]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_parts_to_the_peak(shape):
    assert rates(shape, range(5)) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_constant_stays_at_the_peak():
    assert rates("constant", [4, 9, 14, 99]) == [2.0] * 4


def test_linear_falls_to_a_tenth_at_the_last_step():
    # x = (t - 4) / 10: 0, 0.5, 1
    assert rates("linear", [4, 9, 14]) == pytest.approx([2.0, 1.1, 0.2])


def test_cosine_falls_to_a_tenth_at_the_last_step():
    # 2 (0.1 + 0.45 (1 + cos(pi x))): x = 0.2 gives cos = 0.809017
    assert rates("cosine", [4, 6, 9, 14]) == pytest.approx([2.0, 2 * (0.1 + 0.45 * 1.809017), 1.1, 0.2])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_steps_beyond_the_last_keep_its_rate(shape):
    assert rates(shape, [99]) == pytest.approx([0.2])


def test_no_warm_up_and_a_single_step_give_the_peak():
    assert rates("linear", [0], warmup_steps=0, steps=1) == [2.0]
