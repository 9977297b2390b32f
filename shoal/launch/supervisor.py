"""Supervision of processes: they are kept alive until something holds, and stopped in order."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

from shoal.launch.role_process import RoleProcess

TICK_S = 0.1

ProcessGroup = tuple[Sequence[RoleProcess], float]
"""Processes, and how many seconds they may take to end."""


class Supervisor:
    """Keeps processes alive until somebody asks for their end."""

    def __init__(self) -> None:
        self.stop_requests = 0
        """The first stops cleanly, the second at once."""

    def request_stop(self) -> None:
        """What Ctrl-C does."""
        self.stop_requests += 1

    @contextlib.contextmanager
    def counted_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask for the end, and do not end this process."""

        def ask(number: int, frame: FrameType | None) -> None:
            self.request_stop()

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(
        self,
        processes: Callable[[], Iterable[RoleProcess]],
        until: Callable[[], bool],
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Keep processes alive, and look on, until something holds or a stop is requested."""
        while not self.stop_requests and not until():
            for process in processes():
                process.tend()
            look()
            time.sleep(TICK_S)

    def stop(self, *groups: ProcessGroup, look: Callable[[], object] = lambda: None) -> None:
        """End groups of processes at the same time. Those that take too long are killed."""
        members = [process for processes, _ in groups for process in processes]
        for process in members:
            process.ask_to_end()
        began = time.monotonic()
        while any(process.pid is not None for process in members):
            for processes, patience_s in groups:
                if time.monotonic() - began > patience_s or self.stop_requests > 1:
                    for process in processes:
                        process.kill()
            for process in members:
                process.tend()
            look()
            time.sleep(TICK_S)
