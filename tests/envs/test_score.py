"""What an episode earns: parts and weights, rewards of turns, truncated episodes, siblings, seats; and replay agrees."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig
from shoal.env import Env, Message, Score, Scored, Step
from shoal.envs.env_from_file import make_env
from shoal.envs.evaluate import evaluate
from shoal.envs.exceptions import RewardOutOfBounds
from shoal.envs.interface import Earned, earned
from shoal.envs.isolated.environment import in_child
from shoal.envs.lint import check_env
from shoal.envs.load import load_env
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.envs.settings_wrapper import with_settings
from shoal.errors import ConfigError
from shoal.protocol.messages import Rollout, Sampling

SAMPLING = Sampling(1.0, 8, 60)


class Parts(Env):
    """Two turns of any text. Right is "yes"; each turn but the last earns 0.25; siblings are compared by length."""

    name, num_tasks, num_heldout = "parts", 8, 4
    reward_bounds = (-1.0, 2.0)
    weights = {"right": 1.0, "brief": 0.1, "shortest": 0.5}

    def task(self, index: int, heldout: bool = False) -> int:
        if not 0 <= index < (self.num_heldout if heldout else self.num_tasks):
            raise IndexError(index)
        return index + 100 * heldout

    def reset(self, task: int) -> tuple[tuple[str, ...], list[Message]]:
        return (), [{"role": "user", "content": str(task)}]

    def step(self, state: tuple[str, ...], action: str) -> Step:
        said = (*state, str(action))
        return Step(said, "again", len(said) == 2, reward=0.25 if len(said) == 1 else 0.0)

    def score(self, state: tuple[str, ...]) -> Scored:
        return Score(
            {"right": float("yes" in state), "brief": float(len("".join(state)) < 6)}, {"letters": len("".join(state))}
        )

    def truncated_score(self, state: tuple[str, ...]) -> Scored:
        return -1.0

    def group_scores(self, states: Sequence[tuple[str, ...]]) -> list[Scored]:
        lengths = [len("".join(state)) for state in states]
        return [Score({"shortest": float(length == min(lengths))}) for length in lengths]


class Unit(Parts):
    reward_bounds = (0.0, 1.0)


@pytest.mark.parametrize("score", [1, 1.0, True, np.True_, np.float32(1), np.float64(1), np.int64(1)])
def test_a_score_may_be_a_number_of_numpy(score: Any) -> None:
    assert earned(Unit(), [score]) == Earned(1.0, {}, {}) == earned(Unit(), [], [score])
    assert type(earned(Unit(), [score]).reward) is float
    assert type(earned(Unit(), [Score({"right": score})]).parts["right"]) is float


def test_a_rounded_sum_is_the_bound() -> None:
    rounded = 1.0000000000000002  # what 1 / 9, added nine times, gives in Python 3.11
    assert earned(Unit(), [rounded]).reward == 1.0 < rounded
    assert earned(Unit(), [-1e-17]).reward == 0.0 and earned(Unit(), [1 - 1e-12]).reward == 1 - 1e-12
    for score in (1 + 1e-8, -1e-8):
        with pytest.raises(RewardOutOfBounds):
            earned(Unit(), [score])


def talk_of(env: Env, renderer: Renderer, *texts: str, sampling: Sampling = SAMPLING) -> Conversation:
    talk = Conversation(env, renderer, env.task(0), sampling)
    for text in texts:
        if talk.ending is None:
            talk.write([*renderer.encode(text), renderer.eos_id][: talk.room])
    for row in talk.rows:
        row.logprobs = [0.0] * sum(author > 0 for author in row.author)
    return talk


def claims(talks: Sequence[Conversation]) -> list[Rollout]:
    return [talk.rollout(0) for talk in talks]


def rewards(env: Env, renderer: Renderer, talks: Sequence[Conversation]) -> list[float]:
    found = replay_group(env, renderer, env.task(0), claims(talks), SAMPLING)
    assert not any(one.problem for one in found)
    return [one.reward for one in found]


def test_parts_times_their_weights_and_the_rewards_of_turns_are_the_reward(renderer: Renderer) -> None:
    talk = talk_of(Parts(), renderer, "no", "yes")
    assert talk.reward == pytest.approx(0.25 + 1.0 + 0.1 * 1.0)
    assert talk.parts == {"right": 1.0, "brief": 1.0} and talk.metrics == {"letters": 5.0}
    assert talk.episode.turn_rewards == [0.25, 0.0]


def test_a_run_file_may_give_the_parts_other_weights(renderer: Renderer) -> None:
    env = with_settings(Parts(), EnvConfig("parts", weights={"brief": -0.5}))
    assert talk_of(env, renderer, "no", "yes").reward == pytest.approx(0.25 + 1.0 - 0.5)
    with pytest.raises(
        ConfigError, match=r"weights.style: the reward has no such part; its parts are right, brief, shortest"
    ):
        with_settings(Parts(), EnvConfig("parts", weights={"style": 1.0}))


def test_a_truncated_episode_has_its_own_score(renderer: Renderer) -> None:
    talk = talk_of(Parts(), renderer, "no", "yesyesyes")
    assert talk.ending == "length" and talk.reward == -0.75  # the first turn has earned 0.25
    plain = talk_of(load_env("arithmetic", {}), renderer, "9" * 30)
    assert plain.ending == "length" and plain.reward == plain.env.score(plain.state)


def test_siblings_are_compared_and_replay_finds_the_same(renderer: Renderer) -> None:
    env = Parts()
    talks = [talk_of(env, renderer, *texts) for texts in (("no", "yes"), ("a", "yes"), ("no", "yes"), ("b", "b"))]
    own = [talk.reward for talk in talks]
    assert rewards(env, renderer, talks) == pytest.approx([own[0], own[1], own[2], own[3] + 0.5])
    assert rewards(env, renderer, talks[:2]) == pytest.approx([own[0], own[1] + 0.5])


@pytest.mark.parametrize("given", [[Score({"shortest": 9.0})] * 2, [0.0], [float("nan")] * 2, ["x", "y"], None])
def test_a_comparison_that_fails_gives_all_the_lowest_reward(given: Any, renderer: Renderer) -> None:
    class Faulty(Parts):
        def group_scores(self, states: Sequence[Any]) -> Any:
            return given

    env = Faulty()
    talks = [talk_of(env, renderer, "no", text) for text in ("yes", "so")]
    assert rewards(env, renderer, talks) == [-1.0, -1.0]
    finding = {one.check: one for one in check_env(env, tasks=2)}["group scores"]
    assert finding.outcome == "failed"


class Coached(Parts):
    """Only the last turn is learned from."""

    def step(self, state: tuple[str, ...], action: str) -> Step:
        step = super().step(state, action)
        return step._replace(learn=step.done)


def test_a_masked_turn_is_checked_and_paid_but_not_learned_from(renderer: Renderer) -> None:
    env = Coached()
    talk = talk_of(env, renderer, "no", "yes")
    assert [author for author, _ in itertools.groupby(talk.author)] == [0, 2, 0, 1]
    rollout = claims([talk])[0]
    assert rollout.num_policy_tokens() == len(rollout.logprobs_P()) == 3 + 4
    assert rewards(env, renderer, [talk]) == [pytest.approx(talk.reward + 0.5)]
    lies = [bytes(2 if author else 0 for author in talk.author), bytes(min(author, 1) for author in talk.author)]
    for author in lies:
        claim = msgspec.structs.replace(rollout, author=author)
        assert replay_group(env, renderer, env.task(0), [claim], SAMPLING)[0].problem
    assert replay_group(Parts(), renderer, env.task(0), [rollout], SAMPLING)[0].problem


@pytest.mark.parametrize(
    ("scored", "says"),
    [
        (Score({"a": float("nan")}), "part a is nan, not a finite number"),
        (Score({"": 1.0}), "part '': a name has 1 to 64 printable characters"),
        (Score({"a\n": 1.0}), "a name has"),
        (Score({f"p{i}": 0.0 for i in range(65)}), "65 parts in a score, limit 64"),
        (Score({}, {"m": float("inf")}), "metric m is inf"),
        (Score({"a": 2.0, "b": 1.0}), "score 3.0 is outside reward_bounds"),
    ],
)
def test_a_malformed_score_is_refused(scored: Score, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        earned(Parts(), [scored])


def test_evaluation_reports_parts_and_metrics_and_compares_the_episodes_of_a_task(
    answering_engine: Any, renderer: Renderer
) -> None:
    found = evaluate(answering_engine(lambda text: "yes"), renderer, Parts(), 8, 0, SAMPLING)
    assert found.parts == {"brief": 0.0, "right": 1.0, "shortest": 1.0} and found.metrics == {"letters": 6.0}
    assert found.mean == pytest.approx(1.75)


def test_an_environment_of_parts_passes_its_checks() -> None:
    findings = {one.check: one for one in check_env(Parts(), tasks=4)}
    assert [one.check for one in findings.values() if one.outcome == "failed"] == []
    assert findings["group scores"].detail == "4 groups compared, the same way twice"


def test_the_check_of_groups_adds_what_turns_earn() -> None:
    class Rich(Parts):
        reward_bounds = (-1.0, 0.7)  # enough for 0.1 and 0.5 of the scores, and not for 0.25 of the first turn as well

    failed = {one.check: one.detail for one in check_env(Rich(), tasks=2) if one.outcome == "failed"}
    assert "0.85 is outside reward_bounds" in failed["group scores"]


FORGETFUL = """
from shoal.env import Env, Step

