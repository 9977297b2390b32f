"""Sources on links of given rates, in simulated time: an hour of fetching takes a moment, and each failure replays.

The loop's clock jumps to the next timer instead of waiting for it. Bytes, hashes and files are real.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.protocol import encoding
from shoal.weights.fetch.chunks import Chunk, FileRange, take_up_parts
from shoal.weights.fetch.sources import Passing
from shoal.weights.fetch.transfer import Transfer, TransferEvents

PART_BYTES = 1024


class Loop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for timers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        really = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            if timeout:
                self.now += timeout
                timeout = 0
            return really(timeout)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def simulate(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run a story in simulated time, for at most a day of it."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(asyncio.wait_for(scenario, 86_400))


def now() -> float:
    return asyncio.get_running_loop().time()


class Link:
    """A line that many requests share."""

    def __init__(self, bytes_per_s: float | Callable[[float], float]) -> None:
        """The rate, or the rate by time."""
        self._rate = bytes_per_s if callable(bytes_per_s) else lambda time: bytes_per_s
        self._free_at = 0.0

    async def carry(self, size: int) -> None:
        begin = max(now(), self._free_at)
        self._free_at = begin + size / self._rate(begin)
        await asyncio.sleep(self._free_at - now())


@dataclass
class Server:
    """A source of chunks behind a link. The fields say what is wrong with it."""

    name: str
    held: dict[str, bytes]
    uplink: Link
    downlink: Link | None = None
    """Of the client."""
    latency_s: float = 0.005
    spoil: Callable[[bytes, int], bytes] = lambda chunk, count: chunk
    """Changes a chunk; gets the number of the request."""
    stalls_at: Callable[[int], int | None] = lambda count: None
    """After how many bytes a request stalls for ever."""
    cuts_at: Callable[[int], int | None] = lambda count: None
    """After how many bytes a request ends with an error."""
    is_up: Callable[[float], bool] = lambda time: True
    sent: int = 0
    rank: int = 0
    asked: list[tuple[float, str, int]] = field(default_factory=list)
    """When which chunk was asked for, and from which byte on."""

    async def parts(self, digest: str, start: int, size: int) -> AsyncGenerator[bytes, None]:
        self.asked.append((now(), digest, start))
        count = len(self.asked)
        await asyncio.sleep(self.latency_s)
        data, given = self.spoil(self.held[digest], count)[start:], 0
        for at in range(0, len(data), PART_BYTES):
            if not self.is_up(now()):
                raise Passing("connection refused")
            stall, cut = self.stalls_at(count), self.cuts_at(count)
            if stall is not None and given >= stall:
                await asyncio.Event().wait()
            if cut is not None and given >= cut:
                raise Passing("connection reset")
            part = data[at : at + PART_BYTES]
            await self.uplink.carry(len(part))
            if self.downlink is not None:
                await self.downlink.carry(len(part))
            given += len(part)
            self.sent += len(part)
            yield part

    async def close(self) -> None:
        pass


class Version:
    """Chunks that are wanted, and the file that they make."""

    def __init__(self, folder: Path, num_chunks: int, chunk_bytes: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.chunks = [rng.randbytes(chunk_bytes) for _ in range(num_chunks)]
        self.held = {encoding.digest(chunk): chunk for chunk in self.chunks}
        self.size = num_chunks * chunk_bytes
        self.folder, self.file = folder, folder / "weights"
        folder.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(b"")
        self.missing = [
            Chunk(encoding.digest(chunk), chunk_bytes, [FileRange(self.file, index * chunk_bytes)])
            for index, chunk in enumerate(self.chunks)
        ]
        self.blamed: list[tuple[str, str]] = []
        self.told: list[str] = []
        self.took_s = 0.0

    def fetch(self, sources: list[Server], seed: int = 0) -> "Version":
        """Fetch the missing chunks in simulated time."""

        async def scenario() -> None:
            begun, data = now(), self.file.read_bytes()
            missing = [
                piece
                for piece in self.missing
                if data[piece.places[0].offset :][: piece.size] != self.held[piece.digest]
            ]
            for piece in missing:
                piece.part = None
            take_up_parts(self.folder, missing)
            transfer = Transfer(
                missing,
                sources,
                self.folder,
                rng=random.Random(seed),
                events=TransferEvents(on_blame=lambda *told: self.blamed.append(told), on_progress=self.told.append),
            )
            try:
                await transfer.run()
            finally:
                self.took_s = now() - begun

        simulate(scenario())
        return self

    @property
    def is_right(self) -> bool:
        return self.file.read_bytes() == b"".join(self.chunks)
