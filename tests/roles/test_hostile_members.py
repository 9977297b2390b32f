"""Runs that go on, whatever one member sends or fails to send: stories with the real roles."""

import asyncio

import msgspec
import pytest

from shoal.ledger.entry import GENESIS
from shoal.ledger.facts.run import RunEnded
from shoal.ledger.log.book import Book
from shoal.ledger.log.store import Store, sqlite_url
from shoal.ledger.table import make_entry
from shoal.metrics import read_metrics
from shoal.net.client import PeerRefused
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_EVENTS_BYTES, MAX_FACT_CHARS
from shoal.protocol.wire import WireError
from shoal.roles.validator import Validator
from shoal.roles.worker import Worker
from tests.roles.town import Town, tiny_run

NAMES = ["[" * 60, "]" * 30 + "[" * 30, "{" * MAX_FACT_CHARS, '"\\', "[/x] \N{SNOWMAN}"]


async def joined(town, name, key="stranger.key"):
    """A stranger's client, joined as a worker of that name."""
    client = town.client(town.folder.root / key)
    info = await client.get_json("/v1/run", t.RunInfo)
    client.run, client.head = info.run, info.head
    await client.post_json("/v1/nodes", t.Join("worker", name, 0.0, "x", "float32", "cpu"), t.NodeState)
    return client


@pytest.mark.parametrize("name", NAMES)
def test_a_log_with_any_name_in_it_can_be_read_again(tmp_path, name):
    town = Town(tmp_path / "run", tiny_run())

    async def story():
        async with await joined(town, name):
            pass

    asyncio.run(story())
    assert [node.name for node in town.desk.state.members.values()] == [name]
    again = Book(Store(sqlite_url(town.folder.log)))
    assert again.state.head == town.desk.state.head and town.audit().findings == []


@pytest.mark.parametrize("name", ["x" * (MAX_FACT_CHARS + 1), "a\nb", "\x1b[31m", "\x9b31m", "\u202eevil", "a\n"])
def test_a_name_is_short_and_controls_no_terminal(tmp_path, name):
    town = Town(tmp_path / "run", tiny_run())
    with pytest.raises(PeerRefused, match="not a valid Join"):
        asyncio.run(joined(town, name))
    assert t.fact(name) and len(t.fact(name)) <= MAX_FACT_CHARS
    assert msgspec.convert(t.fact(name), t.Fact)


def test_an_event_that_nobody_could_read_is_not_stored():
    with pytest.raises(WireError, match="not a valid RunEnded"):
        make_entry(0, 0.0, RunEnded("no number"), GENESIS)


