"""`--share`: a node serves what it has verified, also while it fetches, and only if its user asked for that."""

import asyncio
import shutil
import time

import httpx
import pytest

from shoal.cli import parser
from shoal.errors import NothingYet
from shoal.net.client import Client
from shoal.net.connections import Limits
from shoal.protocol.identity import Key
from shoal.protocol.types import RelayEntry
from shoal.roles.coordinator.api import application as coordinator
from shoal.roles.offering import application
from shoal.roles.sharing import Share, SharedVersions, sharing
from shoal.weights.fetch import fetch
from shoal.weights.manifest import content_of
from shoal.weights.pieces import sized_chunks
from shoal.weights.relays import RelaySource
from tests.net.wires import serving
from tests.roles.town import Town, tiny_run
from tests.weights.checkpoints import Chunks, make_checkpoint, published


@pytest.fixture
def origin() -> Chunks:
    return Chunks()


def test_a_node_shares_only_if_it_is_told_to():
    assert not parser().parse_args(["join", "http://host"]).share
    args = parser().parse_args(["validate", "http://host", "--share", "--share-port", "9000"])
    assert args.share and args.share_port == 9000


def test_a_chunk_is_shared_once_it_is_verified_and_as_long_as_it_is_here(origin, tmp_path):
    manifest = published(make_checkpoint(tmp_path / "checkpoint"), origin)
    shared, seen = SharedVersions(tmp_path / "cache"), []

    async def get(app, name):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return await http.get(f"/v1/blobs/{name}")

    async def story():
        app = application(shared, Key.generate(), "run", time.time)

        async def look(count: int) -> None:
            """What is served in the middle of the fetch."""
            seen.append({name for name in sized_chunks(manifest) if (await get(app, name)).status_code == 200})

        origin.before = look
        directory = await fetch(manifest, [origin], tmp_path / "cache", shared=shared)
        for name in sized_chunks(manifest):
            assert (await get(app, name)).content == origin.held[name]
        shutil.rmtree(directory)
        assert (await get(app, next(iter(sized_chunks(manifest))))).status_code == 404

    asyncio.run(story())
    assert seen[0] == set() and 0 < len(seen[-1]) < len(sized_chunks(manifest))


def test_a_version_that_is_fetched_again_is_shared_anew_and_never_as_empty_files(origin, tmp_path):
    """Its files have their sizes from the beginning, and zeros in the place of chunks."""
    manifest = published(make_checkpoint(tmp_path / "checkpoint"), origin)
    shared, held = SharedVersions(tmp_path / "cache"), []

    async def look(count: int) -> None:
        held.append({name for name in sized_chunks(manifest) if name in shared._held[content_of(manifest)]})

    async def story():
        shutil.rmtree(await fetch(manifest, [origin], tmp_path / "cache", shared=shared))
        origin.before = look
        await fetch(manifest, [origin], tmp_path / "cache", shared=shared)

    asyncio.run(story())
    assert held[0] == set() and len(held) == len(sized_chunks(manifest))


def test_a_client_fetches_from_a_worker_that_shares(origin, tmp_path):
    manifest = published(make_checkpoint(tmp_path / "checkpoint"), origin)
    shared = SharedVersions(tmp_path / "cache")

    async def story():
        await fetch(manifest, [origin], tmp_path / "cache", shared=shared)
        async with serving(application(shared, Key.generate(), "run", time.time), Limits()) as port:
            entry = RelayEntry(f"http://127.0.0.1:{port}", "127.0.0.1", "key")
            source = RelaySource(entry, manifest, beside="127.0.0.1")
            assert (await fetch(manifest, [source], tmp_path / "other")).is_dir()

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_sharing_node_is_listed_when_the_coordinator_reached_it_and_not_before(tmp_path):
    town, key = Town(tmp_path / "run", tiny_run()), Key.generate()

    async def story():
        working = asyncio.create_task(town.desk.relays.run())
        url = "http://127.0.0.1"
        async with serving(coordinator(town.desk), Limits()) as port:
            client, shared = Client(f"{url}:{port}", key, run=town.desk.state.run), SharedVersions(tmp_path / "weights")
            async with client, sharing(Share(key, 0, "127.0.0.1"), client, shared), asyncio.timeout(10):
                while not town.desk.relays.told():
                    await asyncio.sleep(0.05)
            (entry,) = town.desk.relays.told()
            assert entry.key == key.public
        working.cancel()

    asyncio.run(asyncio.wait_for(story(), 30))
    with pytest.raises(NothingYet):
        SharedVersions(tmp_path).serve("0" * 64)
