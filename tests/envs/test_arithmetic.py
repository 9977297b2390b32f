"""Arithmetic: values, the split, difficulty, rewards by hand, and its scripted players."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.envs.builtin.arithmetic import environment, is_heldout, solve
from shoal.errors import ConfigError


@given(st.lists(st.integers(0, 999), min_size=1, max_size=5), st.data())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_answers_are_those_of_python(numbers: list[int], data: st.DataObject) -> None:
    problem = str(numbers[0]) + "".join(data.draw(st.sampled_from("+-*")) + str(n) for n in numbers[1:])
    assert solve(problem) == eval(problem)


@pytest.mark.parametrize("args", [{}, {"digits": 1}, {"digits": 3, "operands": 3, "operations": "+-*"}])
def test_heldout_problems_never_appear_in_training(args: dict[str, object]) -> None:
    env = environment(**args)
    training = {env.task(i) for i in range(1000)}
    held = {env.task(i, heldout=True) for i in range(env.num_heldout)}
    assert not training & held
    assert all(map(is_heldout, held)) and not any(map(is_heldout, training))


def test_digits_operands_and_operations_set_the_difficulty() -> None:
    env = environment(digits=3, operands=4, operations="+*")
    for index in range(200):
        problem = env.task(index)
        operands = problem.replace("*", "+").split("+")
        assert len(operands) == 4 and all(len(number) <= 3 for number in operands) and "-" not in problem


def test_problems_stay_the_same_from_version_to_version() -> None:
    assert [environment().task(i) for i in range(4)] == ["98+2", "2+85", "76+0", "97-37"]


def test_the_opening_is_the_problem_and_the_first_answer_ends_the_episode() -> None:
    env = environment()
    state, opening = env.reset("12-30")
    assert opening == [{"role": "user", "content": "12-30="}]
    after, reply, done, *_ = env.step(state, "-18\n")
    assert (reply, done) == (None, True)
    assert env.success(after) and env.score(after) == 1.0


@pytest.mark.parametrize(
    ("action", "score"),
    [
        ("146", 1.0),
        ("145", 0.1 + 0.4 * 2 / 3),  # a well-formed number, two of three digits in place
        ("46", 0.1 + 0.4 * 2 / 3),
        ("0146", 0.1 + 0.4 * 3 / 4),
        ("999", 0.1),
        ("-146", 0.1),
        ("1 46", 0.0),
        ("14.6", 0.0),
        ("146!", 0.0),
        ("\N{ARABIC-INDIC DIGIT THREE}", 0.0),
        ("9" * 5000, 0.0),
        ("", 0.0),
    ],
)
def test_rewards_equal_the_numbers_worked_by_hand(action: str, score: float) -> None:
    env = environment()
    state, _ = env.reset("99+47")
    assert env.score(state) == 0.0
    assert env.score(env.step(state, action).state) == pytest.approx(score)


@pytest.mark.parametrize("args", [{"digits": 0}, {"operations": "/"}, {"operand": 2}, {"heldout": 0}])
def test_wrong_arguments_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="environment arithmetic"):
        environment(**args)
