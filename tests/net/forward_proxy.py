"""A small forward proxy, as companies have one: it connects to servers (CONNECT), and forwards requests with whole URLs."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class ForwardProxy:
    """Runs in a thread of its own, on a port of this machine."""

    def __init__(self, user: str = "", refuses: bool = False) -> None:
        """`user`: what it wants in Proxy-Authorization. It `refuses` every server."""
        self.user, self.refuses = user, refuses
        self.knows = dict[str, str]()
        """Addresses of names that it alone can look up."""
        self.asked = list[tuple[str, str]]()
        """Method and place (host and port) of each request."""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client: it ends with its first answer."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            first, *headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            url = urlsplit(target if method != "CONNECT" else f"//{target}")
            self.asked.append((method, url.netloc))
            if self.user and f"Proxy-Authorization: Basic {self.user}" not in headers:
                writer.write(b"HTTP/1.1 407 Who are you\r\ncontent-length: 0\r\n\r\n")
            elif self.refuses:
                writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
            else:
                there, out = await asyncio.open_connection(
                    self.knows.get(url.hostname or "", url.hostname), url.port or 80
                )
                if method == "CONNECT":
                    writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
                else:
                    path = f"{url.path or '/'}{'?' if url.query else ''}{url.query}"
                    kept = [line for line in headers if line and not line.lower().startswith(("proxy-", "connection:"))]
                    out.write(
                        "\r\n".join([f"{method} {path} HTTP/1.1", *kept, "Connection: close", "", ""]).encode("latin-1")
                    )
                await asyncio.gather(_pump(reader, out), _pump(there, writer))
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


@contextlib.contextmanager
def forward_proxy(user: str = "", refuses: bool = False) -> Iterator[ForwardProxy]:
    """A proxy that runs meanwhile."""
    proxy, loop, up = ForwardProxy(user, refuses), asyncio.new_event_loop(), threading.Event()

    async def begin() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        up.set()

    def run() -> None:
        loop.create_task(begin())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    up.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