class Forgetful(Env):
    name, num_tasks = "forgetful", 4
    def task(self, index, heldout=False): return index
    def reset(self, task): return task, [{"role": "user", "content": "a"}]
    def step(self, state, action):
        return Step(state, None, True, reward=STEP)
    def score(self, state):
        if state == "won": return 1.0
        return SCORE

environment = Forgetful
"""


@pytest.mark.parametrize("opener", [make_env, in_child])
@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (("0.0", "None"), "line 10: score(): TypeError: the score is None, not a number"),
        (("0.0", "7.0"), "line 10: score(): RewardOutOfBounds: score 7.0 is outside"),
        (("'x'", "1.0"), "line 8: step(): TypeError: the reward of a step is 'x', not a number"),
        (("0.0", "1 / 0"), "line 12: ZeroDivisionError: division by zero"),
    ],
)
def test_what_an_environment_must_not_return_is_told_with_its_authors_function_and_line(
    opener: Any, gives: tuple[str, str], says: str, renderer: Renderer, tmp_path: Path
) -> None:
    """Rather than with the line of ours that refuses it."""
    file = tmp_path / "forgetful.py"
    file.write_text(FORGETFUL.replace("STEP", gives[0]).replace("SCORE", gives[1]))
    talk = talk_of(opener(file, {}, "environment"), renderer, "a")
    knows_line = opener is make_env or "outside" not in says  # bounds are compared where no line is known
    says = f"forgetful.py {says}" if knows_line else says.partition(": ")[2]
    assert talk.ending == "error" and says in talk.fault and talk.public_fault.startswith(says)


def test_a_file_may_score_with_numpy(renderer: Renderer, tmp_path: Path) -> None:
    file = tmp_path / "forgetful.py"
    file.write_text(FORGETFUL.replace("STEP", "0.0").replace("SCORE", "__import__('numpy').float32(0.5)"))
    assert talk_of(in_child(file, {}, "environment"), renderer, "a").reward == 0.5


class Torn(Parts):
    """Its `success` returns what is neither true nor false."""

    def success(self, state: Any) -> Any:
        return np.zeros(2)


def test_a_success_that_is_no_truth_value_is_told_of_success(renderer: Renderer) -> None:
    talk = talk_of(Torn(), renderer, "a", "b")
    assert talk.ending == "error" and ": success(): ValueError: " in talk.fault, talk.fault
