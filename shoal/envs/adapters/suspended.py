"""Turns a coroutine that asks the policy for turns into a generator that yields each request and receives the answer.

This suspends unmodified code that awaits a model at each request, without threads: its event loop runs only until it
asks or ends. Called by the adapters of packages that use asyncio. All episodes of an environment share one loop,
because its clients and locks belong to that loop. Between turns nothing runs. The caller itself must not be in a
coroutine.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from shoal.env import Message

Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")

Ask: TypeAlias = Callable[[Sequence[Message]], Awaitable[str | None]]
"""Show messages to the policy, and await its turn; None if a token limit ended the episode."""

CLOSE_S = 5.0
"""How long a cancelled coroutine may clean up. After that we no longer wait for it."""


class Line(Generic[Q, A]):
    """The requests of one coroutine that wait for an answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self.rang = asyncio.Event()

    async def ask(self, request: Q) -> A:
        """The answer to a request. The coroutine stops here."""
        answer: asyncio.Future[A] = self._loop.create_future()
        self.waiting.append((request, answer))
        self.rang.set()
        return await answer


def suspended(
    loop: asyncio.AbstractEventLoop, program: Callable[[Callable[[Q], Awaitable[A]]], Coroutine[Any, Any, R]]
) -> Generator[Q, A, R]:
    """Run `program` with a function that asks. Closing the generator cancels the program."""
    line: Line[Q, A] = Line(loop)
    task = loop.create_task(program(line.ask))
    try:
        while True:
            if not line.waiting:
                line.rang.clear()
                loop.run_until_complete(_until_asked(task, line))
            if task.done():
                return task.result()
            request, answer = line.waiting.popleft()
            answer.set_result((yield request))
    finally:
        if not task.done():
            task.cancel()
            if not (loop.is_closed() or loop.is_running()):  # the garbage collector may call this while the loop runs
                loop.run_until_complete(asyncio.wait([task], timeout=CLOSE_S))


async def _until_asked(task: "asyncio.Task[R]", line: Line[Q, A]) -> None:
    ring = asyncio.ensure_future(line.rang.wait())
    try:
        await asyncio.wait([task, ring], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ring.cancel()
