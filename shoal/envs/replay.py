"""Replay a claimed rollout: all of it must follow from the task, except the tokens that the policy chose.

Called by the checks of a submission (a role passes it in the context), by any role that needs a rollout's reward, and
by auditors. It takes only the policy's turns from the claim, rebuilds the conversation from them, and compares. So a
claim cannot invent the environment's words, move the end of a turn, or choose its ending or reward. It knows no model:
the sampling check asks whether the policy would have chosen these tokens.

Axes: T tokens of the rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shoal.envs.base import Env, Task, describe_fault, source_of
from shoal.envs.conversation import Conversation
from shoal.envs.score import Earned, earned
from shoal.errors import Overreach
from shoal.policy.render import Renderer
from shoal.protocol.types import ENVIRONMENT, Ending, Rollout, Sampling


@dataclass(frozen=True)
class Replay:
    """The reward of a rollout, or what is wrong with it."""

    reward: float
    """The replayed reward; the environment's lowest if there is a problem."""
    ending: Ending
    """The replayed ending; the claimed one if the replay stopped before the end."""
    problem: str = ""
    """One line; empty if everything agrees."""
    position: int = -1
    """Absolute index of the first token that differs; -1 if none does."""
    talk: Conversation | None = field(default=None, compare=False, repr=False)
    """The conversation, if everything agrees."""


def replay_group(
    env: Env, renderer: Renderer, task: Task, rollouts: Sequence[Rollout], sampling: Sampling
) -> list[Replay]:
    """Replay the rollouts of a group, equal ones once, and judge them beside each other. Raises as `replay_rollout`."""
    names = [(rollout.token_ids, rollout.author, rollout.ending) for rollout in rollouts]
    found = {
        name: replay_rollout(env, renderer, task, r.tokens_T(), r.author_T(), r.ending, sampling)
        for name, r in dict(zip(names, rollouts, strict=True)).items()
    }
    return judge([found[name] for name in names], env)


def judge(replays: Sequence[Replay], env: Env) -> list[Replay]:
    """Add what an environment gives for each rollout beside its siblings. If it fails, all have the lowest reward."""
    talks = [found.talk for found in replays if found.talk is not None]
    if getattr(env, "group_scores", None) is None or len(talks) < len(replays):
        return list(replays)
    beside = judge_talks(talks, env)
    return [replace(found, reward=told.reward) for found, told in zip(replays, beside, strict=True)]


def judge_talks(talks: Sequence[Conversation], env: Env) -> list[Earned]:
    """What a group's conversations earn. Several places of a group may hold the same conversation."""
    compare = getattr(env, "group_scores", None)
    whole = [talk for talk in talks if talk.ending != "error"]
    if compare is None or not whole:
        return [Earned(talk.reward, talk.parts, talk.metrics) for talk in talks]
    try:
        scores = list(compare([talk.state for talk in whole]))
        if len(scores) != len(whole):
            raise ValueError(f"group_scores() gives {len(scores)} scores for {len(whole)} rollouts")
        beside = [
            earned(env, [talk.scored, score], talk.turn_rewards) for talk, score in zip(whole, scores, strict=True)
        ]
    except (Overreach, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  foreign code may raise anything
        place = describe_fault(error, source_of(env))
        for talk in talks:
            talk.fault = talk.fault or place
        return [Earned(min(env.reward_bounds), {}, {})] * len(talks)  # guard: failed-comparison-does-not-pay
    left = iter(beside)
    return [next(left) if talk.ending != "error" else Earned(talk.reward, {}, {}) for talk in talks]


def replay_rollout(
    env: Env,
    renderer: Renderer,
    task: Task,
    tokens_T: NDArray[np.int32],
    author_T: NDArray[np.uint8],
    ending: Ending,
    sampling: Sampling,
) -> Replay:
    """Replay a claimed rollout. Pure: a false claim gives an answer with `problem`, not an exception.

    Raises `ShoalError` if the environment cannot begin the task, which no claim can cause.
    """

    def refused(problem: str, position: int = -1) -> Replay:
        return Replay(min(env.reward_bounds), ending, problem, position)

    if len(tokens_T) != len(author_T):
        return refused(f"{len(tokens_T)} tokens but {len(author_T)} authors")
    outside = (tokens_T < 0) | (tokens_T >= renderer.vocabulary)
    if outside.any():
        position = int(outside.argmax())
        return refused(f"token id {tokens_T[position]} is outside the vocabulary of {renderer.vocabulary}", position)
    tokens, author = tokens_T.tolist(), author_T.tolist()
    conversation = Conversation(env, renderer, task, sampling)
    compared = 0
    while True:
        problem, position = _difference(conversation, tokens, author, compared)
        if problem:
            return refused(problem, position)
        compared = len(conversation.tokens)
        if conversation.ending is not None:
            break
        turn = _turn(tokens[compared : compared + conversation.room], renderer.stop_ids)
        if len(turn) < conversation.room and (not turn or turn[-1] not in renderer.stop_ids):
            return refused("the rollout stops in a turn of the policy, before a stop token or a limit", len(tokens))
        conversation.write(turn)
    if len(tokens) > compared:
        problem = f"{len(tokens) - compared} tokens follow the end of the rollout, by {conversation.ending}"
        return Replay(min(env.reward_bounds), conversation.ending, problem, compared)
    if ending != conversation.ending:
        problem = f"ended by {conversation.ending}, not by {ending} as claimed"
        return Replay(min(env.reward_bounds), conversation.ending, problem)
    return Replay(conversation.reward, conversation.ending, talk=conversation)


def retell(env: Env, renderer: Renderer, task: Task, claim: Rollout, sampling: Sampling) -> Conversation | None:
    """The conversation of a claimed rollout, for people to read; None if the claim is false.

    Raises `ShoalError` as `replay_rollout` does.
    """
    tokens_T = claim.tokens_T()
    if replay_rollout(env, renderer, task, tokens_T, claim.author_T(), claim.ending, sampling).problem:
        return None
    conversation, tokens = Conversation(env, renderer, task, sampling), tokens_T.tolist()
    while conversation.ending is None:
        begin = len(conversation.tokens)
        conversation.write(_turn(tokens[begin : begin + conversation.room], renderer.stop_ids))
    return conversation


def _turn(token_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """The policy's turn at the start of the tokens: up to and including the first stop token, or all of them."""
    for i, token in enumerate(token_ids):
        if token in stop_ids:
            return token_ids[: i + 1]
    return token_ids


def _difference(conversation: Conversation, tokens: list[int], author: list[int], start: int) -> tuple[str, int]:
    """The first place from `start` on where a claim differs from the conversation so far: the problem and its index."""
    end = len(conversation.tokens)
    if tokens[start:end] == conversation.tokens[start:] and author[start:end] == conversation.author[start:]:
        return "", -1
    for at in range(start, end):
        if at >= len(tokens):
            return f"the rollout stops before the environment's words are complete, {end - at} tokens short", at
        if author[at] != conversation.author[at]:
            writer = "the environment" if conversation.author[at] == ENVIRONMENT else "the policy"
            return f"{writer} wrote the token, the claim says author {author[at]}", at
        if tokens[at] != conversation.tokens[at]:
            return f"the environment says token {conversation.tokens[at]}, the claim {tokens[at]}", at
    raise AssertionError("unequal lists must differ somewhere")
