"""The sentence about the reward, against means worked by hand."""

from shoal.watch.trend import trend_of


def test_the_trend_compares_equal_numbers_of_steps() -> None:
    rewards = (9.0, 1.0, 1.0, 0.5, 0.25)
    assert trend_of(rewards) == "reward down: 1.000 to 0.375, means of 2 steps each"
    assert trend_of(rewards[:3]) == ""
    close = [0.0041 + i * 1e-5 for i in range(4)]
    assert trend_of(close) == "reward level: 0.004 to 0.004, means of 2 steps each"
