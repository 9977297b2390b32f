"""The checks of an environment in this process: behind `shoal env check`, and for tests.

They play scripted and hostile actions, without a model or tokens, and return findings instead of raising exceptions. What
an environment rewards is checked in `lint/reward_checks`; what only shows in another process, in `lint/process_checks`.

A new check needs its function in `checks_of` and its name in `ALWAYS` or `SOMETIMES`; one that compares processes, its
place in `CheckedEnv` of `lint/process_checks`; and a row of tests/envs/test_sabotaged.py.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from shoal.chat.messages import BadMessage, normal, template_arguments
from shoal.env import Env, GroupScoring
from shoal.envs.episode import Episode
from shoal.envs.interface import (
    compares,
    describe,
    describe_fault,
    earned,
    make_task,
    players_of,
    solution_of,
    source_of,
)
from shoal.envs.lint.finding import CheckFailed, CheckResult, Differs, NotImplementedByEnv, find
from shoal.envs.lint.reward_checks import hacks, leaks, right_player, solutions, wrong_player
from shoal.envs.lint.scripted_episode import (
    HOSTILE,
    MAX_TURNS,
    ScriptedEpisode,
    describe_difference,
    difference,
    played,
    replay_actions,
    scripted_player,
    stepwise,
    take_turn,
    two_walks,
    while_time,
)
from shoal.protocol.audit_and_pay import MAX_REWARD

MAX_COMPARED = 4096
"""The most training tasks, and the most held-out tasks, that are compared with each other."""

NUM_TASKS = 32
"""Tasks that are played, if there are so many."""

NAMED = 4
"""Further actions that a finding names."""

FEWER_TASKS = 4
"""The same of an environment that is not reproducible: it may ask a judge for each episode."""

SOMETIMES = ("tools", "group scores")
"""Checks of environments that have tools, or that compare rollouts."""

ALWAYS = (
    "members", "indices", "openings", "heldout", "solutions", "right player", "wrong player", "leaks", "reward hacks",
    "replay", "isolation", "hostile actions",
)  # fmt: skip
"""Checks of every environment."""


def check_env(env: Env, tasks: int = NUM_TASKS, seed: int = 0) -> list[CheckResult]:
    """Run every check, from the simplest to the deepest, on up to `tasks` tasks that `seed` picks."""
    return [find(name, check, env) for name, check in checks_of(env, tasks, seed).items()]


def checks_of(env: Env, tasks: int = NUM_TASKS, seed: int = 0) -> dict[str, Callable[[], str]]:
    """The checks by name, in their order. Each returns its evidence, or raises."""
    picked = pick(env, tasks, seed)
    checks: dict[str, Callable[[], str]] = {
        "members": lambda: _members(env),
        "indices": lambda: _indices(env),
        "tools": lambda: _tools(env),
        "openings": lambda: _openings(env, picked),
        "heldout": lambda: _heldout(env),
        "solutions": lambda: solutions(env),
        "right player": lambda: right_player(env, picked, seed),
        "wrong player": lambda: wrong_player(env, picked, seed),
        "leaks": lambda: leaks(env, picked, seed),
        "reward hacks": lambda: hacks(env, picked, seed),
        "replay": lambda: _replay(env, picked, seed),
        "isolation": lambda: _isolation(env, picked, seed),
        "hostile actions": lambda: _hostile(env, picked),
        "group scores": lambda: _group(env, picked, seed),
    }
    if not describe(env).tools:
        del checks["tools"]
    if not compares(env):
        del checks["group scores"]
    return checks


def pick(env: Env, tasks: int, seed: int) -> list[int]:
    """Which training tasks are played."""
    most = min(tasks, max(0, env.num_tasks), NUM_TASKS if describe(env).reproducible else FEWER_TASKS)
    return sorted(random.Random(seed).sample(range(env.num_tasks), most)) if most else []


# --- the checks: each returns its evidence, or raises ---


def _members(env: Env) -> str:
    low, high = env.reward_bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise CheckFailed(f"reward_bounds are {low} to {high}: give two finite numbers, the lower first")
    if max(-low, high) > MAX_REWARD:
        raise CheckFailed(
            f"reward_bounds are {low} to {high}, the limit is {MAX_REWARD:g} in size: scale the rewards down"
        )
    if env.num_tasks < 1 or env.num_heldout < 0:
        raise CheckFailed(f"num_tasks is {env.num_tasks} (at least 1), num_heldout is {env.num_heldout} (at least 0)")
    return f"{env.num_tasks} tasks, {env.num_heldout} held out, rewards {low:g} to {high:g}"


def _indices(env: Env) -> str:
    asked = [(-1, False), (env.num_tasks, False)]
    if env.num_heldout > 0:
        asked += [(-1, True), (env.num_heldout, True)]
    for index, heldout in asked:
        try:
            make_task(env, index, heldout)
        except (IndexError, ValueError):
            continue
        call = f"task({index}{', heldout=True' if heldout else ''})"
        raise CheckFailed(f"{call} gives a task: raise IndexError, for example with shoal.env.require_index")
    return "an index outside the range is refused"


def _openings(env: Env, picked: Sequence[int]) -> str:
    count = 0
    for count, index in enumerate(while_time(picked), 1):  # noqa: B007
        _, messages = env.reset(env.task(index))
        if not messages:
            raise CheckFailed(f"reset() of task {index} gives no message to open with")
        try:
            repr(normal(messages)).encode()
        except BadMessage as problem:
            raise CheckFailed(f"task {index}: {problem}") from None
        if messages[-1]["role"] == "assistant":
            raise CheckFailed(f"task {index}: the last message is the assistant's; the policy writes the next one")
        again = env.reset(env.task(index))[1]
        if messages != again:
            raise Differs(
                f"task({index}) opens differently the second time, {describe_difference(messages, again)}: use no global "
                "random state, "
                "and nothing that an earlier episode changed"
            )
    return f"{count} tasks open correctly, and the same way twice"


def _heldout(env: Env) -> str:
    if env.num_heldout == 0:
        raise NotImplementedByEnv("there are no held-out tasks (num_heldout = 0): shoal eval will use training tasks")
    training = {repr(env.task(i)) for i in range(min(env.num_tasks, MAX_COMPARED))}
    held = {repr(make_task(env, i, True)) for i in range(min(env.num_heldout, MAX_COMPARED))}
    if both := sorted(training & held):
        raise CheckFailed(f"{len(both)} held-out tasks are training tasks too, such as {both[0]:.100}")
    last = env.num_heldout - 1
    for index in while_time(sorted({last * place // (FEWER_TASKS - 1) for place in range(FEWER_TASKS)})):
        task, right = make_task(env, index, True), players_of(env).get("right")
        turns = solution_of(env, task)
        try:
            played(
                env,
                task,
                scripted_player(right, 0, index) if turns is None and right else replay_actions(turns or HOSTILE),
            )
        except CheckFailed as problem:
            raise CheckFailed(f"held-out task {index}: {problem}") from None
    return f"{len(held)} held-out tasks, none among {len(training)} training tasks"


def _replay(env: Env, picked: Sequence[int], seed: int) -> str:
    count = 0
    for index in while_time(picked):
        for walk in two_walks(env, index, seed):
            again, count = played(env, env.task(index), replay_actions(walk.actions)), count + 1
            if again != walk:
                raise Differs(f"task {index}, same actions again: {difference(walk, again)}")
    return f"{count} episodes replayed: same replies, same scores"


def _isolation(env: Env, picked: Sequence[int], seed: int) -> str:
    """Two episodes of one task, played in turn and scored after every turn, must go as each went alone."""
    count = 0
    for index in while_time(picked):
        first, second = two_walks(env, index, seed)[:2]
        task, count = env.task(index), count + 1
        sides = [stepwise(env, task, replay_actions(walk.actions), score_often=True) for walk in (first, second)]
        ends: list[ScriptedEpisode | None] = [None, None]
        while None in ends:
            for side in (0, 1):
                if ends[side] is None:
                    ends[side] = next(sides[side])
        for alone, together in zip((first, second), ends, strict=True):
            if together is not None and alone != together:
                raise Differs(
                    f"task {index}, two episodes at once, scored after every turn: {difference(alone, together)}; "
                    "keep everything in the state, and let score() change nothing"
                )
    return f"episodes at the same time do not touch each other ({count} pairs)"


def _hostile(env: Env, picked: Sequence[int]) -> str:
    for index in while_time(picked[:4]):
        failed: dict[str, str] = {}
        for action in HOSTILE:
            try:
                played(env, env.task(index), replay_actions((action,)))
            except CheckFailed as problem:
                failed[f"{action!r:.60}"] = str(problem)
            except Exception as error:  # noqa: BLE001  foreign code: the finding must name the action
                failed[f"{action!r:.60}"] = f"raised {describe_fault(error, source_of(env))}"
        if failed:
            (first, why), *others = failed.items()
            named = f"; so do {', '.join(action for action, _ in others[:NAMED])}" if others else ""
            raise CheckFailed(
                f"task {index}, action {first}: {why}{named}. Correct that line, so that it answers any text: a run leaves "
                "such rollouts out, and pauses if there are many"
            )
        played(env, env.task(index), replay_actions(HOSTILE))
    return f"{len(HOSTILE)} of them answered and scored"


def _group(env: Env, picked: Sequence[int], seed: int) -> str:
    """Each task's episodes as a group, compared twice."""
    compare = cast(GroupScoring, env).group_scores
    for index in while_time(picked):
        episodes = []
        players = [player for _, player in sorted(players_of(env).items())]
        for player in [*players, lambda state, rng: "", lambda state, rng: "a"]:
            act = scripted_player(player, seed, index)
            episode, done = Episode(env), False
            episode.state, _ = env.reset(env.task(index))
            while not done and len(episode.credit) < MAX_TURNS:
                done = bool(take_turn(episode, act(episode.state)).done)
            episodes.append(episode)
        states = [episode.state for episode in episodes]
        scores, again = list(compare(list(states))), list(compare(list(states)))
        if len(scores) != len(states):
            raise CheckFailed(f"task {index}: group_scores() gives {len(scores)} scores for {len(states)} states")
        if scores != again:
            raise Differs(
                f"task {index}: group_scores() gives {scores!r:.60} and then {again!r:.60} for the same states"
            )
        for episode, score in zip(episodes, scores, strict=True):
            try:
                earned(env, [env.score(episode.state), score], episode.turn_rewards)
            except (ValueError, TypeError) as fault:
                raise CheckFailed(f"task {index}, beside its siblings: {fault}") from None
    return f"{len(picked)} groups compared, the same way twice"


def _tools(env: Env) -> str:
    """Tools are functions with a name, and parameters as a JSON schema."""
    names = []
    facts = describe(env)
    for tool in facts.tools:
        function: Any = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not (isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(name, str) and name):
            raise CheckFailed(f'a tool is {tool!r:.80}: write {{"type": "function", "function": {{"name": ..., ...}}}}')
        if not isinstance(function.get("parameters", {}), Mapping):
            raise CheckFailed(f"the parameters of tool {name} are no JSON schema: give an object")
        names.append(name)
    try:
        template_arguments(facts.arguments)
    except BadMessage as problem:
        raise CheckFailed(str(problem)) from None
    if len(set(names)) < len(names):
        raise CheckFailed(f"two tools have the same name: {', '.join(names)}")
    return f"{', '.join(names)}"
