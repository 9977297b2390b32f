"""Taking a seat in a run: a node refuses a run that it does not support, in one line and before it joins."""

import asyncio
import contextlib
import errno
import os
import time

import httpx
import msgspec
import pytest

from shoal.engine.native import LocalEngine
from shoal.errors import PeerError, Superseded
from shoal.launch.local_run import LOOK_EVERY_S
from shoal.ledger.commands import Admin
from shoal.ledger.leases import LeaseLapsed
from shoal.protocol.constants import MAX_GROUP_ROLLOUTS, MAX_LEASE_BLOCKS, MAX_ROLLOUT_TOKENS
from shoal.protocol.messages import AdminRequest, Block, Join, Lease, Sampling, Slot
from shoal.roles.coordinator import coordinator
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.node import evidence_store, lifecycle
from shoal.roles.node.lease_client import demand_sound
from shoal.roles.node.lifecycle import Node, open_session
from shoal.roles.worker.worker import LATE
from shoal.weights.fetch import transfer
from shoal.weights.fetch.chunks import Chunk
from tests.roles.testbed import RunTestbed, tiny_run

ROLES = ("worker", "validator")


def refusal(testbed, role):
    """The one line with which a role refuses the testbed's run; it did not join."""
    node = testbed.worker("worker") if role == "worker" else testbed.validator()
    with pytest.raises(PeerError) as raised:
        asyncio.run(asyncio.wait_for(node.run(), 30.0))
    assert "\n" not in str(raised.value) and not testbed.coordinator.state.members
    return str(raised.value)


def saying(testbed, monkeypatch, **changes):
    """The testbed, with these changes to what its run says of itself."""
    info = StatusCache.info
    monkeypatch.setattr(
        StatusCache, "info", lambda status_cache: msgspec.structs.replace(info(status_cache), **changes)
    )
    return testbed


@pytest.mark.parametrize(("role", "key"), [("worker", "protocol"), ("validator", "rules_version")])
def test_the_versions_of_a_run_are_read_before_rules_that_a_node_cannot_read(tmp_path, monkeypatch, role, key):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    info = StatusCache(testbed.coordinator).info()
    later = msgspec.structs.replace(info.rules, proofs="later", algorithm=Later())
    testbed = saying(testbed, monkeypatch, rules=later, **{key: 7})
    theirs = {"protocol": "version 7 of the protocol and 1", "rules_version": "version 1 of the protocol and 7"}[key]
    ours = "version 1 of the protocol and 1 of the rules"
    assert f"the run follows {theirs} of the rules, this shoal {ours}: install" in refusal(testbed, role)


class Replaced(httpx.AsyncBaseTransport):
    """Another web server answers the first calls in the host's place."""

    def __init__(self, host, times):
        self.host, self.times = host, times

    async def handle_async_request(self, request):
        self.times -= 1
        return (
            httpx.Response(404, stream=httpx.ByteStream(b""))
            if self.times >= 0
            else await self.host.handle_async_request(request)
        )


@pytest.mark.parametrize("role", ROLES)
def test_a_node_that_starts_again_waits_out_another_program_where_it_joined_before(tmp_path, role):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    home, key_file = testbed.folder.nodes / role, testbed.folder.keys / "validator-0.key"

    async def join(times):
        client, said = testbed.client(key_file), []
        client._http._transport = Replaced(client.transport, times)
        client._on_wait, client._monotonic = said.append, iter(range(0, 1000, 9)).__next__
        async with client:
            key = client.key.public
            await open_session(Node(client, key, testbed.options(home), lambda dtype: LocalEngine(1, dtype)), role)
        return said

    with pytest.raises(PeerError, match="is not a shoal node"):
        asyncio.run(join(3))
    assert asyncio.run(join(0)) == []
    assert "another program answers there now, with HTTP 404" in asyncio.run(join(3))[0]
    (home / "evidence" / testbed.coordinator.state.run / "url").write_text("http://elsewhere")
    with pytest.raises(PeerError, match="is not a shoal node"):
        asyncio.run(join(3))


def test_a_validator_that_is_not_admitted_asks_more_often_than_a_host_looks_whether_its_run_has_ended():
    assert 2 * lifecycle.ADMISSION_POLL_S <= LOOK_EVERY_S


