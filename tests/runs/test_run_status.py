"""The sentence about the reward, against means worked by hand."""

from shoal.runs.run_status import trend_of


def test_the_trend_compares_equal_numbers_of_steps() -> None:
    rewards = (9.0, 1.0, 1.0, 0.5, 0.25)
    assert trend_of(rewards) == "reward down in the last 4 steps: 1.000 to 0.375, means of 2 each"
    assert trend_of(rewards[:3]) == ""
    noisy = [0.7, 0.9, 0.6, 0.8, 0.75, 0.85, 0.65, 0.79]
    assert trend_of(noisy) == "reward level in the last 8 steps: 0.750 to 0.760, means of 4 each"
    assert trend_of([0.01 * step for step in range(8)]).startswith("reward up in the last 8 steps: ")
    assert trend_of([0.25] * 8) == "reward level in the last 8 steps: 0.250 to 0.250, means of 4 each"
    close = [0.0041 + i * 1e-5 for i in range(4)]
    assert trend_of(close) == "reward level in the last 4 steps: 0.004 to 0.004, means of 2 each"


def test_rewards_beyond_all_measure_raise_nothing() -> None:
    """A stranger's host may report them."""
    for huge in (1e160, 1e200):
        assert (
            trend_of([huge] * 4 + [0.5] * 4) == f"reward down in the last 8 steps: {huge:.6g} to 0.5, means of 4 each"
        )
    for huge in (1.7e308, float("inf"), float("nan")):
        assert trend_of([huge] * 4 + [0.5] * 4) == ""
    assert trend_of([1e6] * 4 + [1e6 + 0.25] * 4) == "reward level in the last 8 steps: 1e+06 to 1e+06, means of 4 each"
    assert trend_of([1e200, -1e200] * 4) == "", "their variance is infinite"
