"""What a trainer publishes twice, at once or otherwise than before; and chunks that were damaged and sent again."""

import asyncio
import random
import time

import httpx
import pytest
from msgspec.structs import replace

from shoal.ledger.errors import Refused
from shoal.net.blobs import shelf
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.constants import MANIFEST_LIFETIME_S
from shoal.protocol.encoding import digest, to_json
from shoal.roles.coordinator.versions import put_chunk, take_checkpoint
from shoal.weights.manifest import content_of, sign_manifest
from tests.roles.in_memory_run import Town, tiny_run

ROOT = "a" * 64


@pytest.fixture
def town(tmp_path):
    return Town(tmp_path / "run", tiny_run())


def manifest_of(town: Town, data: bytes, version: int = 0) -> t.Manifest:
    """Version 0 whose weights are in a file of these bytes, which the trainer has left in the run's folder."""
    town.folder.outgoing.mkdir(parents=True, exist_ok=True)
    (town.folder.outgoing / digest(data)).write_bytes(data)
    entry = t.FileEntry("model.safetensors", len(data), digest(data), (digest(data),))
    return t.Manifest(town.desk.state.run, "policy", version, (), "float32", ROOT, (entry,), 8 << 20, 0.0, 0.0)


async def publish(town: Town, manifest: t.Manifest, later_s: float = 0.0) -> None:
    key = load_or_make_key(town.folder.keys / "trainer.key")
    signed = sign_manifest(manifest, key, now=town.clock() + later_s)
    await take_checkpoint(town.desk, key.public, to_json(signed))


def published(town: Town) -> int:
    """How many events say that a version is published."""
    return sum(b'"checkpoint_published"' in data for data, _ in town.desk.book.store.read())


def test_of_two_publications_at_once_the_first_stands(town):
    """As of a trainer that was killed while its request was under way, and of the one started after it."""
    one, other = manifest_of(town, b"weights in one file"), manifest_of(town, b"the same weights, cut otherwise")

    async def story():
        await asyncio.gather(publish(town, one), publish(town, other))

    asyncio.run(story())
    assert town.desk.kept.content(0) == content_of(one) and published(town) == 1


def test_another_content_of_a_known_version_changes_nothing_and_the_trainer_goes_on(town):
    one, other = manifest_of(town, b"weights"), manifest_of(town, b"the same weights, cut otherwise")
    asyncio.run(publish(town, one))
    before = town.desk.state.main.versions[0].manifest
    for later_s in (0.0, 50.0):
        asyncio.run(publish(town, other, later_s))
    assert town.desk.state.main.versions[0].manifest == before and published(town) == 1
    assert town.desk.kept.content(0) == content_of(one)
    with pytest.raises(Refused, match="published once"):
        asyncio.run(publish(town, replace(other, root="b" * 64)))


def test_a_version_whose_weights_are_gone_is_not_published_again_otherwise(town):
    one, other = manifest_of(town, b"weights"), manifest_of(town, b"the same weights, cut otherwise")
    asyncio.run(publish(town, one))
    before = town.desk.state.main.versions[0].manifest
    town.desk.kept._forget_weights([0])
    with pytest.raises(Refused, match="its weights are not kept any more"):
        asyncio.run(publish(town, other))
    assert town.desk.state.main.versions[0].manifest == before and published(town) == 1


def test_a_renewal_is_taken_also_beside_another(tmp_path):
    now = time.time()
    town = Town(tmp_path / "run", tiny_run(), clock=lambda: now)
    one = manifest_of(town, b"weights")
    asyncio.run(publish(town, one))
    now += MANIFEST_LIFETIME_S / 2

    async def story():
        await asyncio.gather(publish(town, one), publish(town, one))

    asyncio.run(story())
    assert published(town) == 2 and town.desk.kept.manifests[0].issued == now


def served_by_the_origin(town: Town, name: str) -> bytes:
    async def story():
        transport = httpx.ASGITransport(shelf(town.folder.chunks, time.time))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return (await http.get(f"/v1/blobs/{name}")).content

    return asyncio.run(story())


def test_a_chunk_that_was_damaged_and_sent_again_is_served_whole_by_the_origin_too(town):
    data = b"weights"
    asyncio.run(publish(town, manifest_of(town, data)))
    stored = town.desk.blobs.path_of(digest(data))
    stored.write_bytes(b"damaged")
    assert served_by_the_origin(town, digest(data)) == b"damaged"
    put_chunk(town.desk, digest(data), data, digest(data))
    assert stored.read_bytes() == served_by_the_origin(town, digest(data)) == data


def test_a_chunk_that_was_lost_and_left_again_is_served_by_the_origin(town):
    data = b"weights"
    manifest = manifest_of(town, data)
    asyncio.run(publish(town, manifest))
    town.desk.blobs.path_of(digest(data)).unlink()
    (town.folder.chunks / digest(data)[:2] / digest(data)).write_bytes(b"damaged")
    manifest_of(town, data)
    asyncio.run(publish(town, manifest))
    assert served_by_the_origin(town, digest(data)) == data


def test_relays_are_not_judged_by_a_damaged_chunk(town, caplog):
    data = b"weights"
    asyncio.run(publish(town, manifest_of(town, data)))
    assert town.desk.kept.public_piece(random.Random(0), 4)[0] == digest(data)
    town.desk.blobs.path_of(digest(data)).write_bytes(b"damaged")
    assert town.desk.kept.public_piece(random.Random(0), 4) is None and "is damaged" in caplog.text
