"""Web servers on real sockets that serve chunks, well or badly, and nothing of shoal."""

import asyncio
import contextlib
import functools
import http.server
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

Answer = Callable[[str, dict[str, str], asyncio.StreamWriter], Awaitable[None]]
"""Gets the path, the headers by lower-case name, and what to write the answer to."""


@contextlib.contextmanager
def plain_web_server(folder: Path) -> Iterator[str]:
    """Python's own web server for a folder's files: it knows neither `Range` nor shoal. Gives its URL."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.asynccontextmanager
async def web_server(answer: Answer) -> AsyncIterator[str]:
    """A server whose answers are written byte by byte. Gives its URL."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:] if line}
                await answer(head[0].split(" ")[1], headers, writer)
                await writer.drain()
                if writer.is_closing():
                    return
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def head(status: int, **headers: object) -> bytes:
    """The first bytes of an answer."""
    lines = [f"HTTP/1.1 {status} Told", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
