"""Replay: honest rollouts are accepted with the reward they earned; no edit except of the policy's own text is."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.chat.renderer import Renderer
from shoal.env import Env
from shoal.envs.builtin import arithmetic, wordle
from shoal.envs.play_episodes import EpisodeAttempt, converse
from shoal.envs.replay import ReplayResult, replay_group
from shoal.envs.rollout_rules import Conversation
from shoal.protocol.messages import POLICY, Sampling, make_rollout
from shoal.protocol.seed_chain import sample_seed
from tests.envs.conftest import RandomEngine

ENDINGS = ("environment", "length", "error", "stop")


@pytest.fixture(scope="module")
def game() -> wordle.Wordle:
    return wordle.environment(num_words=64, heldout=8)


@pytest.fixture(scope="module")
def talks(game: wordle.Wordle, renderer: Renderer) -> list[Conversation]:
    """Many games under tight limits: won, lost, cut off within a turn and between turns."""
    played = []
    for max_turn, max_tokens in ((8, 200), (6, 40), (12, 57), (6, 24)):
        episodes = [EpisodeAttempt(game, game.task(i % 7), sample_seed(bytes([max_turn] * 32), i)) for i in range(24)]
        sampling = Sampling(1.0, max_turn, max_tokens)
        played += converse(RandomEngine(renderer, game.words[:12]), renderer, episodes, sampling)
    return played


def again(talk: Conversation, **edits: Any) -> ReplayResult:
    """Replay a conversation's claim, with some of it edited."""
    edited = {"tokens": talk.tokens, "author": talk.author, "ending": talk.ending} | edits
    claim = make_rollout(edited["tokens"], edited["author"], (), version=0, ending=edited["ending"])
    return replay_group(talk.env, talk.renderer, talk.task, [claim], talk.sampling)[0]


def test_honest_rollouts_are_accepted_with_the_reward_they_earned(talks: list[Conversation]) -> None:
    assert {talk.ending for talk in talks} == {"environment", "length"}
    assert {talk.success for talk in talks} == {True, False}
    for talk in talks:
        assert again(talk) == ReplayResult(talk.reward, talk.ending)


def test_every_other_ending_is_refused(talks: list[Conversation]) -> None:
    for talk in talks:
        for ending in set(ENDINGS) - {talk.ending}:
            told = f"ended by {talk.ending}, not by {ending} as claimed"
            assert again(talk, ending=ending) == ReplayResult(0.0, talk.ending, told)


def test_every_flipped_author_is_refused(talks: list[Conversation]) -> None:
    for talk in talks[::12]:
        for at in range(len(talk.tokens)):
            for author in {0, 1, 2} - {talk.author[at]}:
                edited = [*talk.author[:at], author, *talk.author[at + 1 :]]
                assert again(talk, author=edited).problem


def test_every_edited_environment_token_is_refused_at_its_place(talks: list[Conversation]) -> None:
    for talk in talks[::11]:
        for at in (i for i, author in enumerate(talk.author) if author != POLICY):
            edited = [*talk.tokens[:at], (talk.tokens[at] + 1) % 64, *talk.tokens[at + 1 :]]
            found = again(talk, tokens=edited)
            assert found.problem and found.position == at


def test_edited_policy_token_is_refused_or_only_changes_the_policys_own_text(talks: list[Conversation]) -> None:
    outcomes = set()
    for talk in talks[::7]:
        for at in (i for i, author in enumerate(talk.author) if author == POLICY):
            for token in ((talk.tokens[at] + 1) % 64, talk.renderer.eos_id, 7):
                edited = [*talk.tokens[:at], token, *talk.tokens[at + 1 :]]
                found = again(talk, tokens=edited)
                outcomes.add(bool(found.problem))
                if not found.problem:
                    assert found.reward == independent_reward(talk, edited)
    assert outcomes == {True, False}


