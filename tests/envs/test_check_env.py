"""The checks of an environment: built-ins pass all, and each broken promise is found by its own check."""

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.env import Env, Message, Player, Step, require_index
from shoal.envs.lint import check_env
from shoal.envs.load import BUILT_IN, load_env


class Count(Env):
    """A sound environment, which subclasses break in one way each: say the next number, twice."""

    name = "count"
    num_tasks = 10
    num_heldout = 5

    def task(self, index: int, heldout: bool = False) -> int:
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return index + 100 * heldout

    def reset(self, task: int) -> tuple[Any, list[Message]]:
        return (task, ()), [{"role": "user", "content": f"after {task - 1}"}]

    def step(self, state: Any, action: str) -> Step:
        task, said = state
        return Step((task, (*said, action)), "again", len(said) == 1)

    def score(self, state: Any) -> float:
        task, said = state
        return said.count(str(task)) / 2

    def solution(self, task: int) -> list[str]:
        return [str(task)] * 2

    def players(self) -> Mapping[str, Player]:
        return {"right": lambda state, rng: str(state[0]), "wrong": lambda state, rng: "?"}


def outcomes(env: Env, outcome: str) -> dict[str, str]:
    """Details of the findings of an outcome, by check."""
    return {finding.check: finding.detail for finding in check_env(env, tasks=6) if finding.outcome == outcome}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_environments_pass_every_check(name: str) -> None:
    findings = check_env(load_env(name, {}))
    assert [f for f in findings if f.outcome == "failed"] == []
    assert {f.check for f in findings if f.outcome == "skipped"} <= {"solutions", "leaks"}


def test_sound_environment_passes_and_findings_are_the_same_each_time() -> None:
    assert outcomes(Count(), "failed") == {}
    assert list(outcomes(Count(), "skipped")) == ["leaks"]
    assert check_env(Count(), seed=3) == check_env(Count(), seed=3)


class NoPlayers:
    """Count without scripted players and held-out tasks."""

    name, num_tasks, num_heldout, reward_bounds = "plain", 10, 0, (0.0, 1.0)
    task, reset, step, score = Count.task, Count.reset, Count.step, Count.score


def test_environment_without_players_gets_the_other_checks_and_is_told_what_was_not_checked() -> None:
    env: Any = NoPlayers()
    assert outcomes(env, "failed") == {}
    skipped = outcomes(env, "skipped")
    assert set(skipped) == {"right player", "wrong player", "heldout", "solutions", "leaks"}
    assert 'no "right" player' in skipped["right player"]
    assert skipped["leaks"].endswith("give solution(task)")
    solves = type("Solves", (NoPlayers,), {"solution": lambda self, task: ["a", "b"]})
    assert outcomes(solves(), "skipped")["leaks"].endswith("solution(task) gives several turns, or too few")


class PaysNan(Count):
    def step(self, state: Any, action: str) -> Step:
        return super().step(state, action)._replace(reward=float("nan"))


def test_a_reward_of_a_step_that_is_no_number_names_step() -> None:
    assert "step() answers wrongly: the reward of a step is nan" in str(outcomes(PaysNan(), "failed"))


class Boundless(Count):
    reward_bounds = (0.0, 2e6)


def test_rewards_that_no_run_accepts_are_found() -> None:
    assert "the limit is 1e+06" in outcomes(Boundless(), "failed")["members"]


class LooseIndex(Count):
    def task(self, index: int, heldout: bool = False) -> int:
        return index + 100 * heldout


class Overlap(Count):
    def task(self, index: int, heldout: bool = False) -> int:
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return index


class GlobalRandom(Count):
    def reset(self, task: int) -> tuple[Any, list[Message]]:
        return (task, ()), [{"role": "user", "content": str(random.random())}]


class BadRole(Count):
    def reset(self, task: int) -> tuple[Any, list[Message]]:
        return (task, ()), [{"role": "human", "content": ""}]


class Drifting(Count):
    counter = itertools.count()

    def step(self, state: Any, action: str) -> Step:
        return super().step(state, action)._replace(reply=str(next(self.counter)))


