"""What a server lets through, and what it answers to the rest."""

import asyncio
import logging

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from shoal.net import server
from shoal.protocol import encoding
from shoal.protocol.messages import Refusal, Submission
from shoal.protocol.signing import Key, RequestLine, SenderState, content_digest, sign_request
from tests.net.toy_bank import RUN, Balance, Deposit, Time, Toy, take

KEY = Key(b"\x01" * 32)


def call(app: object, method: str, url: str, **options: object) -> httpx.Response:
    """One request as any HTTP client would make it."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://toy") as http:  # type: ignore[arg-type]
            return await http.request(method, url, **options)  # type: ignore[arg-type]

    return asyncio.run(send())


def signed(time: Time, body: bytes, *, created: float | None = None, run: str = RUN, path: str = "/deposits") -> dict:
    made = int(time.now if created is None else created)
    return sign_request(
        KEY, RequestLine("POST", path), encoding.digest(body), created=made, nonce="n" * 22, sender=SenderState(run)
    )


def refusal(response: httpx.Response) -> Refusal:
    return encoding.from_json(response.content, Refusal)


GOOD = encoding.to_json(Deposit(id="a", amount=5))


def test_a_signed_request_passes_and_its_answer_carries_a_digest(toy, time):
    response = call(toy.app, "POST", "/deposits", content=GOOD, headers=signed(time, GOOD))
    assert encoding.from_json(response.content, Balance).total == 5
    assert response.headers["content-digest"] == content_digest(encoding.digest(response.content))
    assert response.headers["shoal-protocol"] == "1"
    assert toy.callers[0].key == KEY.public


@pytest.mark.parametrize(
    ("make", "status", "code"),
    [
        (lambda t: (GOOD, {}), 401, "unsigned"),
        (lambda t: (GOOD, signed(t, GOOD, created=t.now - 3600)), 401, "clock"),
        (lambda t: (GOOD, signed(t, GOOD, path="/elsewhere")), 401, "signature"),
        (lambda t: (b"{}", signed(t, GOOD)), 400, "digest"),
        (lambda t: (GOOD, signed(t, GOOD, run="run-2")), 409, "wrong_run"),
        (lambda t: (GOOD, signed(t, GOOD, run="")), 409, "wrong_run"),
        (lambda t: (b"{", signed(t, b"{")), 400, "malformed"),
        (lambda t: (b"x" * 1001, signed(t, b"x" * 1001)), 413, "too_large"),
    ],
)
def test_each_fault_of_a_request_has_its_refusal(toy, time, make, status, code):
    body, headers = make(time)
    response = call(toy.app, "POST", "/deposits", content=body, headers=headers)
    assert (response.status_code, refusal(response).code) == (status, code)
    assert toy.deposits == {}


def test_a_header_that_occurs_twice_is_refused(toy, time):
    headers = [*signed(time, GOOD).items(), ("shoal-run", "run-2")]
    response = call(toy.app, "POST", "/deposits", content=GOOD, headers=headers)
    assert response.status_code == 400 and "shoal-run" in refusal(response).error


@pytest.mark.parametrize(
    ("what", "status", "code"),
    [
        ("superseded", 410, "superseded"),
        ("nothing", 404, "nothing_yet"),
        ("disk", 507, "storage"),
        ("forbidden", 403, "not_admitted"),
        ("again", 503, "replayed"),
        ("bug", 500, "internal"),
    ],
)
def test_each_of_our_errors_has_its_status(toy, what, status, code, caplog):
    caplog.set_level(logging.CRITICAL)
    response = call(toy.app, "GET", f"/raise/{what}")
    assert (response.status_code, refusal(response).code) == (status, code)
    assert response.headers["shoal-protocol"] == "1"


def test_a_bug_is_logged_with_its_trace_and_not_told_to_the_peer(toy, caplog):
    response = call(toy.app, "GET", "/raise/bug")
    assert b"secret detail" not in response.content
    assert "secret detail" in caplog.text and caplog.text.count("Traceback") == 1


def test_a_stranger_cannot_fill_the_log_with_refusals_and_our_own_faults_are_logged(toy, caplog):
    for what in ("again", "forbidden", "superseded", "nothing"):
        call(toy.app, "GET", f"/raise/{what}")
    assert caplog.records == []
    call(toy.app, "GET", "/raise/disk")
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "the disk is full" in caplog.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("DELETE", "/deposits", 405)])
def test_an_unknown_call_is_a_refusal_too(toy, method, path, status):
    response = call(toy.app, method, path)
    assert (response.status_code, refusal(response).code) == (status, "no_such_call")


# --- bodies ---


class Stream:
    """A body that arrives as the test says; counts how much of it was taken."""

    def __init__(self, parts: list[bytes], *, forever: bool = False, broken: bool = False) -> None:
        self.parts, self.forever, self.broken, self.taken = parts, forever, broken, 0

    async def receive(self) -> dict:
        if self.taken < len(self.parts):
            self.taken += 1
            return {"type": "http.request", "body": self.parts[self.taken - 1], "more_body": True}
        if self.forever:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"} if self.broken else {"type": "http.request", "body": b"", "more_body": False}


def read(stream: Stream, *, length: int = 10, window: tuple[float, int] = (5.0, 100)) -> bytes:
    headers = [(b"content-length", str(length).encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers}, stream.receive)
    body = bytearray()
    asyncio.run(asyncio.wait_for(server.read_body(request, body.extend, window=window), 10.0))
    return bytes(body)


def test_a_body_that_is_longer_than_it_declares_is_cut_off():
    stream = Stream([b"123456"] * 1000)
    with pytest.raises(server.RequestRefused, match="10 bytes") as caught:
        read(stream)
    assert caught.value.status == 400 and stream.taken == 2


@pytest.mark.parametrize("parts", [[], [b"123"]])
def test_a_body_that_stalls_is_refused(parts):
    with pytest.raises(server.RequestRefused, match="BODY_WINDOW_S") as caught:
        read(Stream(parts, forever=True), window=(0.02, 3))
    assert caught.value.status == 408


def test_a_slow_body_that_keeps_coming_is_accepted():
    class Slow(Stream):
        async def receive(self) -> dict:
            await asyncio.sleep(0.01)
            return await super().receive()

    assert len(read(Slow([b"1" * 10] * 30), length=300, window=(0.1, 20))) == 300
    assert 2 * server.constants.BODY_WINDOW_BYTES / server.constants.BODY_WINDOW_S < 20_000


def test_a_body_that_breaks_off_is_refused():
    with pytest.raises(server.RequestRefused) as caught:
        read(Stream([b"1"], broken=True))
    assert (caught.value.status, caught.value.code) == (400, "truncated")


def test_nothing_of_a_body_is_read_before_its_signature_is_verified(time):
    """Nor is a body read that is too large, of unknown length, or for another run."""
    toy, body = Toy(time), b"x" * 500
    of_another_run, old = signed(time, body, run="run-2"), signed(time, body, created=time.now - 3600)
    for headers, status in (({}, 401), (old, 401), (of_another_run, 409), ({"content-length": "2000"}, 413)):
        stream = Stream([body])
        raw = [(k.encode(), v.encode()) for k, v in {"content-length": "500", **headers}.items()]
        scope = {"type": "http", "method": "POST", "path": "/deposits", "query_string": b"", "headers": raw}
        with pytest.raises(server.RequestRefused) as caught:
            asyncio.run(take(toy.gate, Request(scope, stream.receive)))
        assert (caught.value.status, stream.taken) == (status, 0)


def test_a_body_without_a_length_is_refused(toy, time):
    async def parts():
        yield GOOD

    answers = [call(toy.app, "POST", "/deposits", content=parts(), headers=signed(time, GOOD)),
               call(toy.app, "GET", "/open", content=parts())]  # fmt: skip
    assert [(a.status_code, refusal(a).code) for a in answers] == [(411, "length_required")] * 2
    assert call(toy.app, "GET", "/open", content=b"x").status_code == 413


def test_large_bodies_share_a_budget_and_small_ones_need_none(time, monkeypatch):
    monkeypatch.setattr(server.constants, "SMALL_BODY_BYTES", 100)
    gate, large, small = Toy(time, bodies_bytes=1000).gate, b"x" * 600, b"x" * 100

    def begin(body: bytes, stream: Stream):
        headers = {"content-length": str(len(body)), **signed(time, body)}
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/deposits", "query_string": b"", "headers": raw}
        return take(gate, Request(scope, stream.receive))

    async def scenario():
        first = asyncio.create_task(begin(large, Stream([], forever=True)))
        await asyncio.sleep(0)
        with pytest.raises(server.RequestRefused) as caught:
            await begin(large, Stream([large]))
        assert (caught.value.status, caught.value.code) == (503, "busy")
        assert (await begin(small, Stream([small])))[1] == small
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await begin(large, Stream([large])))[1] == large

    asyncio.run(scenario())


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_is_malformed_and_nothing_worse(body):
    time = Time()
    toy = Toy(time)
    response = call(toy.app, "POST", "/deposits", content=body, headers=signed(time, body))
    assert (response.status_code, refusal(response).code) == (400, "malformed")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_msgpack_is_a_wire_error(body):
    with pytest.raises(encoding.WireError):
        encoding.from_msgpack(body, Submission)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 50_000, b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
def test_bombs_are_wire_errors(body):
    with pytest.raises(encoding.WireError):
        encoding.from_json(body, Deposit)
    with pytest.raises(encoding.WireError):
        encoding.from_msgpack(body, Submission)


# --- rates ---


def test_a_flood_from_one_address_is_limited_before_signatures_are_verified(time):
    toy = Toy(time, address_rate=(1.0, 2))
    answers = [call(toy.app, "POST", "/deposits", content=GOOD) for _ in range(3)]
    assert [a.status_code for a in answers] == [401, 401, 429]
    assert answers[2].headers["retry-after"] == "1"
    time.now += 1.0
    assert call(toy.app, "GET", "/open").status_code == 200


def test_a_flood_from_one_key_is_limited_and_another_key_passes(time):
    toy = Toy(time, key_rate=(1.0, 1))
    assert call(toy.app, "POST", "/deposits", content=GOOD, headers=signed(time, GOOD)).status_code == 200
    assert call(toy.app, "POST", "/deposits", content=GOOD, headers=signed(time, GOOD)).status_code == 429
    other = sign_request(
        Key(b"\x02" * 32),
        RequestLine("POST", "/deposits"),
        encoding.digest(GOOD),
        created=int(time.now),
        nonce="n" * 22,
        sender=SenderState(RUN),
    )
    assert call(toy.app, "POST", "/deposits", content=GOOD, headers=other).status_code == 200


def test_an_honest_slow_caller_is_never_made_to_wait():
    buckets = server.Buckets(per_s=1.0, burst=3)
    assert all(buckets.take("a", float(second)) == 0.0 for second in range(1000))


def test_a_clock_that_is_set_back_neither_gives_nor_takes_tokens():
    buckets = server.Buckets(per_s=1.0, burst=2)
    assert [buckets.take("a", now) for now in (100.0, 50.0)] == [0.0, 0.0]
    assert buckets.take("a", 50.0) > 0


def test_the_bucket_that_was_idle_longest_is_forgotten_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(server.constants, "MAX_BUCKETS", 2)
    buckets = server.Buckets(per_s=1.0, burst=1)
    for name in ("a", "b", "c"):
        assert buckets.take(name, 0.0) == 0.0
    assert buckets.take("c", 0.0) > 0
    assert buckets.take("a", 0.0) == 0.0


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("x", "x"),
    ],
)
def test_ipv6_addresses_of_one_network_share_a_rate(host, name):
    request = Request({"type": "http", "headers": [], "client": (host, 1)})
    assert server.address_of(request) == name
