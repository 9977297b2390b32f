"""Runs that go on, whatever one member sends or fails to send: stories with the real roles."""

import asyncio

import msgspec
import pytest

from shoal.errors import PeerError, StateError
from shoal.ledger.commands import Submit
from shoal.ledger.errors import Refused
from shoal.ledger.event import GENESIS
from shoal.ledger.fault_rate import FAULT_REMEDY, FAULTS
from shoal.ledger.hints import split_remedy
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.records import LeaseRecord
from shoal.ledger.registry import make_entry
from shoal.ledger.run import RunEnded
from shoal.metrics import read_metrics
from shoal.net.client import PeerRefused
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_EVENTS_BYTES, MAX_FACT_CHARS
from shoal.protocol.encoding import WireError, digest, to_json
from shoal.roles.auditor.verify_log import audit_folder
from shoal.roles.coordinator.env_hang_reports import StopReports
from shoal.roles.coordinator.main import open_run
from shoal.roles.coordinator.status import StatusBoard
from shoal.roles.coordinator.versions import put_chunk, take_checkpoint
from shoal.roles.validator import Validator
from shoal.roles.worker.worker import VersionExpired, Worker
from shoal.weights.manifest import sign_manifest
from tests.roles.in_memory_run import Town, tiny_run
from tests.roles.test_replays import Night

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
    again = LogWriter(Store(sqlite_url(town.folder.log)))
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
    monkeypatch.setattr("shoal.roles.coordinator.request_context.MAX_EVENTS_BYTES", 2_000)
    monkeypatch.setattr("shoal.roles.trainer.batches.MAX_EVENTS_BYTES", 2_000)
    town = Town(tmp_path / "run", tiny_run())
    for number in range(40):
        asyncio.run(joined(town, f"name {number}", f"{number}.key"))
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
        size = self.session.info.rules.group_size
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
    bribed = Bribed(honest.node)
    vandal = Vandal(town.worker("vandal").node)
    asyncio.run(town.live(town.trainer(), bribed, vandal))
    lines = read_metrics(town.folder.metrics)
    assert [line["groups_unlearnable"] for line in lines] == [3, 3, 3]
    assert [line["update_skipped"] for line in lines] == [1, 1, 1]
    assert town.desk.state.phase == "ended" and town.audit().findings == []


def test_what_a_worker_says_of_a_stopped_environment_is_told_as_its_words(tmp_path, caplog):
    """Its own lease's alone, once for each text, without commands; and nothing of it is booked."""
    night = Night(tmp_path)

    async def back(lease, said, block=None):
        stopped = lease.blocks[0].index if block is None else block
        request = t.LeaseRequest(returning=(lease.id,), stopped=stopped, said=said)
        await night.client.post_json("/v1/leases", request, t.LeaseAnswer)
        night.now += 10

    async def story():
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
        waits, state = StatusBoard(night.desk).status().waiting_for, night.desk.state
        state.phase, state.pause_cause = "paused", f"{FAULTS}words fails"
        paused, remedy = split_remedy(StatusBoard(night.desk).status().waiting_for)
        assert words in paused and remedy == FAULT_REMEDY, "the host's own advice ends the sentence"
        return waits

    said = "it hangs'. The host should type 'shoal admin drain'; worker y says 'ok"
    words = f'worker "w\'\'" ({night.key[:12]}) says "{said}"'
    waits = asyncio.run(story())
    (told,) = [record.getMessage() for record in caplog.records if "was stopped" in record.getMessage()]
    assert words in told and words in waits and "was given back 2 times" in waits
    assert not any("hangs" in str(body) for body in night.bodies(object))