def test_a_validator_that_was_admitted_says_so_at_once(tmp_path, monkeypatch):
    testbed, said = RunTestbed(tmp_path / "run", tiny_run()), []
    monkeypatch.setattr(lifecycle, "ADMISSION_POLL_S", 0.0)

    async def scenario():
        async with testbed.client(tmp_path / "guest.key") as client:
            client.run = testbed.coordinator.state.run

            def now(words):
                said.append(words)
                testbed.coordinator.log_writer.write(
                    Admin("admit", AdminRequest(client.key.public), testbed.clock()), testbed.clock()
                )

            await lifecycle.join_run(client, Join("validator", "guest", 0.0, "test", "float32", "cpu"), now)

    asyncio.run(scenario())
    assert said == ["waiting: the host has not admitted this validator's key", "admitted: asking for work"]


class Later(msgspec.Struct, tag="later", tag_field="name"):
    """An algorithm that this version does not know."""


LEASE = Lease("1", "w", 0, (Block(0, (Slot(0, "00" * 32, "easy", 0),)),), Sampling(1.0, 8, 64), 0.0, 1.0)


def of_another_kind(lease):
    blocks = tuple(msgspec.structs.replace(block, kind="preferences") for block in lease.blocks)
    return msgspec.structs.replace(lease, blocks=blocks)


def test_a_worker_gives_back_a_lease_of_a_kind_that_it_does_not_know(tmp_path, monkeypatch):
    testbed, lease_of = RunTestbed(tmp_path / "run", tiny_run()), coordinator.lease_of
    monkeypatch.setattr(coordinator, "lease_of", lambda *args: of_another_kind(lease_of(*args)))

    async def scenario():
        trainer = asyncio.create_task(testbed.trainer().run())
        try:
            with pytest.raises(
                PeerError, match="the lease holds preferences, but this version of shoal knows only episodes"
            ):
                await asyncio.wait_for(testbed.worker("worker").run(), 30.0)
        finally:
            trainer.cancel()

    asyncio.run(scenario())
    lapses = [entry.body.cause for entry in testbed.audit().entries if isinstance(entry.body, LeaseLapsed)]
    assert lapses == ["returned"] and not testbed.coordinator.state.submissions


def test_a_validator_judges_no_lease_of_a_kind_that_it_does_not_know(tmp_path, monkeypatch):
    testbed, lease_of = RunTestbed(tmp_path / "run", tiny_run()), coordinator.lease_of
    worker, validator = testbed.worker("worker"), testbed.validator()

    async def scenario():
        others = [asyncio.create_task(role.run()) for role in (testbed.trainer(), worker)]
        while not testbed.coordinator.state.submissions:
            await asyncio.sleep(0.02)
        monkeypatch.setattr(coordinator, "lease_of", lambda *args: of_another_kind(lease_of(*args)))
        try:
            with pytest.raises(PeerError, match="the lease holds preferences"):
                await asyncio.wait_for(validator.run(), 30.0)
        finally:
            for task in others:
                task.cancel()

    asyncio.run(scenario())
    assert not any(submission.verdicts for submission in testbed.coordinator.state.submissions.values())


def test_a_lease_that_no_host_of_ours_grants_is_refused():
    block = LEASE.blocks[0]
    long = msgspec.structs.replace(LEASE, blocks=(block,) * (MAX_LEASE_BLOCKS + 1))
    with pytest.raises(PeerError, match="a lease has 65 blocks, limit 64"):
        demand_sound(long)
    for seed in ("no", "", "g" * 64, "1" * 63, "1" * 65, "1" * 64 + "\n"):
        slot = msgspec.structs.replace(block.slots[0], seed=seed)
        with pytest.raises(PeerError, match="not 64 hex digits: tell the host"):
            demand_sound(msgspec.structs.replace(LEASE, blocks=(msgspec.structs.replace(block, slots=(slot,)),)))
    sampling = msgspec.structs.replace(LEASE.sampling, max_tokens=MAX_ROLLOUT_TOKENS + 1)
    together = msgspec.structs.replace(LEASE.sampling, max_rollout_tokens=MAX_ROLLOUT_TOKENS + 1)
    for too_long in (sampling, together):
        with pytest.raises(PeerError, match="more than 1048576 tokens"):
            demand_sound(msgspec.structs.replace(LEASE, sampling=too_long))
    demand_sound(msgspec.structs.replace(LEASE, blocks=(block,) * MAX_LEASE_BLOCKS))


@pytest.mark.parametrize("role", ROLES)
def test_a_run_with_groups_that_no_host_of_ours_makes_is_refused(tmp_path, monkeypatch, role):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    for size in (-1, 0, MAX_GROUP_ROLLOUTS + 1):
        rules = msgspec.structs.replace(testbed.coordinator.state.rules, group_size=size)
        refused = refusal(saying(testbed, monkeypatch, rules=rules), role)
        assert "$.rules.group_size" in refused or "groups of fewer than 1 or more than 4096" in refused


