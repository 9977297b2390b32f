"""A client waits out temporary faults and says so, and reports permanent ones to its user."""

import asyncio
import logging
import random
import re
import socket
import ssl

import httpx
import pytest

from shoal.errors import NothingYet, PeerError, Superseded
from shoal.net.client import LONGEST_RETRY_S, Client, PeerRefused, Timing
from shoal.protocol import encoding
from shoal.protocol.signing import Key, content_digest
from tests.net.faults import Fault, FaultyTransport
from tests.net.toy_bank import RUN, Balance, Deposit

KEY = Key(b"\x01" * 32)


class Scripted(httpx.AsyncBaseTransport):
    """Answers or raises what the script says, in order; the last for ever."""

    def __init__(self, *script: object) -> None:
        self.script, self.calls = list(script), 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        step = self.script[min(self.calls, len(self.script) - 1)]
        self.calls += 1
        if isinstance(step, Exception):
            raise step
        return step() if callable(step) else step


def ours(status: int = 200, body: bytes = b'{"total":1,"digest":""}', **headers: str):
    return lambda: httpx.Response(status, headers={"shoal-protocol": "1"} | headers, stream=httpx.ByteStream(body))


def foreign(status: int, body: bytes = b"", **headers: str):
    return lambda: httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))


def scripted(time, *script: object, **options: object) -> Client:
    return Client(
        "http://toy",
        KEY,
        transport=Scripted(*script),
        timing=Timing(time, time.sleep, time, random.Random(0)),
        **options,
    )


def get(client: Client, **options: object) -> Balance:
    return asyncio.run(client.get_json("/open", Balance, **options))


def fails(client: Client, kind: type[PeerError] = PeerError, **options: object) -> PeerError:
    with pytest.raises(kind) as caught:
        get(client, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_signed_call_reaches_the_application_with_run_and_head(toy, connect):
    client = connect(toy.app, KEY)
    client.head = "ab" * 32
    balance = asyncio.run(client.post_json("/deposits?x=%20y", Deposit(id="a", amount=3), Balance))
    assert balance.total == 3
    assert (toy.callers[0].key, toy.callers[0].run, toy.callers[0].head) == (KEY.public, RUN, "ab" * 32)


@pytest.mark.parametrize("fault", list(Fault))
def test_each_fault_of_the_network_leaves_exactly_one_effect(fault, toy, time, connect):
    networks: list[FaultyTransport] = []

    def wrap(transport: httpx.AsyncBaseTransport) -> FaultyTransport:
        networks.append(FaultyTransport(transport, random.Random(7), time.sleep, faults=[fault], rate=0.5))
        return networks[0]

    client = connect(toy.app, KEY, wrap=wrap)

    async def scenario() -> list[int]:
        return [(await client.post_json("/deposits", Deposit(id=str(i), amount=1), Balance)).total for i in range(30)]

    assert asyncio.run(scenario()) == list(range(1, 31))
    assert toy.deposits == {str(i): 1 for i in range(30)}
    assert networks[0].seen[fault] >= 10


@pytest.mark.parametrize("seed", range(2))
def test_all_faults_together_leave_exactly_one_effect(seed, toy, time, connect):
    def wrap(transport: httpx.AsyncBaseTransport) -> FaultyTransport:
        return FaultyTransport(transport, random.Random(seed), time.sleep, rate=0.7)

    client = connect(toy.app, KEY, wrap=wrap)

    async def scenario() -> None:
        for i in range(40):
            await client.post_json("/deposits", Deposit(id=str(i), amount=i), Balance)

    asyncio.run(scenario())
    assert toy.deposits == {str(i): i for i in range(40)}


def test_pauses_grow_to_their_limit_and_are_random(time):
    client = scripted(time, *[httpx.ConnectError("refused")] * 12, ours())
    get(client)
    assert len(time.slept) == 12
    assert 0.05 <= time.slept[0] <= 0.1 and all(pause <= LONGEST_RETRY_S for pause in time.slept)
    assert time.slept[-1] > LONGEST_RETRY_S / 2


def test_a_long_wait_is_reported_with_its_cause_and_length(time):
    said: list[str] = []
    client = scripted(time, *[httpx.ConnectError("refused")] * 20, ours(), on_wait=said.append)
    get(client)
    assert 2 <= len(said) <= 6
    assert re.search(
        r"http://toy \(GET /open\) for [3-6] s: refused.* It has not answered before: check the URL", said[0]
    )


def test_a_server_that_answered_before_is_waited_for_longer_and_its_url_is_not_doubted(time):
    said: list[str] = []
    client = scripted(time, ours(), *[httpx.ConnectError("refused")] * 20, ours(), on_wait=said.append)
    get(client)
    get(client)
    assert re.search(r"for [5-9] s: refused", said[0]) and "check the URL" not in said[0]


def test_the_time_of_a_poll_before_an_outage_is_none_of_it(time):
    def held() -> httpx.Response:
        time.now += 12.0
        raise httpx.RemoteProtocolError("Server disconnected")

    said: list[str] = []
    client = scripted(time, ours(), held, ours(), ours(), on_wait=said.append)
    get(client)
    get(client)
    assert said == []


def test_an_address_that_says_nothing_at_all_is_told_in_seconds(monkeypatch):
    """Something accepts the connection, and never answers: an attempt alone takes a minute."""
    monkeypatch.setattr("shoal.net.client.FIRST_PATIENCE_S", 1.0)

    async def scenario() -> list[str]:
        said: list[str] = []
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(url, on_wait=said.append) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.get("/open"), 1.5)
        server.close()
        return said

    (line,) = asyncio.run(scenario())
    assert "for 1 s: no answer. It has not answered before: check the URL" in line


