"""Check that an environment keeps its promises: the checks behind `shoal env check`.

Called by the CLI and by tests, on built-ins and on files that a user has just written. It plays scripted and hostile
actions, without a model or tokens, and returns findings instead of raising exceptions.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shoal.envs.action import Action
from shoal.envs.base import Env, Player, State, Step, Task, describe_fault, players_of, source_of, success_of
from shoal.envs.score import Score, earned
from shoal.policy.messages import BadMessage, Written, arguments_of, as_messages, normal, template_arguments
from shoal.protocol.audits import MAX_REWARD

MAX_TURNS = 256
"""An episode that takes more turns than this counts as endless."""

RIGHT_AT_LEAST, WRONG_AT_MOST = 0.9, 0.5
"""Limits on the scripted players' mean score, as a fraction of the range from the lowest reward to the highest."""

RIGHT_WINS_AT_LEAST, WRONG_WINS_AT_MOST = 0.9, 0.1
"""Limits on the share of episodes won, if the environment says which are won."""

MAX_COMPARED = 4096
"""The most training tasks, and the most held-out tasks, that are compared with each other."""

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


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str
    """One line: the evidence, the fault, or what is missing."""


class Walk(NamedTuple):
    """An episode, played to its end or for MAX_TURNS turns."""

    actions: tuple[str, ...]
    replies: tuple[Any, ...]
    done: bool
    score: float
    success: bool | None


class Broken(Exception):
    """The environment breaks a promise; the message says which."""


class Missing(Exception):
    """A check cannot run; the message says why."""


def check_env(env: Env, tasks: int = 32, seed: int = 0) -> list[Finding]:
    """Run every check, from the simplest to the deepest, on up to `tasks` tasks that `seed` picks."""
    rng = random.Random(seed)
    picked = sorted(rng.sample(range(env.num_tasks), min(tasks, env.num_tasks))) if env.num_tasks > 0 else []
    checks: list[tuple[str, Callable[[], str]]] = [
        ("members", lambda: _members(env)),
        ("indices", lambda: _indices(env)),
        ("openings", lambda: _openings(env, picked)),
        ("heldout", lambda: _heldout(env)),
        ("right player", lambda: _right_player(env, picked, seed)),
        ("wrong player", lambda: _wrong_player(env, picked, seed)),
        ("replay", lambda: _replay(env, picked, seed)),
        ("isolation", lambda: _isolation(env, picked, seed)),
        ("hostile actions", lambda: _hostile(env, picked)),
    ]
    if getattr(env, "tools", ()):
        checks.insert(2, ("tools", lambda: _tools(env)))
    if getattr(env, "group_scores", None) is not None:
        checks.append(("group scores", lambda: _group(env, picked, seed)))
    return [_make(name, check, env) for name, check in checks]


def _make(name: str, check: Callable[[], str], env: Env) -> Finding:
    try:
        return Finding(name, "passed", check())
    except Missing as reason:
        return Finding(name, "skipped", str(reason))
    except Broken as problem:
        return Finding(name, "failed", str(problem))
    except Exception as error:  # noqa: BLE001  foreign code may raise anything: that is a finding too
        return Finding(name, "failed", f"raised {describe_fault(error, source_of(env))}")


# --- the checks: each returns its evidence, or raises ---


def _members(env: Env) -> str:
    low, high = env.reward_bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise Broken(f"reward_bounds are {low} to {high}: give two finite numbers, the lower first")
    if max(-low, high) > MAX_REWARD:
        raise Broken(f"reward_bounds are {low} to {high}, the limit is {MAX_REWARD:g} in size: scale the rewards down")
    if env.num_tasks < 1 or env.num_heldout < 0:
        raise Broken(f"num_tasks is {env.num_tasks} (at least 1), num_heldout is {env.num_heldout} (at least 0)")
    return f"{env.num_tasks} tasks, {env.num_heldout} held out, rewards {low:g} to {high:g}"