@contextlib.asynccontextmanager
async def joined(testbed, worker):
    """The session of a worker in a run whose trainer has published version 0."""
    trainer = asyncio.create_task(testbed.trainer().run())
    async with asyncio.timeout(60), worker.client:
        await worker.join()
        worker.session.store = None
        while testbed.coordinator.state.main.version < 0:
            await asyncio.sleep(0.05)
        yield worker.session
    trainer.cancel()


def test_a_lease_that_comes_twice_is_refused_in_one_line(tmp_path):
    """The host gives a lease again to a worker that does not say that it holds it."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    worker = testbed.worker("worker")

    async def scenario():
        async with joined(testbed, worker):
            grant = await worker.leases.next_grant(())
            with pytest.raises(PeerError, match=f"granted lease '{grant.lease.id}' twice"):
                await worker.leases.next_grant(())

    asyncio.run(scenario())


def test_a_version_that_was_brought_while_another_is_loaded_is_not_fetched_again(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    worker = testbed.worker("worker")

    async def scenario():
        async with joined(testbed, worker) as session:
            load = session._load

            async def beside(brought):
                await load(brought)
                session._brought = "that of the next lease"

            session._load = beside
            await session.load(0)
            assert session._brought == "that of the next lease"

    asyncio.run(scenario())


def played(tmp_path, allowed_s, block_s):
    """What a worker makes of a lease of two blocks that allows so much time, if a block takes `block_s`; and the worker."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    worker = testbed.worker("slow")

    async def scenario():
        async with joined(testbed, worker) as session:
            lease = (await worker.leases.next_grant(())).lease
            await session.load(lease.version)
        return msgspec.structs.replace(lease, blocks=lease.blocks[:1] * 2, deadline=lease.issued + allowed_s)

    lease, extend = asyncio.run(scenario()), worker.session.engine.extend

    def slow(requests, temperature):
        time.sleep(block_s)
        return extend(requests, temperature)

    worker.session.engine.extend = slow
    return worker._play(lease, {}), worker


@pytest.mark.parametrize("status", [200, 302, 404, 502])
def test_weights_are_waited_for_while_another_program_answers_in_the_hosts_place(tmp_path, monkeypatch, caplog, status):
    monkeypatch.setattr(transfer, "PATIENCE_S", 0.2)
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1))
    host, asked = httpx.ASGITransport(testbed.app, raise_app_exceptions=False), []

    async def answer(request):
        if "/v1/blobs/" in request.url.path:
            asked.append(time.monotonic())
            if asked[-1] < asked[0] + 0.5:
                return httpx.Response(status, html="<h1>nginx</h1>", headers={"location": "https://login/"})
        return await host.handle_async_request(request)

    worker = testbed.worker("worker")
    worker.client.transport = httpx.MockTransport(answer)

    async def scenario():
        async with joined(testbed, worker) as session:
            await session.load(0)

    asyncio.run(scenario())
    assert worker.session.engine.version == 0
    assert f"another program answers there now, with HTTP {status}" in caplog.text
    assert "waiting for the weights of version=0 for " in caplog.text


@pytest.mark.parametrize("is_over", [False, True])
def test_a_node_whose_disk_is_full_waits_for_space_until_the_run_ends(tmp_path, monkeypatch, caplog, is_over):
    monkeypatch.setattr(evidence_store, "LONGEST_RETRY_S", 0.01)
    testbed, take, tried = RunTestbed(tmp_path / "run", tiny_run(steps=1)), Chunk.take, []

    def full(piece, part):
        tried.append(piece)
        if len(tried) < 3 or is_over:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        take(piece, part)

    monkeypatch.setattr(Chunk, "take", full)
    worker = testbed.worker("worker")

    async def scenario():
        async with joined(testbed, worker) as session:
            if is_over:
                monkeypatch.setattr(testbed.coordinator.state, "phase", "ended")
            with pytest.raises(Superseded, match="Free some space") if is_over else contextlib.nullcontext():
                await session.load(0)

    asyncio.run(scenario())
    assert worker.session.engine.version == (-1 if is_over else 0)
    assert caplog.text.count("waiting for space on the disk") == 1 and "Free some space" in caplog.text


def test_a_lease_that_takes_far_too_long_is_dropped_between_two_blocks(tmp_path):
    """A host could ask for days of work. The worker then asks for a smaller lease, because it knows its speed."""
    groups, worker = played(tmp_path, allowed_s=0.01, block_s=0.01 * LATE)
    assert groups is None and 0 < worker.leases.tokens_per_s < 10_000
