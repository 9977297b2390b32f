"""The root names another publisher: one event, in order, and only what the root signed."""

import msgspec
import pytest

from shoal.ledger.commands import Publish, Rotate
from shoal.ledger.errors import Refused
from shoal.ledger.event_types import make_entry
from shoal.ledger.log.check import verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter, replay
from shoal.ledger.state import state_hash
from shoal.ledger.versions import PublisherChanged
from shoal.protocol.encoding import digest
from shoal.protocol.host_signatures import sign_rotation
from shoal.protocol.messages import Rotation
from shoal.protocol.signing import Key
from tests.ledger.ledger_fixture import TRAINER, World, without_links

ROOT, NEW, NEWER, THIEF = (Key(bytes([n]) * 32) for n in range(11, 15))


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, root=ROOT.public)
    world.publish()
    return world


def signed(world, key=NEW, root=ROOT, **changes):
    state = world.state
    values = dict(
        run=state.run, stream="main", key=key if isinstance(key, str) else key.public, since=state.main.version + 1,
        serial=len(state.publishers.rotations) + 1, created=int(world.now), signature="",
    )  # fmt: skip
    return sign_rotation(Rotation(**(values | changes)), root)


def rotate(world, key=NEW, root=ROOT, **changes):
    return world.do(Rotate(signed(world, key, root, **changes), world.now))


def batch(world):
    """Fill the next batch, so that the next version may be published."""
    world.enter("w" * 64)
    while world.state.main.version not in world.state.main.batches:
        world.serve("w" * 64)


def publish_by(world, key):
    version = world.state.main.version + 1
    return world.do(Publish(key, version, digest(b"root%d" % version), "m", {}, world.now))


def test_after_a_rotation_only_the_new_publisher_publishes(world):
    batch(world)
    (changed,) = rotate(world)
    assert isinstance(changed.body, PublisherChanged) and changed.body.since == 1
    with pytest.raises(Refused, match="is not the trainer key"):
        publish_by(world, TRAINER)
    publish_by(world, NEW.public)
    world.enter(NEW.public, "trainer")
    assert world.state.main.version == 1 and world.state.publishers.keys == (TRAINER, NEW.public)
    assert world.audit().findings == []


def test_a_second_rotation_follows_the_first_and_a_replay_gives_the_same_state(world):
    rotate(world)
    world.now += 5
    rotate(world, NEWER)
    assert world.state.trainer_key == NEWER.public and world.audit().findings == []
    assert state_hash(replay(world.log_writer.store.read())) == state_hash(world.state)
    assert LogWriter(Store(sqlite_url(world.path))).state.publishers == world.state.publishers


def test_the_replaced_publisher_renews_nothing(world):
    rotate(world)
    version = world.state.main.versions[0]
    with pytest.raises(Refused, match="is not the trainer key"):
        world.do(Publish(TRAINER, 0, version.root, "renewed", {}, world.now))
    world.do(Publish(NEW.public, 0, version.root, "renewed", {}, world.now))
    assert world.state.main.versions[0].manifest == "renewed" and world.audit().findings == []


def test_the_same_rotation_again_changes_nothing(world):
    sent = signed(world)
    assert world.do(Rotate(sent, world.now)) and world.do(Rotate(sent, world.now)) == []


ATTACKS = {
    "rollback": (dict(serial=1), "rollback"),
    "skipped serial": (dict(serial=3), "one is missing"),
    "another run's": (dict(run="s" * 32), "is of run ssssssssssss"),
    "back in time": (dict(since=0), "back in time"),
    "too early": (dict(since=2), "too early"),
    "signed long ago": (dict(created=1100 - 61), "limit 60 s"),
    "signed in the future": (dict(created=1100 + 61), "limit 60 s"),
    "the first publisher again": (dict(key=TRAINER), "is no new key"),
    "a validator's key": (dict(key="v" * 64), "is no new key"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_each_wrong_rotation_is_refused_by_its_name(world, attack):
    rotate(world)
    world.now += 100
    changes, said = ATTACKS[attack]
    with pytest.raises(Refused, match=said):
        rotate(world, **({"key": NEWER} | changes))
    assert world.state.trainer_key == NEW.public


@pytest.mark.parametrize("key", [THIEF, NEW])
def test_a_rotation_that_the_root_did_not_sign_is_refused(world, key):
    with pytest.raises(Refused, match="did not sign"):
        rotate(world, NEW, key)
    with pytest.raises(Refused, match="did not sign"):
        world.do(Rotate(msgspec.structs.replace(signed(world), key=THIEF.public), world.now))


def test_the_root_cannot_name_the_key_of_a_worker(world):
    world.enter(NEW.public, "worker")
    with pytest.raises(Refused, match="has another role"):
        rotate(world)


def test_an_ended_run_has_no_rotation(world):
    world.state.phase = "ended"
    with pytest.raises(Refused, match="has ended"):
        rotate(world)


def test_without_a_root_of_its_own_a_runs_key_is_its_root(tmp_path):
    world = World(tmp_path)
    assert world.state.root == world.state.run_key
    with pytest.raises(Refused, match="did not sign"):
        rotate(world)


def forged(world, body):
    """The log with one event more, its hashes right: what a dishonest host could write."""
    rows = list(world.log_writer.store.read())
    entry = make_entry(world.state.seq + 1, world.now, body, world.state.head)
    return [*rows, (entry.data, entry.hash)]


def test_an_auditor_finds_a_publisher_that_the_root_did_not_name(world):
    for root, changes, said in (
        (THIEF, {}, "did not sign"),
        (ROOT, dict(serial=2), "one is missing"),
        (ROOT, dict(since=0), "back in time"),
        (ROOT, dict(created=1), "limit 60 s"),
    ):
        made = signed(world, root=root, **changes)
        body = PublisherChanged(made.key, made.since, made.serial, made.created, made.signature)
        findings = without_links(verify(forged(world, body)).findings)
        assert len(findings) == 1 and "publisher_changed" in findings[0] and said in findings[0]
