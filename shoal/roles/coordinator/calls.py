"""The coordinator's HTTP calls, version 1: a table of the calls, and their handlers.

A handler reads a request within the gate's limits, asks the desk or a file beside it, and encodes the answer. It decides
nothing: the rules refuse, and this file chooses the HTTP status. The handlers of what is only shown are in `public_calls`.
"""

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal import __version__
from shoal.ledger.batches import BatchFormed
from shoal.ledger.commands import Admin, JoinRun, LeaveRun
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.members import NodeJoined, NodeLeft, ValidatorFault, refuse_replayed
from shoal.ledger.run import RulesChanged, RunEnded
from shoal.ledger.state import State
from shoal.ledger.status import node_state
from shoal.ledger.submissions import SubmissionReceived, refuse_other_time
from shoal.ledger.verdicts import Decision, Rechecked, VerdictGiven
from shoal.ledger.versions import CheckpointPublished
from shoal.net import server
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
from shoal.protocol.encoding import from_msgpack, to_json, to_msgpack
from shoal.protocol.messages.responses import CreditPage, Statement
from shoal.protocol.tolerances import unmeasured
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.lease_queue import LeasePollReplays, LeaseQueue
from shoal.roles.coordinator.prometheus import Meter, Metered, PrometheusCollector
from shoal.roles.coordinator.public_calls import (
    get_credits,
    get_events,
    get_front,
    get_health,
    get_hub,
    get_manifest,
    get_metrics,
    get_node,
    get_nodes,
    get_relays,
    get_state,
    get_statement,
    get_status,
    get_steps,
)
from shoal.roles.coordinator.request_context import Handler, LongPollLimits, Pages, RequestContext, number
from shoal.roles.coordinator.status import StatusBoard, batch_of
from shoal.roles.coordinator.verdicts import admit_validator, next_check, take_verdict
from shoal.roles.coordinator.versions import admit_trainer, put_chunk, rotate, take_checkpoint

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


def application(desk: Coordinator, **options: Any) -> Starlette:
    """The coordinator as an ASGI application. `options` are Starlette's."""
    meter, board = Meter(), StatusBoard(desk)
    door = RequestContext(
        desk, board, Gate(desk.clock), LeaseQueue(desk.book, desk.clock), LeasePollReplays(), Pages(desk.book.store),
        LongPollLimits(),
        PrometheusCollector(desk, board, meter, board.alarms),
    )  # fmt: skip
    routes = [_route(call, _bound(handler, door), meter) for call, handler in CALLS]
    app = server.application(routes, **options)
    app.state.meter = meter
    return app


def _route(call: Call, endpoint: Callable[[Request], Awaitable[Response]], meter: Meter) -> Route:
    metered = Middleware(Metered, meter=meter, call=f"{call.method} {call.path}")
    return Route(call.path, endpoint, methods=[call.method], middleware=[metered])


def _bound(handler: Handler, door: RequestContext) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(door, request)
        except Refused as refused:
            retry_s = {"replayed": 1.0, "joins_too_often": 10.0}.get(refused.code)  # `created` counts whole seconds
            raise server.RequestRefused(STATUS_OF.get(refused.code, 400), refused.code, str(refused), retry_s) from None

    return endpoint


async def get_run(door: RequestContext, request: Request) -> Response:
    """The run; with ?after=VERSION a long poll, answered when a newer version is published. A caller for whom there is no
    place to wait is answered at once."""
    await door.gate.anyone(request)
    if "after" not in request.query_params:
        return answer(door.board.info())
    after, until = number(request.query_params["after"], "after"), time.monotonic() + LONG_POLL_S
    with door.waits.place(server.host_of(request)) as has_place:
        while has_place and door.desk.state.main.version <= after and (left_s := until - time.monotonic()) > 0:
            await door.desk.book.changed(left_s, CheckpointPublished)  # guard: wake-for-versions-only
    return answer(door.board.info())


async def get_batch(door: RequestContext, request: Request) -> Response:
    """Long poll: answered when the batch is formed. A caller for whom there is no place to wait is to ask again soon.

    The trainer always has a place: it renews the manifest, and looks for a new key, when its wait ends without a batch.
    """
    publisher = await _publisher_or_anyone(door, request)
    step, until = number(request.path_params["step"], "step"), time.monotonic() + LONG_POLL_S
    with door.waits.place(server.host_of(request), publisher) as has_place:
        while True:
            batch = batch_of(door.desk.state, step)
            left_s = until - time.monotonic()
            if batch is not None:
                return answer(door.board.with_solve_rates(batch))
            if left_s <= 0 or door.desk.state.phase == "ended":
                raise Refused("nothing_yet", f"batch {step} is not formed yet: {door.board.status().waiting_for}")
            if not has_place:  # guard: few-wait-for-batches
                raise server.RequestRefused(503, "busy", f"batch {step} is not formed yet, and many wait for news", 1.0)
            await door.desk.book.changed(left_s, BatchFormed, RunEnded)  # guard: wake-for-batches-only


