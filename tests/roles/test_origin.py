"""The origin: what is public has a folder of its own, another process serves it, and without it the coordinator does."""

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.errors import PeerError
from shoal.net import urls
from shoal.net.blobs import blob_app
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits
from shoal.net.server_address import listen
from shoal.protocol.messages import RunInfo
from shoal.roles.coordinator.routes import application
from shoal.run_folder import RunFolder
from shoal.weights.fetch import scheduler, sources
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.relay_sources import UNREACHED_S, Relays
from shoal.weights.fetch.sources import COORDINATOR, ORIGIN, sources_of
from shoal.weights.fetch.version_directory import VersionFolder
from tests.net.wires import serving
from tests.roles.test_hostile_members import chunks_of, until
from tests.roles.testbed import RunTestbed, tiny_run


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of three steps that has ended."""
    testbed = RunTestbed(tmp_path_factory.mktemp("origin") / "run", tiny_run())
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("honest")))
    return testbed


def shown(folder: RunFolder) -> set[str]:
    return {path.name for path in folder.chunks.glob("??/*")}


def manifests_of(testbed: RunTestbed) -> set[str]:
    return {version.manifest for version in testbed.coordinator.state.main.versions.values()}


def test_only_chunks_and_manifests_are_public_and_nothing_is_stored_twice(ended):
    chunks = {chunk for version in ended.coordinator.kept.manifests for chunk in chunks_of(ended, version)}
    assert shown(ended.folder) == chunks | manifests_of(ended)
    for name in shown(ended.folder):
        assert (ended.folder.chunks / name[:2] / name).samefile(ended.coordinator.blobs.path_of(name))
    assert all(ended.coordinator.kept.may_read(name, "") for name in manifests_of(ended))


def test_a_start_repairs_what_a_kill_left(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    asyncio.run(until(lambda: testbed.coordinator.state.pending, testbed.trainer(), testbed.worker("quick")))
    before, (body, *_) = shown(testbed.folder), testbed.coordinator.state.pending
    assert testbed.coordinator.blobs.has(body) and body not in before, "a body that is not final is not public"
    lost = sorted(before)[0]
    (testbed.folder.chunks / lost[:2] / lost).unlink()
    left = testbed.folder.chunks / body[:2] / body
    left.parent.mkdir(exist_ok=True)
    os.link(testbed.coordinator.blobs.path_of(body), left)
    again = RunTestbed(testbed.folder.root, testbed.config)
    assert shown(again.folder) == before


def test_without_hard_links_the_coordinator_serves_alone(tmp_path, monkeypatch, caplog):
    really = os.link

    def no_links(stored: Path, link: Path) -> None:
        if "chunks" in link.parts:
            raise OSError(95, "Operation not supported")
        really(stored, link)

    monkeypatch.setattr(os, "link", no_links)
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("honest")))
    assert testbed.coordinator.state.phase == "ended" and shown(testbed.folder) == set()
    assert [record.message for record in caplog.records].count(
        "the origin lacks blobs, and the coordinator serves them itself: Operation not supported"
    ) == 1


# --- who serves a fetch ---


@contextlib.asynccontextmanager
async def hosted(testbed: RunTestbed):
    """The coordinator's URL, and the names of the blobs that it was asked for."""
    asked = []
    app = application(testbed.coordinator)

    async def watched(scope, receive, send):
        if scope["type"] == "http" and scope["path"].startswith("/v1/blobs/"):
            asked.append(scope["path"])
        await app(scope, receive, send)

    async with serving(watched, ServerLimits()) as port:
        yield f"http://127.0.0.1:{port}", asked


def say_origin(folder: RunFolder, port: int, pid: int | None = None) -> None:
    folder.origin_address.write_text(json.dumps({"port": port, "pid": os.getpid() if pid is None else pid}))


def closed_port() -> int:
    """A port at which nothing listens."""
    with listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


async def fetched(url: str, testbed: RunTestbed, home: Path) -> tuple[RunInfo, float]:
    """What the host says, and how long a fetch of the last version took."""
    async with Client(url) as client:
        info, began = await client.get_json("/v1/run", RunInfo), time.monotonic()
        directory = await fetch(testbed.coordinator.kept.manifests[3], sources_of(info, client), VersionFolder(home))
        assert directory.is_dir()
        return info, time.monotonic() - began


def test_the_coordinator_sends_no_chunk_while_the_origin_serves(ended, tmp_path):
    async def scenario():
        async with (
            hosted(ended) as (url, asked),
            serving(blob_app(ended.folder.chunks, time.time), ServerLimits()) as port,
        ):
            say_origin(ended.folder, port)
            info, _ = await fetched(url, ended, tmp_path)
            assert info.origin == f":{port}/v1/blobs" and asked == []

    asyncio.run(scenario())


def test_a_client_that_cannot_reach_the_origin_fetches_from_the_coordinator(ended, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "SPARE_AFTER_S", 0.5)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def scenario():
        server = await asyncio.start_server(silent, "127.0.0.1", 0)  # as behind a firewall that drops packets
        async with hosted(ended) as (url, asked), server:
            say_origin(ended.folder, server.sockets[0].getsockname()[1])
            _, took_s = await fetched(url, ended, tmp_path / "silent")
            assert asked and took_s < 5
            say_origin(ended.folder, closed_port())
            _, took_s = await fetched(url, ended, tmp_path / "closed")
            assert took_s < 3

    asyncio.run(scenario())