def independent_reward(talk: Conversation, tokens: list[int]) -> float:
    """Score of the guesses in a list of tokens, computed without conversation or replay."""
    env, state = talk.env, talk.env.reset(talk.task)[0]
    turn: list[int] = []
    for token, author in zip(tokens, talk.author, strict=True):
        if author == POLICY:
            turn.append(token)
            if token in talk.renderer.stop_ids:
                state = env.step(state, talk.renderer.decode(turn)).state
                turn = []
    return env.score(state)


def test_every_shorter_or_longer_rollout_is_refused(talks: list[Conversation]) -> None:
    for talk in talks[::13]:
        for length in range(len(talk.tokens)):
            assert again(talk, tokens=talk.tokens[:length], author=talk.author[:length]).problem
        for author in (0, 1):
            for token in (7, talk.renderer.eos_id):
                assert again(talk, tokens=[*talk.tokens, token], author=[*talk.author, author]).problem


def test_inserted_and_removed_tokens_are_refused_or_are_the_policys_own_text(talks: list[Conversation]) -> None:
    for talk in talks[::8]:
        for at in range(len(talk.tokens)):
            claims = [
                (talk.tokens[:at] + talk.tokens[at + 1 :], talk.author[:at] + talk.author[at + 1 :]),
                ([*talk.tokens[:at], 9, *talk.tokens[at:]], [*talk.author[:at], talk.author[at], *talk.author[at:]]),
            ]
            for tokens, author in claims:
                found = again(talk, tokens=tokens, author=author)
                assert found.problem or talk.author[at] == POLICY


def test_another_tasks_rollout_is_refused(talks: list[Conversation], renderer: Renderer) -> None:
    env = arithmetic.environment()
    talk = next(talk for talk in talks if talk.ending == "environment")
    claim = [talk.rollout(0)]
    assert replay_group(env, renderer, env.task(0), claim, talk.sampling)[0].position <= 2
    other = [word for word in talk.env.words if word != talk.task]
    rejected = [replay_group(talk.env, renderer, task, claim, talk.sampling)[0].problem for task in other]
    assert sum(map(bool, rejected)) > 0.9 * len(other)


@given(data=st.data())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_arbitrary_claims_never_raise(data: st.DataObject, renderer: Renderer, game: wordle.Wordle) -> None:
    opening = renderer.start(game.reset(game.task(0))[1])
    tail = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 63), max_size=40))
    tokens = (opening if data.draw(st.booleans()) else []) + tail
    size = data.draw(st.sampled_from([len(tokens), len(tokens) + 1, 0]))
    author = data.draw(st.lists(st.integers(0, 255), min_size=size, max_size=size))
    if data.draw(st.booleans()):
        author = [int(i >= len(opening)) for i in range(len(tokens))]
    claim = make_rollout(tokens, author, (), version=0, ending=data.draw(st.sampled_from(ENDINGS)))
    sampling = Sampling(1.0, data.draw(st.integers(1, 8)), data.draw(st.integers(1, 60)))
    (found,) = replay_group(game, renderer, game.task(0), [claim], sampling)
    assert 0.0 <= found.reward <= 1.0
    assert found.position <= len(tokens)


def test_an_environment_error_is_reproduced_and_cannot_be_claimed(
    random_engine: Callable[..., Any], renderer: Renderer, game: wordle.Wordle, sampling: Sampling
) -> None:
    class Fragile(wordle.Wordle):
        def step(self, state: Any, action: str) -> Any:
            if len(state.guesses) == 2:
                raise KeyError(action)
            return super().step(state, action)

    env: Env = Fragile(game.args)
    episodes = [EpisodeAttempt(env, env.task(i), sample_seed(bytes(32), i)) for i in range(20)]
    talks = converse(random_engine(game.words), renderer, episodes, sampling)
    failed = [talk for talk in talks if talk.ending == "error"]
    assert failed and all(again(talk) == ReplayResult(0.0, "error") for talk in failed)
    assert all(again(talk, ending="environment").problem for talk in failed)
