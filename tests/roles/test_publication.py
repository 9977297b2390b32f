"""What a trainer publishes twice, at once or otherwise than before; and chunks that were damaged and sent again."""

import asyncio
import random
import time

import httpx
import pytest
from msgspec.structs import replace

from shoal.ledger.errors import Refused
from shoal.net.blobs import blob_app
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest, to_json
from shoal.roles.coordinator.version_uploads import put_chunk, take_checkpoint
from shoal.weights.manifest import content_of, sign_manifest
from tests.roles.testbed import RunTestbed, tiny_run

ROOT = "a" * 64


@pytest.fixture
def testbed(tmp_path):
    return RunTestbed(tmp_path / "run", tiny_run())


def manifest_of(testbed: RunTestbed, data: bytes, version: int = 0) -> t.Manifest:
    """Version 0 whose weights are in a file of these bytes, which the trainer has left in the run's folder."""
    testbed.folder.outgoing.mkdir(parents=True, exist_ok=True)
    (testbed.folder.outgoing / digest(data)).write_bytes(data)
    entry = t.FileEntry("model.safetensors", len(data), digest(data), (digest(data),))
    return t.Manifest(
        testbed.coordinator.state.run, "policy", version, (), "float32", ROOT, (entry,), 8 << 20, 0.0, 0.0
    )


async def publish(testbed: RunTestbed, manifest: t.Manifest, later_s: float = 0.0) -> None:
    key = load_or_make_key(testbed.folder.keys / "trainer.key")
    signed = sign_manifest(manifest, key, now=testbed.clock() + later_s)
    await take_checkpoint(testbed.coordinator, key.public, to_json(signed))


def published(testbed: RunTestbed) -> int:
    """How many events say that a version is published."""
    return sum(b'"checkpoint_published"' in data for data, _ in testbed.coordinator.log_writer.store.read())


def test_of_two_publications_at_once_the_first_stands(testbed):
    """As of a trainer that was killed while its request was under way, and of the one started after it."""
    one, other = manifest_of(testbed, b"weights in one file"), manifest_of(testbed, b"the same weights, cut otherwise")

    async def scenario():
        await asyncio.gather(publish(testbed, one), publish(testbed, other))

    asyncio.run(scenario())
    assert testbed.coordinator.kept.content(0) == content_of(one) and published(testbed) == 1


def test_another_content_of_a_known_version_changes_nothing_and_the_trainer_goes_on(testbed):
    one, other = manifest_of(testbed, b"weights"), manifest_of(testbed, b"the same weights, cut otherwise")
    asyncio.run(publish(testbed, one))
    before = testbed.coordinator.state.main.versions[0].manifest
    for later_s in (0.0, 50.0):
        asyncio.run(publish(testbed, other, later_s))
    assert testbed.coordinator.state.main.versions[0].manifest == before and published(testbed) == 1
    assert testbed.coordinator.kept.content(0) == content_of(one)
    with pytest.raises(Refused, match="published once"):
        asyncio.run(publish(testbed, replace(other, root="b" * 64)))


def test_a_version_whose_weights_are_gone_is_not_published_again_otherwise(testbed):
    one, other = manifest_of(testbed, b"weights"), manifest_of(testbed, b"the same weights, cut otherwise")
    asyncio.run(publish(testbed, one))
    before = testbed.coordinator.state.main.versions[0].manifest
    testbed.coordinator.kept._forget_weights([0])
    with pytest.raises(Refused, match="its weights are not kept any more"):
        asyncio.run(publish(testbed, other))
    assert testbed.coordinator.state.main.versions[0].manifest == before and published(testbed) == 1


def served_by_the_origin(testbed: RunTestbed, name: str) -> bytes:
    async def scenario():
        transport = httpx.ASGITransport(blob_app(testbed.folder.chunks, time.time))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return (await http.get(f"/v1/blobs/{name}")).content

    return asyncio.run(scenario())


def test_a_chunk_that_was_damaged_and_sent_again_is_served_whole_by_the_origin_too(testbed):
    data = b"weights"
    asyncio.run(publish(testbed, manifest_of(testbed, data)))
    stored = testbed.coordinator.blobs.path_of(digest(data))
    stored.write_bytes(b"damaged")
    assert served_by_the_origin(testbed, digest(data)) == b"damaged"
    put_chunk(testbed.coordinator, digest(data), data, digest(data))
    assert stored.read_bytes() == served_by_the_origin(testbed, digest(data)) == data


def test_a_chunk_that_was_lost_and_left_again_is_served_by_the_origin(testbed):
    data = b"weights"
    manifest = manifest_of(testbed, data)
    asyncio.run(publish(testbed, manifest))
    testbed.coordinator.blobs.path_of(digest(data)).unlink()
    (testbed.folder.chunks / digest(data)[:2] / digest(data)).write_bytes(b"damaged")
    manifest_of(testbed, data)
    asyncio.run(publish(testbed, manifest))
    assert served_by_the_origin(testbed, digest(data)) == data


def test_relays_are_not_judged_by_a_damaged_chunk(testbed, caplog):
    data = b"weights"
    asyncio.run(publish(testbed, manifest_of(testbed, data)))
    assert testbed.coordinator.kept.public_piece(random.Random(0), 4)[0] == digest(data)
    testbed.coordinator.blobs.path_of(digest(data)).write_bytes(b"damaged")
    assert testbed.coordinator.kept.public_piece(random.Random(0), 4) is None and "is damaged" in caplog.text
