"""Rewards that a run shapes: from the tokens alone, the same on replay, with the length that the prompt asks for."""

import math
from collections import Counter
from typing import Any

import pytest

from shoal.chat.renderer import Renderer
from shoal.config import EnvConfig, load_run
from shoal.env import Env, Message, Score, Scored, Step
from shoal.envs.interface import ShapedTask, solution_of, task_of
from shoal.envs.lint import check_env
from shoal.envs.load import env_of, load_env
from shoal.envs.replay import replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.envs.settings_wrapper import target_of, with_settings
from shoal.errors import ConfigError, ShoalError
from shoal.protocol.messages import Sampling
from shoal.protocol.messages.run import LengthTarget, OverlongPenalty, RepetitionPenalty, Shaping
from tests.envs import pile
from tests.envs.plain import Plain
from tests.models.templates import renderer_of, spell

SAMPLING = Sampling(1.0, 32, 200)
LENGTH = LengthTarget((4, 8), weight=0.01, say=" use {target}.")
ALL = Shaping(LENGTH, OverlongPenalty(limit=10, buffer=4, weight=0.5), RepetitionPenalty(size=2, weight=0.2))


class Free(Plain):
    """Any text in two turns. Right is a text with an x. Siblings are compared by it, too."""

    name, num_tasks, num_heldout = "free", 64, 64

    def step(self, state: tuple[str, ...], action: str) -> Step:
        return Step((*state, str(action)), "again", len(state) == 1)

    def score(self, state: tuple[str, ...]) -> Scored:
        return Score({"right": float("x" in "".join(state))})

    def solution(self, task: int) -> str:
        return f"x{task}"


class Compared(Free):
    def group_scores(self, states: Any) -> list[float]:
        return [-0.25 * ("y" in "".join(state)) for state in states]


def shaped(env: Env, shaping: Shaping = ALL) -> Env:
    return with_settings(env, EnvConfig("free", shaping=shaping))


def talk_of(env: Env, renderer: Renderer, *texts: str, index: int = 0) -> Conversation:
    talk = Conversation(env, renderer, task_of(env, index), SAMPLING)
    for text in texts:
        talk.write([*renderer.encode(text), renderer.eos_id][: talk.room])
    for row in talk.rows:
        row.logprobs = [0.0] * sum(author > 0 for author in row.author)
    return talk


def test_terms_count_the_policys_tokens_and_are_parts_of_the_reward(renderer: Renderer) -> None:
    env = shaped(Free())
    talk = talk_of(env, renderer, "xabab", "z")
    # written: x a b a b <end> | z <end>, 8 tokens. Pairs: xa ab ba ab b<end> | z<end>: six, one of them again.
    assert isinstance(talk.task, ShapedTask) and talk.task.tokens in (4, 8)
    off = abs(talk.task.tokens - 8)
    assert talk.parts == {
        "right": 1.0, "shaping.length": -off, "shaping.overlong": -0.5, "shaping.repetition": pytest.approx(-1 / 6),
    }  # fmt: skip
    assert talk.reward == pytest.approx(1.0 - 0.01 * off - 0.5 * 0.5 - 0.2 / 6)


def test_replay_finds_the_same_reward_from_the_tokens_alone(renderer: Renderer) -> None:
    env, told = shaped(Free()), shaped(Free())
    talk = talk_of(env, renderer, "xaa", "bbbb", index=5)
    (found,) = replay_group(told, renderer, task_of(told, 5), [talk.rollout(0)], SAMPLING)
    assert not found.problem and found.reward == talk.reward and found.earned is not None
    assert found.earned.parts == talk.parts
    other = next(i for i in range(64) if target_of(i, False, LENGTH.targets) != target_of(5, False, LENGTH.targets))
    (refused,) = replay_group(told, renderer, task_of(told, other), [talk.rollout(0)], SAMPLING)
    assert refused.problem and refused.reward == min(told.reward_bounds)


def test_siblings_are_compared_on_top_of_the_runs_terms(renderer: Renderer) -> None:
    env = shaped(Compared())
    talks = [talk_of(env, renderer, *texts) for texts in (("x", "a"), ("xy", "a"))]
    own = [talk.reward for talk in talks]
    found = replay_group(env, renderer, task_of(env, 0), [talk.rollout(0) for talk in talks], SAMPLING)
    assert [one.reward for one in found] == pytest.approx([own[0], own[1] - 0.25])


def test_the_prompt_asks_for_the_length_that_the_tasks_index_draws(renderer: Renderer) -> None:
    env = shaped(Free())
    drawn = Counter()
    for index in range(64):
        for heldout in (False, True):
            task = task_of(env, index, heldout)
            drawn[heldout, task.tokens] += 1
            told = env.reset(task)[1][-1]["content"]
            assert told == f"task {index + 100 * heldout} use {target_of(index, heldout, (4, 8))}."
    assert min(drawn.values()) > 16  # of 64
    assert solution_of(env, task_of(env, 3)) == ("x3",)


