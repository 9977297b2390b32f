"""How a node serves chunks to others: the calls of a relay, and the offer to the coordinator that makes clients ask it.

It knows no chunk: what is served comes from `ServedFiles`. If serving or offering ends by an error, the log says so, and it
starts again.
"""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import NothingYet, PeerError
from shoal.net.blobs import FileAnswer, blob_app
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits, http_server
from shoal.net.server import Gate, answer
from shoal.net.server_address import listen
from shoal.protocol.host_signatures import sign_proof
from shoal.protocol.messages.batches import RelayOffer, RelayProof, RelayStanding
from shoal.protocol.signing import Key

log = logging.getLogger("relay")

NONCE = re.compile(r"[A-Za-z0-9_-]{16,64}", re.ASCII)

LEAST_S, MOST_S = 1.0, 600.0
"""Between two offers, whatever the coordinator asks for."""

REST_S = 10.0
"""Before serving or offering starts again."""

END_S = 3.0
"""The server may take so long to end."""


class ServedFiles(Protocol):
    """What a node serves."""

    folder: Path

    def serve(self, name: str) -> FileAnswer:
        """A verified chunk as an answer. Raises `NothingYet`."""
        ...

    def holdings(self, content: str) -> bytes:
        """Which chunks of a version are here, a bit each."""
        ...


def application(held: ServedFiles, key: Key, run: str, clock: Callable[[], float]) -> Starlette:
    """The calls of a relay, for a server."""
    gate = Gate(clock)

    async def get_holdings(request: Request) -> Response:
        await gate.anyone(request)
        bits = await asyncio.to_thread(held.holdings, request.path_params["content"])
        return Response(bits, headers={"cache-control": "no-store"}, media_type="application/octet-stream")

    async def get_proof(request: Request) -> Response:
        await gate.anyone(request)
        nonce = request.path_params["nonce"]
        if not NONCE.fullmatch(nonce):
            raise NothingYet("a nonce has 16 to 64 letters, digits, - and _")
        return answer(RelayProof(key.public, sign_proof(key, run, nonce)))

    more = [
        Route("/v1/holdings/{content}", get_holdings),
        Route("/.well-known/shoal-relay/{nonce}", get_proof),
    ]
    return blob_app(held.folder, clock, gate=gate, serve=held.serve, more=more)


@contextlib.asynccontextmanager
async def serving(
    app: Starlette, listener: socket.socket, client: Client, *, public_url: str, limits: ServerLimits
) -> AsyncIterator[None]:
    """Serve at a listening socket, and offer that to the coordinator, meanwhile."""
    (bind, port), is_over = listener.getsockname()[:2], False
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        with listener if listener.fileno() >= 0 else listen(bind, port) as here:
            server = http_server(app, limits)
            server.config.lifespan = "off"  # else a server that ends at once prints a traceback
            server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]  # roles have them
            servers[:] = [server]
            await server.serve(sockets=[here])

    tasks = [
        asyncio.create_task(kept_up("serving chunks", serve, lambda: is_over)),
        asyncio.create_task(kept_up("offering to serve", lambda: offer(client, public_url, port))),
    ]
    try:
        yield
    finally:
        is_over = True
        for server in servers:
            server.should_exit = server.force_exit = True
        tasks[1].cancel()
        await asyncio.wait(tasks[:1], timeout=END_S)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def kept_up(
    what: str, work: Callable[[], Coroutine[None, None, None]], is_over: Callable[[], bool] = lambda: False
) -> None:
    """Do some work; when it ends, begin it again, until cancelled or until everything `is_over`."""
    while True:
        doing = asyncio.create_task(work())
        try:
            await asyncio.wait({doing})
        finally:
            doing.cancel()
        if is_over():  # guard: kept-up
            return
        error = None if doing.cancelled() else doing.exception()
        log.warning("%s ended (%s): it starts again in %.0f s", what, _cause(error), REST_S)
        await asyncio.sleep(REST_S)


def _cause(error: BaseException | None) -> str:
    """Why a task ended, in a few words."""
    return "without an error" if error is None else f"{type(error).__name__}: {error}"


async def offer(client: Client, public_url: str, port: int) -> None:
    """Offer this node to the coordinator, again and again, until cancelled. The client signs with the key that serves."""
    said = ""
    while True:
        retry_s = 60.0
        try:
            standing = await client.post_json("/v1/relays", RelayOffer(public_url, port), RelayStanding)
        except PeerError as error:
            told = f"not listed: {error}"
        else:
            retry_s = standing.retry_s
            told = (
                f"listed url={standing.url}" if standing.listed else f"not listed url={standing.url}: {standing.reason}"
            )
        if told != said:
            log.info("%s", told)
            said = told
        await asyncio.sleep(min(max(retry_s, LEAST_S), MOST_S))