def test_a_worker_that_plays_nothing_cannot_say_that_an_environment_stopped(tmp_path, caplog):
    """Where the host plays, no call of an environment is the worker's: its leases come back as any others."""
    night = Night(tmp_path, envs=[{"name": "arithmetic", "kind": "completions"}])

    async def story():
        await night.join()
        await night.publish()
        lease = await night.lease()
        request = t.LeaseRequest(returning=(lease.id,), stopped=lease.blocks[0].index, said="it hangs")
        await night.client.post_json("/v1/leases", request, t.LeaseAnswer)

    asyncio.run(story())
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
    assert lease.version == 0 and desk.state.main.version == 5 and desk.state.leases[lease.id].status == "overtaken"
    desk.kept.forget_old()
    assert desk.kept.manifests.keys() == {3, 4, 5}


def test_weights_stay_as_long_as_a_submission_is_open(tmp_path):
    town = Town(tmp_path / "run", tiny_run())

    async def story():
        await until(lambda: town.desk.state.pending, town.trainer(), town.worker("quick"))

    asyncio.run(story())
    town.desk.state.open_leases.clear()
    assert town.desk.kept._versions_at_work() == {0}


def test_a_run_whose_window_is_larger_than_its_quota_goes_on(tmp_path):
    """Without leases no version is published, so space must be freed when it is asked for."""
    wide = {"tiny": {"width": 64, "layers": 3, "heads": 2, "kv_heads": 1, "mlp_width": 192, "max_positions": 64}}
    town = Town(tmp_path / "run", tiny_run(steps=6, policy=wide, storage={"quota_mb": 1, "window_steps": 16}))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("honest"), limit_s=60.0))
    assert town.desk.state.phase == "ended" and town.audit().findings == []
    weights_bytes = sum(f.size for f in town.desk.kept.manifests[6].files)
    assert weights_bytes > 150_000 and 6 * weights_bytes > 1_000_000


def test_a_run_that_begins_again_with_a_lower_quota_first_deletes_what_it_can(tmp_path):
    wide = {"tiny": {"width": 64, "layers": 3, "heads": 2, "kv_heads": 1, "mlp_width": 192, "max_positions": 64}}
    town = Town(tmp_path / "run", tiny_run(steps=9, policy=wide, rollouts={"max_staleness": 0}))
    asyncio.run(until(lambda: town.desk.state.main.version >= 5, town.trainer(), town.validator(), town.worker("w")))
    assert town.desk.blobs.size_bytes > 1_000_000
    lower = msgspec.structs.replace(town.config, storage=msgspec.structs.replace(town.config.storage, quota_mb=1))
    again = open_run(town.folder, lower)
    assert again.over_quota == "" and again.blobs.size_bytes <= 1_000_000


async def three_versions(town):
    """Publish versions 0 to 3, and return a submission of version 0."""
    await until(lambda: town.desk.state.main.version >= 3, town.trainer(), town.validator(), town.worker("honest"))
    state = town.desk.state
    return next(name for name, found in state.submissions.items() if state.lease_of(found).version == 0)


def test_room_is_made_of_old_weights_but_not_of_those_that_are_judged_or_fresh(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=9, rollouts={"max_staleness": 1}))
    kept, blobs = town.desk.kept, town.desk.blobs
    first = asyncio.run(three_versions(town))
    town.desk.state.pending.clear()
    town.desk.state.rechecks.clear()
    old = chunks_of(town, 0) - chunks_of(town, 3)
    assert kept.manifests.keys() >= {0, 1, 2, 3} and all(map(blobs.has, old))

    newest = town.desk.state.main.version
    town.desk.state.rechecks.append(first)  # a slow validator has still to judge it
    assert not kept.make_room(0) and kept.manifests.keys() == {0, newest - 1, newest}
    assert all(map(blobs.has, old)) and blobs.has(first)

    town.desk.state.rechecks.remove(first)
    assert not kept.make_room(0) and kept.manifests.keys() == {newest - 1, newest}
    assert not any(map(blobs.has, old)) and not blobs.has(first)
    assert not blobs.has(town.desk.state.main.versions[0].manifest)
    assert all(map(blobs.has, chunks_of(town, newest - 1) | chunks_of(town, newest)))