async def _publisher_or_anyone(door: RequestContext, request: Request) -> str:
    """The key of a request that a publisher of the run signed, also one that was replaced; empty for all others."""
    signed = request.headers.get("signature-input", "")
    if not any(f'keyid="{key}"' in signed for key in door.desk.state.publishers.keys):
        await door.gate.anyone(request)
        return ""
    return door.admit(request, cap=0).key


async def get_openapi(door: RequestContext, request: Request) -> Response:
    await door.gate.anyone(request)
    return answer_bytes(_openapi(), "application/json")


@functools.cache
def _openapi() -> bytes:
    return to_json(document("shoal coordinator", __version__, [call for call, _ in CALLS]))


# --- nodes ---


async def post_nodes(door: RequestContext, request: Request) -> Response:
    caller, body = await door.caller(request)
    join = server.decode(body, t.Join)
    why = unmeasured(door.desk.state.rules, join.implementation) if join.role == "worker" else ""
    if why:  # guard: workers-without-bounds
        raise Refused("no_bounds", why)
    if caller.key not in door.desk.state.members:  # guard: newcomers-of-an-address
        door.gate.newcomer(request)
    await door.desk.book.submit(JoinRun(caller.key, join, door.desk.clock(), caller.created))
    if join.role == "validator":
        door.desk.entered[caller.key] = door.desk.clock()
    return answer(node_state(door.desk.state.members[caller.key]))


async def post_leave(door: RequestContext, request: Request) -> Response:
    caller, _ = await door.caller(request)
    # A leave that comes late is refused if the node came back and has asked for a lease since.
    door.asked.refuse_older(caller)  # guard: leave-that-comes-late
    await door.desk.book.submit(LeaveRun(caller.key, door.desk.clock(), caller.created))
    return answer(node_state(door.desk.state.members[caller.key]))


async def post_leases(door: RequestContext, request: Request) -> Response:
    """Long poll: answered when there is a lease, or when none can come soon."""
    caller, body = await door.caller(request)
    asked, until = server.decode(body, t.LeaseRequest), time.monotonic() + LONG_POLL_S
    with door.asked.poll(caller, door.desk.state) as poll, door.line.place(caller.key) as place:
        # guard: gone-gets-no-lease
        while not await request.is_disconnected():  # a lease for nobody would hold up the run until it lapses
            if poll.over:  # guard: one-lease-a-poll
                return answer(door.desk.lease_again(poll.lease, asked))
            try:
                given = await door.desk.lease(caller.key, asked, place.may_take())
                poll.lease = given.lease.id if given.lease else ""
                return answer(given)
            except Wait as wait:
                left_s = until - time.monotonic()
                if left_s <= 0 or wait.retry_s > LONG_POLL_S:
                    return answer(t.LeaseAnswer(None, min(wait.retry_s, LONG_POLL_S), str(wait)))
                await place.wait(wait.retry_s, left_s)
    return answer(t.LeaseAnswer(None, 0.0, "the caller has gone"))


async def put_submission(door: RequestContext, request: Request) -> Response:
    """Stream an expected body to disk; it is decoded only if its digest is the signed one."""
    caller, lease = door.admit(request, MAX_SUBMISSION_BYTES), request.path_params["id"]
    known = door.desk.expect_submission(caller.key, lease, caller.digest, server.body_bytes(request))
    if known is not None:
        return answer(known)
    state, now = door.desk.state, max(door.desk.state.time, door.desk.clock())
    refuse_other_time(state, caller.created, now, 0)  # before the body is read  # guard: time-before-body
    with door.desk.kept.upload(lease) as upload:
        await door.gate.pour(request, caller, upload.write)
        return answer(await door.desk.take_submission(caller.key, lease, upload, caller.digest, caller.created))


async def post_turns(door: RequestContext, request: Request) -> Response:
    """One turn of a leased block, which the host's stage answers."""
    caller, size = door.admit(request, MAX_SUBMISSION_BYTES), server.body_bytes(request)
    lease = door.desk.expect_turn(caller.key, request.path_params["id"], size)
    turn = from_msgpack(await door.gate.body(request, caller), t.EnvTurn)
    with door.desk.stage.place(caller.key):  # not while a body trickles in: slow ones would hold the places of all
        return answer_bytes(to_msgpack(await door.desk.take_turn(lease, turn)), "application/msgpack")