def test_a_content_of_parts_and_an_opening_without_a_user_get_the_sentence_too() -> None:
    class Listed(Free):
        def reset(self, task: int) -> tuple[Any, list[Message]]:
            if task:
                return (), [{"role": "system", "content": "PLAY"}]
            return (), [{"role": "user", "content": [{"type": "text", "text": "GO"}]}]

    env = with_settings(Listed(), EnvConfig("free", system="RUN", shaping=Shaping(LengthTarget((6,)))))
    said = "Think for 6 tokens before giving a response."
    assert env.reset(task_of(env, 0))[1] == [
        {"role": "system", "content": "RUN"},
        {"role": "user", "content": [{"type": "text", "text": "GO"}, {"type": "text", "text": " " + said}]},
    ]
    assert env.reset(task_of(env, 1))[1] == [{"role": "system", "content": "RUN"}, {"role": "user", "content": said}]


def test_each_seat_reads_the_length() -> None:
    renderer, env = renderer_of("qwen3"), shaped(pile.environment(), Shaping(LENGTH))
    talk = Conversation(env, renderer, task_of(env, 0), Sampling(1.0, 8, 400))
    while talk.ending is None and len(talk.rows) < 2:
        talk.write([*renderer.encode("1"), renderer.eos_id])
    asks = f"use {target_of(0, False, LENGTH.targets)}."
    assert all(asks in spell(renderer, row.tokens) for row in talk.rows) and len(talk.rows) == 2


def test_no_shaping_can_leave_the_bounds_and_a_fault_earns_the_least(renderer: Renderer) -> None:
    class Failing(Free):
        def score(self, state: tuple[str, ...]) -> Scored:
            raise KeyError("score")

    env = shaped(Free())
    assert env.reward_bounds == (pytest.approx(0 - 8 * 0.01 - 0.5 - 0.2), 1.0)
    worst = talk_of(env, renderer, "a" * 31, "a" * 31)
    assert worst.ending == "environment" and min(env.reward_bounds) <= worst.reward < min(env.reward_bounds) + 0.02
    fault = talk_of(shaped(Failing()), renderer, "x", "x")
    assert fault.ending == "error" and fault.reward == min(env.reward_bounds)


def test_rounding_puts_no_rollout_below_the_lowest_reward(renderer: Renderer) -> None:
    class Least(Free):
        reward_bounds = (0.7, 1.0)

        def score(self, state: tuple[str, ...]) -> Scored:
            return 0.7

    worst = Shaping(LengthTarget((1,), weight=0.24, most=8, say=" {target}"), OverlongPenalty(1, 0, weight=0.3))
    assert math.fsum([0.7, -0.24 * 8, -0.3]) < 0.7 - math.fsum([0.24 * 8, 0.3])
    talk = talk_of(shaped(Least(), worst), renderer, "aaaa", "aaaa")
    assert talk.ending == "environment" and talk.reward == min(talk.env.reward_bounds)


@pytest.mark.parametrize(
    ("shaping", "says"),
    [
        (Shaping(LengthTarget(())), "shaping.length.targets: give 1 to 64 lengths"),
        (Shaping(LengthTarget((0,))), "shaping.length.targets"),
        (Shaping(LengthTarget((4,), say="be brief")), "shaping.length.say: .* with {target} once"),
        (Shaping(LengthTarget((4,), most=-1)), "shaping.length.most = -1"),
        (Shaping(LengthTarget((4,), weight=float("nan"))), "shaping.length.weight = nan"),
        (Shaping(overlong=OverlongPenalty(4, 5)), "shaping.overlong.buffer = 5: must be 0 to the limit, 4"),
        (Shaping(overlong=OverlongPenalty(4, 2, weight=-1.0)), "shaping.overlong.weight = -1"),
        (Shaping(repetition=RepetitionPenalty(0)), "shaping.repetition.size = 0"),
        (Shaping(repetition=RepetitionPenalty(65)), "shaping.repetition.size = 65: must be 1 to 64"),
        (Shaping(LengthTarget((4,), weight=1000.0, most=10_000)), "may lower a reward to -1e\\+07"),
    ],
)
def test_shaping_that_cannot_be_used_is_refused_in_one_line(shaping: Shaping, says: str) -> None:
    with pytest.raises(ShoalError, match=says) as refused:
        env_of(EnvConfig("arithmetic", shaping=shaping))
    assert "\n" not in str(refused.value)


def test_a_run_file_names_the_terms_and_mistakes_name_the_key(tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "r"\nsteps = 1\n[[envs]]\nname = "arithmetic"\n[envs.shaping.length]\ntargets = [4, 8]\n')
    config = load_run(path, ["envs.0.shaping.length.weight=0.5"])
    assert config.envs[0].shaping == Shaping(LengthTarget((4, 8), weight=0.5))
    with pytest.raises(ConfigError, match="target"):
        load_run(path, ["envs.0.shaping.length.target=4"])


def test_a_shaped_environment_passes_its_checks() -> None:
    findings = check_env(shaped(load_env("arithmetic", {}), Shaping(LENGTH)), tasks=4)
    assert [one for one in findings if one.outcome == "failed"] == []