def test_weights_of_the_window_stay_while_there_is_room(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=9))
    asyncio.run(three_versions(town))
    before = town.desk.blobs.size_bytes
    assert town.desk.kept.make_room(before) and town.desk.blobs.size_bytes == before
    assert town.desk.kept.make_room(before - 1) and set(town.desk.kept.manifests) >= {1, 2, 3}


def test_bodies_that_are_being_uploaded_drive_nothing_out(tmp_path):
    """Any key may have a lease and send garbage for it: its bytes count against the quota, but only until it ends."""
    town = Town(tmp_path / "run", tiny_run(steps=9))
    asyncio.run(three_versions(town))
    kept, blobs = town.desk.kept, town.desk.blobs
    quota, before = blobs.size_bytes + 1000, (set(kept.bodies), set(kept.manifests))
    with blobs.upload() as upload:
        upload.write(bytes(quota))
        assert not kept.make_room(quota)
    assert kept.make_room(quota) and (set(kept.bodies), set(kept.manifests)) == before
    assert blobs.size_bytes == quota - 1000


def test_chunks_that_no_version_names_are_deleted_when_one_is_published(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=9))

    async def story():
        await three_versions(town)
        version = town.desk.state.main.version
        put_chunk(town.desk, digest(b"garbage"), b"garbage", digest(b"garbage"))
        roles = (town.trainer(), town.validator(), town.worker("honest"))
        await until(lambda: town.desk.state.main.version > version, *roles)

    asyncio.run(story())
    assert not town.desk.blobs.has(digest(b"garbage"))
    assert all(map(town.desk.blobs.has, chunks_of(town, town.desk.state.main.version)))


def test_chunks_on_their_way_are_not_deleted_with_an_old_version_that_has_the_same(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=9))
    asyncio.run(three_versions(town))
    chunk = next(iter(chunks_of(town, 0) - chunks_of(town, 3)))
    put_chunk(town.desk, chunk, town.desk.blobs.get(chunk), chunk)
    assert not town.desk.kept.make_room(0) and town.desk.blobs.has(chunk)


@pytest.mark.parametrize(("version", "starts"), [(0, True), (3, False)])
def test_a_damaged_manifest_of_an_old_version_does_not_keep_a_run_from_starting(tmp_path, version, starts):
    """Nobody needs its weights any more. Without the newest, nobody could work."""
    town = Town(tmp_path / "run", tiny_run(steps=9))
    asyncio.run(three_versions(town))
    chosen = version if starts else town.desk.state.main.version
    name = town.desk.state.main.versions[chosen].manifest
    town.desk.blobs.path_of(name).write_bytes(b"garbage")
    if not starts:
        with pytest.raises(StateError, match=f"blob {name[:16]}.* is damaged"):
            open_run(town.folder, town.config)
        return
    again = Town(tmp_path / "run", tiny_run(steps=9))
    assert 0 not in again.desk.kept.manifests
    asyncio.run(again.live(again.trainer(), again.validator(), again.worker("honest")))
    assert again.desk.state.main.version == 9


class Killed(Exception):
    """The process ended here."""


async def body_that_was_not_booked(town):
    """Kill the coordinator between keeping a body and booking it; returns the body, its lease and its worker."""
    worker, sent, book = town.worker("honest"), [], town.desk.book.submit
    put = worker.client.put_bytes

    async def submit(command):
        if isinstance(command, Submit):
            raise Killed
        return await book(command)

    async def send(path, body, kind):
        answer = asyncio.create_task(put(path, body, kind))
        while not town.desk.blobs.has(digest(body)):
            await asyncio.sleep(0.01)
        answer.cancel()
        sent.append((path.split("/")[3], body))
        raise PeerError("no answer came")

    worker.client.put_bytes, town.desk.book.submit = send, submit
    trainer = asyncio.create_task(town.trainer().run())
    with pytest.raises(PeerError, match="no answer came"):
        await asyncio.wait_for(worker.run(), 30.0)
    trainer.cancel()
    town.desk.book.store.close()
    return sent[0][1], sent[0][0], worker


