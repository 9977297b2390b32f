"""A bad line between two real programs, driven by a seed: a proxy that limits, damages, cuts and stalls answers.

Called by tests and benchmarks, which put it between a client and a server. `faults` does the same to whole requests of one
process; this one acts on bytes in the middle of an answer. It reads no HTTP.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Collection
from enum import Enum
from types import TracebackType

BLOCK_BYTES = 16 << 10

SWAPPED_BYTES = 256


class LineFault(Enum):
    """What can happen to the bytes of an answer."""

    FLIP = "one bit is flipped"
    SWAP = "two runs of bytes change places"
    CUT = "the connection ends"
    STALL = "nothing comes any more"


class Line:
    """What several proxies may share: a rate of all their answers together."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        """0 means no limit."""
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0
        self._open = asyncio.Event()
        self._open.set()

    def rate(self, bytes_per_s: float) -> None:
        """Carry so much from now on; 0 means no limit."""
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    def hold(self) -> None:
        """Carry nothing until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Carry bytes again."""
        self._open.set()

    async def carry(self, size: int) -> None:
        """Return when so many bytes, and those before them, are carried."""
        await self._open.wait()
        if self._bytes_per_s:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + size / self._bytes_per_s
            await asyncio.sleep(self._free_at - now)


class FaultProxy:
    """Use as `async with FaultProxy(...) as proxy`, and connect to `proxy.port`."""

    def __init__(
        self,
        port: int,
        rng: random.Random,
        *,
        faults: Collection[LineFault] = tuple(LineFault),
        every_bytes: float = 0.0,
        bytes_per_s: float = 0.0,
        block_bytes: int = BLOCK_BYTES,
        line: Line | None = None,
    ) -> None:
        """Passes connections on to a port of this machine. A fault comes after a random number of bytes of answers, of mean
        `every_bytes`; 0 means no faults. All answers together get `bytes_per_s`, 0 means no limit; or what `line` has.
        Larger blocks than `block_bytes` are passed in parts; larger parts cost less CPU."""
        self._target, self._rng, self._block_bytes = port, rng, block_bytes
        self._faults, self._every_bytes = list(faults), every_bytes
        self.line = line or Line(bytes_per_s)
        self._next_fault = self._distance()
        self._server: asyncio.Server | None = None
        self._tasks = set[asyncio.Task[None]]()
        self.seen: Counter[LineFault] = Counter()
        """How often each fault happened."""
        self.passed_bytes = 0
        """Bytes of answers that were passed on."""

    async def __aenter__(self) -> "FaultProxy":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(
                OSError, asyncio.CancelledError
            ):  # the proxy ends: asyncio would log a cancelled task
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
                try:
                    asked = asyncio.create_task(self._pass_questions(reader, up_writer))
                    asked.add_done_callback(lambda _: task.cancel())  # a client that is gone is sent nothing more
                    await self._pass_answers(up_reader, writer)
                    asked.cancel()
                finally:
                    up_writer.close()
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pass_questions(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(self._block_bytes):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _pass_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(self._block_bytes):
            await self.line.carry(len(data))
            self._next_fault -= len(data)
            if self._next_fault < 0:
                self._next_fault = self._distance()
                fault = self._rng.choice(self._faults)
                self.seen[fault] += 1
                if fault is LineFault.STALL:
                    await asyncio.Event().wait()
                if fault is LineFault.CUT:
                    writer.write(data[: self._rng.randrange(len(data))])
                    return
                data = self._damaged(data, fault)
            if writer.is_closing():
                return
            self.passed_bytes += len(data)
            writer.write(data)
            await writer.drain()

    def _distance(self) -> float:
        return self._rng.expovariate(1 / self._every_bytes) if self._every_bytes else float("inf")

    def _damaged(self, data: bytes, fault: LineFault) -> bytes:
        changed = bytearray(data)
        if fault is LineFault.FLIP:
            changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        elif len(data) >= 2 * SWAPPED_BYTES:
            first = self._rng.randrange(len(data) - 2 * SWAPPED_BYTES + 1)
            middle, end = first + SWAPPED_BYTES, first + 2 * SWAPPED_BYTES
            changed[first:end] = data[middle:end] + data[first:middle]
        return bytes(changed)
