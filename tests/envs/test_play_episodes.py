"""Play: lockstep turns, authors, endings and limits, scripted players, blocks."""

import itertools
import random
import re
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from shoal.chat.renderer import Renderer
from shoal.env import Env, Message, Step
from shoal.envs.builtin import arithmetic, wordle
from shoal.envs.interface import step_of
from shoal.envs.play_episodes import EpisodeAttempt, begin, converse, play, play_block, play_scripted
from shoal.envs.prompt_preview import no_task_begins
from shoal.errors import Interrupted, Overreach, ShoalError, StateError, Undecided
from shoal.protocol.messages import POLICY, Block, Sampling, Slot
from shoal.protocol.seed_chain import sample_seed


class Echo(Env):
    """Asks until told "end"; misbehaves on request."""

    name = "echo"
    num_tasks = 1

    def task(self, index: int, heldout: bool = False) -> str:
        return "say"

    def reset(self, task: str) -> tuple[list[str], list[Message]]:
        if task == "broken":
            raise OSError("no such\ntask")
        return [], [{"role": "user", "content": task}]

    def step(self, state: list[str], action: str) -> Step:
        if action == "raise":
            raise ZeroDivisionError("by request")
        return Step([*state, action], None if action == "none" else "go on", action == "end")

    def score(self, state: list[str]) -> float:
        return float("nan") if "nan" in state else 0.25 * len(state)


def run(engine: Any, renderer: Renderer, sampling: Sampling, task: str = "say") -> Any:
    return converse(engine, renderer, [EpisodeAttempt(Echo(), task, bytes(32))], sampling)[0]


