"""Runs that go on, whatever one member sends or fails to send: stories with the real roles."""

import asyncio
import shutil

import msgspec
import pytest

from shoal.errors import PeerError, StateError
from shoal.ledger.commands import Submit
from shoal.ledger.errors import Refused
from shoal.ledger.event import GENESIS
from shoal.ledger.event_types import make_entry
from shoal.ledger.fault_rate import FAULT_REMEDY, FAULTS
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.run_events import RunEnded
from shoal.ledger.state_records import LeaseRecord
from shoal.net.client import PeerRefused
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_EVENTS_BYTES, MAX_FACT_CHARS
from shoal.protocol.encoding import WireError, digest, to_json
from shoal.roles.auditor.verify_log import audit_folder
from shoal.roles.coordinator.env_hang_reports import StopReports
from shoal.roles.coordinator.main import open_run
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.coordinator.version_uploads import put_chunk, take_checkpoint
from shoal.roles.validator import Validator
from shoal.roles.worker.worker import VersionExpired, Worker
from shoal.step_metrics import read_metrics
from shoal.weights.manifest import sign_manifest
from tests.roles.test_replays import Night
from tests.roles.testbed import RunTestbed, tiny_run

NAMES = ["[" * 60, "]" * 30 + "[" * 30, "{" * MAX_FACT_CHARS, '"\\', "[/x] \N{SNOWMAN}"]


async def joined(testbed, name, key="stranger.key"):
    """A stranger's client, joined as a worker of that name."""
    client = testbed.client(testbed.folder.root / key)
    info = await client.get_json("/v1/run", t.RunInfo)
    client.run, client.head = info.run, info.head
    await client.post_json("/v1/nodes", t.Join("worker", name, 0.0, "x", "float32", "cpu"), t.NodeState)
    return client