class Shared(Count):
    """Only one episode at a time works: the state is in the environment."""

    def reset(self, task: int) -> tuple[Any, list[Message]]:
        self.said: list[str] = []
        return super().reset(task)

    def step(self, state: Any, action: str) -> Step:
        self.said.append(action)
        return Step(state, "again", len(self.said) == 2)

    def score(self, state: Any) -> float:
        return self.said.count(str(state[0])) / 2


class ScoreConsumes(Count):
    """Asking for the score changes what the next step answers."""

    def reset(self, task: int) -> tuple[Any, list[Message]]:
        return [task, 0, ()], [{"role": "user", "content": str(task)}]

    def step(self, state: Any, action: str) -> Step:
        return Step([state[0], state[1], (*state[2], action)], str(state[1]), len(state[2]) == 2)

    def score(self, state: Any) -> float:
        state[1] += 1
        return state[2].count(str(state[0])) / 3

    def players(self) -> Mapping[str, Player]:
        return {"right": lambda state, rng: str(state[0]), "wrong": lambda state, rng: "?"}


class OutOfBounds(Count):
    def score(self, state: Any) -> float:
        return 2 * super().score(state)


class Generous(Count):
    def score(self, state: Any) -> float:
        return 1.0


class Messaging(Count):
    def players(self) -> Mapping[str, Player]:
        return {**super().players(), "right": lambda state, rng: {"role": "assistant", "content": str(state[0])}}  # type: ignore[dict-item,return-value]


class Stingy(Count):
    def score(self, state: Any) -> float:
        return super().score(state) / 2


class Endless(Count):
    def step(self, state: Any, action: str) -> Step:
        return super().step(state, action)._replace(done=False)

    def score(self, state: Any) -> float:
        return 1.0


class NeedsNumber(Count):
    def step(self, state: Any, action: str) -> Step:
        if action != "?":
            int(action)
        return super().step(state, action)


class NoReply(Count):
    def step(self, state: Any, action: str) -> Step:
        return super().step(state, action)._replace(reply=None)


@pytest.mark.parametrize(
    ("kind", "check", "part"),
    [
        (LooseIndex, "indices", "task(-1) gives a task"),
        (Overlap, "heldout", "5 held-out tasks are training tasks too"),
        (GlobalRandom, "openings", "opens differently"),
        (BadRole, "openings", "has role 'human'"),
        (Drifting, "replay", "same actions again: turn 0 is answered"),
        (Shared, "isolation", "two episodes at once"),
        (ScoreConsumes, "isolation", "let score() change nothing"),
        (OutOfBounds, "right player", "score() gives 2.0, not a number within reward_bounds 0 to 1"),
        (Generous, "wrong player", "scores too high"),
        (Stingy, "right player", "scores too low: mean score 50% of the range"),
        (Messaging, "right player", "a player returns a text, and the player right returned dict"),
        (Endless, "right player", "did not end within 256 turns"),
        (NeedsNumber, "hostile actions", "action '': raised"),
        (NoReply, "right player", "not done but replies NoneType"),
    ],
)
def test_broken_promise_is_found_by_its_check(kind: type[Count], check: str, part: str) -> None:
    failed = outcomes(kind(), "failed")
    assert part in failed.get(check, f"not found; found {failed}")
    assert all("\n" not in detail for detail in failed.values())


class Cased(Count):
    """Asks for a word in other letters: `strict` decides whether its copy is right."""

    strict = True

    def task(self, index: int, heldout: bool = False) -> str:
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return f"word{index + 100 * heldout}x"

    def reset(self, task: str) -> tuple[Any, list[Message]]:
        return (task, ""), [{"role": "user", "content": f"upper {task}"}]

    def step(self, state: Any, action: str) -> Step:
        return Step((state[0], action), None, True)

    def score(self, state: Any) -> float:
        given, wanted = state[1], state[0].upper()
        return float(given == wanted or (not self.strict and given.upper() == wanted))

    def solution(self, task: str) -> str:
        return task.upper()


def test_an_answer_in_other_letters_leaks_only_if_its_copy_is_rewarded() -> None:
    loose = Cased()
    loose.strict = False
    assert "leaks" not in outcomes(Cased(), "failed") and "'upper '" in outcomes(loose, "failed")["leaks"]
