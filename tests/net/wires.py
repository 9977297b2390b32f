"""A real server on loopback, and clients that speak to it byte by byte: what no in-memory transport can show."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop

from shoal.net.connection_limits import ServerLimits, http_server


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run a story on the event loop that the coordinator uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(scenario, 20.0))


@contextlib.asynccontextmanager
async def serving(app: Any, limits: ServerLimits) -> AsyncIterator[int]:
    """The port of a server of `app`, while it serves."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = http_server(app, limits)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


@dataclass
class Wire:
    """One connection, as a stranger's program would make it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        """Send bytes; nothing waits for them."""
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
        return int(lines[0].split()[1]), await self.reader.readexactly(length)

    async def ask(self, data: bytes) -> int:
        """Send bytes; returns the status of the answer."""
        self.send(data)
        return (await self.answer())[0]

    async def is_closed(self, within_s: float) -> bool:
        """Whether the server ends the connection within a time; what it says before is passed over."""
        try:
            async with asyncio.timeout(within_s):
                while await self.reader.read(65_536):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True


@contextlib.asynccontextmanager
async def wires(port: int, count: int = 1, host: str = "127.0.0.1") -> AsyncIterator[list[Wire]]:
    """Connections to a server, one after another."""
    made: list[Wire] = []
    try:
        for _ in range(count):
            made.append(Wire(*await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))))
        yield made
    finally:
        for wire in made:
            wire.writer.close()


def request(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """A request's bytes; the body's length is declared unless the headers say how it comes."""
    fields = {"host": "toy", "content-length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body