def test_a_long_log_is_read_page_by_page(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.api.MAX_EVENTS_BYTES", 2_000)
    monkeypatch.setattr("shoal.roles.trainer.batches.MAX_EVENTS_BYTES", 2_000)
    town = Town(tmp_path / "run", tiny_run())
    for number in range(40):
        asyncio.run(joined(town, f"name {number}"))
    trainer = town.trainer()

    async def story():
        async with trainer.client:
            page = await trainer.client.get("/v1/events?after=-1", cap=MAX_EVENTS_BYTES)
            await trainer.batches.accepted_for(0)
            return page

    page = asyncio.run(story())
    assert 2_000 < len(page) < 6_000
    assert trainer.batches.seen_seq == town.desk.state.seq >= 40


class Vandal(Worker):
    """Sends tokens that no vocabulary has."""

    async def _submit(self, lease, groups, proofs):
        wrong = [msgspec.structs.replace(group, rollouts=tuple(map(_spoilt, group.rollouts))) for group in groups]
        await super()._submit(lease, wrong, proofs)


def _spoilt(rollout):
    return msgspec.structs.replace(rollout, token_ids=b"\xff\xff\xff\x7f" * rollout.tokens_T().size)


class Bribed(Validator):
    """Judges honestly, but sends every refused group as accepted and with signal."""

    async def _give(self, verdict):
        size = self.seat.info.rules.group_size
        groups = [
            group
            if group.outcome == "accept"
            else t.GroupVerdict(group.slot, True, "accept", rewards=(0.0, 1.0) * (size // 2), tokens=size)
            for group in verdict.groups
        ]
        await super()._give(msgspec.structs.replace(verdict, groups=tuple(groups)))


def test_a_run_gets_past_a_batch_that_nobody_can_learn_from(tmp_path):
    town = Town(tmp_path / "run", tiny_run())
    honest = town.validator()
    bribed = Bribed(honest.client, honest.home, honest.make_engine, own_files=True)
    worker = town.worker("vandal")
    vandal = Vandal(worker.client, worker.key, worker.home, worker.make_engine, 0, "vandal", own_files=True)
    asyncio.run(town.live(town.trainer(), bribed, vandal))
    lines = read_metrics(town.folder.metrics)
    assert [line["groups_unlearnable"] for line in lines] == [3, 3, 3]
    assert [line["update_skipped"] for line in lines] == [1, 1, 1]
    assert town.desk.state.phase == "ended" and town.audit().findings == []


# --- what the coordinator keeps ---


def chunks_of(town, version):
    return {c for f in town.desk.kept.manifests[version].files for c in f.chunks}


async def until(holds, *roles):
    """Let roles work until something holds, then stop them as a signal would."""
    tasks = [asyncio.create_task(role.run()) for role in roles]
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.05)
        for role in roles:
            role.stopping.set()
        await asyncio.gather(*tasks)


async def taken(client):
    """Take a lease."""
    return (await client.post_json("/v1/leases", t.LeaseRequest(), t.LeaseAnswer)).lease


def test_a_lease_that_nobody_can_learn_from_keeps_no_weights(tmp_path):
    config = tiny_run(steps=5, rollouts={"max_staleness": 1, "lease_s": 600.0}, storage={"window_steps": 1})
    town = Town(tmp_path / "run", config)

    async def story():
        async with await joined(town, "slow") as slow:
            roles = asyncio.gather(town.trainer().run(), town.validator().run())
            while town.desk.state.main.version < 0:
                await asyncio.sleep(0.05)
            lease = await taken(slow)
            await town.live(town.worker("quick"))
            await roles
            return lease

    lease = asyncio.run(story())
    desk = town.desk
    assert lease.version == 0 and desk.state.main.version == 5 and desk.state.leases[lease.id].status == "stale"
    desk.kept.forget_old()
    assert desk.kept.manifests.keys() == {3, 4, 5}


def test_weights_stay_as_long_as_a_submission_is_open(tmp_path):
    town = Town(tmp_path / "run", tiny_run())

    async def story():
        await until(lambda: town.desk.state.pending, town.trainer(), town.worker("quick"))

    asyncio.run(story())
    town.desk.state.open_leases.clear()
    assert town.desk.kept._versions_at_work() == {0}


def test_refused_bodies_make_room_when_the_quota_is_used_up(tmp_path):
    config = tiny_run(storage={"quota_mb": 1}, verify={"quarantine_s": 0.01}, rollouts={"max_staleness": 1})
    town = Town(tmp_path / "run", config)
    worker = town.worker("vandal")
    vandal = Vandal(worker.client, worker.key, worker.home, worker.make_engine, 0, "vandal", own_files=True)

    async def story():
        state = town.desk.state
        both = lambda: state.refused and any(node.accepted for node in state.members.values())  # noqa: E731
        await until(both, town.trainer(), town.validator(), vandal, town.worker("good"))
        bodies = [name for name in town.desk.kept.bodies if town.desk.state.submissions[name].decided]
        town.desk.blobs.put(bytes(1_000_001 - town.desk.blobs.size_bytes))
        return bodies

    bodies = asyncio.run(story())
    assert town.desk.blobs.size_bytes > 1_000_000 and town.desk.kept.make_room(1_000_000)
    assert town.desk.blobs.size_bytes <= 1_000_000
    accepted = {
        slot.submission for version in town.desk.state.main.versions.values() for slot in version.slots.values()
    }
    assert not town.desk.kept.make_room(0) and accepted
    assert {name for name in bodies if town.desk.blobs.has(name)} == accepted & set(bodies)
