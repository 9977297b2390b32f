"""The coordinator's HTTP calls, version 1: a table of the calls, and their handlers.

A handler reads a request within the gate's limits, asks the coordinator or a file beside it, and encodes the answer.
The rules refuse, and this file chooses the HTTP status.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from shoal import __version__
from shoal.env_packages.package_reference import is_registry_path
from shoal.ledger.batches import BatchFormed
from shoal.ledger.commands import Admin, JoinRun, LeaveRun
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.log.pay_history import credit_page, sign_statement
from shoal.ledger.members import NodeJoined, NodeLeft, ValidatorFault, refuse_replayed
from shoal.ledger.run_events import RulesChanged, RunEnded
from shoal.ledger.state import State
from shoal.ledger.status import batch_of, node_state
from shoal.ledger.submissions import SubmissionReceived, refuse_other_time
from shoal.ledger.verdicts import Decision, Rechecked, VerdictGiven
from shoal.ledger.versions import CheckpointPublished
from shoal.net import server
from shoal.net.blobs import names
from shoal.net.openapi import Call, document
from shoal.net.server import Gate, answer, answer_bytes
from shoal.protocol import messages as t
from shoal.protocol.constants import (
    LONG_POLL_S,
    MAX_CHUNK_BYTES,
    MAX_JSON_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_SUBMISSION_BYTES,
)
from shoal.protocol.encoding import digest, from_msgpack, to_json, to_msgpack
from shoal.protocol.messages.responses import CreditPage, Statement
from shoal.protocol.tolerances import unmeasured
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.lease_queue import LeasePollReplays, LeaseQueue
from shoal.roles.coordinator.prometheus import Meter, Metered, PrometheusCollector
from shoal.roles.coordinator.request_context import Handler, LongPollLimits, Pages, RequestContext, number
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.coordinator.verdict_uploads import admit_validator, next_check, take_verdict
from shoal.roles.coordinator.version_uploads import admit_trainer, put_chunk, rotate, signed_manifest, take_checkpoint
from shoal.step_metrics import MAX_LINE_BYTES

STATUS_OF = {
    "not_joined": 403, "not_admitted": 403, "kicked": 403, "not_yours": 403, "conflict": 409, "fork": 409,
    "superseded": 410, "nothing_yet": 404, "not_your_turn": 404, "unknown": 404, "busy": 503, "replayed": 503,
    "joins_too_often": 429, "not_rotated": 403,
}  # fmt: skip
"""HTTP status for the code of a refusal; 400 for all other codes."""

TO_JUDGE = (
    SubmissionReceived, VerdictGiven, Decision, Rechecked, ValidatorFault, NodeJoined, NodeLeft,
    RulesChanged, RunEnded,
)  # fmt: skip
"""Events after which a validator may have something to judge, or may learn that it has not."""


def application(coordinator: Coordinator, **options: Any) -> Starlette:
    """The coordinator as an ASGI application. `options` are Starlette's."""
    meter, status_cache = Meter(), StatusCache(coordinator)
    context = RequestContext(
        coordinator, status_cache, Gate(coordinator.clock), LeaseQueue(coordinator.log_writer, coordinator.clock),
        LeasePollReplays(), Pages(coordinator.log_writer.store),
        LongPollLimits(),
        PrometheusCollector(coordinator, status_cache, meter, status_cache.alarms),
    )  # fmt: skip
    routes = [_route(call, _bound(call, handler, context), meter) for call, handler in CALLS]
    app = server.application(routes, **options)
    app.state.meter = meter
    return app


def _route(call: Call, endpoint: Callable[[Request], Awaitable[Response]], meter: Meter) -> Route:
    metered = Middleware(Metered, meter=meter, call=f"{call.method} {call.path}")
    return Route(call.path, endpoint, methods=[call.method], middleware=[metered])


