"""An environment that the caller's own program holds: its first fault ends the training, in one line.

In a run of many machines, a fault costs its rollout the reward and the run goes on. Here the reader of the error wrote
the environment, so the error comes at once. A call that does not return is interrupted by a signal, which only the main
thread gets.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from shoal.env import Env
from shoal.envs.interface import describe_fault, label_of, source_of
from shoal.envs.replay import ReplayResult
from shoal.errors import Overreach

CALL_S = 30.0
"""Limit on the seconds of one call of an environment that this program holds."""

CALLS = ("task", "reset", "step", "score", "truncated_score", "group_scores")
"""What is called while a rollout is played."""

REMEDY = "Fix it, and run the cell again"


class OwnFault(Overreach):
    """The caller's environment failed. It passes through what catches an environment's faults elsewhere."""


class OwnEnv:
    """An environment under limits. Everything else is passed on to it."""

    def __init__(self, env: Env, call_s: float = CALL_S) -> None:
        self.env, self._call_s = env, call_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.env, name)
        return partial(self._call, name, found) if name in CALLS else found

    def demand_sound(self, found: Sequence[ReplayResult]) -> None:
        """Raise `OwnFault` if a rollout has a fault that only shows in what calls returned, such as a score that is not a
        number."""
        for one in found:
            if one.talk is not None and one.talk.fault:
                raise OwnFault(f"environment {label_of(self)} fails: {one.talk.fault}. {REMEDY}")

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            with interrupted_after(self._call_s):
                return function(*args, **named)
        except (Overreach, MemoryError):
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            place = describe_fault(error, source_of(self.env))
            raise OwnFault(f"environment {label_of(self)} fails in {name}(): {place}. {REMEDY}") from error


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer, and again after each further second; not outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"it did not return within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
