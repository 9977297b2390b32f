"""Faults of an environment: which rollouts they leave out, and what they are called."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig
from shoal.env import Env, Step
from shoal.envs.concurrent_episodes import alone
from shoal.envs.exceptions import redact_paths
from shoal.envs.replay import ReplayResult, judge, replaying
from shoal.envs.rollout_rules import Conversation
from shoal.envs.settings_wrapper import with_settings
from shoal.errors import Overreach
from shoal.protocol.messages import Faults, Sampling
from shoal.protocol.reward_rules import faults_of
from tests.envs.plain import Plain

SAMPLING = Sampling(1.0, 8, 64)


class Odd(Plain):
    """It does with an answer what the answer says."""

    name, num_tasks = "odd", 1

    def reset(self, task: int) -> tuple[Any, list[dict[str, str]]]:
        return "", [{"role": "user", "content": "?"}]

    def step(self, state: Any, action: str) -> Step:
        if action == "raise":
            raise KeyError("x")
        return Step(str(action), "", True, math.nan if action == "step" else 0.0)

    def score(self, state: Any) -> Any:
        return {"nan": math.nan, "inf": math.inf, "two": 2.0, "none": None, "huge": 10**400}.get(state, 0.5)


class Compared(Odd):
    def group_scores(self, states: Any) -> Any:
        if "all" in states:
            raise ValueError("not this one")
        return [{"more": 0.75}.get(state, 0.0) for state in states]


def played(env: Env, renderer: Renderer, *answers: str) -> list[ReplayResult]:
    """Replays of a group whose rollouts give these answers."""
    found = []
    for answer in answers:
        talk = Conversation(env, renderer, 0, SAMPLING)
        talk.write([*renderer.encode(answer), renderer.eos_id][: talk.room])
        assert talk.ending is not None
        found.append(alone(replaying(env, renderer, 0, talk.rollout(0), SAMPLING)))
    return judge(found, env)


@pytest.mark.parametrize(
    ("answer", "said"),
    [("raise", ": KeyError: 'x'"), ("nan", "the score is nan"), ("inf", "the score is inf"),
     ("none", "TypeError"), ("step", "the reward of a step is nan"), ("huge", "OverflowError")],
)  # fmt: skip
def test_a_rollout_on_which_the_environment_fails_is_left_out(answer: str, said: str, renderer: Renderer) -> None:
    replays = played(Odd(), renderer, "ok", answer)
    assert [one.ending for one in replays] == ["environment", "error"] and replays[1].reward == 0.0
    faults = faults_of(replays)
    assert isinstance(faults, Faults) and (faults.rollouts, faults.outside) == ((1,), ())
    assert said in faults.said and "/" not in faults.said


def test_a_score_outside_the_bounds_is_a_fault_with_its_value(renderer: Renderer) -> None:
    faults = faults_of(played(Odd(), renderer, "two", "ok", "two"))
    assert isinstance(faults, Faults)
    assert (faults.rollouts, faults.outside, faults.score) == ((0, 2), (0, 2), 2.0)
    assert "score 2.0 is outside reward_bounds 0.0 to 1.0" in faults.said


def test_a_rollout_that_fails_has_no_part_in_the_scores_of_its_group(renderer: Renderer) -> None:
    """If the comparison fails, it fails on all of the group; if one score is none, on this one."""
    replays = played(Compared(), renderer, "raise", "more", "ok")
    assert [one.reward for one in replays] == [0.0, 0.0, 0.5], "0.5 and 0.75 are outside"
    faults = faults_of(replays)
    assert isinstance(faults, Faults) and (faults.rollouts, faults.outside, faults.score) == ((0, 1), (1,), 1.25)
    whole = played(Compared(), renderer, "ok", "all")
    assert [one.reward for one in whole] == [0.0, 0.0] and [one.ending for one in whole] == ["environment"] * 2
    faults = faults_of(whole)
    assert isinstance(faults, Faults) and faults.rollouts == (0, 1) and "not this one" in faults.said


def test_on_fault_lowest_learns_from_it_but_still_names_scores_outside(renderer: Renderer) -> None:
    env = with_settings(Odd(), EnvConfig("odd", on_fault="lowest"))
    replays = played(env, renderer, "raise", "ok")
    assert faults_of(replays) is msgspec.UNSET and [one.reward for one in replays] == [0.0, 0.5]
    assert faults_of(played(env, renderer, "ok", "two")) == Faults((), (1,), 2.0)


@pytest.mark.parametrize("error", [MemoryError(), Overreach("too slow")])
def test_what_only_this_machine_met_is_no_fault(error: Exception, renderer: Renderer) -> None:
    class Short(Odd):
        def step(self, state: Any, action: str) -> Step:
            raise error

    with pytest.raises(type(error)):
        played(Short(), renderer, "ok")


def test_the_log_does_not_learn_the_folder_of_a_file() -> None:
    source = Path("/home/me/my games/words.py")
    for fault, public in {
        "/home/me/my games/words.py line 7: KeyError: 'a/b'": "words.py line 7: KeyError: 'a/b'",
        "/usr/lib of me/json.py line 7: KeyError: 'a'": "json.py line 7: KeyError: 'a'",
        "ValueError: no such file data/a.txt line 3 of it": "ValueError: no such file data/a.txt line 3 of it",
        "words.py line 3: OSError: no '/home/me/secret/a.txt'": "words.py line 3: OSError: no 'a.txt'",
        "words.py line 3: no /home/me/my games/data/b.txt, /srv/c": "words.py line 3: no data/b.txt, c",
        "ValueError: http://host/a/b and 1/2 and and/or": "ValueError: http://host/a/b and 1/2 and and/or",
        "it gives 2 scores for 3 rollouts": "it gives 2 scores for 3 rollouts",
    }.items():
        assert redact_paths(fault, source) == public
