"""A trainer's key has leaked: the root names another, the run loses no step, and the thief publishes nothing."""

import asyncio
import time

import msgspec
import pytest

from shoal.errors import PeerError, StateError
from shoal.net.client import PeerRefused
from shoal.net.key_files import load_or_make_key, save_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest, from_json, to_json
from shoal.protocol.host_signatures import sign_rotation
from shoal.protocol.messages import Publishers, Rotation, RunInfo
from shoal.protocol.signing import Key
from shoal.roles.auditor.verify_log import audit_folder
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.node.evidence_store import take_publishers
from shoal.weights.manifest import sign_manifest, signer_of
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

ROOT, NEW, NEWER, THIEF = (Key(bytes([n]) * 32) for n in range(21, 25))


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.routes.LONG_POLL_S", 0.2)


@pytest.fixture
def testbed(tmp_path):
    keys = tmp_path / "run" / "keys"
    keys.mkdir(parents=True)
    (keys / "root.pub").write_text(ROOT.public)
    return RunTestbed(tmp_path / "run", tiny_run())


def client_of(testbed, key):
    path = testbed.folder.root.parent / f"{key.public[:8]}.key"
    if not path.exists():
        save_key(path, key)
    client = testbed.client(path)
    client.run = testbed.coordinator.state.run
    return client


def rotation_of(testbed, key=NEW, root=ROOT, **changes):
    state = testbed.coordinator.state
    values = (state.run, "main", key.public, state.main.version + 1, len(state.publishers.rotations) + 1)
    rotation = Rotation(*values, int(testbed.clock()), "")
    return sign_rotation(msgspec.structs.replace(rotation, **changes), root)


async def rotate(testbed, key=NEW, root=ROOT, **changes):
    async with client_of(testbed, root) as client:
        await client.post_json("/v1/publisher", rotation_of(testbed, key, root, **changes), t.WriteAck, deadline_s=2.0)


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.02)


def test_a_run_whose_publisher_changes_twice_ends_with_the_weights_of_one_that_kept_its_own(testbed, tmp_path):
    async def rotating():
        for version, key in enumerate((NEW, NEWER)):
            await until(lambda version=version: testbed.coordinator.state.main.version >= version)
            save_key(testbed.folder.keys / f"trainer-{key.public[:8]}.key", key)
            await rotate(testbed, key)

    async def scenario():
        async with asyncio.TaskGroup() as group:
            group.create_task(rotating())
            group.create_task(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("one")))

    asyncio.run(scenario())
    assert testbed.coordinator.state.main.version == 3
    assert testbed.weights() == weights_of_one_file(tiny_run(), tmp_path / "one")
    state = testbed.coordinator.state
    assert [r.key for r in state.publishers.rotations] == [NEW.public, NEWER.public]
    assert testbed.audit().findings == [] and audit_folder(testbed.folder.root).findings == []
    newest = testbed.coordinator.blobs.get(state.main.versions[3].manifest)
    assert signer_of(newest) == NEWER.public


def test_the_thief_of_a_replaced_key_sends_no_chunk_no_version_and_no_renewal(testbed):
    old = load_or_make_key(testbed.folder.keys / "trainer.key")

    async def scenario():
        trainer = asyncio.create_task(testbed.trainer().run())
        await until(lambda: testbed.coordinator.state.main.version == 0)
        trainer.cancel()
        await asyncio.wait([trainer])
        await rotate(testbed)
        again = to_json(sign_manifest(testbed.coordinator.kept.manifests[0], old, now=testbed.clock() + 9))
        async with client_of(testbed, old) as thief:
            for call in (
                thief.send("PUT", f"/v1/blobs/{digest(b'x')}", b"x", t.WriteAck, deadline_s=2.0),
                thief.send("POST", "/v1/checkpoints", again, t.WriteAck, deadline_s=2.0),
            ):
                with pytest.raises(PeerRefused, match="rotation 1 replaced the trainer key"):
                    await call
        async with client_of(testbed, NEW) as publisher:  # the new publisher passes on what the old one signed
            stale = to_json(sign_manifest(testbed.coordinator.kept.manifests[0], old, now=testbed.clock()))
            with pytest.raises(PeerError, match="which may not publish"):
                await publisher.send("POST", "/v1/checkpoints", stale, t.WriteAck, deadline_s=2.0)

    asyncio.run(scenario())
    assert testbed.coordinator.state.main.version == 0 and testbed.audit().findings == []


def test_the_new_publisher_signs_again_what_can_still_be_fetched(testbed):
    async def scenario():
        trainer = asyncio.create_task(testbed.trainer().run())
        await until(lambda: testbed.coordinator.state.main.version == 0)
        before = testbed.coordinator.state.main.versions[0].manifest
        save_key(testbed.folder.keys / "trainer-new.key", NEW)
        await rotate(testbed)
        await until(lambda: testbed.coordinator.state.main.versions[0].manifest != before)
        trainer.cancel()
        await asyncio.wait([trainer])

    asyncio.run(scenario())
    state = testbed.coordinator.state
    assert signer_of(testbed.coordinator.blobs.get(state.main.versions[0].manifest)) == NEW.public
    assert {m.role for m in state.members.values()} == {"trainer"} and len(state.members) == 2
    assert testbed.audit().findings == []


