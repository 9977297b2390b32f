"""What turns and steps earn: by which tokens, in which runs, and what no environment may say."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.chat.renderer import Renderer
from shoal.env import Env, Step
from shoal.envs.episode import marks_of
from shoal.envs.interface import AuthorError
from shoal.envs.lint import check_env
from shoal.envs.load import load_env
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.protocol.algorithm_config import StepCredit, Steps, Turns
from shoal.protocol.audit_and_pay import MAX_REWARD
from shoal.protocol.constants import MAX_ROLLOUT_STEPS
from shoal.protocol.messages import Sampling, StepReward
from tests.envs import pile
from tests.envs.test_score import Parts, claims, talk_of

SAMPLING = Sampling(1.0, 16, 96)
SUMS = str(Path(__file__).parents[2] / "examples" / "environments" / "running-sums")


def steps_of(talk: Conversation, credit: StepCredit) -> list[StepReward]:
    (found,) = replay_group(talk.env, talk.renderer, talk.task, claims([talk]), SAMPLING)
    assert not found.problem and found.reward == talk.reward
    steps = found.steps(credit)
    assert math.fsum(step.reward for step in steps) == found.reward
    return list(steps)


def ends(talk: Conversation) -> list[int]:
    """Indices of the last token of each turn, in a rollout of one row."""
    author = [*talk.author, 0]
    return [i for i in range(len(author) - 1) if author[i] and not author[i + 1]]


def play(renderer: Renderer, *texts: str, env: Env | None = None, **args: Any) -> Conversation:
    return talk_of(env or load_env(SUMS, args), renderer, *texts, sampling=SAMPLING)


def test_each_turn_earns_its_reward_and_the_last_one_the_score_as_well(renderer: Renderer) -> None:
    talk = talk_of(Parts(), renderer, "no", "yes", sampling=SAMPLING)
    (found,) = replay_group(talk.env, renderer, talk.task, claims([talk]), SAMPLING)
    first, last = ends(talk)
    # 1 for being right, 0.1 for being brief, and 0.5 for being the shortest of the group
    assert found.steps(Turns()) == (StepReward(first, 0.25), StepReward(last, pytest.approx(1.6)))
    assert found.steps(Turns(most=1)) == (StepReward(last, found.reward),)
    assert found.steps(Steps()) == found.steps(Turns())


def test_a_right_turn_of_several_earns_its_share(renderer: Renderer) -> None:
    env = load_env(SUMS, {"turns": True})
    right = env.solution(env.task(0))  # type: ignore[attr-defined]
    talk = play(renderer, right[0], "no", *right[2:], turns=True)
    assert [step.reward for step in steps_of(talk, Turns())] == [0.25, 0.0, 0.25, 0.25]
    assert [step.end for step in steps_of(talk, Turns())] == ends(talk)
    assert [step.reward for step in steps_of(talk, Turns(most=2))] == [0.25, 0.5]


def test_marked_steps_end_at_the_tokens_of_their_last_characters(renderer: Renderer) -> None:
    env = load_env(SUMS, {})
    (answer,) = env.solution(env.task(0))  # type: ignore[attr-defined]
    lines = answer.split("\n")
    talk = play(renderer, "\n".join([lines[0], "x", lines[2], lines[3]]))
    begin, (end,) = talk.author.index(1), ends(talk)
    found = steps_of(talk, Steps())
    assert found == [(begin + 1, 0.25), (begin + 3, 0.0), (begin + 5, 0.25), (end, 0.25)]
    assert steps_of(talk, Turns()) == [(end, 0.75)] == steps_of(talk, Steps(most=1))
    assert end == begin + 7  # the last line has the stop token, too
    talk = play(renderer, answer + "\n9")
    assert steps_of(talk, Steps())[-2:] == [(begin + 7, 0.25), (*ends(talk), 0.0)], "what follows is a step of its own"


def test_steps_that_end_within_one_token_are_one(renderer: Renderer) -> None:
    class Halves(Parts):
        def step(self, state: Any, action: str) -> Step:
            return Step((*state, str(action)), None, True, steps=[(1, 0.25), (2, 0.5), (len(action), 0.125)])

    whole = Renderer.decode

    def coarse(self: Renderer, token_ids: Any) -> str:
        """As of a tokenizer whose first token has two characters."""
        text = whole(self, token_ids)
        return ("a" + text) if text else text

    talk = play(renderer, "xyz", env=Halves())
    begin, (end,) = talk.author.index(1), ends(talk)
    (found,) = replay_group(talk.env, renderer, talk.task, claims([talk]), SAMPLING)
    assert [step.end for step in found.steps(Steps())] == [begin, begin + 1, end]
    assert found.talk is not None
    found.talk.renderer.decode = coarse.__get__(found.talk.renderer)  # type: ignore[method-assign]
    try:
        assert found.steps(Steps())[0] == StepReward(begin, 0.75)
    finally:
        del found.talk.renderer.decode


def test_turns_of_several_seats_are_in_the_order_of_play_and_end_in_their_rows(renderer: Renderer) -> None:
    talk = talk_of(pile.environment(), renderer, "go", "on", "up", sampling=Sampling(1.0, 6, 96, 240))
    played = talk.played()
    assert len(talk.rows) == 2 and [turn.text for turn in played] == ["go", "on", "up"]
    assert played[2].begin < played[1].begin  # the first row goes on, and stands before the second
    for turn in played:
        assert talk.tokens[turn.begin : turn.begin + len(turn.token_ids)] == list(turn.token_ids)


class FailingParts(Parts):
    def step(self, state: Any, action: str) -> Step:
        if action == "bad":
            raise KeyError(action)
        return Step((*state, action), "again", False, reward=0.25, steps=[(len(action), 0.25)])


def test_an_episode_that_fails_earned_nothing_before(renderer: Renderer) -> None:
    """Otherwise the turn that makes the environment fail would pay back what the others earned."""
    talk = talk_of(FailingParts(), renderer, "no", "bad", sampling=SAMPLING)
    assert talk.ending == "error" and [step.reward for step in steps_of(talk, Turns())] == [0.0, -1.0]
    assert [step.reward for step in steps_of(talk, Steps())] == [0.0, -1.0]


@pytest.mark.parametrize(
    ("marks", "says"),
    [
        ([(4, 0.1)], "a step ends at character 4, after 0, in an action of 3"),
        ([(2, 0.1), (2, 0.1)], "a step ends at character 2, after 2"),
        ([(0, 0.1)], "a step ends at character 0"),
        ([(-1, 0.1)], "a step ends at character -1"),
        ([(i, 0.0) for i in range(1, MAX_ROLLOUT_STEPS + 2)], f"more than {MAX_ROLLOUT_STEPS} steps in a turn"),
    ],
)
def test_steps_that_do_not_end_one_after_another_in_the_action_end_the_episode(
    marks: Any, says: str, renderer: Renderer
) -> None:
    text = "abc" if len(marks) < 3 else "a" * 300

    class Marked(Parts):
        def step(self, state: Any, action: str) -> Step:
            return Step((action,), None, True, steps=marks)

    with pytest.raises(ValueError, match=says):
        marks_of(marks, text)
    if len(text) == 3:
        talk = talk_of(Marked(), renderer, text, sampling=SAMPLING)
        assert talk.ending == "error" and says in talk.fault and talk.reward == -1.0
        failed = {one.check: one for one in check_env(Marked(), tasks=2) if one.outcome == "failed"}
        assert any("step() answers wrongly: a step ends at" in one.detail for one in failed.values())


@pytest.mark.parametrize("marks", [[(1.5, 0.1)], [(1,)], [5], 5, [(1, None)], [("1", 0.0)]])
def test_steps_that_are_no_pairs_of_an_end_and_a_reward_are_refused(marks: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        marks_of(marks, "abc")


@pytest.mark.parametrize("reward", [None, "", [], "x", 10**400, [1.0], 1j])
def test_a_reward_of_a_turn_that_is_no_number_stops_no_validator(reward: Any, renderer: Renderer) -> None:
    """None and empty values count as 0 in the total, and the others end the episode by error. Both have steps."""

    class Odd(Parts):
        def step(self, state: Any, action: str) -> Step:
            return super().step(state, action)._replace(reward=reward)

    talk = talk_of(Odd(), renderer, "no", "yes", sampling=SAMPLING)
    assert talk.ending == ("error" if reward else "environment")
    (found,) = replay_group(talk.env, renderer, talk.task, claims([talk]), SAMPLING)
    for credit in (Turns(), Steps()):
        assert [step.reward for step in found.steps(credit)] == [0.0, found.reward]


def test_an_episode_fails_although_its_environment_does_not_say_why(renderer: Renderer) -> None:
    """A package may send any line about a fault. An empty one must not keep what the turns before it earned."""

    class Silent(Parts):
        def step(self, state: Any, action: str) -> Step:
            if state:
                raise AuthorError("")
            return super().step(state, action)

    talk = talk_of(Silent(), renderer, "no", "bad", sampling=SAMPLING)
    assert talk.fault and [step.reward for step in steps_of(talk, Turns())] == [0.0, -1.0]


def test_rewards_that_are_too_large_stay_numbers_and_too_large(renderer: Renderer) -> None:
    """They cancel in the order in which a reward is added up, but not in that of the steps. A verdict must not say them."""
    large = 1.7e308

    class Huge(Parts):
        def step(self, state: Any, action: str) -> Step:
            marks = [(1, large), (2, large)] if not state else []
            return Step((*state, action), "again", len(state) == 1, reward=-large, steps=marks)

    env = Huge()
    talk = talk_of(env, renderer, "abc", "d", sampling=SAMPLING)
    assert talk.ending == "environment"
    (found,) = replay_group(env, renderer, env.task(0), claims([talk]), SAMPLING)
    for credit in (Turns(), Steps()):
        rewards = [step.reward for step in found.steps(credit)]
        assert all(map(math.isfinite, rewards)) and max(map(abs, rewards)) > MAX_REWARD


def test_a_turn_that_is_paid_otherwise_the_second_time_is_found_by_the_check() -> None:
    """The total is the same, so that only the turns tell. Validators would not agree on them."""
    plays = itertools.count()

    class Moving(Parts):
        reward_bounds = (-2.0, 3.0)

        def reset(self, task: int) -> Any:
            self.sign = next(plays) % 3 - 1
            return super().reset(task)

        def step(self, state: Any, action: str) -> Step:
            return super().step(state, action)._replace(reward=0.25 * self.sign * (-1) ** len(state))

    failed = {one.check: one.detail for one in check_env(Moving(), tasks=3) if one.outcome == "failed"}
    assert any("earns (" in detail for detail in failed.values()), failed