def test_an_origin_that_was_not_reached_is_not_waited_for_again(ended, tmp_path):
    """Otherwise each version would cost a node behind a firewall some seconds."""
    say_origin(ended.folder, closed_port())

    async def scenario():
        async with hosted(ended) as (url, _), Client(url) as client:
            info, now = await client.get_json("/v1/run", RunInfo), 0.0
            relays = Relays(client, clock=lambda: now)
            first = sources_of(info, client)
            assert relays.usable(first) == first
            await fetch(ended.coordinator.kept.manifests[3], first, VersionFolder(tmp_path))
            relays.learn(first)
            assert [source.rank for source in relays.usable(sources_of(info, client))] == [COORDINATOR]
            now = UNREACHED_S + 1
            assert len(relays.usable(sources_of(info, client))) == 2

    asyncio.run(scenario())
    ended.folder.origin_address.unlink()


def test_a_dead_origin_is_not_named(ended):
    say_origin(ended.folder, 8471, pid=2**22 + 1)
    assert ended.coordinator.origin() == ""
    ended.folder.origin_address.unlink()
    assert ended.coordinator.origin() == ""


def test_behind_a_proxy_only_the_run_file_names_an_origin(ended):
    say_origin(ended.folder, 8471)
    host = ended.config.host
    for named in ("", "https://cdn.example.org/run"):
        ended.coordinator._config = msgspec.structs.replace(
            ended.config, host=msgspec.structs.replace(host, public_url="https://x.example.org", origin_url=named)
        )
        assert ended.coordinator.origin() == named
    ended.coordinator._config = ended.config
    ended.folder.origin_address.unlink()


@pytest.mark.parametrize(
    ("said", "called", "asked"),
    [
        ("", "http://host:8470", None),
        (":8471/v1/blobs", "http://host:8470", "http://host:8471/v1/blobs"),
        (":8471/v1/blobs", "http://[::1]:8470", "http://[::1]:8471/v1/blobs"),
        (":8471/v1/blobs", "https://host", None),
        (":99999/v1/blobs", "http://host:8470", None),
        (":22/v1/blobs", "http://host:8470", None),
        (":22/v1/blobs", "http://127.0.0.1:8470", None),
        (":80/v1/blobs", "http://host:8470", "http://host/v1/blobs"),
        ("http://cdn.example.org:25/run", "http://host:8470", None),
        (":22@evil/x", "http://host:8470", None),
        ("https://cdn.example.org/run", "https://host", "https://cdn.example.org/run"),
        ("https://user:word@cdn.example.org/", "https://host", None),
        ("file:///etc/passwd", "https://host", None),
        ("https://cdn.example.org/?to=", "https://host", None),
    ],
)
def test_what_a_host_may_name_as_origin(ended, said, called, asked):
    info = msgspec.structs.replace(_info(ended), origin=said)
    client = Client(called)
    sources = sources_of(info, client)
    assert [source.rank for source in sources] == ([ORIGIN] if asked else []) + [COORDINATOR]
    assert [source.name for source in sources] == ([asked] if asked else []) + [called]


@pytest.mark.parametrize("inside", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]"])
def test_a_host_outside_cannot_send_its_guests_inside(ended, inside):
    """A guest of http://93.184.216.34 would call a service of its own network."""

    info = msgspec.structs.replace(_info(ended), origin=f"http://{inside}:8000/chunks")

    async def scenario(called: str) -> str:
        origin = sources_of(info, Client(called))[0]
        return await origin._judged_address(inside.strip("[]"), 8000)

    with pytest.raises(PeerError, match="an address inside a network"):
        asyncio.run(scenario("http://93.184.216.34:8470"))
    assert asyncio.run(scenario("http://127.0.0.1:8470")) == inside.strip("[]")


@pytest.mark.parametrize("said", ["http://10.0.0.1:8000/chunks", ":8000/v1/blobs"])
def test_a_name_that_moves_inside_sends_no_guest_there(ended, monkeypatch, said):
    """The host decides where its name leads, so only the address that answered at first counts."""
    asked = []

    async def moved(host, port):
        return [host if host[0].isdigit() else "192.168.1.1"]

    monkeypatch.setattr(urls, "addresses_of", moved)
    monkeypatch.setattr(sources, "addresses_of", moved)
    client = Client("http://host.example.org:8470")
    client._network.inside = False
    info = msgspec.structs.replace(_info(ended), origin=said)

    async def scenario():
        for source in sources_of(info, client):
            source._opened().send = asked.append
            with pytest.raises(PeerError, match="an address inside a network"):
                async for _ in source.parts("0" * 64, 0, 10):
                    pass
            await source.close()

    asyncio.run(scenario())
    assert asked == []


def _info(testbed: RunTestbed) -> RunInfo:
    async def scenario() -> RunInfo:
        async with testbed.client(testbed.folder.keys / "anyone.key") as client:
            return await client.get_json("/v1/run", RunInfo)

    return asyncio.run(scenario())


def test_a_private_blob_is_never_cached_on_the_way(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    asyncio.run(until(lambda: testbed.coordinator.state.pending, testbed.trainer(), testbed.worker("quick")))
    (body, *_) = testbed.coordinator.state.pending
    said = []
    testbed.coordinator.kept.may_read = lambda name, key: (
        bool(key) or name != body
    )  # as for a validator that has joined

    async def scenario():
        transport = httpx.ASGITransport(application(testbed.coordinator))
        key = testbed.folder.keys / "validator-0.key"

        async def note(response: httpx.Response) -> None:
            said.append((response.status_code, response.headers.get("cache-control")))

        async with testbed.client(key) as client:
            client.run = testbed.folder.run_id()
            client._http.event_hooks = {"response": [note]}
            await client.get_blob(body, cap=1 << 20)
        manifest = testbed.coordinator.state.main.versions[0].manifest
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            await note(await http.get(f"/v1/blobs/{manifest}"))

    asyncio.run(scenario())
    assert said == [(200, "private, no-store"), (200, "public, max-age=31536000, immutable")]
