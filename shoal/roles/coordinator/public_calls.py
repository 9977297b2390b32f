"""Calls that anyone may make: the run, its status, nodes, metrics, and a node's pay."""

import asyncio

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response

from shoal.env_packages.naming import is_registry_path
from shoal.ledger.errors import Refused
from shoal.ledger.log.pay_history import explain, sign_statement
from shoal.ledger.registry import read_entry
from shoal.ledger.status import node_state
from shoal.metrics import MAX_LINE_BYTES
from shoal.net.blobs import names
from shoal.net.server import answer, answer_bytes
from shoal.protocol.constants import MAX_EVENTS
from shoal.protocol.encoding import digest
from shoal.protocol.messages.responses import CreditLine, CreditPage, Statement
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.request_context import RequestContext, number
from shoal.roles.coordinator.versions import signed_manifest

# --- A member's pay ---
#
# A page of the events that changed it, and its balance as a signed statement.
#
# It reads the log and decides nothing; `ledger/log/pay_history` explains an event.


MAX_CREDIT_LINES = 500
"""Most lines on one page that explains a node's pay."""
LOOK_BACK_EVENTS = 200
"""Events read before a page, to find the verdicts behind its first lines."""


def credit_page(desk: Coordinator, key: str, after: int) -> CreditPage:
    """What changed a member's pay after event `after`: about `MAX_CREDIT_LINES` lines from at most `MAX_EVENTS` events."""
    after = max(-1, after)
    first = max(-1, after - LOOK_BACK_EVENTS)
    rows = desk.book.store.read(first, after - first + MAX_EVENTS)
    entries = [read_entry(data)[0] for data, _ in rows]
    end = max(after, entries[-1].seq) if entries else after
    lines: list[CreditLine] = []
    for line in explain(entries, desk.state, key):
        if line.seq <= after:
            continue
        if len(lines) >= MAX_CREDIT_LINES and line.seq > lines[-1].seq:
            end = lines[-1].seq
            break
        lines.append(line)
    node = desk.state.members[key]
    return CreditPage(key, node.leases, node.lapsed, tuple(lines), end, end < desk.state.seq)


def statement(desk: Coordinator, key: str) -> Statement:
    """A member's balance, signed by the run."""
    return sign_statement(desk.state, key, desk.key, desk.clock())


# --- Calls that show the run to anyone ---
#
# Its state, its log, its nodes and their accounts, and what it has to offer.
#
# They change nothing and wait for nothing.


async def get_nodes(door: RequestContext, request: Request) -> Response:
    await door.gate.anyone(request)
    return answer(door.board.nodes(request.query_params.get("after", "")))


async def get_node(door: RequestContext, request: Request) -> Response:
    return answer(node_state(door.desk.state.members[await _member(door, request)]))


async def get_credits(door: RequestContext, request: Request) -> Response:
    key = await _member(door, request)
    return answer(credit_page(door.desk, key, number(request.query_params.get("after", "-1"), "after")))


async def get_statement(door: RequestContext, request: Request) -> Response:
    return answer(statement(door.desk, await _member(door, request)))


async def _member(door: RequestContext, request: Request) -> str:
    """The key in the path. Raises `Refused` if it is not a member's."""
    await door.gate.anyone(request)
    key: str = request.path_params["key"]
    if key not in door.desk.state.members:
        raise Refused("unknown", f"no node {key[:16]} in this run")
    return key


async def get_status(door: RequestContext, request: Request) -> Response:
    await door.gate.anyone(request)
    return answer(door.board.status())


async def get_state(door: RequestContext, request: Request) -> Response:
    await door.gate.anyone(request)
    return answer(door.board.state_hash())


async def get_manifest(door: RequestContext, request: Request) -> Response:
    await door.gate.anyone(request)
    return answer_bytes(signed_manifest(door.desk, request.path_params["version"]), "application/json")


async def get_events(door: RequestContext, request: Request) -> Response:
    await door.gate.anyone(request)
    return await door.pages.after(number(request.query_params.get("after", "-1"), "after"))


async def get_health(door: RequestContext, request: Request) -> Response:
    await door.gate.anyone(request)
    return PlainTextResponse("ok\n")


async def get_metrics(door: RequestContext, request: Request) -> Response:
    """For a Prometheus server: its text format, or OpenMetrics to one that accepts that."""
    await door.gate.anyone(request)
    return answer_bytes(*door.exposed.page(request.headers.get("accept", "")))


async def get_steps(door: RequestContext, request: Request) -> Response:
    """A page of the run's metrics: lines of the steps above ?after=STEP. A browser that has the page gets no body."""
    await door.gate.anyone(request)
    step = number(request.query_params.get("after", "-1"), "after")
    async with door.desk.reading_metrics:
        page = await asyncio.to_thread(door.desk.metrics.after, step, MAX_LINE_BYTES)
    etag = f'"{digest(page)[:32]}"'
    if names(request.headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers={"etag": etag})
    response = answer_bytes(page, "application/x-ndjson")
    response.headers["etag"] = etag
    return response


async def get_front(door: RequestContext, request: Request) -> Response:
    """A page for people who open the URL: a browser is led to the run's dashboard, if there is one. Nothing is passed on to
    that: see `Coordinator.dashboard`. With `?text` it stays, for those whom no way leads to the dashboard's port."""
    await door.gate.anyone(request)
    proxied = "x-forwarded-for" in request.headers  # who sends this without a proxy misleads himself
    page = door.desk.dashboard(request.url.scheme, request.url.hostname or "", proxied)
    stays = "text" in request.query_params
    if page and not stays and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(page, 307, {"cache-control": "no-store"})
    info, status = door.board.info(), door.board.status()
    url = str(request.base_url).rstrip("/")
    has_ended = status.waiting_on == "nothing"
    waits = "the run has ended" if has_ended else f"waiting for {status.waiting_for} ({status.waiting_s:.0f} s)"
    return PlainTextResponse(
        f"shoal run {info.name}: {status.phase}, version {status.version} of {status.steps}, "
        f"{status.accepted} groups accepted\n{waits}\n\n"
        f"join:   shoal join {url}\ncalls:  {url}/openapi.json\n{door.desk.about_dashboard(page)}"
    )


async def get_hub(door: RequestContext, request: Request) -> Response:
    """A file of the registry in the run's folder. Nothing is written over HTTP: the host pushes on its own machine."""
    await door.gate.anyone(request)
    path = request.path_params["path"]
    file = door.desk.hub / path
    if not is_registry_path(path) or not file.is_file():  # guard: registry-files-only
        raise Refused("nothing_yet", "this run's registry has no such file")
    return FileResponse(file, media_type="application/octet-stream")


async def get_relays(door: RequestContext, request: Request) -> Response:
    await door.gate.anyone(request)
    return answer(door.desk.relays.told())