def test_tries_end_by_the_deadline(time):
    error = fails(scripted(time, httpx.ConnectError("refused")), deadline_s=10)
    assert "GET /open" in str(error) and "refused" in str(error)
    assert sum(time.slept) <= 10


def test_a_client_waits_as_long_as_the_server_says(time):
    client = scripted(
        time, ours(429, b'{"error":"slow down","code":"too_many_requests"}', **{"retry-after": "7"}), ours()
    )
    get(client)
    assert time.slept == [7.0]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 507])
def test_a_temporary_fault_is_tried_again(status, time):
    assert get(scripted(time, ours(status, b'{"error":"e","code":"c"}'), ours())).total == 1
    assert len(time.slept) == 1


@pytest.mark.parametrize("body", [b'{"total":1,"dig', b'{"total":9,"digest":""}'])
def test_a_damaged_answer_is_asked_for_again(time, body):
    digest = content_digest(encoding.digest(b'{"total":1,"digest":""}'))
    assert get(scripted(time, ours(body=body, **{"content-digest": digest}), ours())).total == 1


@pytest.mark.parametrize(
    ("path", "kind", "word"),
    [
        ("/raise/superseded", Superseded, "the lease went to another"),
        ("/raise/nothing", NothingYet, "no batch yet"),
        ("/raise/forbidden", PeerRefused, "ask the host"),
        ("/nowhere", PeerRefused, "openapi"),
    ],
)
def test_a_refusal_becomes_an_error_at_once(toy, connect, time, path, kind, word):
    with pytest.raises(kind, match=word):
        asyncio.run(connect(toy.app, KEY).get(path))
    assert time.slept == []


def test_a_full_disk_at_the_server_is_waited_out_until_the_deadline(toy, connect, caplog):
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(PeerError, match="free some space"):
        asyncio.run(connect(toy.app, KEY).get("/raise/disk", deadline_s=12))
    assert toy.calls == 3


def test_a_clock_off_by_an_hour_is_named(toy, time, connect):
    with pytest.raises(PeerRefused, match=r"3600 s behind.*set the clock") as caught:
        asyncio.run(
            connect(toy.app, KEY, timing=Timing(lambda: time.now - 3600, time.sleep, time)).post_json(
                "/deposits", Deposit(id="a", amount=1), Balance
            )
        )
    assert (caught.value.status, caught.value.code) == (401, "clock")


