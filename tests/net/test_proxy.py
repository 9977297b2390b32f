"""A node behind a forward proxy: it reaches its run through it, and no name leads the proxy into the node's own network."""

import asyncio
import base64
import socket
import ssl
import subprocess
from types import SimpleNamespace

import pytest

from shoal.errors import ConfigError, PeerError
from shoal.net.client import Client
from shoal.net.outbound_proxy import _choice, proxy_for, proxy_of, use_proxy
from shoal.weights.fetch.sources import HttpSource, SourceAddress, sources_of
from tests.net.forward_proxy import forward_proxy
from tests.net.test_sided import INSIDE, OUTSIDE, Names, servers


@pytest.fixture(autouse=True)
def forgotten():
    """No choice outlives its test."""
    yield
    _choice.clear()


@pytest.fixture
def names(monkeypatch):
    return Names(monkeypatch)


def told(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 20))


def test_plain_http_is_forwarded_and_the_side_is_that_of_the_server(names):
    """The proxy itself is inside, and does not make its servers so."""

    async def scenario():
        async with servers(OUTSIDE) as (url, reached):
            use_proxy(f"http://127.0.0.1:{proxy.port}")
            async with Client(url) as client:
                await client.get("/v1/run")
                assert not client.may_be_inside and client.address == OUTSIDE and reached == [OUTSIDE]
                assert proxy.asked == [("GET", url.replace("http://host.example.org", OUTSIDE))]
            source = HttpSource(f"{url}/chunks", SourceAddress(known=OUTSIDE))
            assert await source.small("x", 10) == b"{}"
            assert len(proxy.asked) == 2, "chunks come through it, too"
            await source.close()

    with forward_proxy() as proxy:
        told(scenario)


def test_a_name_leads_no_proxy_inside(names):
    async def scenario():
        async with servers(OUTSIDE, INSIDE) as (url, reached):
            use_proxy(f"http://127.0.0.1:{proxy.port}")
            async with Client(url) as client:
                await client.get("/v1/run")
                names.leads = [INSIDE]
                client._network._failed = True
                with pytest.raises(PeerError, match="inside a network: it is not called there"):
                    await client.get("/v1/run", deadline_s=0.5)
            stranger = HttpSource(f"{url}/chunks")
            with pytest.raises(PeerError, match="an address inside a network"):
                await stranger.small("x", 10)
            await stranger.close()
            assert reached == [OUTSIDE] and {place.split(":")[0] for _, place in proxy.asked} == {OUTSIDE}

    with forward_proxy() as proxy:
        told(scenario)


def test_a_name_that_is_not_known_here_is_no_question_for_a_proxy_over_plain_http():
    async def scenario():
        use_proxy(f"http://127.0.0.1:{proxy.port}")
        async with Client("http://nosuch.invalid:8470") as client:
            with pytest.raises(PeerError, match=r"no proxy is asked for it.*use https://, or an address"):
                await client.get("/v1/run", deadline_s=0.5)
        assert proxy.asked == []

    with forward_proxy() as proxy:
        told(scenario)


@pytest.mark.parametrize("host", ["127.0.0.1", "nosuch.invalid"])
def test_a_server_with_tls_is_connected_to_and_a_name_unknown_here_is_the_proxys(host):
    """What the proxy finds for the name must prove it by TLS before it gets a request: this server cannot."""

    async def scenario():
        heard = []

        async def serve(reader, writer):
            heard.append(await reader.read(3))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        use_proxy(f"http://127.0.0.1:{proxy.port}")
        async with Client(f"https://{host}:{port}") as client:
            with pytest.raises(PeerError):
                await client.get("/v1/run", deadline_s=0.5)
        server.close()
        assert proxy.asked[0] == ("CONNECT", f"{host}:{port}")
        assert set(heard) <= {b"\x16\x03\x01"}, "the beginning of a TLS handshake, and no request"
        assert bool(heard) == (host == "127.0.0.1")

    with forward_proxy() as proxy:
        told(scenario)


