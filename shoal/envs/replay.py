"""Replay a claimed rollout: everything in it but the policy's choice of tokens must follow from the task.

Called by the check of a submission (a role hands it over in the context), by whoever needs a rollout's reward, and
by auditors. It takes from the claim nothing but the policy's turns, grows the conversation anew from them, and
compares. So a claim can neither invent an environment's words, nor move a turn's end, nor choose its ending or
reward. It knows no model: whether the policy would have chosen these tokens is the sampling check's question.

Axes: T tokens of the rollout.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.envs.base import Env, Task
from shoal.envs.conversation import Conversation
from shoal.policy.render import Renderer
from shoal.protocol.types import ENVIRONMENT, Ending, Rollout, Sampling


class Replay(NamedTuple):
    """What a rollout is worth, or what is wrong with it."""

    reward: float
    """As re-derived; the environment's lowest where there is a problem."""
    ending: Ending
    """As re-derived; as claimed where the replay did not get to the end."""
    problem: str = ""
    """One line; empty when everything fits."""
    position: int = -1
    """Absolute index of the first token that does not fit, -1 if none."""


def replay(
    env: Env,
    renderer: Renderer,
    task: Task,
    tokens_T: NDArray[np.int32],
    author_T: NDArray[np.uint8],
    ending: Ending,
    sampling: Sampling,
) -> Replay:
    """Re-derive a claimed rollout. Pure; a false claim is an answer with `problem`, not an exception.

    Raises `ShoalError` when the environment cannot begin the task, which no claim can cause.
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
            return refused("the rollout breaks off in a turn of the policy, with neither stop nor limit", len(tokens))
        conversation.write(turn)
    if len(tokens) > compared:
        problem = f"{len(tokens) - compared} tokens follow the end of the rollout, which is by {conversation.ending}"
        return Replay(min(env.reward_bounds), conversation.ending, problem, compared)
    if ending != conversation.ending:
        problem = f"ended by {conversation.ending}, not by {ending} as claimed"
        return Replay(min(env.reward_bounds), conversation.ending, problem)
    return Replay(conversation.reward, conversation.ending)


def retell(env: Env, renderer: Renderer, task: Task, claim: Rollout, sampling: Sampling) -> Conversation | None:
    """The conversation that a claimed rollout is of, for people to read; None where the claim does not fit.

    Raises `ShoalError` as `replay` does.
    """
    tokens_T = claim.tokens_T()
    if replay(env, renderer, task, tokens_T, claim.author_T(), claim.ending, sampling).problem:
        return None
    conversation, tokens = Conversation(env, renderer, task, sampling), tokens_T.tolist()
    while conversation.ending is None:
        begin = len(conversation.tokens)
        conversation.write(_turn(tokens[begin : begin + conversation.room], renderer.stop_ids))
    return conversation


def _turn(token_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """The policy's turn at the head of some tokens: up to and with its first stop token, or all of them."""
    for i, token in enumerate(token_ids):
        if token in stop_ids:
            return token_ids[: i + 1]
    return token_ids


def _difference(conversation: Conversation, tokens: list[int], author: list[int], start: int) -> tuple[str, int]:
    """The first place from `start` on where a claim differs from the conversation so far, as a problem and index."""
    end = len(conversation.tokens)
    if tokens[start:end] == conversation.tokens[start:] and author[start:end] == conversation.author[start:]:
        return "", -1
    for at in range(start, end):
        if at >= len(tokens):
            return f"the rollout breaks off before the environment's words are complete, {end - at} tokens short", at
        if author[at] != conversation.author[at]:
            writer = "the environment" if conversation.author[at] == ENVIRONMENT else "the policy"
            return f"the token was written by {writer}, the claim says author {author[at]}", at
        if tokens[at] != conversation.tokens[at]:
            return f"the environment says token {conversation.tokens[at]}, the claim {tokens[at]}", at
    raise AssertionError("lists that differ differ somewhere")