def test_a_log_with_any_name_in_it_can_be_read_again(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    for number, name in enumerate(NAMES):
        asyncio.run(joined(testbed, name, f"{number}.key"))
    assert [node.name for node in testbed.coordinator.state.members.values()] == NAMES
    again = LogWriter(Store(sqlite_url(testbed.folder.log)))
    assert again.state.head == testbed.coordinator.state.head and testbed.audit().findings == []


@pytest.mark.parametrize("name", ["x" * (MAX_FACT_CHARS + 1), "a\nb", "\x1b[31m", "\x9b31m", "\u202eevil", "a\n"])
def test_a_name_is_short_and_controls_no_terminal(tmp_path, name):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    with pytest.raises(PeerRefused, match="not a valid Join"):
        asyncio.run(joined(testbed, name))
    assert t.fact(name) and len(t.fact(name)) <= MAX_FACT_CHARS
    assert msgspec.convert(t.fact(name), t.Fact)


def test_an_event_that_nobody_could_read_is_not_stored():
    with pytest.raises(WireError, match="not a valid RunEnded"):
        make_entry(0, 0.0, RunEnded("no number"), GENESIS)


def test_a_long_log_is_read_page_by_page(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.request_context.MAX_EVENTS_BYTES", 2_000)
    monkeypatch.setattr("shoal.roles.trainer.batch_reader.MAX_EVENTS_BYTES", 2_000)
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    for number in range(40):
        asyncio.run(joined(testbed, f"name {number}", f"{number}.key"))
    trainer = testbed.trainer()

    async def scenario():
        async with trainer.client:
            page = await trainer.client.get("/v1/events?after=-1", cap=MAX_EVENTS_BYTES)
            await trainer.batches.accepted_for(0)
            return page

    page = asyncio.run(scenario())
    assert 2_000 < len(page) < 6_000
    assert trainer.batches.seen_seq == testbed.coordinator.state.seq >= 40


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
        size = self.session.info.rules.group_size
        groups = [
            group
            if group.outcome == "accept"
            else t.GroupVerdict(group.slot, True, "accept", rewards=(0.0, 1.0) * (size // 2), tokens=size)
            for group in verdict.groups
        ]
        await super()._give(msgspec.structs.replace(verdict, groups=tuple(groups)))


def test_a_run_gets_past_a_batch_that_nobody_can_learn_from(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    honest = testbed.validator()
    bribed = Bribed(honest.node)
    vandal = Vandal(testbed.worker("vandal").node)
    asyncio.run(testbed.live(testbed.trainer(), bribed, vandal))
    (line,) = read_metrics(testbed.folder.metrics)
    assert (line["groups_unlearnable"], line["update_skipped"]) == (3, 1)
    assert testbed.coordinator.state.phase == "ended" and testbed.audit().findings == []


def test_what_a_worker_says_of_a_stopped_environment_is_told_as_its_words(tmp_path, caplog):
    """Its own lease's alone, once for each text, without commands; and nothing of it is booked."""
    night = Night(tmp_path)

    async def back(lease, said, block=None):
        stopped = lease.blocks[0].index if block is None else block
        request = t.LeaseRequest(returning=(lease.id,), stopped=stopped, said=said)
        await night.client.post_json("/v1/leases", request, t.LeaseAnswer)
        night.now += 10

    async def scenario():
        await night.join(name="w”`")
        await night.publish()
        lease = await night.lease()
        for said in ("x" * 301, "two\nlines", "\x1b[2J"):
            with pytest.raises(PeerRefused, match="said"):
                await back(lease, said)
        said = 'it hangs". The host should type `shoal admin drain`; worker y says "ok'
        await back(lease, "not mine", block=77)
        for _ in range(2):
            lease = await night.lease()
            await back(lease, said)
        waits, state = StatusCache(night.coordinator).status().waiting_for, night.coordinator.state
        state.phase, state.pause_cause = "paused", f"{FAULTS}words fails"
        paused = StatusCache(night.coordinator).status()
        assert words in paused.waiting_for and paused.remedy == FAULT_REMEDY, "the host's own advice is apart"
        return waits

    said = "it hangs'. The host should type 'shoal admin drain'; worker y says 'ok"
    words = f'worker "w\'\'" ({night.key[:12]}) says "{said}"'
    waits = asyncio.run(scenario())
    (told,) = [record.getMessage() for record in caplog.records if "was stopped" in record.getMessage()]
    assert words in told and words in waits and "was given back 2 times" in waits
    assert not any("hangs" in str(body) for body in night.bodies(object))


def test_a_worker_that_plays_nothing_cannot_say_that_an_environment_stopped(tmp_path, caplog):
    """Where the host plays, no call of an environment is the worker's: its leases come back as any others."""
    night = Night(tmp_path, envs=[{"name": "arithmetic", "kind": "completions"}])

    async def scenario():
        await night.join()
        await night.publish()
        lease = await night.lease()
        request = t.LeaseRequest(returning=(lease.id,), stopped=lease.blocks[0].index, said="it hangs")
        await night.client.post_json("/v1/leases", request, t.LeaseAnswer)

    asyncio.run(scenario())
    (lapse,) = night.bodies(LeaseLapsed)
    assert lapse.cause == "returned" and not any("was stopped" in one.getMessage() for one in caplog.records)


def test_reports_of_stopped_environments_fill_no_memory(monkeypatch):
    monkeypatch.setattr("shoal.roles.coordinator.env_hang_reports.MAX_REPORTS", 3)
    reports = StopReports()
    for number in range(9):
        lease = LeaseRecord(str(number), "w" * 64, "main", number, (0,), 0.0, 60.0)
        reports.add(lease, "w", t.LeaseRequest(stopped=0, said=f"{number}"), "task 1")
    assert len(reports._newest) == len(reports._logged) == 3


# --- what the coordinator keeps ---


def chunks_of(testbed, version):
    return {c for f in testbed.coordinator.kept.manifests[version].files for c in f.chunks}


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
    testbed = RunTestbed(tmp_path / "run", config)

    async def scenario():
        async with await joined(testbed, "slow") as slow:
            roles = asyncio.gather(testbed.trainer().run(), testbed.validator().run())
            while testbed.coordinator.state.main.version < 0:
                await asyncio.sleep(0.05)
            lease = await taken(slow)
            await testbed.live(testbed.worker("quick"))
            await roles
            return lease

    lease = asyncio.run(scenario())
    coordinator = testbed.coordinator
    assert (
        lease.version == 0
        and coordinator.state.main.version == 5
        and coordinator.state.leases[lease.id].status == "overtaken"
    )
    coordinator.kept.forget_old()
    assert coordinator.kept.manifests.keys() == {3, 4, 5}


def test_weights_stay_as_long_as_a_submission_is_open(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run())

    async def scenario():
        await until(lambda: testbed.coordinator.state.pending, testbed.trainer(), testbed.worker("quick"))

    asyncio.run(scenario())
    testbed.coordinator.state.open_leases.clear()
    assert testbed.coordinator.kept._versions_at_work() == {0}


WIDE = {"tiny": {"width": 64, "layers": 3, "heads": 2, "kv_heads": 1, "mlp_width": 192, "max_positions": 64}}
"""Six versions are larger than 1 MB."""


def test_a_run_whose_window_is_larger_than_its_quota_goes_on(tmp_path):
    """Without leases no version is published, so space must be freed when it is asked for."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=6, policy=WIDE, storage={"quota_mb": 1, "window_steps": 16}))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("honest"), limit_s=60.0))
    assert testbed.coordinator.state.phase == "ended" and testbed.audit().findings == []
    weights_bytes = sum(f.size for f in testbed.coordinator.kept.manifests[6].files)
    assert weights_bytes > 150_000 and 6 * weights_bytes > 1_000_000


def test_a_run_that_begins_again_with_a_lower_quota_first_deletes_what_it_can(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=9, policy=WIDE, rollouts={"max_staleness": 0}))
    asyncio.run(
        until(
            lambda: testbed.coordinator.state.main.version >= 5,
            testbed.trainer(),
            testbed.validator(),
            testbed.worker("w"),
        )
    )
    assert testbed.coordinator.blobs.size_bytes > 1_000_000
    lower = msgspec.structs.replace(testbed.config, storage=msgspec.structs.replace(testbed.config.storage, quota_mb=1))
    again = open_run(testbed.folder, lower)
    assert again.over_quota == "" and again.blobs.size_bytes <= 1_000_000


def copied(testbed, place):
    """The run of a testbed whose coordinator was stopped, in another folder."""
    shutil.copytree(testbed.folder.root, place)
    return RunTestbed(place, testbed.config)


@pytest.fixture(scope="module")
def first_versions(tmp_path_factory):
    """A run of nine steps that was stopped after version 3."""
    folder = tmp_path_factory.mktemp("versions") / "run"
    testbed = RunTestbed(folder, tiny_run(steps=9, rollouts={"max_staleness": 1}))
    roles = (testbed.trainer(), testbed.validator(), testbed.worker("honest"))
    asyncio.run(until(lambda: testbed.coordinator.state.main.version >= 3, *roles))
    testbed.coordinator.log_writer.store.close()
    return testbed


@pytest.fixture
def testbed(first_versions, tmp_path):
    """A run of nine steps that has versions 0 to 3."""
    return copied(first_versions, tmp_path / "run")


def test_room_is_made_of_old_weights_but_not_of_those_that_are_judged_or_fresh(testbed):
    kept, blobs, state = testbed.coordinator.kept, testbed.coordinator.blobs, testbed.coordinator.state
    first = next(name for name, found in state.submissions.items() if state.lease_of(found).version == 0)
    testbed.coordinator.state.pending.clear()
    testbed.coordinator.state.rechecks.clear()
    old = chunks_of(testbed, 0) - chunks_of(testbed, 3)
    assert kept.manifests.keys() >= {0, 1, 2, 3} and all(map(blobs.has, old))

    newest = testbed.coordinator.state.main.version
    testbed.coordinator.state.rechecks.append(first)  # a slow validator has still to judge it
    assert not kept.make_room(0) and kept.manifests.keys() == {0, newest - 1, newest}
    assert all(map(blobs.has, old)) and blobs.has(first)

    testbed.coordinator.state.rechecks.remove(first)
    assert not kept.make_room(0) and kept.manifests.keys() == {newest - 1, newest}
    assert not any(map(blobs.has, old)) and not blobs.has(first)
    assert not blobs.has(testbed.coordinator.state.main.versions[0].manifest)
    assert all(map(blobs.has, chunks_of(testbed, newest - 1) | chunks_of(testbed, newest)))


def test_weights_of_the_window_stay_while_there_is_room(testbed):
    before = testbed.coordinator.blobs.size_bytes
    assert testbed.coordinator.kept.make_room(before) and testbed.coordinator.blobs.size_bytes == before
    assert testbed.coordinator.kept.make_room(before - 1) and set(testbed.coordinator.kept.manifests) >= {1, 2, 3}


def test_bodies_that_are_being_uploaded_drive_nothing_out(testbed):
    """Any key may have a lease and send garbage for it: its bytes count against the quota, but only until it ends."""
    kept, blobs = testbed.coordinator.kept, testbed.coordinator.blobs
    quota, before = blobs.size_bytes + 1000, (set(kept.bodies), set(kept.manifests))
    with blobs.upload() as upload:
        upload.write(bytes(quota))
        assert not kept.make_room(quota)
    assert kept.make_room(quota) and (set(kept.bodies), set(kept.manifests)) == before
    assert blobs.size_bytes == quota - 1000


def test_chunks_that_no_version_names_are_deleted_when_one_is_published(testbed):
    version = testbed.coordinator.state.main.version
    put_chunk(testbed.coordinator, digest(b"garbage"), b"garbage", digest(b"garbage"))
    roles = (testbed.trainer(), testbed.validator(), testbed.worker("honest"))
    asyncio.run(until(lambda: testbed.coordinator.state.main.version > version, *roles))
    assert not testbed.coordinator.blobs.has(digest(b"garbage"))
    assert all(map(testbed.coordinator.blobs.has, chunks_of(testbed, testbed.coordinator.state.main.version)))


def test_chunks_on_their_way_are_not_deleted_with_an_old_version_that_has_the_same(testbed):
    chunk = next(iter(chunks_of(testbed, 0) - chunks_of(testbed, 3)))
    put_chunk(testbed.coordinator, chunk, testbed.coordinator.blobs.get(chunk), chunk)
    assert not testbed.coordinator.kept.make_room(0) and testbed.coordinator.blobs.has(chunk)


def test_a_damaged_manifest_of_an_old_version_does_not_keep_a_run_from_starting(testbed):
    """Nobody needs its weights any more. Without the newest, nobody could work."""
    main = testbed.coordinator.state.main
    testbed.coordinator.blobs.path_of(main.versions[0].manifest).write_bytes(b"garbage")
    assert 0 not in open_run(testbed.folder, testbed.config).kept.manifests
    newest = main.versions[main.version].manifest
    testbed.coordinator.blobs.path_of(newest).write_bytes(b"garbage")
    with pytest.raises(StateError, match=f"blob {newest[:16]}.* is damaged"):
        open_run(testbed.folder, testbed.config)


class Killed(Exception):
    """The process ended here."""


async def body_that_was_not_booked(testbed):
    """Kill the coordinator between keeping a body and booking it; returns the body, its lease and its worker."""
    worker, sent, log_writer = testbed.worker("honest"), [], testbed.coordinator.log_writer.submit
    put = worker.client.put_bytes

    async def submit(command):
        if isinstance(command, Submit):
            raise Killed
        return await log_writer(command)

    async def send(path, body, kind):
        answer = asyncio.create_task(put(path, body, kind))
        while not testbed.coordinator.blobs.has(digest(body)):
            await asyncio.sleep(0.01)
        answer.cancel()
        sent.append((path.split("/")[3], body))
        raise PeerError("no answer came")

    worker.client.put_bytes, testbed.coordinator.log_writer.submit = send, submit
    trainer = asyncio.create_task(testbed.trainer().run())
    with pytest.raises(PeerError, match="no answer came"):
        await asyncio.wait_for(worker.run(), 30.0)
    trainer.cancel()
    testbed.coordinator.log_writer.store.close()
    return sent[0][1], sent[0][0], worker.key


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    testbed = RunTestbed(tmp_path_factory.mktemp("killed") / "run", tiny_run(steps=1))
    return testbed, *asyncio.run(body_that_was_not_booked(testbed))


async def send_again(coordinator, body, lease, key):
    with coordinator.kept.upload(lease) as upload:
        upload.write(body)
        await coordinator.take_submission(key, lease, upload, digest(body), int(coordinator.clock()))


def test_what_a_kill_left_is_deleted_when_a_version_is_published(tmp_path, killed):
    testbed, body, _, _ = killed
    again = copied(testbed, tmp_path / "run")
    coming = again.coordinator.blobs.put(b"a chunk of a version that is not published")
    again = RunTestbed(tmp_path / "run", testbed.config)
    assert again.coordinator.kept.coming == {digest(body), coming}
    asyncio.run(again.live(again.trainer(), again.validator(), again.worker("other")))
    assert not again.coordinator.blobs.has(digest(body)) and not again.coordinator.blobs.has(coming)
    assert audit_folder(again.folder.root).findings == []


def test_a_body_that_is_sent_again_after_a_kill_stays(tmp_path, killed):
    testbed, body, lease, key = killed
    coordinator = copied(testbed, tmp_path / "run").coordinator
    asyncio.run(send_again(coordinator, body, lease, key))
    coordinator.kept.published(0)
    assert coordinator.blobs.get(digest(body)) == body


def test_nothing_is_kept_of_a_body_that_a_full_disk_did_not_let_the_log_take(tmp_path, killed):
    testbed, body, lease, key = killed
    coordinator = copied(testbed, tmp_path / "run").coordinator

    def full(entries):
        raise StateError("the log could not be written: database or disk is full")

    coordinator.log_writer.store.append = full
    with pytest.raises(StateError, match="disk is full"):
        asyncio.run(send_again(coordinator, body, lease, key))
    assert not coordinator.blobs.has(digest(body)) and not coordinator.kept.bodies


def test_nothing_is_kept_of_a_manifest_that_is_refused(testbed):
    trainer = load_or_make_key(testbed.folder.keys / "trainer.key")
    wrong = msgspec.structs.replace(testbed.coordinator.kept.manifests[3], version=7, parents=(6,))
    signed = to_json(sign_manifest(wrong, trainer, now=testbed.clock()))
    before = testbed.coordinator.blobs.size_bytes
    with pytest.raises(Refused, match="the next version is"):
        asyncio.run(take_checkpoint(testbed.coordinator, trainer.public, signed))
    assert testbed.coordinator.blobs.size_bytes == before


def test_a_worker_whose_version_is_too_old_by_now_asks_for_the_next_lease(testbed):
    late = testbed.worker("late")
    lease = t.Lease("7", late.key, 0, (), testbed.coordinator.state.sampling, 0.0, 0.0)
    grant = t.Grant(testbed.coordinator.state.run, lease, "", "", "", "")
    far = msgspec.structs.replace(grant, lease=msgspec.structs.replace(lease, version=99))
    testbed.coordinator.kept.make_room(0)

    async def scenario():
        async with late.client:
            await late.join()
            with pytest.raises(VersionExpired):
                await late._load_for(grant)
            with pytest.raises(PeerError):
                await late._load_for(far)

    asyncio.run(scenario())


def test_refused_bodies_make_room_when_the_quota_is_used_up(tmp_path, monkeypatch):
    config = tiny_run(
        storage={"quota_mb": 1, "retain": "window"}, verify={"quarantine_s": 0.01}, rollouts={"max_staleness": 1}
    )
    testbed = RunTestbed(tmp_path / "run", config)
    vandal, state, kept = Vandal(testbed.worker("vandal").node), testbed.coordinator.state, testbed.coordinator.kept
    has = testbed.coordinator.blobs.has

    def both():
        return state.refused and any(node.accepted for node in state.members.values())

    asyncio.run(until(both, testbed.trainer(), testbed.validator(), vandal, testbed.worker("good")))
    bodies = [name for name in kept.bodies if state.submissions[name].decided]
    slots = [slot for version in state.main.versions.values() for slot in version.slots.values()]
    refused = {*bodies} - {slot.submission for slot in slots}
    testbed.coordinator.blobs.put(bytes(1_000_001 - testbed.coordinator.blobs.size_bytes))
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_storage", msgspec.structs.replace(kept._storage, retain="all"))
        kept.make_room(0)
        assert refused and not any(map(has, refused)), "though all others are kept"
    assert kept.make_room(1_000_000) and testbed.coordinator.blobs.size_bytes <= 1_000_000
    for slot in slots:
        slot.status, slot.step = "signal", -1  # a batch may still take them
    accepted = {slot.submission for slot in slots}
    assert not kept.make_room(0) and accepted
    assert {name for name in bodies if has(name)} == accepted & set(bodies)
    for slot in slots:
        slot.status = "flat"  # nobody learns from them
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_storage", msgspec.structs.replace(kept._storage, retain="all"))
        assert not kept.make_room(0) and any(map(has, bodies))
    assert not kept.make_room(0) and not any(map(has, bodies))