def test_a_trainer_without_the_key_that_the_root_named_says_so(testbed):
    async def scenario():
        trainer = asyncio.create_task(testbed.trainer().run())
        await until(lambda: testbed.coordinator.state.main.version == 0)
        await rotate(testbed)
        with pytest.raises(StateError, match="the root named the publisher"):
            await asyncio.wait_for(trainer, 20.0)

    asyncio.run(scenario())


def test_a_publication_is_sent_again_if_the_step_beside_it_has_taken_the_new_key(testbed):
    trainer, tries = testbed.trainer(), []

    async def work():
        tries.append(trainer.publisher.key.public)
        if len(tries) == 1:
            trainer.publisher.sign_with(NEW)  # what the other task does meanwhile
            raise PeerRefused("POST", 403, "not_admitted", "rotation 1 replaced the trainer key")
        return "published"

    assert asyncio.run(trainer._as_publisher(work)) == "published"
    assert tries[1] == NEW.public and len(tries) == 2


def test_a_node_takes_no_publishers_of_another_run(testbed):
    """The same root may serve two runs: what it named in one is not for the other."""

    async def scenario():
        await publish_first(testbed)
        worker = testbed.worker("worker")
        async with worker.client:
            await worker.join()
            await rotate(testbed)
            told = other(run_info(testbed), run="ab" * 16)
            signed = to_json(sign_manifest(testbed.coordinator.kept.manifests[0], NEW, now=testbed.clock()))

            async def get(path, **more):
                return signed

            async def get_json(path, kind):
                return told

            worker.client.get, worker.client.get_json = get, get_json
            with pytest.raises(PeerError, match="the host serves run"):
                await worker.session.load(0)

    asyncio.run(scenario())


def test_only_the_root_rotates(testbed):
    run_key = load_or_make_key(testbed.folder.keys / "run.key")
    asyncio.run(publish_first(testbed))
    for root in (run_key, load_or_make_key(testbed.folder.keys / "trainer.key"), THIEF):
        with pytest.raises(PeerRefused, match="only the root key"):
            asyncio.run(rotate(testbed, NEW, root))
    with pytest.raises(PeerRefused, match="did not sign"):
        asyncio.run(rotate_with(testbed, rotation_of(testbed, NEW, THIEF)))
    with pytest.raises(PeerRefused, match="is of run"):
        asyncio.run(rotate(testbed, run="ab" * 16))
    assert testbed.coordinator.state.publishers.rotations == ()


async def rotate_with(testbed, rotation):
    async with client_of(testbed, ROOT) as client:
        await client.post_json("/v1/publisher", rotation, t.WriteAck, deadline_s=2.0)


async def publish_first(testbed):
    trainer = asyncio.create_task(testbed.trainer().run())
    await until(lambda: testbed.coordinator.state.main.version == 0)
    trainer.cancel()
    await asyncio.wait([trainer])


# --- what a node pins ---


@pytest.fixture
def info(testbed):
    asyncio.run(publish_first(testbed))
    asyncio.run(rotate(testbed))
    return run_info(testbed)


def run_info(testbed):
    return from_json(to_json(StatusCache(testbed.coordinator).info()), RunInfo)


def other(info, **changes):
    return msgspec.structs.replace(info, **changes)


def by(root, info, key, serial=1):
    rotation = Rotation(info.run, "main", key.public, info.version + 1, serial, int(time.time()), "")
    return sign_rotation(rotation, root)


def test_a_node_takes_what_the_root_named_and_what_it_names_later(info, testbed, tmp_path):
    path, one = tmp_path / "pins.json", info.all_publishers
    assert take_publishers(path, info) == one and one.newest == NEW.public
    two = Publishers(one.first, (*one.rotations, by(ROOT, info, NEWER, 2)))
    assert take_publishers(path, other(info, publishers=two, trainer_key=NEWER.public)) == two
    assert take_publishers(path, other(info, publishers=two, trainer_key=NEWER.public)) == two


def swaps(info):
    one = info.all_publishers
    forged = Publishers(one.first, (*one.rotations, by(THIEF, info, THIEF, 2)))
    return {
        "a publisher that nobody named": (other(info, trainer_key=THIEF.public), "but its root named"),
        "a publisher that the run key named": (
            other(info, publishers=forged, trainer_key=THIEF.public), "publisher that its root key did not",
        ),
        "another first publisher": (other(info, publishers=None, trainer_key=THIEF.public), "without its root"),
        "a rotation taken back": (other(info, publishers=None, trainer_key=one.first), "rollback"),
        "another root": (
            other(info, root_key=THIEF.public, publishers=Publishers(one.first, (by(THIEF, info, THIEF),)),
                  trainer_key=THIEF.public), "another root key",
        ),
        "no root": (other(info, root_key="", publishers=None, trainer_key=one.first), "another root key"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "swap",
    [
        "a publisher that nobody named", "a publisher that the run key named", "another first publisher",
        "a rotation taken back", "another root", "no root",
    ],
)  # fmt: skip
def test_a_coordinator_cannot_swap_the_publisher_without_the_root(info, tmp_path, swap):
    path = tmp_path / "pins.json"
    take_publishers(path, info)
    pinned = path.read_bytes()
    lie, said = swaps(info)[swap]
    with pytest.raises(PeerError, match=said):
        take_publishers(path, lie)
    assert path.read_bytes() == pinned