def test_a_run_with_tls_is_joined_by_a_name_that_the_proxy_alone_knows(tmp_path, monkeypatch):
    cert, key, host = tmp_path / "cert.pem", tmp_path / "key.pem", "host.invalid"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert),
            "-days", "2", "-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}"]  # fmt: skip
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))
    monkeypatch.setattr("httpx._transports.default.create_ssl_context", lambda **options: trusting)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\nshoal-protocol: 1\r\ncontent-length: 2\r\n\r\n{}"
        writer.write(head)
        await writer.drain()
        writer.close()

    async def scenario():
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://{host}:{server.sockets[0].getsockname()[1]}"
        use_proxy(f"http://127.0.0.1:{proxy.port}")
        async with Client(url) as client:
            assert await client.get("/v1/run") == b"{}"
            assert not client.may_be_inside and client.goes_by_name
            info = SimpleNamespace(origin="")
            (chunks,) = sources_of(info, client)
            assert await chunks.small("x", 10) == b"{}", "its weights come the same way"
            await chunks.close()
        server.close()
        assert {method for method, _ in proxy.asked} == {"CONNECT"}

    with forward_proxy() as proxy:
        proxy.knows[host] = "127.0.0.1"
        told(scenario)


def test_a_proxy_whose_name_is_not_known_is_no_matter_of_waiting():
    async def scenario():
        use_proxy("http://nosuch.invalid:80")
        async with Client("https://10.9.9.9:8470") as client:
            with pytest.raises(PeerError, match=r"the proxy nosuch.invalid:80.* Check the address of the proxy"):
                await client.get("/v1/run")

    told(scenario)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_refuses_is_named_and_not_the_server(scheme):
    async def scenario():
        use_proxy(f"http://127.0.0.1:{proxy.port}")
        async with Client(f"{scheme}://127.0.0.1:8470") as client:
            with pytest.raises(PeerError, match=f"the proxy 127.0.0.1:{proxy.port}"):
                await client.get("/v1/run", deadline_s=0.5)

    with forward_proxy(refuses=True) as proxy:
        told(scenario)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_a_password_says_so_and_gets_it(scheme):
    async def scenario():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        use_proxy(f"http://127.0.0.1:{proxy.port}")
        async with Client(f"{scheme}://127.0.0.1:{port}") as client:
            with pytest.raises(PeerError, match="wants a user and a password"):
                await client.get("/v1/run", deadline_s=0.5)
        use_proxy(f"http://anna:s%20cret@127.0.0.1:{proxy.port}")
        async with Client(f"{scheme}://127.0.0.1:{port}") as client:
            with pytest.raises(PeerError) as caught:
                await client.get("/v1/run", deadline_s=0.5)
        assert "password" not in str(caught.value) and "cret" not in str(caught.value)
        server.close()

    with forward_proxy(user=base64.b64encode(b"anna:s cret").decode()) as proxy:
        told(scenario)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_wrong_password_is_told_apart_from_none(scheme):
    async def scenario():
        use_proxy(f"http://anna:wrong@127.0.0.1:{proxy.port}")
        async with Client(f"{scheme}://127.0.0.1:8470") as client:
            with pytest.raises(PeerError, match="refuses this user and password: check both") as caught:
                await client.get("/v1/run", deadline_s=0.5)
        assert "wrong" not in str(caught.value) and "wants" not in str(caught.value)

    with forward_proxy(user=base64.b64encode(b"anna:s cret").decode()) as proxy:
        told(scenario)