def test_an_answer_past_its_cap_is_not_read(time):
    endless = (b"x" * 1000 for _ in range(1000))

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self):
            for part in endless:
                yield part

    client = scripted(time, lambda: httpx.Response(200, headers={"shoal-protocol": "1"}, stream=Endless()))
    assert "more than 5000 bytes" in str(fails(client, cap=5000))
    assert sum(1 for _ in endless) >= 990


def test_a_declared_length_past_the_cap_is_refused(time):
    error = fails(scripted(time, ours(**{"content-length": "999999999"})), cap=100)
    assert "more than 100 bytes" in str(error)


def test_a_long_reason_is_cut(time):
    error = fails(scripted(time, ours(403, b'{"error":"' + b"no" * 100_000 + b'","code":"no"}')))
    assert "403 no" in str(error) and len(str(error)) < 1200


def test_a_slow_link_has_time_for_a_large_body(monkeypatch):
    """The answer comes after the body, however long that takes; only each part must get through in the usual time."""
    monkeypatch.setattr("shoal.net.client.SILENCE_TIMEOUT_S", 0.4)
    body, taken = b"x" * (300 << 10), bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head.lower() and b"chunked" not in head
        while len(taken) < len(body):
            taken.extend(await reader.read(64 << 10))
            await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\nshoal-protocol: 1\r\ncontent-length: 23\r\n\r\n" + b'{"total":1,"digest":""}')

    async def scenario() -> Balance:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        listener.bind(("127.0.0.1", 0))
        server = await asyncio.start_server(serve, sock=listener, limit=8 << 10)
        async with server, Client(f"http://127.0.0.1:{listener.getsockname()[1]}", KEY) as client:
            return await client.send("PUT", "/deposits", body, Balance, timeout_s=0.3, deadline_s=15.0)

    assert asyncio.run(scenario()).total == 1 and bytes(taken) == body


def test_a_server_that_never_answers_is_left_after_the_timeout(time):
    class Mute(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    client = Client("http://toy", KEY, transport=Mute(), timing=Timing(time, time.sleep, time))
    assert "no answer within" in str(fails(client, timeout_s=60.0, deadline_s=0.02))


def test_an_answer_of_another_form_names_the_call(time):
    assert "/open gave an answer of the wrong form" in str(fails(scripted(time, ours(body=b'{"other":1}'))))


# --- wrong addresses ---


def test_a_port_that_cannot_be_is_named_with_the_range():
    for port in (0, 65536, 99999):
        with pytest.raises(PeerError, match=f"has port {port}, and ports are from 1 to 65535"):
            Client(f"http://toy:{port}")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "toy:80",
        "ftp://toy",
        "http://",
        "http://toy/path",
        "http://u:p@toy",
        "http://toy?x",
        "http://[",
        "http://toy:99999",
        "::",
    ],
)
def test_a_bad_url_is_refused_with_the_right_form(url):
    with pytest.raises(PeerError, match="http"):
        Client(url)


def test_another_web_server_is_recognised_as_such(time):
    client = scripted(time, foreign(404, b"<h1>nginx</h1>"))
    assert "is not a shoal node" in str(fails(client)) and time.slept == []


NO_CALL = {"error": "Not Found: see GET /openapi.json for the calls", "code": "no_such_call"}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (foreign(501, b"<h1>Unsupported method</h1>"), "another program answers there now, with HTTP 501"),
        (foreign(404), "with HTTP 404"),
        (foreign(200, b"<html>Welcome</html>"), "with HTTP 200"),
        (foreign(302, location="https://login/"), "with HTTP 302"),
        (ours(404, encoding.to_json(NO_CALL)), "such as an origin or a relay"),
        (ours(405, encoding.to_json(NO_CALL)), "with HTTP 405"),
    ],
)
def test_another_program_at_the_url_is_waited_out_once_the_run_has_answered(time, other, says):
    said = []
    client = scripted(time, ours(), *[other] * 9, ours(), on_wait=said.append)
    get(client)
    assert get(client).total == 1 and len(time.slept) == 9
    assert says in said[0] and said[0].startswith("waiting for http://toy (GET /open) for ")
    assert fails(scripted(time, other)) and len(time.slept) == 9, "before it has answered, its URL may be wrong"


