"""One episode, played by a script and observed: what checks are made of."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from shoal.chat.messages import BadMessage, Written, as_messages, normal
from shoal.env import Action, Env, Player, State, Step, Task
from shoal.envs.episode import Episode
from shoal.envs.interface import describe, earned, finite_rewards, players_of, success_of
from shoal.envs.lint.finding import CheckFailed, Differs

MAX_TURNS = 256
"""An episode that takes more turns than this counts as endless."""

ENOUGH_S = 4.0
"""One check begins no further task after so long. All checks of a quick environment together take a few seconds."""

HOSTILE = (
    "",
    " \n\t ",
    "\0\x01\x1b[2J\x7f",
    "a" * 100_000,
    "9" * 5_000,
    "-" * 1_000 + "1",
    "(" * 2_000,
    "\N{REPLACEMENT CHARACTER}",
    "\N{ARABIC-INDIC DIGIT THREE}\N{SUPERSCRIPT TWO}",
    "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}\N{LATIN SMALL LETTER SHARP S}\N{RIGHT-TO-LEFT OVERRIDE}",
    "\N{GRINNING FACE}" * 50,
    "nan",
    "inf",
    "None",
    "{0.__class__} %s %n $(reboot) ../../etc/passwd",
    "<|im_end|><|end|></s>[INST]</think>",
    '{"answer": [[[[]]]]}',
)
"""Actions that a policy may write."""

T = TypeVar("T")
Act = Callable[[State], str | None]
"""The next action; None ends the episode early."""


class ScriptedEpisode(NamedTuple):
    """An episode, played to its end or for MAX_TURNS turns."""

    actions: tuple[str, ...]
    replies: tuple[Any, ...]
    done: bool
    score: float
    success: bool | None
    earned: tuple[tuple[float, ...], ...] = ()
    """Of each turn: what it earns, then the end and the reward of each step in it."""


def played(env: Env, task: Task, act: Act, turns: int = MAX_TURNS) -> ScriptedEpisode:
    """Play an episode. If `act` gives None, it ends early."""
    return next(walk for walk in stepwise(env, task, act, turns=turns) if walk is not None)


def stepwise(
    env: Env, task: Task, act: Act, score_often: bool = False, turns: int = MAX_TURNS
) -> Iterator[ScriptedEpisode | None]:
    """Play an episode turn by turn: yield None after each turn, then the walk. Tools are called as in Hermes."""
    episode, done = Episode(env), False
    episode.state, _ = env.reset(task)
    actions: list[str] = []
    replies: list[Any] = []
    while not done and len(actions) < turns and (action := act(episode.state)) is not None:
        step = take_turn(episode, action)
        reply, done = step.reply, bool(step.done)
        if not done:
            try:
                normal(as_messages(_without_turns(reply) if step.restart else reply))
            except BadMessage as problem:
                raise CheckFailed(f"step() is not done but replies {type(reply).__name__}: {problem}") from None
        actions.append(action)
        replies.append(None if done else reply)
        if score_often:
            _score(env, episode.state, episode.turn_rewards)
        yield None
    score = _score(env, episode.state, episode.turn_rewards)
    paid = tuple((reward, *(number for mark in marks for number in mark)) for reward, marks in episode.credit)
    yield ScriptedEpisode(tuple(actions), tuple(replies), done, score, success_of(env, episode.state), paid)


def take_turn(episode: Episode, action: str) -> Step:
    """Play a turn. Raises `CheckFailed` if what `step` returns breaks a rule."""
    facts = episode.facts
    notation = facts.parser or ("hermes" if facts.tools else "")
    told = episode.env.step(episode.state, Action(action, notation, tools=facts.tools))
    try:
        step = episode.answer(told, action)
        finite_rewards([step.reward])
    except (TypeError, ValueError) as problem:
        words = str(problem)
        raise CheckFailed(words if words.startswith("step() ") else f"step() answers wrongly: {words}") from None
    return step


def replay_actions(actions: Sequence[str]) -> Act:
    """A player that plays the given actions, then stops."""
    left = iter(actions)
    return lambda state: next(left, None)


def scripted_player(player: Player, seed: int, index: int) -> Callable[[State], str]:
    """A scripted player with random numbers of its own."""
    rng = random.Random(f"{seed}/{index}")
    return lambda state: player(state, rng)


def two_walks(env: Env, index: int, seed: int) -> list[ScriptedEpisode]:
    """At least two episodes of one task: those of the scripted players, or of hostile actions if there are too few."""
    acts: list[Act] = [scripted_player(player, seed, index) for _, player in sorted(players_of(env).items())]
    spare = [replay_actions(HOSTILE), replay_actions(HOSTILE[::-1])]
    return [played(env, env.task(index), act) for act in [*acts, *spare][: max(2, len(acts))]]


def difference(before: ScriptedEpisode, after: ScriptedEpisode) -> str:
    """The first difference between two walks that play the same actions."""
    for turn, (old, new) in enumerate(zip(before.replies, after.replies, strict=False)):
        if old != new:
            return f"turn {turn} is answered {describe_difference(old, new)}"
    if len(before.replies) != len(after.replies):
        return f"the episode takes {len(before.replies)} turns, then {len(after.replies)}"
    for turn, (paid, then) in enumerate(zip(before.earned, after.earned, strict=False)):
        if paid != then:
            return f"turn {turn} earns {describe_difference(paid, then)}"
    if before.score != after.score:
        return f"it scores {before.score}, then {after.score}"
    return f"done {before.done} and success {before.success}, then {after.done} and {after.success}"


def describe_difference(old: object, new: object) -> str:
    """Two values that differ, from a little before the place where they do."""
    before, after = repr(old), repr(new)
    pairs = enumerate(zip(before, after, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
    begin = max(0, at - 30) if at >= 60 else 0
    mark = "..." if begin else ""
    return f"{mark}{before[begin : begin + 60]}, then {mark}{after[begin : begin + 60]}"


def while_time(items: Iterable[T], enough_s: float = ENOUGH_S) -> Iterator[T]:
    """The items, as many as time allows, and at least two."""
    begun = time.monotonic()
    for number, item in enumerate(items):
        if number >= 2 and time.monotonic() - begun > enough_s:
            return
        yield item


def share_of(env: Env, score: float) -> float:
    """A score as a fraction of the range from the lowest to the highest."""
    low, high = env.reward_bounds
    return (score - low) / (high - low)


def _without_turns(reply: Any) -> Any:
    """A history that begins anew, without the places of the policy's turns."""
    return [item for item in reply if not isinstance(item, Written)] if isinstance(reply, list | tuple) else reply


def _score(env: Env, state: State, turn_rewards: Sequence[float] = ()) -> float:
    """The reward, computed twice if the environment promises that this gives the same.

    Raises `CheckFailed` if it is not a number within the bounds.
    """
    (low, high), facts = env.reward_bounds, describe(env)
    for name in ("truncated_score", "score"):
        if name != "score" and name not in facts.members:
            continue
        judge = getattr(env, name)
        score = judge(state)
        again = judge(state) if facts.reproducible else score
        if isinstance(score, bool):
            raise CheckFailed(f"{name}() gives {score!r:.60}, not a number from {low:g} to {high:g}")
        if score != again and not (score != score and again != again):
            raise Differs(f"{name}() gives {score} and then {again} for the same state")
        try:
            reward = earned(env, [score], turn_rewards).reward
        except (TypeError, ValueError) as fault:
            why = "" if isinstance(score, Real) and not any(turn_rewards) else f": {fault}"
            raise CheckFailed(
                f"{name}() gives {score!r:.60}, not a number within reward_bounds {low:g} to {high:g}{why}"
            ) from None
    return reward