def _indices(env: Env) -> str:
    asked = [(-1, False), (env.num_tasks, False)]
    if env.num_heldout > 0:
        asked += [(-1, True), (env.num_heldout, True)]
    for index, heldout in asked:
        try:
            _task(env, index, heldout)
        except (IndexError, ValueError):
            continue
        call = f"task({index}{', heldout=True' if heldout else ''})"
        raise Broken(f"{call} gives a task: raise IndexError, for example with shoal.envs.base.require_index")
    return "an index outside the range is refused"


def _openings(env: Env, picked: Sequence[int]) -> str:
    for index in picked:
        _, messages = env.reset(env.task(index))
        if not messages:
            raise Broken(f"reset() of task {index} gives no message to open with")
        try:
            repr(normal(messages)).encode()
        except BadMessage as problem:
            raise Broken(f"task {index}: {problem}") from None
        if messages[-1]["role"] == "assistant":
            raise Broken(f"task {index}: the last message is the assistant's; the policy writes the next one")
        if messages != env.reset(env.task(index))[1]:
            raise Broken(f"task({index}) opens differently the second time: use no clock and no global random state")
    return f"{len(picked)} tasks open correctly, and the same way twice"


def _heldout(env: Env) -> str:
    if env.num_heldout == 0:
        raise Missing("there are no held-out tasks (num_heldout = 0): shoal eval will use training tasks")
    training = {repr(env.task(i)) for i in range(min(env.num_tasks, MAX_COMPARED))}
    held = {repr(_task(env, i, True)) for i in range(min(env.num_heldout, MAX_COMPARED))}
    if both := sorted(training & held):
        raise Broken(f"{len(both)} held-out tasks are training tasks too, such as {both[0]:.100}")
    return f"{len(held)} held-out tasks, none among {len(training)} training tasks"


def _right_player(env: Env, picked: Sequence[int], seed: int) -> str:
    walks = _play_all(env, picked, "right", seed)
    if endless := sum(not walk.done for walk in walks):
        raise Broken(f"{endless} of {len(walks)} episodes of the right player did not end within {MAX_TURNS} turns")
    share, wins = _standing(env, walks)
    if share < RIGHT_AT_LEAST or (wins is not None and wins < RIGHT_WINS_AT_LEAST):
        raise Broken(
            f"the right player scores too low: {_tell(share, wins)}; at least {RIGHT_AT_LEAST:.0%} is expected"
        )
    return _tell(share, wins)


def _wrong_player(env: Env, picked: Sequence[int], seed: int) -> str:
    share, wins = _standing(env, _play_all(env, picked, "wrong", seed))
    if share > WRONG_AT_MOST or (wins is not None and wins > WRONG_WINS_AT_MOST):
        raise Broken(f"the wrong player scores too high: {_tell(share, wins)}; at most {WRONG_AT_MOST:.0%} is expected")
    return _tell(share, wins)


def _replay(env: Env, picked: Sequence[int], seed: int) -> str:
    walks = [(index, walk) for index in picked for walk in _walks(env, index, seed)]
    for index, walk in walks:
        again = _walk(env, env.task(index), _recite(walk.actions))
        if again != walk:
            raise Broken(f"task {index}, same actions again: {_difference(walk, again)}")
    return f"{len(walks)} episodes replayed: same replies, same scores"


def _isolation(env: Env, picked: Sequence[int], seed: int) -> str:
    """Two episodes of one task, played in turn and scored after every turn, must go as each went alone."""
    for index in picked:
        first, second = _walks(env, index, seed)[:2]
        task = env.task(index)
        steps = [_steps(env, task, _recite(walk.actions), score_often=True) for walk in (first, second)]
        ends: list[Walk | None] = [None, None]
        while None in ends:
            for side in (0, 1):
                if ends[side] is None:
                    ends[side] = next(steps[side])
        for alone, together in zip((first, second), ends, strict=True):
            if together is not None and alone != together:
                raise Broken(
                    f"task {index}, two episodes at once, scored after every turn: {_difference(alone, together)}; "
                    "keep everything in the state, and let score() change nothing"
                )
    return f"episodes at the same time do not touch each other ({len(picked)} pairs)"