def test_an_environment_that_names_no_proxy_is_no_proxy_to_take(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with pytest.raises(ConfigError, match="none of HTTPS_PROXY, HTTP_PROXY and ALL_PROXY is set"):
        use_proxy("env")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    use_proxy("env")


def test_a_proxy_that_is_not_there_is_named():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        use_proxy(f"http://127.0.0.1:{port}")
        for scheme in ("http", "https"):
            async with Client(f"{scheme}://127.0.0.1:8470") as client:
                with pytest.raises(PeerError, match=f"the proxy 127.0.0.1:{port} does not answer"):
                    await client.get("/v1/run", deadline_s=0.5)
        use_proxy("http://nosuch.invalid:3128")
        async with Client("http://127.0.0.1:8470") as client:
            with pytest.raises(PeerError, match=r"the proxy nosuch\.invalid:3128 does not answer"):
                await client.get("/v1/run", deadline_s=0.5)
        waits = list[str]()
        use_proxy(f"http://127.0.0.1:{port}")
        client = Client("http://127.0.0.1:8470", on_wait=waits.append)
        client._say_silent()
        assert waits[-1].endswith(f"and that the host is up, and that the proxy 127.0.0.1:{port} works")
        for trouble, advice in (("does not answer: refused", "Check the address of the proxy"),
                                ("does not reach h:80 (HTTP 502)", "check the URL")):  # fmt: skip
            assert advice in client._advice(f"the proxy 127.0.0.1:{port} {trouble}"), "the URL may be right"

    told(scenario)


def test_the_environment_names_a_proxy_only_when_it_is_asked(monkeypatch):
    for name, value in (
        ("HTTPS_PROXY", "http://secure:1"),
        ("http_proxy", "plain:2"),
        ("NO_PROXY", "near.example.org"),
    ):
        monkeypatch.setenv(name, value)
    assert proxy_for("https", "host.example.org") is None
    use_proxy("env")
    assert str(proxy_for("https", "host.example.org")) == "http://secure:1/"
    assert str(proxy_for("http", "host.example.org")) == "http://plain:2/"
    assert proxy_for("https", "near.example.org") is None
    monkeypatch.delenv("http_proxy")
    assert proxy_for("http", "host.example.org") is None
    monkeypatch.setenv("ALL_PROXY", "http://every:3")
    assert str(proxy_for("http", "host.example.org")) == "http://every:3/"


@pytest.mark.parametrize("text", ["socks5://host:1080", "https://host:3128", "http://", "http://host:port"])
def test_what_is_no_proxy_is_refused_in_one_line_without_a_password(text):
    with pytest.raises(ConfigError, match="write it as http"):
        proxy_of(text.replace("://", "://anna:secret@") if text.startswith(("socks", "https")) else text)


@pytest.mark.parametrize(
    "text",
    ["user:secret", "http://user:secret", "http://user:secret/x@proxy:3128", "http://user:secret#x@proxy:3128",
     "http://user:secret?x@proxy:3128", "user:secret@proxy:port", "socks5://user:secret/x@proxy:3128",
     "user:x@secret/y@proxy:3128", "secret:12/x@proxy:3128", "secret:12#x@proxy:3128"],
)  # fmt: skip
def test_a_proxys_url_that_cannot_be_read_shows_no_part_of_its_password(text):
    with pytest.raises(ConfigError, match=r"write it as http://\[USER:PASSWORD@\]HOST:PORT") as refusal:
        proxy_of(text)
    assert "secret" not in str(refusal.value) and refusal.value.__cause__ is None


@pytest.mark.parametrize(
    ("entry", "host", "excepted"),
    [("10.0.0.0/8", "10.1.2.3", True), ("10.0.0.0/8", "11.1.2.3", False), ("10.1.2.3:8420", "10.1.2.3", True),
     ("host.example:8420", "host.example", True), ("host.example:8420", "a.host.example", True),
     ("fd00::/8", "fd00::1", True), ("[fd00::1]:80", "fd00::1", True), ("10.0.0.0/8", "10.example", False),
     ("*", "10.1.2.3", True), ("*.example", "host.example", True), ("", "host.example", False)],
)  # fmt: skip
def test_no_proxy_takes_networks_and_ports(entry, host, excepted, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://plain:2")
    monkeypatch.setenv("NO_PROXY", f"other.example, {entry}")
    use_proxy("env")
    assert (proxy_for("http", host) is None) == excepted
