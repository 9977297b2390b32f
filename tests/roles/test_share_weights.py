"""`--share`: a node serves what it has verified, also while it fetches, and only if its user asked for that."""

import asyncio
import contextlib
import shutil
import time

import httpx
import pytest

from shoal.cli import main
from shoal.errors import ConfigError
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits
from shoal.protocol.messages import RelayEntry
from shoal.protocol.signing import Key
from shoal.roles.coordinator.routes import application as coordinator
from shoal.roles.node import serve_chunks
from shoal.roles.node.lifecycle import Node
from shoal.roles.node.serve_chunks import application
from shoal.roles.node.share_weights import SHARED_VERSIONS, SharedVersions, WeightSharing, sharing
from shoal.weights.fetch.chunks import sized_chunks
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.relay_sources import RelaySource, held_chunks
from shoal.weights.fetch.version_directory import VersionFolder
from shoal.weights.manifest import content_of
from tests.net.wires import serving
from tests.roles.testbed import RunTestbed, tiny_run
from tests.weights.checkpoints import Chunks, make_checkpoint, published
from tests.weights.test_apply_patches import Line


@pytest.fixture
def origin() -> Chunks:
    return Chunks()


@pytest.mark.parametrize("role", ["join", "validate"])
def test_a_node_shares_only_if_it_is_told_to(role, tmp_path, monkeypatch):
    started = []

    class Opened:
        """What a node is opened with."""

        def __init__(self, options, packages, share, *more):
            started.append(share)
            raise ConfigError("no more")

    monkeypatch.setattr(Node, "open", Opened)
    url = ["--share-url", "http://203.0.113.7:9001"]
    for words in ([], ["--share-port", "9000"], ["--share", "--share-port", "9000"], ["--share"], ["--share", *url]):
        assert main.main([role, "http://host", "--home", str(tmp_path), *words]) == 2
    assert started == [None, None, (9000, ""), (8481, ""), (8481, url[1])]
    assert main.main([role, "http://host", "--home", str(tmp_path), *url]) == 2 and len(started) == 5


def test_a_chunk_is_shared_once_it_is_verified_and_as_long_as_it_is_here(origin, tmp_path):
    manifest = published(make_checkpoint(tmp_path / "checkpoint"), origin)
    shared, seen = SharedVersions(tmp_path / "cache"), []

    async def get(app, name):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return await http.get(f"/v1/blobs/{name}")

    async def scenario():
        app = application(shared, Key.generate(), "run", time.time)

        async def look(count: int) -> None:
            """What is served in the middle of the fetch."""
            seen.append({name for name in sized_chunks(manifest) if (await get(app, name)).status_code == 200})

        origin.before = look
        directory = await fetch(manifest, [origin], VersionFolder(tmp_path / "cache"), shared=shared)
        for name in sized_chunks(manifest):
            assert (await get(app, name)).content == origin.held[name]
        chunks = list(sized_chunks(manifest))
        assert held_chunks(shared.holdings(content_of(manifest)), chunks) == frozenset(chunks)
        shutil.rmtree(directory)
        assert held_chunks(shared.holdings(content_of(manifest)), chunks) == frozenset()
        assert (await get(app, chunks[0])).status_code == 404

    asyncio.run(scenario())
    assert seen[0] == set() and 0 < len(seen[-1]) < len(sized_chunks(manifest))


def test_a_version_that_is_fetched_again_is_shared_anew_and_never_as_empty_files(origin, tmp_path):
    """Its files have their sizes from the beginning, and zeros in the place of chunks."""
    manifest = published(make_checkpoint(tmp_path / "checkpoint"), origin)
    shared, held = SharedVersions(tmp_path / "cache"), []

    async def look(count: int) -> None:
        held.append({name for name in sized_chunks(manifest) if name in shared._held[content_of(manifest)]})

    async def scenario():
        shutil.rmtree(await fetch(manifest, [origin], VersionFolder(tmp_path / "cache"), shared=shared))
        origin.before = look
        await fetch(manifest, [origin], VersionFolder(tmp_path / "cache"), shared=shared)

    asyncio.run(scenario())
    assert held[0] == set() and len(held) == len(sized_chunks(manifest))


def test_a_client_fetches_from_a_worker_that_shares(origin, tmp_path):
    manifest = published(make_checkpoint(tmp_path / "checkpoint"), origin)
    shared = SharedVersions(tmp_path / "cache")

    async def scenario():
        await fetch(manifest, [origin], VersionFolder(tmp_path / "cache"), shared=shared)
        async with serving(application(shared, Key.generate(), "run", time.time), ServerLimits()) as port:
            entry = RelayEntry(f"http://127.0.0.1:{port}", "127.0.0.1", "key")
            source = RelaySource(entry, beside=True)
            assert (await fetch(manifest, [source], VersionFolder(tmp_path / "other"))).is_dir()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def follow(line: Line, shared: SharedVersions, *versions: int) -> None:
    """A sharing node fetches these versions, one after another."""
    shared.is_on = True
    for version in versions:
        scenario = fetch(
            line.manifests[version],
            [line.chunks],
            VersionFolder(shared.folder),
            manifest_of=line.manifest_of,
            shared=shared,
        )
        assert line.has(asyncio.run(scenario), version)


