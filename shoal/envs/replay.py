"""Replay a claimed rollout: everything in it must follow from the task, except the tokens that the policy chose.

It takes only the policy's turns from the claim, rebuilds the conversation from them, and compares. So a claim cannot invent
the environment's words, move the end of a turn, or choose its ending or reward. It uses no model: the sampling check
decides whether the policy would have chosen these tokens.

Axes: T tokens of the rollout, its rows one after another.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import cast

from shoal.chat.renderer import Renderer
from shoal.env import Env, GroupScoring, Scored, Task
from shoal.envs.concurrent_episodes import alone, together
from shoal.envs.episode import Calling
from shoal.envs.exceptions import LOCAL_ERRORS, REPRODUCIBLE_ERRORS
from shoal.envs.interface import Earned, compares, earned
from shoal.envs.rollout_rules import Conversation, CreditedTurn
from shoal.envs.seat_history import TalkRow
from shoal.protocol.algorithm_config import StepCredit, Turns
from shoal.protocol.audit_and_pay import MAX_REWARD
from shoal.protocol.messages import ENVIRONMENT, Ending, Rollout, Sampling, StepReward, StepRewards
from shoal.protocol.reward_rules import divided


@dataclass(frozen=True)
class ReplayResult:
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
    earned: Earned | None = field(default=None, compare=False, repr=False)
    """Where the reward comes from, if everything agrees."""

    @property
    def fault(self) -> str:
        """What the environment raised, as one line, if the rollout counts in nothing because of it; else empty."""
        if self.talk is None or not self.talk.left_out:
            return ""
        return self.talk.public_fault

    @property
    def is_learned_fault(self) -> bool:
        """Whether the rollout counts although the environment failed on it."""
        return self.talk is not None and bool(self.talk.fault) and not self.talk.left_out

    @property
    def outside(self) -> float | None:
        """The environment's score, if that is outside its bounds."""
        return self.talk.outside if self.talk is not None else None

    def steps(self, credit: StepCredit) -> StepRewards:
        """What the rollout's turns or steps earn, as the run's credit asks; none if something is wrong."""
        if self.talk is None:
            return ()
        played, failed = self.talk.played(), bool(self.talk.fault)
        return step_rewards(played, self.reward, failed, credit, self.talk.renderer.decode)


def replay_group(
    env: Env, renderer: Renderer, task: Task, rollouts: Sequence[Rollout], sampling: Sampling
) -> list[ReplayResult]:
    """Replay the rollouts of a group, equal ones once, and compare them with each other. Raises as `replaying`."""
    # guard: rows-name-a-replay
    names = [(rollout.token_ids, rollout.author, rollout.ending, rollout.starts) for rollout in rollouts]
    different = dict(zip(names, rollouts, strict=True))
    replays = together([replaying(env, renderer, task, rollout, sampling) for rollout in different.values()])
    found = dict(zip(different, replays, strict=True))
    return judge([found[name] for name in names], env)


def judge(replays: Sequence[ReplayResult], env: Env) -> list[ReplayResult]:
    """Add what the environment's `group_scores` gives to each rollout. If it fails, it fails on all."""
    talks = [found.talk for found in replays if found.talk is not None]
    if not compares(env) or len(talks) < len(replays):
        return list(replays)
    beside = judge_talks(talks, env)
    return [replace(found, reward=told.reward, earned=told) for found, told in zip(replays, beside, strict=True)]


def judge_talks(talks: Sequence[Conversation], env: Env) -> list[Earned]:
    """What a group's conversations earn. The same conversation may be several times in a group. Those on which the
    environment fails earn the lowest reward."""
    whole = [talk for talk in talks if talk.ending != "error"]
    if not (compares(env) and whole):
        return [Earned(talk.reward, talk.parts, talk.metrics) for talk in talks]
    try:
        scores = list(cast(GroupScoring, env).group_scores([talk.state for talk in whole]))
        if len(scores) != len(whole):
            raise ValueError(f"group_scores() gives {len(scores)} scores for {len(whole)} rollouts")
    except LOCAL_ERRORS:
        raise
    except REPRODUCIBLE_ERRORS as error:
        failed = [_uncompared(talk, error) for talk in whole]
        return failed[:1] * len(talks)  # guard: failed-comparison-does-not-pay
    left = iter(scores)
    return [_compared(talk, next(left)) if talk.ending != "error" else Earned(talk.reward, {}, {}) for talk in talks]


