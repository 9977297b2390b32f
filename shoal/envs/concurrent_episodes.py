"""Calls of environments, of several episodes beside each other.

Calls of an environment of this process are made at once, and those of one that has processes of its own beside those of
other episodes. No answer depends on that.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from shoal.envs.episode import Calling
from shoal.envs.interface import AuthorError, describe_fault, source_of
from shoal.envs.isolated.environment import ContainedEnv
from shoal.envs.isolated.pool import LOOK_S
from shoal.envs.settings_wrapper import WithSettings

T = TypeVar("T")


def alone(calling: Calling[T]) -> T:
    """The result of one."""
    return together([calling])[0]


def together(callings: Sequence[Calling[T]]) -> list[T]:
    """The results of several, in order. Raises what one of them raises, and gives up the others."""
    results: dict[int, T] = {}
    answered: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()
    under_way: dict[int, tuple[ContainedEnv, Future[Any]]] = {}

    def go_on(place: int, value: Any = None, error: BaseException | None = None) -> None:
        """Play an episode, which gets this of its last call, up to a call that takes time."""
        calling = callings[place]
        while True:
            try:
                call = calling.send(value) if error is None else calling.throw(error)
            except StopIteration as end:
                results[place] = end.value
                return
            env = call.env.env if isinstance(call.env, WithSettings) else call.env
            if isinstance(env, ContainedEnv):
                future = env.begin(call.name, *call.args)
                under_way[place] = env, future
                future.add_done_callback(lambda future: answered.put((place, future)))
                return
            value = error = None
            try:
                value = call_here(env, call.name, call.args)
            except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001  the episode decides what it means
                error = raised

    try:
        for place in range(len(callings)):
            go_on(place)
        looked = time.monotonic()
        while under_way:
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                for env in {id(env): env for env, _ in under_way.values()}.values():
                    env.pool.look()
            try:
                place, future = answered.get(timeout=LOOK_S)
            except Empty:
                continue
            env, _ = under_way.pop(place)
            go_on(place, error=error) if (error := future.exception()) else go_on(place, future.result())
    except BaseException:
        for env, future in under_way.values():
            env.pool.give_up(future)
        raise
    return [results[place] for place in range(len(callings))]


def of_this_process(env: Any) -> Any:
    """The environment itself, without a run's settings, if its methods run in this process; else None."""
    env = env.env if isinstance(env, WithSettings) else env
    return None if isinstance(env, ContainedEnv) else env


def call_here(env: Any, name: str, args: tuple[Any, ...]) -> Any:
    """What a method returns. Raises what it raises, and `AuthorError` for a `SystemExit` and its like."""
    try:
        return getattr(env, name)(*args)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  it would end this process
        raise AuthorError(describe_fault(error, source_of(env))) from None