async def get_parents(door: RequestContext, request: Request) -> Response:
    """What a lease of continuations continues."""
    caller, _ = await door.caller(request)
    parents = await door.desk.parents(caller.key, request.path_params["id"])
    return answer_bytes(to_msgpack(parents), "application/msgpack")


async def get_checks(door: RequestContext, request: Request) -> Response:
    """Long poll: answered when there is a submission to judge, or when the run is over."""
    caller, _ = await door.caller(request)
    until = time.monotonic() + LONG_POLL_S
    while True:
        check = next_check(door.desk, caller.key)
        left_s = until - time.monotonic()
        over = door.desk.state.phase == "ended" and not door.board.status().pending
        if check is not None or over or left_s <= 0:
            return answer(t.CheckAnswer(check, "" if check else door.board.status().waiting_for))
        await door.desk.book.changed(
            min(left_s, door.desk.state.law.turn_s), *TO_JUDGE
        )  # a turn begins without an event


async def put_verdict(door: RequestContext, request: Request) -> Response:
    caller = door.admit(request, MAX_JSON_BYTES)
    admit_validator(door.desk, caller.key)  # guard: verdicts-from-validators
    body = await door.gate.body(request, caller)
    verdict = server.decode(body, t.Verdict)
    if verdict.submission != request.path_params["id"]:
        raise Refused("malformed", "the verdict is for another submission than the path names")
    await take_verdict(door.desk, caller.key, verdict)
    return answer(t.WriteAck(door.desk.state.seq))


async def post_checkpoints(door: RequestContext, request: Request) -> Response:
    caller = door.admit(request, MAX_MANIFEST_BYTES)
    admit_trainer(door.desk, caller.key)
    await take_checkpoint(door.desk, caller.key, await door.gate.body(request, caller), caller.created)
    return answer(t.WriteAck(door.desk.state.seq))


async def get_blob(door: RequestContext, request: Request) -> Response:
    """A blob. Private ones need a signed request."""
    name = request.path_params["hash"]
    key = door.admit(request).key if "signature" in request.headers else ""
    if not key:
        await door.gate.anyone(request)
    if not door.desk.kept.may_read(name, key):
        raise Refused("nothing_yet", f"blob {name[:16]} is not here, or is private until its slot is final")
    return door.desk.blobs.serve(name, public=not key)  # guard: private-answers-are-not-cached


async def post_relays(door: RequestContext, request: Request) -> Response:
    caller, body = await door.caller(request)  # not always a member: it serves, and takes no part
    return answer(door.desk.relays.offer(caller.key, server.decode(body, t.RelayOffer), *server.came_from(request)))


async def put_blob(door: RequestContext, request: Request) -> Response:
    caller = door.admit(request, MAX_CHUNK_BYTES)
    admit_trainer(door.desk, caller.key)  # guard: chunks-from-the-trainer
    refuse_replayed(caller.created, door.desk.kept.published_at, changes=False)  # guard: old-chunk
    body = await door.gate.body(request, caller)
    put_chunk(door.desk, request.path_params["hash"], body, caller.digest)
    return answer(t.WriteAck(door.desk.state.seq))


def _demand_admissible(keys: Sequence[str], state: State) -> None:
    """Refuse to admit nodes that could not judge with it, because their host would believe that they can."""
    for member in (state.members[key] for key in keys if key in state.members):
        whose = f"{member.name} ({member.key[:12]})"
        if member.role != "validator":
            raise Refused("conflict", f"{whose} is a {member.role}, which needs no admission and cannot judge: only keys "
                          "that `shoal validate` prints are admitted")  # fmt: skip
        if member.standing in ("kicked", "suspended"):
            raise Refused("conflict", f"{whose} was {member.standing}, and that is for good: admit another key")


async def post_admin(door: RequestContext, request: Request) -> Response:
    caller, body = await door.caller(request)
    if caller.key != door.desk.state.run_key:
        raise Refused(
            "not_admitted", "only the host's run key may do this: use the run's folder, `shoal admin ... RUN_DIR`"
        )
    asked = server.decode(body, t.AdminRequest)
    action, now = request.path_params["action"], door.desk.clock()
    if action == "admit":
        _demand_admissible((asked.node, *asked.also), door.desk.state)  # guard: admitted-can-judge
    await door.desk.book.submit(
        Admin(action, asked.node, now, caller.created, asked.lr_factor, asked.evidence, asked.also)
    )
    return answer(door.board.status())


async def post_publisher(door: RequestContext, request: Request) -> Response:
    caller, body = await door.caller(request)
    await rotate(door.desk, caller.key, server.decode(body, t.Rotation))
    return answer(t.WriteAck(door.desk.state.seq))


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
