"""Calls that show the run to anyone: its state, its log, its nodes and their accounts, and what it has to offer.

Called by `api`, whose table names them. They change nothing and wait for nothing.
"""

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response

from shoal.hub.names import is_registry_path
from shoal.ledger.answers import Refused
from shoal.net.server import answer, answer_bytes
from shoal.roles.coordinator.board import node_state
from shoal.roles.coordinator.credits import credit_page, statement
from shoal.roles.coordinator.door import Api, number
from shoal.roles.coordinator.versions import signed_manifest


async def get_run(api: Api, request: Request) -> Response:
    await api.gate.anyone(request)
    return answer(api.board.info())


async def get_nodes(api: Api, request: Request) -> Response:
    await api.gate.anyone(request)
    return answer(api.board.nodes(request.query_params.get("after", "")))


async def get_node(api: Api, request: Request) -> Response:
    return answer(node_state(api.desk.state.members[await _member(api, request)]))


async def get_credits(api: Api, request: Request) -> Response:
    key = await _member(api, request)
    return answer(credit_page(api.desk, key, number(request.query_params.get("after", "-1"), "after")))


async def get_statement(api: Api, request: Request) -> Response:
    return answer(statement(api.desk, await _member(api, request)))


async def _member(api: Api, request: Request) -> str:
    """The key in the path. Raises `Refused` if it is not a member's."""
    await api.gate.anyone(request)
    key: str = request.path_params["key"]
    if key not in api.desk.state.members:
        raise Refused("unknown", f"no node {key[:16]} in this run")
    return key


async def get_status(api: Api, request: Request) -> Response:
    await api.gate.anyone(request)
    return answer(api.board.status())


async def get_state(api: Api, request: Request) -> Response:
    await api.gate.anyone(request)
    return answer(api.board.state_hash())


async def get_manifest(api: Api, request: Request) -> Response:
    await api.gate.anyone(request)
    return answer_bytes(signed_manifest(api.desk, request.path_params["version"]), "application/json")


async def get_events(api: Api, request: Request) -> Response:
    await api.gate.anyone(request)
    return await api.pages.after(number(request.query_params.get("after", "-1"), "after"))


async def get_health(api: Api, request: Request) -> Response:
    await api.gate.anyone(request)
    return PlainTextResponse("ok\n")


async def get_metrics(api: Api, request: Request) -> Response:
    """Prometheus text."""
    await api.gate.anyone(request)
    return PlainTextResponse("\n".join(api.board.metrics()) + "\n")


async def get_front(api: Api, request: Request) -> Response:
    """A page for people who open the URL."""
    await api.gate.anyone(request)
    info, status = api.board.info(), api.board.status()
    url = str(request.base_url).rstrip("/")
    return PlainTextResponse(
        f"shoal run {info.name}: {status.phase}, version {status.version} of {status.steps}, "
        f"{status.accepted} groups accepted\nwaiting for {status.waiting_for} ({status.waiting_s:.0f} s)\n\n"
        f"join:   shoal join {url}\ncalls:  {url}/openapi.json\n"
    )


async def get_hub(api: Api, request: Request) -> Response:
    """A file of the registry in the run's folder. Nothing is written over HTTP: the host pushes on its own machine."""
    await api.gate.anyone(request)
    path = request.path_params["path"]
    file = api.desk.hub / path
    if not is_registry_path(path) or not file.is_file():  # guard: registry-files-only
        raise Refused("nothing_yet", "this run's registry has no such file")
    return FileResponse(file, media_type="application/octet-stream")


async def get_relays(api: Api, request: Request) -> Response:
    await api.gate.anyone(request)
    return answer(api.desk.relays.told())
