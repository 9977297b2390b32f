"""A held-out judge scores the very episodes of an evaluation again, and only those."""

import itertools
from typing import Any

import msgspec
import pytest

from shoal.env import Message, Step
from shoal.envs.builtin import arithmetic
from shoal.envs.evaluate import evaluate, mixed
from shoal.errors import ConfigError
from shoal.evaluation_files import Evaluation, JudgeResult
from tests.envs.plain import Plain

ARGS = {"digits": 1, "heldout": 20}


class AnyDigit(arithmetic.Arithmetic):
    """Arithmetic that takes every number for right."""

    name = "any-digit"

    def success(self, state: Any) -> bool:
        return state.given is not None

    def score(self, state: Any) -> float:
        return float(self.success(state))


def any_digit() -> AnyDigit:
    return AnyDigit(arithmetic.environment(**ARGS).args)


def test_the_judge_scores_the_same_episodes_by_its_own_rule(answering_engine, renderer, sampling) -> None:
    guesses = answering_engine(lambda text: "7")
    found = evaluate(guesses, renderer, any_digit(), 40, 0, sampling, judge=arithmetic.environment(**ARGS))
    assert found.mean == 1.0 and found.judge is not None and found.judge.mean < 0.2 < 1.0
    right = evaluate(guesses, renderer, arithmetic.environment(**ARGS), 40, 0, sampling)
    assert (found.judge.mean, found.judge.low95, found.judge.high95) == (right.mean, right.low95, right.high95)
    solver = answering_engine(lambda text: str(arithmetic.solve(text.rstrip("="))))
    agreed = evaluate(solver, renderer, any_digit(), 40, 0, sampling, judge=arithmetic.environment(**ARGS))
    assert agreed.judge is not None and agreed.mean == agreed.judge.mean == 1.0


def test_a_judge_with_other_tasks_is_refused(answering_engine, renderer, sampling) -> None:
    other = arithmetic.environment(digits=2, heldout=20)
    with pytest.raises(ConfigError, match=r"eval\.judge: arithmetic has another task 0 than any-digit"):
        evaluate(answering_engine(lambda text: "7"), renderer, any_digit(), 4, 0, sampling, judge=other)


class Twice(Plain):
    """Two turns: what is said counts, and the second turn again."""

    name = "twice"
    reward_bounds = (0.0, 3.0)

    def __init__(self, turns: int = 2, wants: str = "yes", raises: bool = False) -> None:
        self.turns, self.wants, self.raises = turns, wants, raises

    def reset(self, task: int) -> tuple[Any, list[Message]]:
        return 0, [{"role": "user", "content": "?"}]

    def step(self, state: int, action: str) -> Step:
        if self.raises:
            raise ValueError("no opinion")
        return Step(state + 1, "go on", state + 1 >= self.turns, reward=float(action == self.wants))


def test_turns_are_judged_one_after_another_until_the_judge_is_done(answering_engine, renderer, sampling) -> None:
    says_yes = answering_engine(lambda text: "yes")
    for judge, mean in ((Twice(2), 2.5), (Twice(1), 1.5), (Twice(9), 2.5), (Twice(2, "no"), 0.5)):
        found = evaluate(says_yes, renderer, Twice(), 4, 0, sampling, judge=judge)
        assert found.mean == 2.5 and found.judge is not None and found.judge.mean == mean


def test_a_judge_that_raises_is_told_with_the_place_and_has_no_mean(answering_engine, renderer, sampling) -> None:
    found = evaluate(answering_engine(lambda text: "yes"), renderer, Twice(), 4, 0, sampling, judge=Twice(raises=True))
    assert found.mean == 2.5 and found.fault == "" and found.judge is not None and found.judge.mean is None
    assert "test_heldout_judge.py line" in found.judge.fault and "ValueError: no opinion" in found.judge.fault


def test_a_judge_whose_steps_never_end_fails_on_its_own(answering_engine, renderer, sampling) -> None:
    class Endless(Twice):
        def step(self, state: int, action: str) -> Step:
            return super().step(state, action)._replace(steps=((end, 0.0) for end in itertools.count(1)))

    found = evaluate(answering_engine(lambda text: "yes"), renderer, Twice(), 4, 0, sampling, judge=Endless())
    assert found.mean == 2.5 and found.judge is not None and "steps in a turn" in found.judge.fault


def test_a_judge_is_not_asked_about_episodes_on_which_the_environment_failed(
    answering_engine, renderer, sampling
) -> None:
    class Missing(Twice):
        def task(self, index: int, heldout: bool = False) -> int:
            if index == 1:
                raise KeyError("lost")
            return index

    found = evaluate(answering_engine(lambda text: "yes"), renderer, Missing(), 8, 0, sampling, judge=Twice())
    assert "KeyError" in found.fault and found.faults == 2
    assert found.judge == JudgeResult(2.5, 2.5, 2.5, "", 8, 2)


def test_the_file_of_an_evaluation_keeps_what_the_judge_says(answering_engine, renderer, sampling) -> None:
    judge = arithmetic.environment(**ARGS)
    found = evaluate(answering_engine(lambda text: "7"), renderer, any_digit(), 8, 0, sampling, judge=judge)
    for figures in (found, mixed({"any": found}, [1.0])):
        assert msgspec.json.decode(msgspec.json.encode(figures), type=Evaluation).judge == found.judge
