"""What `benchmarks/beyond.py` computes without a model, and what it makes of the figures of its seeds."""

import pytest

from benchmarks.beyond import BAR, RECIPES, TEMPERATURES, figures_of, game, heldout_rate
from benchmarks.stones import exact, expected, teacher, values, winner


def test_exact_win_rates_equal_those_worked_by_hand() -> None:
    env = game(perfect=0.5, cautious=0.5)
    chances = values(env, teacher(env, 1.0), 11)
    # The opponent takes the last stones in half of its turns, and else in one of as many as it may take.
    assert chances[:5] == pytest.approx([1.0, 0.0, 0.25, 2 / 6, 3 / 8])
    assert chances[10] == 1.0, "from ten, it leaves what the teacher may take"
    left_10 = sum(0.5**taken * chances[10 - taken] for taken in range(1, 10)) / sum(
        0.5**taken for taken in range(1, 10)
    )
    assert expected(teacher(env, 1.0)(10), 10, chances) == pytest.approx(left_10)
    weights = {taken: 0.5**taken * chances[11 - taken] for taken in range(1, 10)}
    wins = {move: weight / sum(weights.values()) for move, weight in weights.items()}
    assert winner(env, 1.0)(11) == pytest.approx(wins)
    assert winner(env, 0.5)(11) == pytest.approx(
        {move: weight**2 / sum(w**2 for w in weights.values()) for move, weight in weights.items()}
    )


def test_imitating_wins_leaves_more_room_than_the_bar_asks_for() -> None:
    found = exact(game(), TEMPERATURES)
    assert found["teacher"] < 0.57 and found["perfect"] == 1.0
    assert max(*found["wins"].values(), *found["imitation"].values()) < 1 - 3 * BAR


def test_the_committed_start_plays_as_badly_as_its_teacher() -> None:
    env = game()
    assert heldout_rate(env, RECIPES / "stones-start") == pytest.approx(exact(env, (1.0,))["teacher"], abs=0.02)


def test_a_margin_is_over_the_best_of_the_other_sides_at_their_best_temperatures() -> None:
    def seed(teacher: float, imitation: float, wins: float, rl: float) -> dict[str, object]:
        return {
            "teacher": {"1.0": teacher}, "imitation": {"1.0": imitation, "0.02": imitation + 0.05},
            "wins": {"1.0": wins, "0.02": wins - 0.1}, "rl": {"1.0": rl, "0.02": rl + 0.02},
            "larger": {"imitation": 0.4, "wins": 0.5, "rl": 0.6},
            "episodes": 768, "games": 70000, "games_won": 30000,
            "seed": round(10 * rl), "heldout_curve": [0.5, rl],
            "wall_s": 200.4, "wall_s_of_rl": 99.6, "cpu_s_of_rl": 150.4,
        }  # fmt: skip

    found = figures_of([seed(0.4, 0.41, 0.6, 0.8), seed(0.4, 0.7, 0.6, 0.85)])
    assert found["margins"] == [0.22, 0.12] and found["margin_worst"] == 0.12
    assert found["margins_over_plain_imitation"] == [0.36, 0.12]
    assert found["win_rates"]["imitation"] == [0.46, 0.75] and found["win_rate_of_rl_worst"] == 0.82
    assert found["by_temperature"]["rl"] == {"1.0": 0.825, "0.02": 0.845}
    assert (found["wall_s_of_rl"], found["cpu_s_of_rl"]) == ([100, 100], [150, 150])