def _hostile(env: Env, picked: Sequence[int]) -> str:
    for index in picked[:4]:
        for action in HOSTILE:
            try:
                _walk(env, env.task(index), _recite((action,)))
            except Broken as problem:
                raise Broken(f"task {index}, action {action!r:.60}: {problem}") from None
            except Exception as error:  # noqa: BLE001  foreign code: the finding must name the action
                place = describe_fault(error, source_of(env))
                raise Broken(f"task {index}, action {action!r:.60}: raised {place}") from None
        _walk(env, env.task(index), _recite(HOSTILE))
    return f"{len(HOSTILE)} of them answered and scored"


# --- episodes ---


def _steps(
    env: Env, task: Task, act: Callable[[State], str | None], score_often: bool = False
) -> Iterator[Walk | None]:
    """Play an episode turn by turn: yield None after each turn, then the walk. If `act` gives None, it ends early."""
    state, _ = env.reset(task)
    actions: list[str] = []
    replies: list[Any] = []
    earned_so_far: list[float] = []
    done = False
    while not done and len(actions) < MAX_TURNS and (action := act(state)) is not None:
        step = Step(*env.step(state, Action(action, tools=getattr(env, "tools", ()))))
        state, reply, done = step[:3]
        seats = getattr(env, "num_seats", 1)
        if step.seat not in range(seats):
            raise Broken(f"step() gives the next turn to seat {step.seat!r:.20}: num_seats is {seats}")
        earned_so_far.append(step.reward)
        if not done:
            try:
                normal(as_messages(_without_turns(reply) if step.restart else reply))
            except BadMessage as problem:
                raise Broken(f"step() is not done but replies {type(reply).__name__}: {problem}") from None
        actions.append(action)
        replies.append(None if done else reply)
        if score_often:
            _score(env, state, earned_so_far)
        yield None
    yield Walk(tuple(actions), tuple(replies), bool(done), _score(env, state, earned_so_far), success_of(env, state))


def _without_turns(reply: Any) -> Any:
    """A history that begins anew, without the places of the policy's turns."""
    return [item for item in reply if not isinstance(item, Written)] if isinstance(reply, list | tuple) else reply


def _walk(env: Env, task: Task, act: Callable[[State], str | None]) -> Walk:
    return next(walk for walk in _steps(env, task, act) if walk is not None)


def _score(env: Env, state: State, turn_rewards: Sequence[float] = ()) -> float:
    """The reward, computed twice. Raises `Broken` if the two differ or are not a number within the bounds."""
    low, high = env.reward_bounds
    for judge in (getattr(env, "truncated_score", None), env.score):
        if judge is None:
            continue
        score, again = judge(state), judge(state)
        if not isinstance(score, Score) and (isinstance(score, bool) or not isinstance(score, int | float)):
            raise Broken(f"{judge.__name__}() gives {score!r:.60}, not a number from {low:g} to {high:g}")
        if score != again and not (score != score and again != again):
            raise Broken(f"{judge.__name__}() gives {score} and then {again} for the same state")
        try:
            reward = earned(env, [score], turn_rewards).reward
        except ValueError as fault:
            raise Broken(
                f"{judge.__name__}() gives {score!r:.60}, not a number from {low:g} to {high:g}: {fault}"
            ) from None
    return reward


