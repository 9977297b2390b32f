"""Connections of strangers over real sockets on loopback: which are let in, and how long they are held.

127.0.0.2 and others serve as strangers' addresses; all of 127.0.0.0/8 is this machine.
"""

import asyncio
import logging
import os
import resource
import socket

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shoal.net import connection_limits, server
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits, connections_that_fit
from shoal.protocol import encoding
from shoal.protocol.messages import Refusal
from shoal.protocol.signing import Key, RequestLine, SenderState, sign_request
from tests.net.toy_bank import RUN, Balance, Deposit, Time, Toy
from tests.net.wires import request, run, serving, wires

KEY = Key(b"\x01" * 32)
GOOD = encoding.to_json(Deposit(id="a", amount=5))
OPEN = request("GET", "/open")


def signed(time: Time, body: bytes) -> dict[str, str]:
    line = RequestLine("PUT", "/deposits")
    return sign_request(
        KEY, line, encoding.digest(body), created=int(time.now), nonce="n" * 22, sender=SenderState(RUN)
    )


# --- how many ---


def test_the_connection_that_was_idle_longest_makes_room_for_a_newcomer(toy):
    async def scenario():
        async with serving(toy.app, ServerLimits(total=8, trusted=("127.0.0.1",))) as port, wires(port, 8) as flood:
            assert await flood[0].ask(OPEN) == 200  # so the second is idle for longer now
            async with wires(port) as (honest,):
                assert await honest.ask(OPEN) == 200
                assert await flood[1].is_closed(1.0)
                assert await flood[0].ask(OPEN) == 200

    run(scenario())


def test_idle_connections_in_any_number_keep_no_client_from_its_answers(toy):
    """The client's own idle connection is closed too; it notices, and makes another."""

    async def scenario():
        limits = ServerLimits(total=8, trusted=("127.0.0.1",))
        async with serving(toy.app, limits) as port, Client(f"http://127.0.0.1:{port}", on_wait=pytest.fail) as client:
            for _ in range(5):
                async with wires(port, 20):
                    assert await client.get_json("/open", Balance, deadline_s=2.0) == Balance(total=0, digest="")

    run(scenario())


def test_a_newcomer_is_told_to_come_back_and_requests_in_flight_stay(toy):
    """Long polls fill the server: each is answered, and one more is refused with a reason."""
    release = asyncio.Event()

    async def poll(_: Request) -> Response:
        await release.wait()
        return Response(b"done")

    async def scenario():
        app = server.application([Route("/poll", poll)])
        async with serving(app, ServerLimits(total=4, trusted=("127.0.0.1",))) as port, wires(port, 4) as polls:
            for each in polls:
                each.send(request("GET", "/poll"))
            await asyncio.sleep(0.05)
            async with wires(port) as (late,):
                status, body = await late.answer()
                assert status == 503 and b"too_many_connections" in body
            release.set()
            assert [(await each.answer())[0] for each in polls] == [200] * 4

    run(scenario())


def test_one_address_gets_a_share_of_the_connections_and_others_pass(toy):
    async def scenario():
        limits = ServerLimits(per_address=3, trusted=("127.0.0.1",))
        crowd, stranger = "127.0.0.2", "127.0.0.3"
        async with (
            serving(toy.app, limits) as port,
            wires(port, 3, crowd) as flood,
            wires(port, 2, crowd) as more,
            wires(port, 1, stranger) as other,
        ):
            assert await flood[0].is_closed(1.0) and await flood[1].is_closed(1.0)
            assert [await each.ask(OPEN) for each in (*more, *other)] == [200] * 3
            assert await flood[2].ask(OPEN) == 200

    run(scenario())


@pytest.mark.parametrize("trusted", ["127.0.0.2", "127.0.0.0/30"])
def test_a_trusted_proxy_may_hold_all_connections(toy, trusted):
    async def scenario():
        limits = ServerLimits(per_address=3, trusted=(trusted,))
        async with serving(toy.app, limits) as port, wires(port, 9, "127.0.0.2") as many:
            assert [await each.ask(OPEN) for each in many] == [200] * 9

    run(scenario())