def _compared(talk: Conversation, score: Scored) -> Earned:
    """What a conversation earns with what its group adds to its score. If that is no reward, only this one fails."""
    try:
        return earned(talk.env, [*talk.scored, score], talk.episode.turn_rewards)
    except LOCAL_ERRORS:
        raise
    except REPRODUCIBLE_ERRORS as error:
        return _uncompared(talk, error)


def _uncompared(talk: Conversation, error: BaseException) -> Earned:
    """What a conversation earns whose comparison the environment fails."""
    talk.fail(error, "group_scores")
    return Earned(min(talk.env.reward_bounds), {}, {})


def replaying(env: Env, renderer: Renderer, task: Task, rollout: Rollout, sampling: Sampling) -> Calling[ReplayResult]:
    """Replay a claimed rollout. A false claim gives an answer with `problem`, not an exception.

    Raises `ShoalError` if the environment cannot begin the task, which no claim can cause.
    """
    tokens_T, author_T, starts, ending = rollout.tokens_T(), rollout.author_T(), rollout.starts, rollout.ending

    def refused(problem: str, position: int = -1) -> ReplayResult:
        return ReplayResult(min(env.reward_bounds), ending, problem, position)

    if len(tokens_T) != len(author_T):
        return refused(f"{len(tokens_T)} tokens but {len(author_T)} authors")
    outside = (tokens_T < 0) | (tokens_T >= renderer.vocabulary)
    if outside.any():
        position = int(outside.argmax())
        return refused(f"token id {tokens_T[position]} is outside the vocabulary of {renderer.vocabulary}", position)
    edges = (0, *starts, len(tokens_T))
    if starts and not all(begin < end for begin, end in pairwise(edges)):
        return refused("rows do not begin one after another within the rollout")
    tokens, author = tokens_T.tolist(), author_T.tolist()
    claims = [_Claim(tokens[begin:end], author[begin:end], begin) for begin, end in pairwise(edges)]
    conversation = yield from Conversation.opening(env, renderer, task, sampling)
    while True:
        problem, position = _difference(conversation, claims)
        if problem:
            return refused(problem, position)
        if conversation.ending is not None:
            break
        claim = claims[conversation.row]
        turn = _turn(claim.tokens[claim.compared : claim.compared + conversation.room], renderer.stop_ids)
        if len(turn) < conversation.room and (not turn or turn[-1] not in renderer.stop_ids):
            problem = "the rollout stops in a turn of the policy, before a stop token or a limit"
            return refused(problem, claim.start + len(claim.tokens))
        yield from conversation.writing(turn)
    left = sum(len(claim.tokens) - claim.compared for claim in claims)
    if left:  # guard: no-token-after-the-end
        problem = f"{left} tokens follow the end of the rollout, by {conversation.ending}"
        return ReplayResult(min(env.reward_bounds), conversation.ending, problem, _first_left(claims))
    if ending != conversation.ending:
        problem = f"ended by {conversation.ending}, not by {ending} as claimed"
        return ReplayResult(min(env.reward_bounds), conversation.ending, problem)
    earned = Earned(conversation.reward, conversation.parts, conversation.metrics)
    return ReplayResult(conversation.reward, conversation.ending, talk=conversation, earned=earned)


def retell(env: Env, renderer: Renderer, task: Task, claim: Rollout, sampling: Sampling) -> Conversation | None:
    """The conversation of a claimed rollout, for people to read; None if the claim is false. Raises as `replaying`."""
    return alone(replaying(env, renderer, task, claim, sampling)).talk