@pytest.fixture
def saying(answering_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an engine that says each of some things in turn."""

    def make(*actions: str) -> Any:
        left = iter(actions)
        return answering_engine(lambda text: next(left))

    return make


def test_turns_are_written_and_answered_until_the_environment_is_done(saying: Any, renderer, sampling) -> None:
    talk = run(saying("one", "two", "end"), renderer, sampling)
    assert talk.ending == "environment" and talk.reward == 0.75
    end = [renderer.eos_id]
    opening, reply = renderer.start([{"role": "user", "content": "say"}]), renderer.reply("go on")
    turns = [renderer.encode(text) + end for text in ("one", "two", "end")]
    assert talk.tokens == opening + turns[0] + reply + turns[1] + reply + turns[2]
    parts = [(opening, 0), (turns[0], 1), (reply, 0), (turns[1], 1), (reply, 0), (turns[2], 1)]
    assert talk.author == [author for part, author in parts for _ in part]
    assert len(talk.logprobs) == sum(map(len, turns))
    assert [who for who, _ in talk.texts] == ["user", "policy"] * 2 + ["user", "policy", "user"]


def test_turn_without_a_stop_token_ends_by_length_and_is_still_scored(saying, renderer, sampling) -> None:
    talk = run(saying("a" * 16), renderer, sampling)
    assert talk.ending == "length" and talk.state == ["a" * len(talk.state[0])] and talk.reward > 0.0
    assert len(talk.logprobs) == sampling.max_turn_tokens


def test_stop_token_at_the_very_limit_still_counts(saying, renderer, sampling) -> None:
    talk = run(saying("a" * 15, "end"), renderer, sampling)
    assert talk.ending == "environment" and talk.reward == 0.5


def test_a_reply_that_leaves_no_room_is_not_appended_and_the_rollout_ends_by_length(saying, renderer) -> None:
    opening, reply = len(renderer.start([{"role": "user", "content": "say"}])), len(renderer.reply("go on"))
    for spare, tokens in ((0, opening + 2), (1, opening + 2 + reply + 1)):
        talk = run(saying("a", "b"), renderer, Sampling(1.0, 8, opening + 2 + reply + spare))
        assert (talk.ending, len(talk.tokens)) == ("length", tokens)
        assert talk.reward == 0.25 * (1 + spare)  # a second turn, cut after one token, is shown too


@pytest.mark.parametrize(("action", "fault"), [("none", "not NoneType"), ("nan", "not a finite number")])
def test_environment_that_misbehaves_ends_by_error_with_the_lowest_reward(action, fault, saying, renderer, sampling):
    talk = run(saying("fine", action, "end"), renderer, sampling)
    assert (talk.ending, talk.reward) == ("error", 0.0)
    assert fault in talk.fault and ".py line " in talk.fault


def test_environment_that_cannot_begin_says_so_in_one_line(saying, renderer, sampling) -> None:
    with pytest.raises(
        ShoalError, match=r"echo cannot begin task 'broken': .*line \d+: OSError: no such task"
    ) as caught:
        run(saying(), renderer, sampling, task="broken")
    assert "\n" not in str(caught.value)


def test_each_turn_is_one_engine_call_for_all_unfinished_rollouts_in_order(random_engine, renderer, sampling) -> None:
    env = wordle.environment(num_words=64, heldout=8)
    engine = random_engine(env.words)
    episodes = [EpisodeAttempt(env, env.task(i % 5), sample_seed(bytes(32), i)) for i in range(20)]
    rollouts = play(engine, renderer, episodes, sampling)
    names = [[request.rollout for request in call] for call in engine.calls]
    assert len(names[0]) == len(set(names[0])) == 20
    for before, after in itertools.pairwise(names):
        assert after == [name for name in before if name in after]
    assert sorted(engine.forgotten) == sorted(names[0])
    assert [request.seed for request in engine.calls[0]] == [episode.seed for episode in episodes]
    assert play(random_engine(env.words), renderer, episodes, sampling) == rollouts


def test_engine_forgets_all_even_when_it_fails(random_engine, renderer, sampling) -> None:
    engine = random_engine()

    def fail(request: Any) -> list[int]:
        raise RuntimeError("device lost")

    engine.write = fail
    with pytest.raises(RuntimeError):
        run(engine, renderer, sampling)
    assert len(engine.forgotten) == 1


def test_a_block_gives_one_group_for_each_slot_under_the_seeds_of_the_slot(random_engine, renderer, sampling) -> None:
    envs = {"wordle": wordle.environment(num_words=64, heldout=8), "arithmetic": arithmetic.environment()}
    slots = tuple(Slot(4 + i, bytes([i] * 32).hex(), name, 3 + i) for i, name in enumerate(envs))
    engine = random_engine()
    groups = play_block(engine, renderer, envs, Block(2, slots), 3, sampling)
    assert [(g.slot, g.env, g.task, len(g.rollouts)) for g in groups] == [(4, "wordle", 3, 3), (5, "arithmetic", 4, 3)]
    assert [r.seed for r in engine.calls[0]] == [sample_seed(bytes([i] * 32), k) for i in (0, 1) for k in range(3)]
    opening = renderer.start(envs["arithmetic"].reset(envs["arithmetic"].task(4))[1])
    assert groups[1].rollouts[0].tokens_T()[: len(opening)].tolist() == opening


def test_block_with_an_unknown_environment_is_refused(random_engine, renderer, sampling) -> None:
    with pytest.raises(ShoalError, match="environment chess, which is not loaded"):
        play_block(random_engine(), renderer, {}, Block(0, (Slot(0, "00" * 32, "chess", 0),)), 2, sampling)


def test_a_scripted_player_is_held_to_the_same_limits(renderer, sampling) -> None:
    env = wordle.environment()
    talks = [
        play_scripted(env, renderer, env.task(i), env.players()["right"], random.Random(i), sampling) for i in range(20)
    ]
    assert sum(bool(talk.success) for talk in talks) >= 18
    cut = play_scripted(env, renderer, env.task(0), lambda state, rng: "a" * 50, random.Random(0), sampling)
    assert cut.ending == "length" and cut.author.count(POLICY) == sampling.max_turn_tokens


def test_what_is_no_step_is_named():
    assert step_of(("state", None, True)) == Step("state", None, True)
    with pytest.raises(TypeError, match=r"step\(\) must return Step\(state, reply, done\), not int"):
        step_of(3)
    with pytest.raises(TypeError, match=r"step\(\) must return Step\(state, reply, done\), not 2 values"):
        step_of(("state", None))


def test_a_task_that_can_never_begin_is_reported_once_with_its_length_and_the_key(
    saying: Any, renderer, sampling, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.envs.play_episodes._reported", {})

    class Long(Echo):
        name, num_tasks = "long", 2

        def task(self, index: int, heldout: bool = False) -> str:
            return "word " * 4000 if index else "broken"

    block = Block(0, tuple(Slot(number, "00" * 32, "long", number % 2) for number in range(6)))
    groups = play_block(saying(), renderer, {"long": Long()}, block, 2, sampling)
    assert [group.rollouts for group in groups] == [()] * 6
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert re.match(r"task cannot begin env=long task=0 reason=.*\.py line \d+: OSError: no such task", lines[0])
    assert re.search(
        rf"task=1 reason=its prompt takes \d+ tokens, and sampling.max_tokens = {sampling.max_tokens} leaves no room for",
        lines[1],
    )
    env = Long()
    env.max_tokens = 9  # type: ignore[attr-defined]
    assert "and envs.max_tokens = 9 leaves no room" in begin(env, renderer, 1, sampling)[1]


def test_a_reply_that_the_chat_template_refuses_ends_the_rollout_in_the_words_of_the_template(
    saying: Any, renderer: Renderer, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: object, arguments: object = None, *more: object) -> Any:
        raise StateError("the chat template refuses these messages: roles must\nalternate")

    monkeypatch.setattr(renderer, "go_on", refuse)
    talk = run(saying("one"), renderer, sampling)
    said = "the chat template refuses these messages: roles must alternate"
    assert (talk.ending, talk.fault) == (
        "error", f"the policy's chat template or tokenizer does not take its reply: {said}",
    )  # fmt: skip


@pytest.mark.parametrize("error", [Undecided, Interrupted, Overreach, MemoryError])
@pytest.mark.parametrize("call", ["task", "reset"])
def test_a_call_that_this_machine_ends_never_says_that_a_task_cannot_begin(
    call: str, error: type[Exception], renderer, sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*args: object, **named: object) -> NoReturn:
        raise error("it took longer than 10 s")

    env = Echo()
    monkeypatch.setattr(env, call, ended)
    with pytest.raises(error):
        begin(env, renderer, 0, sampling)
    if error is not MemoryError:
        assert not no_task_begins(env, renderer, sampling, range(1))
