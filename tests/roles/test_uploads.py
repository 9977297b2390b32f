"""Uploads to a real coordinator: what it refuses before it reads the body, and what is left on its disk."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import msgspec
import pytest

from shoal.ledger.commands import AskLease, JoinRun, Publish
from shoal.net.connection_limits import ServerLimits
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.constants import SMALL_BODY_BYTES
from shoal.protocol.encoding import digest, from_json, from_msgpack, to_msgpack
from shoal.protocol.rollout_validation import most_bytes
from shoal.protocol.signing import Key, RequestLine, SenderState, sign_request
from shoal.verification.encode_submission import encode_submission
from tests.net.wires import request, run, serving, wires
from tests.roles.testbed import RunTestbed, tiny_run

WORKER, OTHER = Key(b"\x01" * 32), Key(b"\x02" * 32)


@pytest.fixture
def world(tmp_path):
    """A run with a lease for each of two workers, and the body that fills the first."""
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    log_writer, trainer, now = (
        testbed.coordinator.log_writer,
        load_or_make_key(testbed.folder.keys / "trainer.key").public,
        time.time(),
    )
    log_writer.write(JoinRun(trainer, t.Join("trainer", "t", 0.0, "x", "float32", "cpu"), now), now)
    log_writer.write(Publish(trainer, 0, digest(b"root"), digest(b"manifest"), {}, now), now)
    for key in (WORKER.public, OTHER.public):
        log_writer.write(JoinRun(key, t.Join("worker", key[:8], 0.0, "x", "float32", "cpu"), now), now)
        log_writer.write(AskLease(key, (), 0.0, now), now)
    lease, other = (
        testbed.coordinator.wire_lease(testbed.coordinator.state.open_leases_of(key.public)[0])
        for key in (WORKER, OTHER)
    )
    groups = [t.Group(slot.slot, slot.task, slot.env, ()) for block in lease.blocks for slot in block.slots]
    named = {
        engine: encode_submission(testbed.coordinator.state.run, lease, groups, t.EngineFacts(engine, "float32", "cpu"))
        for engine in ("x", "y")
    }
    return SimpleNamespace(testbed=testbed, lease=lease, other=other, body=named["x"], of_another_engine=named["y"])


def put(world, key: Key, path: str, body: bytes, length: int | None = None) -> tuple[bytes, bytes]:
    """Headers and body of a signed PUT."""
    line = RequestLine("PUT", path)
    state, now = world.testbed.coordinator.state, int(time.time())
    headers = sign_request(key, line, digest(body), created=now, nonce="n" * 22, sender=SenderState(state.run))
    return request("PUT", path, headers={**headers, "content-length": str(length or len(body))}), body


def submission(world, key=WORKER, lease=None, body=None, length=None) -> tuple[bytes, bytes]:
    return put(world, key, f"/v1/leases/{lease or world.lease.id}/submission", body or world.body, length)


def largest_body(world) -> int:
    coordinator = world.testbed.coordinator
    return coordinator._largest_body(coordinator.state.leases[world.lease.id])


def ahead(world):
    """The newest event is an hour ahead: the host's clock was set back, or forth."""
    world.testbed.coordinator.state.time = time.time() + 3600.0
    return world


@contextlib.asynccontextmanager
async def coordinator(world, count):
    async with serving(world.testbed.app, ServerLimits(rest_s=0.3)) as port, wires(port, count) as made:
        yield made