def _bound(call: Call, handler: Handler, context: RequestContext) -> Callable[[Request], Awaitable[Response]]:
    is_open = call.who == "anyone" and handler is not get_batch  # which publishers sign

    async def endpoint(request: Request) -> Response:
        try:
            if is_open:
                await context.gate.anyone(request)
            return await handler(context, request)
        except Refused as refused:
            retry_s = {"replayed": 1.0, "joins_too_often": 10.0}.get(refused.code)  # `created` counts whole seconds
            raise server.RequestRefused(STATUS_OF.get(refused.code, 400), refused.code, str(refused), retry_s) from None

    return endpoint


async def get_run(context: RequestContext, request: Request) -> Response:
    """The run; with ?after=VERSION a long poll, answered when a newer version is published. A caller for whom there is no
    place to wait is answered at once."""
    if "after" not in request.query_params:
        return answer(context.status_cache.info())
    after, until = number(request.query_params["after"], "after"), time.monotonic() + LONG_POLL_S
    with context.waits.place(server.host_of(request)) as has_place:
        while (
            has_place and context.coordinator.state.main.version <= after and (left_s := until - time.monotonic()) > 0
        ):
            await context.coordinator.log_writer.changed(left_s, CheckpointPublished)  # guard: wake-for-versions-only
    return answer(context.status_cache.info())


async def get_batch(context: RequestContext, request: Request) -> Response:
    """Long poll: answered when the batch is formed. A caller for whom there is no place to wait is to ask again soon.

    The trainer always has a place: it renews the manifest, and looks for a new key, when its wait ends without a batch.
    """
    publisher = await _publisher_or_anyone(context, request)
    step, until = number(request.path_params["step"], "step"), time.monotonic() + LONG_POLL_S
    with context.waits.place(server.host_of(request), publisher) as has_place:
        while True:
            batch = batch_of(context.coordinator.state, step)
            left_s = until - time.monotonic()
            if batch is not None:
                return answer(context.status_cache.with_solve_rates(batch))
            if left_s <= 0 or context.coordinator.state.phase == "ended":
                raise Refused(
                    "nothing_yet", f"batch {step} is not formed yet: {context.status_cache.status().wait_in_words}"
                )
            if not has_place:  # guard: few-wait-for-batches
                raise server.RequestRefused(503, "busy", f"batch {step} is not formed yet, and many wait for news", 1.0)
            await context.coordinator.log_writer.changed(left_s, BatchFormed, RunEnded)  # guard: wake-for-batches-only


async def _publisher_or_anyone(context: RequestContext, request: Request) -> str:
    """The key of a request that a publisher of the run signed, also one that was replaced; empty for all others."""
    signed = request.headers.get("signature-input", "")
    if not any(f'keyid="{key}"' in signed for key in context.coordinator.state.publishers.keys):
        await context.gate.anyone(request)
        return ""
    return context.admit(request, cap=0).key


async def get_openapi(context: RequestContext, request: Request) -> Response:
    return answer_bytes(_openapi(), "application/json")


@functools.cache
def _openapi() -> bytes:
    return to_json(document("shoal coordinator", __version__, [call for call, _ in CALLS]))


# --- what anyone may read: it changes nothing, and waits for nothing ---


async def get_nodes(context: RequestContext, request: Request) -> Response:
    return answer(context.status_cache.nodes(request.query_params.get("after", "")))


async def get_node(context: RequestContext, request: Request) -> Response:
    return answer(node_state(context.coordinator.state.members[await _member(context, request)]))


async def get_credits(context: RequestContext, request: Request) -> Response:
    key, after = await _member(context, request), max(-1, number(request.query_params.get("after", "-1"), "after"))
    entries = await context.pages.entries(after)
    return answer(credit_page(entries, context.coordinator.state, key, after))


async def get_statement(context: RequestContext, request: Request) -> Response:
    key, coordinator = await _member(context, request), context.coordinator
    return answer(sign_statement(coordinator.state, key, coordinator.key, coordinator.clock()))


async def _member(context: RequestContext, request: Request) -> str:
    """The key in the path. Raises `Refused` if it is not a member's."""
    key: str = request.path_params["key"]
    if key not in context.coordinator.state.members:
        raise Refused("unknown", f"no node {key[:16]} in this run")
    return key