def test_few_patches_are_kept_for_others_and_none_after_a_restart(tmp_path):
    line = Line(tmp_path, count=14, anchor_every=14)
    sizes = [manifest.patches[0].file.size for manifest in line.manifests[1:]]
    shared = SharedVersions(tmp_path / "cache", sum(sizes[-3:]))
    follow(line, shared, 0, 13)
    kept = list((tmp_path / "cache" / ".patches").iterdir())
    assert sorted(path.stat().st_size for path in kept) == sorted(sizes[-3:])
    for version, manifest in enumerate(line.manifests):
        chunks = manifest.patches[0].file.chunks if version else ()
        held = set(held_chunks(shared.holdings(content_of(manifest)), list(sized_chunks(manifest))))
        assert (set(chunks) <= held) if version > 10 else not held
    many = SharedVersions(tmp_path / "many", 1 << 30)
    follow(line, many, 0, 13)
    assert len(list((tmp_path / "many" / ".patches").iterdir())) == SHARED_VERSIONS
    nothing = SharedVersions(tmp_path / "cache")
    assert not (tmp_path / "cache" / ".patches").exists()
    follow(line, nothing, 12, 13)
    assert not list((tmp_path / "cache" / ".patches").iterdir())


def test_a_sharing_node_is_listed_when_the_coordinator_reached_it_and_not_before(tmp_path):
    testbed, key = RunTestbed(tmp_path / "run", tiny_run()), Key.generate()

    async def scenario():
        relays, url = testbed.coordinator.relays, "http://127.0.0.1"
        async with serving(coordinator(testbed.coordinator), ServerLimits()) as port:
            client, shared = (
                Client(f"{url}:{port}", key, run=testbed.coordinator.state.run),
                SharedVersions(tmp_path / "weights"),
            )
            async with client, sharing(WeightSharing(key, 0, "127.0.0.1"), client, shared), asyncio.timeout(10):
                while not relays.challenges.queue:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(2.2)  # it offers itself again; nobody has asked it yet
                assert relays.told() == []
                working = asyncio.create_task(relays.run())
                while not relays.told():
                    await asyncio.sleep(0.05)
            (entry,) = relays.told()
            assert entry.key == key.public
            working.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_serving_and_offering_that_end_are_told_and_start_again(tmp_path, monkeypatch, caplog):
    """A node's work goes on without them, so nobody would notice."""
    monkeypatch.setattr(serve_chunks, "REST_S", 0.05)
    make_server, offers, failures = serve_chunks.http_server, [], [OSError("too many files"), None]

    def http_server(app, limits):
        server = make_server(app, limits)
        if failures:
            failed = failures.pop(0)

            async def serve(sockets):
                if failed is not None:
                    raise failed

            server.serve = serve
        return server

    async def offer(client, public_url, port):
        offers.append(port)
        if len(offers) < 3:
            raise RuntimeError("a fault of ours")
        await asyncio.sleep(60)

    monkeypatch.setattr(serve_chunks, "http_server", http_server)
    monkeypatch.setattr(serve_chunks, "offer", offer)

    async def scenario():
        key, shared = Key.generate(), SharedVersions(tmp_path)
        client = Client("http://127.0.0.1:1", key, run="run")
        async with client, sharing(WeightSharing(key, 0, "127.0.0.1"), client, shared), httpx.AsyncClient() as http:
            while True:
                await asyncio.sleep(0.02)
                if offers and len(offers) == 3 and not failures:
                    with contextlib.suppress(httpx.ConnectError):
                        return (await http.get(f"http://127.0.0.1:{offers[0]}/healthz")).text

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == "ok\n"
    told = [record.message for record in caplog.records if "it starts again" in record.message]
    assert len(set(offers)) == 1 and len(told) == 4
    assert sum("OSError: too many files" in line for line in told) == 1
    assert sum("RuntimeError: a fault of ours" in line for line in told) == 2


def test_a_node_that_leaves_prints_no_traceback_of_its_server(tmp_path, capfd):
    async def scenario():
        client = Client("http://127.0.0.1:1", Key.generate(), run="run")
        share = WeightSharing(client.key, 0, "127.0.0.1")
        async with client, sharing(share, client, SharedVersions(tmp_path)):
            await asyncio.sleep(0.3)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert "Traceback" not in capfd.readouterr().err