def _turn(token_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """The policy's turn at the start of the tokens: up to and including the first stop token, or all of them."""
    for i, token in enumerate(token_ids):
        if token in stop_ids:
            return token_ids[: i + 1]
    return token_ids


@dataclass
class _Claim:
    """A claimed row."""

    tokens: list[int]
    author: list[int]
    start: int
    """Index of its first token in the rollout."""
    compared: int = 0
    """Tokens that agree with the conversation."""


def _difference(conversation: Conversation, claims: list[_Claim]) -> tuple[str, int]:
    """The first place where claimed rows differ from the conversation so far: the problem and its index."""
    for number, row in enumerate(conversation.rows):
        if number >= len(claims):  # guard: no-row-is-missing
            return f"row {number} opens here, and the rollout has no such row", _first_left(claims)
        claim, begin, end = claims[number], claims[number].compared, len(row.tokens)
        if claim.tokens[begin:end] != row.tokens[begin:] or claim.author[begin:end] != row.author[begin:]:
            return _first_difference(row, claim)
        claim.compared = end
    return "", -1


def _first_difference(row: TalkRow, claim: _Claim) -> tuple[str, int]:
    for at in range(claim.compared, len(row.tokens)):
        place = claim.start + at
        if at >= len(claim.tokens):
            short = len(row.tokens) - at
            return f"the rollout stops before the environment's words are complete, {short} tokens short", place
        if claim.author[at] != row.author[at]:
            writer = "the environment" if row.author[at] == ENVIRONMENT else "the policy"
            return f"{writer} wrote the token, the claim says author {claim.author[at]}", place
        if claim.tokens[at] != row.tokens[at]:
            return f"the environment says token {row.tokens[at]}, the claim {claim.tokens[at]}", place
    raise AssertionError("unequal lists must differ somewhere")


def _first_left(claims: list[_Claim]) -> int:
    """Index of the first claimed token that was not compared, or the end of the rollout if all were."""
    return next(
        (c.start + c.compared for c in claims if c.compared < len(c.tokens)), sum(len(c.tokens) for c in claims)
    )


# --- what turns and steps earn, by the tokens at which they end ---


def step_rewards(
    played: Sequence[CreditedTurn],
    reward: float,
    failed: bool,
    credit: StepCredit,
    decode: Callable[[Sequence[int]], str],
) -> StepRewards:
    """The steps of an episode with this reward. What turns do not earn by themselves, such as the score at the end, is
    earned by the last step. In an episode that `failed`, nothing else was earned."""
    found: list[StepReward] = []
    for turn in map(_unearned, played) if failed else played:  # guard: failed-steps-earn-nothing
        last = turn.begin + len(turn.token_ids) - 1
        if isinstance(credit, Turns):
            found.append(StepReward(last, _sum([turn.reward, *(reward for _, reward in turn.marks)])))
        else:
            found += _steps_of(turn, last, decode)
    return divided(found, reward, credit.most)


def _unearned(turn: CreditedTurn) -> CreditedTurn:
    return turn._replace(reward=0.0, marks=tuple((end, 0.0) for end, _ in turn.marks))


def _sum(rewards: Sequence[float]) -> float:
    """What is too large for a verdict stays so, and yet can be added up."""
    most = 2 * MAX_REWARD
    return math.fsum(min(max(reward, -most), most) for reward in rewards)  # guard: step-sums-are-finite


def _steps_of(turn: CreditedTurn, last: int, decode: Callable[[Sequence[int]], str]) -> list[StepReward]:
    """The marked steps of a turn, then what follows them. A step that ends with the text has the stop token, too, and steps
    that end within one token are one."""
    earned: dict[int, list[float]] = {}
    for end, reward in turn.marks:
        at = last if end == len(turn.text) else turn.begin + _tokens_up_to(end, turn.token_ids, decode) - 1
        earned.setdefault(at, []).append(reward)
    earned.setdefault(last, []).append(turn.reward)
    return [StepReward(at, _sum(rewards)) for at, rewards in earned.items()]


def _tokens_up_to(characters: int, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """How many tokens the first characters of their text take; a token on the border counts."""
    return bisect_left(range(len(token_ids)), characters, key=lambda count: len(decode(token_ids[:count])))