def _group(env: Env, picked: Sequence[int], seed: int) -> str:
    """Each task's episodes as a group, compared twice."""
    compare = getattr(env, "group_scores", None)
    assert compare is not None, "only asked of environments that compare"
    for index in picked:
        states = []
        players = [player for _, player in sorted(players_of(env).items())]
        for player in [*players, lambda state, rng: "", lambda state, rng: "a"]:
            act = _perform(player, seed, index)
            state, done, turns = env.reset(env.task(index))[0], False, 0
            while not done and turns < MAX_TURNS:
                state, _, done = Step(*env.step(state, Action(act(state))))[:3]
                turns += 1
            states.append(state)
        scores, again = list(compare(list(states))), list(compare(list(states)))
        if len(scores) != len(states):
            raise Broken(f"task {index}: group_scores() gives {len(scores)} scores for {len(states)} states")
        if scores != again:
            raise Broken(
                f"task {index}: group_scores() gives {scores!r:.60} and then {again!r:.60} for the same states"
            )
        for state, score in zip(states, scores, strict=True):
            try:
                earned(env, [env.score(state), score])
            except (ValueError, TypeError) as fault:
                raise Broken(f"task {index}, beside its siblings: {fault}") from None
    return f"{len(picked)} groups compared, the same way twice"


def _tools(env: Env) -> str:
    """Tools are functions with a name, and parameters as a JSON schema."""
    names = []
    for tool in getattr(env, "tools", ()):
        function: Any = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not (isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(name, str) and name):
            raise Broken(f'a tool is {tool!r:.80}: write {{"type": "function", "function": {{"name": ..., ...}}}}')
        if not isinstance(function.get("parameters", {}), Mapping):
            raise Broken(f"the parameters of tool {name} are no JSON schema: give an object")
        names.append(name)
    try:
        template_arguments(arguments_of(env))
    except BadMessage as problem:
        raise Broken(str(problem)) from None
    if len(set(names)) < len(names):
        raise Broken(f"two tools have the same name: {', '.join(names)}")
    return f"{', '.join(names)}"


def _recite(actions: Sequence[str]) -> Callable[[State], str | None]:
    """A player that plays the given actions, then stops."""
    left = iter(actions)
    return lambda state: next(left, None)


def _perform(player: Player, seed: int, index: int) -> Callable[[State], str]:
    rng = random.Random(f"{seed}/{index}")
    return lambda state: player(state, rng)


def _play_all(env: Env, picked: Sequence[int], name: str, seed: int) -> list[Walk]:
    players = players_of(env)
    if name not in players:
        raise Missing(f'players() gives no "{name}" player, so its scores were not checked')
    return [_walk(env, env.task(index), _perform(players[name], seed, index)) for index in picked]


def _walks(env: Env, index: int, seed: int) -> list[Walk]:
    """At least two episodes of one task: those of the scripted players, or of hostile actions if there are too few."""
    players = players_of(env)
    acts = [_perform(player, seed, index) for _, player in sorted(players.items())]
    spare = [_recite(HOSTILE), _recite(HOSTILE[::-1])]
    return [_walk(env, env.task(index), act) for act in [*acts, *spare][: max(2, len(acts))]]


def _task(env: Env, index: int, heldout: bool) -> Task:
    return env.task(index, heldout=True) if heldout else env.task(index)


def _standing(env: Env, walks: Sequence[Walk]) -> tuple[float, float | None]:
    """Mean score as a fraction of the range from lowest to highest, and the share of wins if known."""
    low, high = env.reward_bounds
    share = sum((walk.score - low) / (high - low) for walk in walks) / len(walks)
    told = [walk.success for walk in walks if walk.success is not None]
    return share, sum(told) / len(told) if told else None


def _tell(share: float, wins: float | None) -> str:
    return f"mean score {share:.0%} of the range" + (f", {wins:.0%} won" if wins is not None else "")


def _difference(before: Walk, after: Walk) -> str:
    """The first difference between two walks that play the same actions."""
    for turn, (old, new) in enumerate(zip(before.replies, after.replies, strict=False)):
        if old != new:
            return f"turn {turn} is answered {old!r:.60}, then {new!r:.60}"
    if len(before.replies) != len(after.replies):
        return f"the episode takes {len(before.replies)} turns, then {len(after.replies)}"
    if before.score != after.score:
        return f"it scores {before.score}, then {after.score}"
    return f"done {before.done} and success {before.success}, then {after.done} and {after.success}"
