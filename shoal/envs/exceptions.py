"""Faults of an environment: which errors of its calls follow from the rollout's tokens, and which only from this machine.

A fault that every replay of the same tokens repeats ends the rollout by "error", and the run leaves it out. What only
this machine met (its memory, its time, its sandbox) ends no rollout and is evidence against nobody, so it is raised to
the role.
"""

import dis
import re
import socket
import traceback
from pathlib import Path

from shoal.errors import Overreach

REPRODUCIBLE_ERRORS: tuple[type[BaseException], ...] = (Exception,)
"""What foreign code may raise that a replay of the same tokens repeats, except what is in `LOCAL_ERRORS`."""

LOCAL_ERRORS: tuple[type[BaseException], ...] = (Overreach, MemoryError)
"""What says something about this machine alone. Catch these first."""

UNREACHABLE: tuple[type[BaseException], ...] = (TimeoutError, ConnectionError, socket.gaierror)
"""What Python raises for an endpoint that does not answer. HTTP clients raise their own errors while they handle these."""


_ASKS = frozenset({
    "aiohttp", "anyio", "asyncio", "concurrent", "grpc", "http", "httpcore", "httpx", "requests", "select", "selectors",
    "socket", "ssl", "threading", "urllib", "urllib3", "websockets",
})  # fmt: skip
"""Modules in which code waits for an endpoint, or for a thread that does. An alarm may ring there."""


def is_unreachable(error: BaseException, source: Path | None) -> bool:
    """Whether an error of an environment began with an endpoint that did not answer, which a replay may find otherwise.
    `source` is the environment's file: a TimeoutError that this raises itself, as at an alarm, is a fault like others."""
    seen: set[int] = set()
    while id(error) not in seen:
        if isinstance(error, UNREACHABLE) and not _is_own_timeout(error, source):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__ or error
    return False


def _is_own_timeout(error: BaseException, source: Path | None) -> bool:
    """Whether a `raise` of the environment's file is where a TimeoutError began, and no wait for an endpoint led there."""
    trace = error.__traceback__
    if not isinstance(error, TimeoutError) or trace is None:
        return False
    rooms = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in traceback.walk_tb(trace)}
    if rooms & _ASKS:  # guard: alarm-in-a-wait-is-silence
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_raise = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]  # and no call, as of a socket
    return code.co_filename == str(source) and is_raise


class RewardOutOfBounds(ValueError):
    """A score that is a number, but outside the environment's `reward_bounds`."""

    def __init__(self, score: float, low: float, high: float) -> None:
        super().__init__(f"score {score} is outside reward_bounds {low} to {high}")
        self.score = score


_FOLDERS = re.compile(
    r"""^/[^:]*/(?=[^/:]+ line \d+: )|(?<![\w./-])/(?:[^\s/'":,;()<>\[\]]+/)+(?=[^\s/'":,;()<>\[\]])"""
)
"""Of the file where a fault was raised, and of any absolute path in its text."""


def redact_paths(fault: str, source: Path | None) -> str:
    """A fault as the log may have it: folders of this machine are nobody's business. `source` is the environment's file."""
    if source is not None:
        fault = fault.replace(f"{source.parent.absolute()}/", "").replace(str(source), source.name)
    return _FOLDERS.sub("", fault)


def score_outside(error: BaseException) -> float | None:
    """The score of a fault that is one outside the bounds; None for other faults."""
    return error.score if isinstance(error, RewardOutOfBounds) else None