def test_a_deadline_that_passes_in_a_long_sleep_is_told_with_the_trouble_before_it(time):
    async def overslept(seconds: float) -> None:
        await time.sleep(seconds + 9.0)

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = Client("http://toy", KEY, transport=httpx.MockTransport(gone), timing=Timing(time, overslept, time))
    assert "refused" in str(fails(client, deadline_s=2.0)) and len(time.slept) == 1


def test_another_run_at_the_url_is_waited_out_by_a_node_that_worked_in_this_one(time):
    said, other = [], ours(409, encoding.to_json({"error": "this is run b", "code": "wrong_run"}))
    client = scripted(time, ours(), *[other] * 9, ours(), on_wait=said.append)
    get(client)
    client.run = "a" * 32
    assert get(client).total == 1 and len(time.slept) == 9
    assert "another run is hosted there now: ask the host" in said[0] and "new address" in said[0]
    late = scripted(time, ours(), *[other] * 9)
    get(late)
    late.run = "a" * 32
    assert "wrong_run" in str(fails(late, deadline_s=1.0)), "a call that is not for ever is answered"


@pytest.mark.parametrize(("status", "code"), [(409, "conflict"), (403, "kicked"), (409, "fork"), (410, "ended")])
def test_a_refusal_by_the_run_itself_ends_a_call_also_once_it_has_answered(time, status, code):
    client = scripted(time, ours(), ours(status, encoding.to_json({"error": "no", "code": code})))
    get(client)
    fails(client)
    assert time.slept == []


def test_a_body_that_a_proxy_of_the_host_refuses_for_its_size_is_not_waited_for(time):
    client = scripted(time, ours(), foreign(413))
    get(client)
    fails(client)
    assert time.slept == []


def test_a_redirect_names_where_to_go(time):
    client = scripted(time, foreign(301, location="https://toy/"))
    assert "https://toy/" in str(fails(client))


def wrapping(cause: Exception) -> httpx.ConnectError:
    error = httpx.ConnectError(str(cause))
    error.__cause__ = cause
    return error


def test_an_unknown_host_is_an_error_on_the_first_call_and_waited_out_later(time):
    unknown = wrapping(socket.gaierror(-2, "Name or service not known"))
    assert "no host named toy" in str(fails(scripted(time, unknown)))
    client = scripted(time, ours(), unknown, ours())
    assert [get(client).total, get(client).total] == [1, 1]


def test_a_bad_certificate_is_always_an_error(time):
    bad = ssl.SSLCertVerificationError(1, "certificate verify failed")
    bad.verify_message = "certificate has expired"
    assert "certificate has expired" in str(fails(scripted(time, wrapping(bad))))


def test_https_to_a_server_without_tls_and_http_to_one_with_tls_are_named(time):
    assert "does not speak TLS" in str(fails(scripted(time, wrapping(ssl.SSLError(1, "wrong version number")))))
    assert "does not speak HTTP" in str(fails(scripted(time, httpx.RemoteProtocolError("illegal status line"))))


def test_a_damaged_blob_is_fetched_again(time):
    blob = b"weights"
    right, wrong = ours(body=blob), ours(body=b"Weights")
    digest = encoding.digest(blob)
    assert asyncio.run(scripted(time, wrong, right).get_blob(digest, cap=100)) == blob
    with pytest.raises(PeerError, match="wrong blob"):
        asyncio.run(scripted(time, wrong).get_blob(digest, cap=100))