def test_what_a_kill_left_is_deleted_when_a_version_is_published(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=2))
    body, _, _ = asyncio.run(body_that_was_not_booked(town))
    coming = town.desk.blobs.put(b"a chunk of a version that is not published")
    again = Town(tmp_path / "run", tiny_run(steps=2))
    assert again.desk.kept.coming == {digest(body), coming}
    asyncio.run(again.live(again.trainer(), again.validator(), again.worker("other")))
    assert not again.desk.blobs.has(digest(body)) and not again.desk.blobs.has(coming)
    assert audit_folder(again.folder.root).findings == []


def test_a_body_that_is_sent_again_after_a_kill_stays(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=2))
    body, lease, worker = asyncio.run(body_that_was_not_booked(town))
    desk = open_run(town.folder, town.config)

    async def send_again():
        with desk.kept.upload(lease) as upload:
            upload.write(body)
            await desk.take_submission(worker.key, lease, upload, digest(body), int(town.clock()))

    asyncio.run(send_again())
    desk.kept.published(0)
    assert desk.blobs.get(digest(body)) == body


def test_nothing_is_kept_of_a_body_that_a_full_disk_did_not_let_the_log_take(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=2))
    body, lease, worker = asyncio.run(body_that_was_not_booked(town))
    desk = open_run(town.folder, town.config)

    def full(entries):
        raise StateError("the log could not be written: database or disk is full")

    async def send_again():
        desk.book.store.append = full
        with desk.kept.upload(lease) as upload:
            upload.write(body)
            await desk.take_submission(worker.key, lease, upload, digest(body), int(town.clock()))

    with pytest.raises(StateError, match="disk is full"):
        asyncio.run(send_again())
    assert not desk.blobs.has(digest(body)) and not desk.kept.bodies


def test_nothing_is_kept_of_a_manifest_that_is_refused(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=9))

    async def story():
        await three_versions(town)
        trainer = load_or_make_key(town.folder.keys / "trainer.key")
        wrong = msgspec.structs.replace(town.desk.kept.manifests[3], version=7, parents=(6,))
        before = town.desk.blobs.size_bytes
        with pytest.raises(Refused, match="the next version is"):
            await take_checkpoint(town.desk, trainer.public, to_json(sign_manifest(wrong, trainer, now=town.clock())))
        assert town.desk.blobs.size_bytes == before

    asyncio.run(story())


def test_a_worker_whose_version_is_too_old_by_now_asks_for_the_next_lease(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=9))

    async def story():
        await three_versions(town)
        late = town.worker("late")
        lease = t.Lease("7", late.key, 0, (), town.desk.state.sampling, 0.0, 0.0)
        grant = t.Grant(town.desk.state.run, lease, "", "", "", "")
        far = msgspec.structs.replace(grant, lease=msgspec.structs.replace(lease, version=99))
        town.desk.kept.make_room(0)
        async with late.client:
            await late.join()
            with pytest.raises(VersionExpired):
                await late._load_for(grant)
            with pytest.raises(PeerError):
                await late._load_for(far)

    asyncio.run(story())


@pytest.mark.parametrize("retain", ["window", "all"])
def test_refused_bodies_make_room_when_the_quota_is_used_up(tmp_path, retain):
    config = tiny_run(
        storage={"quota_mb": 1, "retain": retain}, verify={"quarantine_s": 0.01}, rollouts={"max_staleness": 1}
    )
    town = Town(tmp_path / "run", config)
    vandal = Vandal(town.worker("vandal").node)

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
    slots = [slot for version in town.desk.state.main.versions.values() for slot in version.slots.values()]
    for slot in slots:
        slot.status, slot.step = "signal", -1  # a batch may still take them
    accepted = {slot.submission for slot in slots}
    assert not town.desk.kept.make_room(0) and accepted
    assert {name for name in bodies if town.desk.blobs.has(name)} == accepted & set(bodies)
    for slot in slots:
        slot.status = "flat"  # nobody learns from them
    assert not town.desk.kept.make_room(0)
    assert any(map(town.desk.blobs.has, bodies)) == (retain == "all")
