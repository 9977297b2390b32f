"""How a node serves chunks to others: the calls of a relay, and the offer to the coordinator that makes clients ask it.

Called by the relay role, and by nodes that share what they have. It knows no chunk: what is served comes from a `Shelf`.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import NothingYet, PeerError
from shoal.net.client import Client
from shoal.net.file_answer import FileAnswer
from shoal.net.server import Gate, answer
from shoal.net.shelf import shelf
from shoal.protocol.identity import Key
from shoal.protocol.relays import sign_proof
from shoal.protocol.types.relays import RelayOffer, RelayProof, RelayStanding

log = logging.getLogger("relay")

NONCE = re.compile(r"[A-Za-z0-9_-]{16,64}", re.ASCII)

LEAST_S, MOST_S = 1.0, 600.0
"""Between two offers, whatever the coordinator asks for."""


class Shelf(Protocol):
    """What a node serves."""

    folder: Path

    def serve(self, name: str) -> FileAnswer:
        """A verified chunk as an answer. Raises `NothingYet`."""
        ...

    def holdings(self, content: str) -> bytes:
        """Which chunks of a version are here, a bit each."""
        ...


def application(held: Shelf, key: Key, run: str, clock: Callable[[], float]) -> Starlette:
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
    return shelf(held.folder, clock, gate=gate, serve=held.serve, more=more)


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