async def get_status(context: RequestContext, request: Request) -> Response:
    return answer(context.status_cache.status())


async def get_state(context: RequestContext, request: Request) -> Response:
    return answer(context.status_cache.state_hash())


async def get_manifest(context: RequestContext, request: Request) -> Response:
    return answer_bytes(signed_manifest(context.coordinator, request.path_params["version"]), "application/json")


async def get_events(context: RequestContext, request: Request) -> Response:
    return await context.pages.after(number(request.query_params.get("after", "-1"), "after"))


async def get_health(context: RequestContext, request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def get_metrics(context: RequestContext, request: Request) -> Response:
    """For a Prometheus server: its text format, or OpenMetrics to one that accepts that."""
    return answer_bytes(*context.exposed.page(request.headers.get("accept", "")))


async def get_steps(context: RequestContext, request: Request) -> Response:
    """A page of the run's metrics: lines of the steps above ?after=STEP. A browser that has the page gets no body."""
    step = number(request.query_params.get("after", "-1"), "after")
    async with context.coordinator.reading_metrics:
        page = await asyncio.to_thread(context.coordinator.metrics.after, step, MAX_LINE_BYTES)
    etag = f'"{digest(page)[:32]}"'
    if names(request.headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers={"etag": etag})
    response = answer_bytes(page, "application/x-ndjson")
    response.headers["etag"] = etag
    return response


async def get_front(context: RequestContext, request: Request) -> Response:
    """A page for people who open the URL: a browser is led to the run's dashboard, if there is one. Nothing is passed on to
    that: see `Coordinator.dashboard`. With `?text` it stays, for those whom no way leads to the dashboard's port."""
    proxied = "x-forwarded-for" in request.headers  # who sends this without a proxy misleads himself
    page = context.coordinator.dashboard(request.url.scheme, request.url.hostname or "", proxied)
    stays = "text" in request.query_params
    if page and not stays and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(page, 307, {"cache-control": "no-store"})
    info, status = context.status_cache.info(), context.status_cache.status()
    url = str(request.base_url).rstrip("/")
    has_ended = status.waiting_on == "nothing"
    waits = "the run has ended" if has_ended else f"waiting for {status.wait_in_words} ({status.waiting_s:.0f} s)"
    return PlainTextResponse(
        f"shoal run {info.name}: {status.phase}, version {status.version} of {status.steps}, "
        f"{status.accepted} groups accepted\n{waits}\n\n"
        f"join:   shoal join {url}\ncalls:  {url}/openapi.json\n{context.coordinator.about_dashboard(page)}"
    )


async def get_hub(context: RequestContext, request: Request) -> Response:
    """A file of the registry in the run's folder. Nothing is written over HTTP: the host pushes on its own machine."""
    path = request.path_params["path"]
    file = context.coordinator.hub / path
    if not is_registry_path(path) or not file.is_file():  # guard: registry-files-only
        raise Refused("nothing_yet", "this run's registry has no such file")
    return FileResponse(file, media_type="application/octet-stream")


async def get_relays(context: RequestContext, request: Request) -> Response:
    return answer(context.coordinator.relays.told())


# --- nodes ---


async def post_nodes(context: RequestContext, request: Request) -> Response:
    caller, body = await context.caller(request)
    join = server.decode(body, t.Join)
    why = unmeasured(context.coordinator.state.rules, join.implementation) if join.role == "worker" else ""
    if why:  # guard: workers-without-bounds
        raise Refused("no_bounds", why)
    if caller.key not in context.coordinator.state.members:  # guard: newcomers-of-an-address
        context.gate.newcomer(request)
    await context.coordinator.log_writer.submit(JoinRun(caller.key, join, context.coordinator.clock(), caller.created))
    if join.role == "validator":
        context.coordinator.entered[caller.key] = context.coordinator.clock()
    return answer(node_state(context.coordinator.state.members[caller.key]))


async def post_leave(context: RequestContext, request: Request) -> Response:
    caller, _ = await context.caller(request)
    # A leave that comes late is refused if the node came back and has asked for a lease since.
    context.asked.refuse_older(caller)  # guard: leave-that-comes-late
    await context.coordinator.log_writer.submit(LeaveRun(caller.key, context.coordinator.clock(), caller.created))
    return answer(node_state(context.coordinator.state.members[caller.key]))


async def post_leases(context: RequestContext, request: Request) -> Response:
    """Long poll: answered when there is a lease, or when none can come soon."""
    caller, body = await context.caller(request)
    asked, until = server.decode(body, t.LeaseRequest), time.monotonic() + LONG_POLL_S
    with context.asked.poll(caller, context.coordinator.state) as poll, context.line.place(caller.key) as place:
        # guard: gone-gets-no-lease
        while not await request.is_disconnected():  # a lease for nobody would hold up the run until it lapses
            if poll.over:  # guard: one-lease-a-poll
                return answer(context.coordinator.lease_again(poll.lease, asked))
            try:
                given = await context.coordinator.lease(caller.key, asked, place.may_take())
                poll.lease = given.lease.id if given.lease else ""
                return answer(given)
            except Wait as wait:
                left_s = until - time.monotonic()
                if left_s <= 0 or wait.retry_s > LONG_POLL_S:
                    return answer(t.LeaseAnswer(None, min(wait.retry_s, LONG_POLL_S), str(wait)))
                await place.wait(wait.retry_s, left_s)
    return answer(t.LeaseAnswer(None, 0.0, "the caller has gone"))


async def put_submission(context: RequestContext, request: Request) -> Response:
    """Stream an expected body to disk; it is decoded only if its digest is the signed one."""
    caller, lease = context.admit(request, MAX_SUBMISSION_BYTES), request.path_params["id"]
    known = context.coordinator.expect_submission(caller.key, lease, caller.digest, server.body_bytes(request))
    if known is not None:
        return answer(known)
    state, now = context.coordinator.state, max(context.coordinator.state.time, context.coordinator.clock())
    refuse_other_time(state, caller.created, now, 0)  # before the body is read  # guard: time-before-body
    with context.coordinator.kept.upload(lease) as upload:
        await context.gate.pour(request, caller, upload.write)
        return answer(
            await context.coordinator.take_submission(caller.key, lease, upload, caller.digest, caller.created)
        )


async def post_turns(context: RequestContext, request: Request) -> Response:
    """One turn of a leased block, which the host's stage answers."""
    caller, size = context.admit(request, MAX_SUBMISSION_BYTES), server.body_bytes(request)
    lease = context.coordinator.expect_turn(caller.key, request.path_params["id"], size)
    turn = from_msgpack(await context.gate.body(request, caller), t.EnvTurn)
    with context.coordinator.stage.place(
        caller.key
    ):  # not while a body trickles in: slow ones would hold the places of all
        return answer_bytes(to_msgpack(await context.coordinator.take_turn(lease, turn)), "application/msgpack")


async def get_parents(context: RequestContext, request: Request) -> Response:
    """What a lease of continuations continues."""
    caller, _ = await context.caller(request)
    parents = await context.coordinator.parents(caller.key, request.path_params["id"])
    return answer_bytes(to_msgpack(parents), "application/msgpack")


async def get_checks(context: RequestContext, request: Request) -> Response:
    """Long poll: answered when there is a submission to judge, or when the run is over."""
    caller, _ = await context.caller(request)
    until = time.monotonic() + LONG_POLL_S
    while True:
        check = next_check(context.coordinator, caller.key)
        left_s = until - time.monotonic()
        over = context.coordinator.state.phase == "ended" and not context.status_cache.status().pending
        if check is not None or over or left_s <= 0:
            return answer(t.CheckAnswer(check, "" if check else context.status_cache.status().waiting_for))
        await context.coordinator.log_writer.changed(
            min(left_s, context.coordinator.state.law.turn_s), *TO_JUDGE
        )  # a turn begins without an event


async def put_verdict(context: RequestContext, request: Request) -> Response:
    caller = context.admit(request, MAX_JSON_BYTES)
    admit_validator(context.coordinator, caller.key)  # guard: verdicts-from-validators
    body = await context.gate.body(request, caller)
    verdict = server.decode(body, t.Verdict)
    if verdict.submission != request.path_params["id"]:
        raise Refused("malformed", "the verdict is for another submission than the path names")
    await take_verdict(context.coordinator, caller.key, verdict)
    return answer(t.WriteAck(context.coordinator.state.seq))


async def post_checkpoints(context: RequestContext, request: Request) -> Response:
    caller = context.admit(request, MAX_MANIFEST_BYTES)
    admit_trainer(context.coordinator, caller.key)
    await take_checkpoint(context.coordinator, caller.key, await context.gate.body(request, caller), caller.created)
    return answer(t.WriteAck(context.coordinator.state.seq))


async def get_blob(context: RequestContext, request: Request) -> Response:
    """A blob. Private ones need a signed request."""
    name = request.path_params["hash"]
    key = context.admit(request).key if "signature" in request.headers else ""
    if not key:
        await context.gate.anyone(request)
    if not context.coordinator.kept.may_read(name, key):
        raise Refused("nothing_yet", f"blob {name[:16]} is not here, or is private until its slot is final")
    return context.coordinator.blobs.serve(name, public=not key)  # guard: private-answers-are-not-cached


async def post_relays(context: RequestContext, request: Request) -> Response:
    caller, body = await context.caller(request)  # not always a member: it serves, and takes no part
    return answer(
        context.coordinator.relays.offer(caller.key, server.decode(body, t.RelayOffer), *server.came_from(request))
    )


async def put_blob(context: RequestContext, request: Request) -> Response:
    caller = context.admit(request, MAX_CHUNK_BYTES)
    admit_trainer(context.coordinator, caller.key)  # guard: chunks-from-the-trainer
    refuse_replayed(caller.created, context.coordinator.kept.published_at, changes=False)  # guard: old-chunk
    body = await context.gate.body(request, caller)
    put_chunk(context.coordinator, request.path_params["hash"], body, caller.digest)
    return answer(t.WriteAck(context.coordinator.state.seq))


def _demand_admissible(keys: Sequence[str], state: State) -> None:
    """Refuse to admit nodes that could not judge with it, because their host would believe that they can."""
    for member in (state.members[key] for key in keys if key in state.members):
        whose = f"{member.name} ({member.key[:12]})"
        if member.role != "validator":
            raise Refused("conflict", f"{whose} is a {member.role}, which needs no admission and cannot judge: only keys "
                          "that `shoal validate` prints are admitted")  # fmt: skip
        if member.standing in ("kicked", "suspended"):
            raise Refused("conflict", f"{whose} was {member.standing}, and that is for good: admit another key")


async def post_admin(context: RequestContext, request: Request) -> Response:
    caller, body = await context.caller(request)
    if caller.key != context.coordinator.state.run_key:
        raise Refused(
            "not_admitted", "only the host's run key may do this: use the run's folder, `shoal admin ... RUN_DIR`"
        )
    asked = server.decode(body, t.AdminRequest)
    action, now = request.path_params["action"], context.coordinator.clock()
    if action == "admit":
        _demand_admissible((asked.node, *asked.also), context.coordinator.state)  # guard: admitted-can-judge
    await context.coordinator.log_writer.submit(Admin(action, asked, now, caller.created))
    return answer(context.status_cache.status())


async def post_publisher(context: RequestContext, request: Request) -> Response:
    caller, body = await context.caller(request)
    await rotate(context.coordinator, caller.key, server.decode(body, t.Rotation))
    return answer(t.WriteAck(context.coordinator.state.seq))


CALLS: list[tuple[Call, Handler]] = [
    (
        Call("GET", "/v1/run", "anyone", "The run; ?after=VERSION waits for a newer one.", None, t.RunInfo),
        get_run,
    ),
    (
        Call("GET", "/v1/nodes", "anyone", "Nodes and their credits; ?after=KEY.", None, list[t.NodeState]),
        get_nodes,
    ),
    (Call("GET", "/v1/nodes/{key}", "anyone", "One node.", None, t.NodeState), get_node),
    (Call("GET", "/v1/nodes/{key}/credits", "anyone", "Its pay; ?after=SEQ.", None, CreditPage), get_credits),
    (Call("GET", "/v1/nodes/{key}/statement", "anyone", "Its signed balance.", None, Statement), get_statement),
    (
        Call("GET", "/v1/status", "anyone", "How far the run is, and what it waits for.", None, t.Status),
        get_status,
    ),
    (Call("GET", "/v1/state", "anyone", "What a replay of the log must give.", None, t.StateHash), get_state),
    (
        Call("GET", "/v1/manifests/{version}", "anyone", "A version's manifest.", None, t.SignedManifest),
        get_manifest,
    ),
    (Call("GET", "/v1/batches/{step}", "anyone", "The batch of a step (long poll).", None, t.Batch), get_batch),
    (Call("GET", "/v1/events", "anyone", "The log, one event a line; ?after=SEQ.", None, None), get_events),
    (Call("GET", "/v1/metrics", "anyone", "Metrics, one step a line; ?after=STEP.", None, None), get_steps),
    (Call("POST", "/v1/nodes", "node", "Join with the key that signs.", t.Join, t.NodeState), post_nodes),
    (Call("POST", "/v1/nodes/leave", "node", "Leave, and give back all leases.", None, t.NodeState), post_leave),
    (Call("POST", "/v1/leases", "worker", "A lease (long poll).", t.LeaseRequest, t.LeaseAnswer), post_leases),
    (Call("PUT", "/v1/leases/{id}/submission", "worker", "Fill a lease; msgpack.", None, t.Receipt), put_submission),
    (Call("POST", "/v1/leases/{id}/turns", "worker", "Play a turn; msgpack both ways.", None, None), post_turns),
    (Call("GET", "/v1/leases/{id}/parents", "worker", "What it continues; msgpack.", None, None), get_parents),
    (Call("GET", "/v1/checks", "validator", "A submission to judge (long poll).", None, t.CheckAnswer), get_checks),
    (Call("PUT", "/v1/checks/{id}/verdict", "validator", "The verdict.", t.Verdict, t.WriteAck), put_verdict),
    (Call("POST", "/v1/checkpoints", "trainer", "Publish a version.", t.SignedManifest, t.WriteAck), post_checkpoints),
    (Call("GET", "/v1/blobs/{hash}", "anyone, or by key", "A blob by its SHA-256; Range.", None, None), get_blob),
    (Call("PUT", "/v1/blobs/{hash}", "trainer", "A chunk.", None, t.WriteAck), put_blob),
    (Call("GET", "/v1/relays", "anyone", "Some relays that serve chunks.", None, list[t.RelayEntry]), get_relays),
    (Call("POST", "/v1/relays", "anyone, by key", "Offer a relay.", t.RelayOffer, t.RelayStanding), post_relays),
    (
        Call("GET", "/v1/hub/{path:path}", "anyone", "A file of the run's registry of packages.", None, None),
        get_hub,
    ),
    (
        Call(
            "POST",
            "/v1/admin/{action}",
            "host",
            "pause, resume, drain, kick, admit, quarantine, rate.",
            t.AdminRequest,
            t.Status,
        ),
        post_admin,
    ),
    (Call("POST", "/v1/publisher", "root", "Name another publisher.", t.Rotation, t.WriteAck), post_publisher),
    (Call("GET", "/healthz", "anyone", "Whether the coordinator serves.", None, None), get_health),
    (Call("GET", "/metrics", "anyone", "Prometheus metrics.", None, None), get_metrics),
    (Call("GET", "/openapi.json", "anyone", "These calls.", None, None), get_openapi),
    (Call("GET", "/", "anyone", "A page for people.", None, None), get_front),
]