def left_on_disk(world) -> list[str]:
    blobs = world.testbed.coordinator.blobs
    return [path.name for path in blobs.folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        (lambda w: submission(w, lease=w.other.id), 403, b"not_yours"),
        (lambda w: submission(w, lease="999"), 403, b"not_yours"),
        (lambda w: submission(w, key=Key(b"\x03" * 32)), 403, b"not_joined"),
        (lambda w: submission(w, length=largest_body(w) + 1), 400, b"can need"),
        (lambda w: submission(w, length=(64 << 20) + 1), 413, b"too_large"),
        (lambda w: put(w, WORKER, "/v1/blobs/" + digest(b"x"), b"x" * SMALL_BODY_BYTES * 4), 403, b"not_admitted"),
        (lambda w: put(w, WORKER, "/v1/checks/x/verdict", b"x" * SMALL_BODY_BYTES * 4), 403, b"not_admitted"),
        (lambda w: submission(ahead(w)), 503, b"replayed"),
    ],
    ids=["another's lease", "no lease", "no member", "more than its lease can need", "more than any", "chunk", "verdict",
         "a log that is ahead"],
)  # fmt: skip
def test_a_body_that_nobody_waits_for_is_refused_by_its_headers(world, change, status, code):
    async def scenario():
        async with coordinator(world, 1) as (one,):
            one.send(change(world)[0])
            return await one.answer()

    found, answer = run(scenario())
    assert (found, code in answer) == (status, True) and left_on_disk(world) == []


@pytest.mark.parametrize("fault", ["another body", "cut short"])
def test_a_body_that_is_not_what_was_signed_leaves_nothing(world, fault):
    async def scenario():
        async with coordinator(world, 1) as (one,):
            head, body = submission(world)
            if fault == "cut short":
                one.send(head + body[:-1])
                one.writer.write_eof()
                assert await one.is_closed(1.0)
            else:
                one.send(head + body[::-1])
                status, answer = await one.answer()
                assert (status, b"digest" in answer) == (400, True)

    events = world.testbed.coordinator.state.seq
    run(scenario())
    assert left_on_disk(world) == [] and world.testbed.coordinator.state.seq == events


def test_a_submission_names_the_engine_that_joined_and_no_other(world):
    """A worker that could write any text there could try digests until one suits it."""

    async def scenario():
        async with coordinator(world, 1) as (one,):
            one.send(b"".join(submission(world, body=world.of_another_engine)))
            return await one.answer()

    events = world.testbed.coordinator.state.seq
    status, answer = run(scenario())
    assert (status, b"another engine" in answer) == (400, True)
    assert left_on_disk(world) == [] and world.testbed.coordinator.state.seq == events


def test_a_group_that_is_larger_than_its_slot_can_need_is_refused(world):
    """If it were accepted, all who continue it would have to read it. The other groups leave room for it in the body."""
    rules, sampling = world.testbed.coordinator.state.rules, world.lease.sampling
    most = most_bytes(rules, sampling, world.lease.blocks[0].slots[0].slot)
    honest = from_msgpack(world.body, t.Submission)

    async def send(first):
        body = to_msgpack(msgspec.structs.replace(honest, groups=(first, *honest.groups[1:])))
        async with coordinator(world, 1) as (one,):
            one.send(b"".join(submission(world, body=body)))
            return await one.answer()

    status, answer = run(send(b"x" * (most + 1)))
    assert (status, b"a group of the submission" in answer) == (400, True) and left_on_disk(world) == []
    assert run(send(b"x" * most))[0] == 200


def test_a_lease_takes_one_body_at_a_time(world):
    async def scenario():
        async with coordinator(world, 2) as (slow, hasty):
            head, body = submission(world)
            slow.send(head + body[:10])
            await asyncio.sleep(0.05)
            assert len(left_on_disk(world)) == 1
            hasty.send(head + body)
            status, answer = await hasty.answer()
            assert (status, b"busy" in answer) == (503, True)
            slow.send(body[10:])
            return await slow.answer()

    status, answer = run(scenario())
    assert status == 200 and from_json(answer, t.Receipt).digest == digest(world.body)
    assert left_on_disk(world) == [digest(world.body)]


def test_a_submission_that_was_booked_is_not_read_again(world):
    async def scenario():
        async with coordinator(world, 2) as (first, again):
            head, body = submission(world)
            first.send(head + body)
            _, receipt = await first.answer()
            again.send(head)  # its answer comes before its body
            return receipt, await again.answer()

    receipt, (status, answer) = run(scenario())
    assert status == 200 and from_json(answer, t.Receipt) == from_json(receipt, t.Receipt)
