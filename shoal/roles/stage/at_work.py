"""What the stage is working on: each thing once, in threads, and so many at a time for each worker.

Called by `role` for turns and for records. Work that takes longer than an answer may take goes on, and its worker is told
to ask again. It does not know what the work is.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from shoal.net.server import RequestRefused

ANSWER_S = 20.0
"""Work that takes longer is answered "come again", and goes on meanwhile."""

T = TypeVar("T")


class AtWork(Generic[T]):
    """Work of one kind."""

    def __init__(self, kind: str, most: int, most_each: int) -> None:
        """`most` things are worked on at a time; more wait. `most_each` are of one worker; more are refused."""
        self._kind, self._most_each = kind, most_each
        self._threads = ThreadPoolExecutor(most, kind)
        self._tasks: dict[tuple[object, ...], tuple[str, asyncio.Future[T]]] = {}
        """For each place: the name of what is done there, and its result."""
        self._of: Counter[str] = Counter()
        """How many are of a worker."""

    async def answer(self, worker: str, place: tuple[object, ...], name: str, act: Callable[[], T]) -> T:
        """What `act` returns. If it is under way already, as it was named before, it is not done again. Raises as `act`,
        and `RequestRefused` if its worker must ask again."""
        before, task = self._tasks.get(place, ("", None))
        if task is not None and before != name:  # guard: one-turn-at-a-time
            raise _ask_again("another turn of this block is being played")
        if task is None:
            if self._of[worker] >= self._most_each:  # guard: work-of-one-worker
                raise _ask_again(
                    f"{self._of[worker]} {self._kind}s of this worker are at work, limit {self._most_each}"
                )
            task = asyncio.get_running_loop().run_in_executor(self._threads, act)
            self._tasks[place], self._of[worker] = (name, task), self._of[worker] + 1
            task.add_done_callback(lambda done: self._over(worker, place, done))
        done, _ = await asyncio.wait([task], timeout=ANSWER_S)  # guard: slow-turns-go-on
        if not done:
            raise _ask_again("the environment is still at work")
        return task.result()

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _over(self, worker: str, place: tuple[object, ...], task: "asyncio.Future[T]") -> None:
        del self._tasks[place]
        self._of[worker] -= 1
        self._of += Counter()  # drops workers with nothing at work
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it: then it is done again


def _ask_again(why: str) -> RequestRefused:
    return RequestRefused(503, "busy", f"{why}: ask again", retry_s=1.0)