def test_the_address_of_a_client_is_taken_from_a_trusted_proxy_alone(time):
    toy = Toy(time, address_rate=(1.0, 1))

    async def scenario():
        async with serving(toy.app, ServerLimits(trusted=("127.0.0.2",))) as port:

            async def statuses(host: str) -> list[int]:
                async with wires(port, 1, host) as (one,):
                    clients = ["10.0.0.1", "10.0.0.2"]
                    return [await one.ask(request("GET", "/open", headers={"x-forwarded-for": c})) for c in clients]

            return await statuses("127.0.0.2"), await statuses("127.0.0.3")

    assert run(scenario()) == ([200, 200], [200, 429])


def test_closed_connections_are_logged_but_not_each_one(toy, caplog):
    async def scenario():
        limits = ServerLimits(total=2, trusted=("127.0.0.1",))
        async with serving(toy.app, limits) as port, wires(port, 10):
            await asyncio.sleep(0.05)

    run(scenario())
    lines = [record.getMessage() for record in caplog.records if "closed_idle" in record.getMessage()]
    assert len(lines) == 1 and "limit=2" in lines[0]


def test_the_limit_of_open_files_is_raised_and_decides_how_many_connections_fit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd") if name.isdecimal()) + 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        assert connections_that_fit(used) == used
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 2 * used + connection_limits.RESERVED_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_fewer_connections_fit_where_the_system_allows_fewer_files(monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    assert connections_that_fit(4096) == (1024 - connection_limits.RESERVED_FILES) // 2
    assert "wanted=4096" in caplog.text


# --- headers ---


@pytest.mark.parametrize(
    "header",
    [b"GET /open HTTP/1.1\r\nx: ", b"GET /", b"GET /open HTTP/1.1\r\n", b"\r\n"],
    ids=["value", "path", "fields", "nothing"],
)
def test_a_header_without_end_is_cut_off_at_its_size(toy, header):
    endless = {b"GET /open HTTP/1.1\r\n": b"x: y\r\n", b"\r\n": b"\r\n"}.get(header, b"x")

    async def scenario():
        async with serving(toy.app, ServerLimits(header_bytes=4000)) as port, wires(port) as (one,):
            one.send(header)
            for _ in range(20):
                one.send(endless * (1000 // len(endless)))
            return await one.answer()

    status, body = run(scenario())
    assert status == 431 and b"MAX_HEADER_BYTES" in body


def test_a_complete_header_is_held_to_the_same_size(toy):
    async def scenario():
        async with serving(toy.app, ServerLimits(header_bytes=4000)) as port, wires(port, 2) as (long, short):
            assert await short.ask(request("GET", "/open", headers={"x": "y" * 3000})) == 200
            return await long.ask(request("GET", "/open", headers={"x": "y" * 5000}))

    assert run(scenario()) == 431


def test_a_header_that_comes_too_slowly_is_refused_on_a_new_connection_and_on_one_in_use(toy):
    async def scenario():
        async with serving(toy.app, ServerLimits(header_s=0.2)) as port, wires(port, 3) as (mute, slow, used):
            assert await used.ask(OPEN) == 200
            for each in (slow, used):
                each.send(b"GET /open HTTP/1.1\r\n")
            for _ in range(4):
                await asyncio.sleep(0.04)
                slow.send(b"x: y\r\n")
            return [(await each.answer())[0] for each in (mute, slow, used)]

    assert run(scenario()) == [408, 408, 408]


def test_a_header_that_comes_in_pieces_within_its_time_passes(toy):
    async def scenario():
        async with serving(toy.app, ServerLimits(header_s=0.5)) as port, wires(port) as (slow,):
            for byte in OPEN[:-1]:
                slow.send(bytes([byte]))
                await asyncio.sleep(0.001)
            return await slow.ask(OPEN[-1:])

    assert run(scenario()) == 200


# --- idle time ---


def test_a_connection_without_a_request_is_closed_and_one_that_polls_is_not(toy):
    async def poll(_: Request) -> Response:
        await asyncio.sleep(0.6)
        return Response(b"done")

    async def scenario():
        app = server.application([Route("/poll", poll), Route("/open", toy.open)])
        limits = ServerLimits(idle_s=0.2, header_s=0.2, rest_s=0.2, stall_s=0.2)
        async with serving(app, limits) as port, wires(port, 2) as (idle, polling):
            assert await idle.ask(OPEN) == 200
            polling.send(request("GET", "/poll"))
            assert await idle.is_closed(0.5)
            return (await polling.answer())[0]

    assert run(scenario()) == 200


def test_a_client_that_uses_one_connection_for_long_keeps_it(toy):
    """It stays far longer than any time limit, and sends more bytes of headers in total than one request may have."""

    async def scenario():
        limits = ServerLimits(idle_s=0.4, header_s=0.4, rest_s=0.4, stall_s=0.4, header_bytes=200)
        async with serving(toy.app, limits) as port, wires(port) as (one,):
            return [await one.ask(OPEN) for _ in range(9) if await asyncio.sleep(0.1) is None]

    assert run(scenario()) == [200] * 9


def test_a_client_that_does_not_read_its_answer_is_cut_off_and_a_slow_one_is_not():
    async def large(_: Request) -> Response:
        async def parts():
            for _ in range(400):
                yield b"x" * 65_536

        return StreamingResponse(parts(), headers={"content-length": str(400 * 65_536)})

    async def scenario():
        app = server.application([Route("/large", large)])
        async with serving(app, ServerLimits(stall_s=0.3)) as port, wires(port, 2) as (deaf, slow):
            for each in (deaf, slow):
                each.send(request("GET", "/large"))
            taken = 0
            for _ in range(10):
                await asyncio.sleep(0.08)
                taken += len(await slow.reader.readexactly(1 << 20))
            taken += sum([len(part) async for part in _parts(slow.reader, 400 * 65_536 - taken)])
            got = 0
            try:
                while part := await deaf.reader.read(1 << 20):
                    got += len(part)
            except ConnectionError:
                pass
            return taken, got

    taken, got = run(scenario())
    assert taken == 400 * 65_536 and got < taken


async def _parts(reader, length):
    while length > 0:
        part = await reader.read(min(length, 1 << 20))
        length -= len(part)
        yield part


# --- requests and bodies ---


def test_a_request_before_the_answer_to_the_last_ends_the_connection(toy):
    async def scenario():
        async with serving(toy.app, ServerLimits()) as port, wires(port, 2) as (greedy, other):
            greedy.send(OPEN * 1000)
            assert await greedy.is_closed(1.0)
            return await other.ask(OPEN)

    assert run(scenario()) == 200


def test_garbage_is_answered_and_ends_the_connection_without_a_log_line(toy, caplog):
    async def scenario():
        async with serving(toy.app, ServerLimits()) as port, wires(port) as (one,):
            one.send(b"\x16\x03\x01 not http\r\n\r\n")
            return await one.answer(), await one.is_closed(1.0)

    (status, body), closed = run(scenario())
    assert (status, closed) == (400, True) and b"malformed" in body and caplog.records == []


def test_a_chunked_body_is_refused_for_want_of_a_length(toy, time):
    async def scenario():
        headers = {"content-length": "", "transfer-encoding": "chunked", **signed(time, GOOD)}
        async with serving(toy.app, ServerLimits()) as port, wires(port, 2) as (put, get):
            put.send(request("PUT", "/deposits", headers=headers) + b"5\r\nhello\r\n")
            get.send(request("GET", "/open", headers=headers) + b"5\r\nhello\r\n")
            return [(await each.answer())[0] for each in (put, get)]

    assert run(scenario()) == [411, 411] and toy.deposits == {}


def test_an_unsigned_body_is_refused_before_it_arrives_and_is_not_kept(toy):
    """The sender can read the reason while it still sends, and nothing of the rest of its body is kept."""

    async def scenario():
        async with serving(toy.app, ServerLimits(rest_s=0.2)) as port, wires(port) as (one,):
            one.send(request("PUT", "/deposits", headers={"content-length": "900"}))
            status, body = await one.answer()
            one.send(b"x" * 300)
            return status, body, await one.is_closed(1.0)

    status, body, closed = run(scenario())
    assert status == 401 and b"unsigned" in body and closed


def test_a_connection_is_used_again_after_the_rest_of_a_refused_body(toy, time):
    async def scenario():
        limits = ServerLimits(rest_s=0.2, header_s=0.2, idle_s=0.3)
        async with serving(toy.app, limits) as port, wires(port) as (one,):
            for _ in range(2):
                assert await one.ask(request("PUT", "/deposits", b"x" * 5000)) == 413
                await asyncio.sleep(0.1)
            assert await one.ask(request("PUT", "/deposits", GOOD, signed(time, GOOD))) == 200
            assert await one.ask(request("PUT", "/deposits", b"x" * 900)) == 401
            return await one.is_closed(1.0)

    assert run(scenario()) and toy.deposits == {"a": 5}


def test_the_rest_of_a_refused_body_is_read_up_to_a_limit(toy, monkeypatch):
    monkeypatch.setattr(connection_limits.constants, "MAX_DISCARDED_BYTES", 100_000)

    async def scenario():
        async with serving(toy.app, ServerLimits(rest_s=10.0)) as port, wires(port) as (one,):
            one.send(request("PUT", "/deposits", headers={"content-length": "9000000"}))
            for _ in range(40):
                one.send(b"x" * 10_000)
            return await one.is_closed(1.0)

    assert run(scenario())


def test_a_call_that_waits_when_the_server_stops_is_told_to_ask_again(caplog):
    async def wait(request: Request) -> Response:
        await asyncio.sleep(60.0)
        return Response()

    async def scenario():
        listener = socket.create_server(("127.0.0.1", 0))
        host = connection_limits.http_server(server.application([Route("/wait", wait)]), ServerLimits())
        host.config.timeout_graceful_shutdown = 0.1
        logging.getLogger("uvicorn").addHandler(caplog.handler)  # uvicorn's lines go no higher
        serves = asyncio.create_task(host.serve(sockets=[listener]))
        while not host.started:
            await asyncio.sleep(0.005)
        async with wires(listener.getsockname()[1]) as (node,):
            node.send(request("GET", "/wait"))
            await asyncio.sleep(0.1)
            host.should_exit = True
            head = (await node.reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await node.reader.read()
        await serves
        assert head.startswith("http/1.1 503 ") and "retry-after: 1\r\n" in head and "shoal-protocol" in head
        assert encoding.from_json(body, Refusal).code == "stopping"

    run(scenario())
    logging.getLogger("uvicorn").removeHandler(caplog.handler)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("body", "length", "status"),
    [(GOOD, len(GOOD), 200), (b"y" * len(GOOD), len(GOOD), 400), (GOOD, 900, 408), (GOOD, 5000, 413)],
    ids=["honest", "another body", "less than declared", "too long"],
)
def test_a_body_must_be_what_its_signed_headers_say(time, body, length, status):
    toy = Toy(time, body_window=(0.2, 100))

    async def scenario():
        headers = {**signed(time, GOOD), "content-length": str(length)}
        async with serving(toy.app, ServerLimits()) as port, wires(port) as (one,):
            return await one.ask(request("PUT", "/deposits", body, headers))

    assert run(scenario()) == status and toy.deposits == ({"a": 5} if status == 200 else {})
