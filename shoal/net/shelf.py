"""A folder of public blobs over HTTP: `GET /v1/blobs/{hash}` with ranges and conditions, as caches and CDNs expect.

Called by the origin, and by relays, which add calls of their own. It asks nobody who may read: all that is in the folder is
public. An ordinary web server can serve the same folder in its place.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.net import server
from shoal.net.blobs import serve_blob
from shoal.net.server import Gate


def shelf(
    folder: Path,
    clock: Callable[[], float],
    *,
    gate: Gate | None = None,
    serve: Callable[[str], Response] | None = None,
    more: Sequence[BaseRoute] = (),
    **options: Any,
) -> Starlette:
    """An application that serves a folder's blobs. `gate` limits the rate of each address. `serve` makes the answer for a
    hash, if not simply from the folder; `more` are further routes; `options` are Starlette's."""
    doors = gate or Gate(clock)

    async def get_blob(request: Request) -> Response:
        await doors.anyone(request)
        name = request.path_params["hash"]
        return serve(name) if serve else serve_blob(folder, name)

    async def get_health(request: Request) -> Response:
        await doors.anyone(request)
        return PlainTextResponse("ok\n")

    return server.application([Route("/v1/blobs/{hash}", get_blob), Route("/healthz", get_health), *more], **options)
