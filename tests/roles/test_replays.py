"""Signed requests that arrive again: from an attacker on the network they change nothing, from a proxy they do no harm."""

import asyncio
import logging
import time

import httpx
import pytest

from shoal.errors import PeerError
from shoal.ledger.commands import Publish
from shoal.ledger.members import NodeLeft
from shoal.ledger.run_events import RulesChanged
from shoal.net.client import Client, PeerRefused, Timing
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.constants import KEY_REQUESTS_PER_S
from shoal.protocol.encoding import digest, from_json, to_json
from shoal.roles.coordinator import routes as api
from shoal.roles.coordinator.main import open_run
from shoal.roles.coordinator.routes import application
from shoal.weights.manifest import sign_manifest
from tests.nightly import first_of
from tests.roles.testbed import URL, RunTestbed, _hurry, tiny_run, weights_of_one_file


class Tape(httpx.AsyncBaseTransport):
    """An attacker on the network: passes requests on, and can send any of them again."""

    def __init__(self, app):
        self.restart(app)
        self.seen = []

    def restart(self, app):
        self.inner = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def handle_async_request(self, request):
        self.seen.append((request.method, request.url, dict(request.headers), await request.aread()))
        return await self._send(self.seen[-1])

    async def again(self, place):
        """The status of a recorded request that is sent again, and the code of its refusal or its lease."""
        response = await self._send(self.seen[place])
        body = await response.aread()
        if response.status_code >= 400:
            return response.status_code, from_json(body, t.Refusal).code
        lease = from_json(body, t.LeaseAnswer).lease if b'"retry_s"' in body else None
        return response.status_code, lease and lease.id

    async def _send(self, recorded):
        method, url, headers, body = recorded
        return await self.inner.handle_async_request(httpx.Request(method, url, headers=headers, content=body))


class HoldBack(httpx.AsyncBaseTransport):
    """A network that lets nothing through."""

    async def handle_async_request(self, request):
        raise httpx.ConnectTimeout("held back", request=request)


class Night:
    """A coordinator with a clock that a test turns, and one client whose requests are recorded."""

    def __init__(self, root, key_file="stranger.key", **config):
        self.now = 1_000_000.0
        self.testbed = RunTestbed(root / "run", tiny_run(**config), clock=lambda: self.now)
        self.coordinator, self.tape = self.testbed.coordinator, Tape(self.testbed.app)
        key = load_or_make_key(self.testbed.folder.root / key_file)
        self.key, self.run = key.public, self.coordinator.state.run
        self.client = Client(URL, key, run=self.run, transport=self.tape, timing=Timing(lambda: self.now, self._sleep))

    async def _sleep(self, seconds):
        self.now += seconds

    def restart(self):
        self.coordinator = open_run(self.testbed.folder, self.testbed.config, lambda: self.now)
        self.tape.restart(application(self.coordinator))

    async def join(self, device="cpu", name="w"):
        join = t.Join("worker", name, 0.0, "x", "float32", device)
        return await self.client.post_json("/v1/nodes", join, t.NodeState)

    async def lease(self, *holding):
        return (await self.client.post_json("/v1/leases", t.LeaseRequest(holding), t.LeaseAnswer)).lease

    async def leave(self):
        return await self.client.send("POST", "/v1/nodes/leave", b"", t.NodeState)

    async def admin(self, action):
        return await self.client.post_json(f"/v1/admin/{action}", t.AdminRequest(), t.Status)

    async def publish(self):
        trainer, version = self.coordinator.state.trainer_key, self.coordinator.state.main.version + 1
        await self.coordinator.log_writer.submit(
            Publish(trainer, version, digest(b"%d" % version), digest(b"manifest"), {}, self.now)
        )

    def bodies(self, kind):
        rows = [entry.body for entry in self.testbed.audit().entries]
        return [body for body in rows if isinstance(body, kind)]


@pytest.fixture
def night(tmp_path):
    return Night(tmp_path)


@pytest.fixture(autouse=True)
def short_polls(request, monkeypatch):
    if "night" in request.fixturenames:
        monkeypatch.setattr(api, "LONG_POLL_S", 0.05)


@pytest.mark.parametrize("restarted", [False, True])
def test_requests_of_a_worker_that_left_get_nothing(night, restarted):
    async def scenario():
        await night.join()
        await night.publish()
        night.now += 1
        assert await night.lease()
        night.now += 1
        told = await night.leave()
        assert told.lapsed == 1 and told.left
        before = night.coordinator.state.seq
        if restarted:
            night.restart()
        for _ in range(4):
            assert await night.tape.again(0) == (503, "replayed")
            assert await night.tape.again(1) == (403, "not_joined")
            assert (await night.tape.again(2))[0] == 200, "the same leave again gets its first answer"
        assert night.coordinator.state.seq == before and night.coordinator.state.members[night.key].lapsed == 1
        night.now += 1
        await night.join()
        assert await night.tape.again(1) == await night.tape.again(2) == (503, "replayed")
        assert not night.coordinator.state.open_leases

    asyncio.run(scenario())
    assert night.testbed.audit().findings == []


def test_one_signed_request_gets_one_lease(night):
    """Also if the worker was killed and said nothing."""

    async def scenario():
        await night.join()
        await night.publish()
        first = await night.lease()
        night.now += 1
        assert await night.lease() == first, "a worker that was killed gets its lease again"
        polls = [place for place, (_, url, *_) in enumerate(night.tape.seen) if url.path == "/v1/leases"]
        assert await night.tape.again(polls[1]) == (200, first.id)
        night.now += 20
        await night.coordinator.tick()
        assert not night.coordinator.state.open_leases, "it lapsed, and the signatures are still valid"
        assert await night.tape.again(polls[1]) == (200, None)
        assert await night.tape.again(polls[0]) == (503, "replayed")
        assert len(night.coordinator.state.leases) == 1

    asyncio.run(scenario())


def test_a_second_holds_no_more_requests_than_a_key_may_send_in_it(night, monkeypatch):
    monkeypatch.setattr(api, "LONG_POLL_S", 0.0)

    async def scenario():
        await night.join()
        began = night.now
        for _ in range(int(KEY_REQUESTS_PER_S)):
            await night.lease()
        assert night.now == began
        await night.lease()
        assert int(night.now) == int(began) + 1, "refused until the next second, and taken then"

    asyncio.run(scenario())


def test_a_leave_that_was_held_back_does_not_remove_a_worker_that_came_back(night):
    async def scenario():
        await night.join()
        night.now += 10
        inner, night.tape.inner = night.tape.inner, HoldBack()
        with pytest.raises(PeerError, match="no usable answer"):
            await night.client.send("POST", "/v1/nodes/leave", b"", t.NodeState, deadline_s=0.1)
        night.tape.inner, held = inner, len(night.tape.seen) - 1
        night.now += 10
        await night.join()
        await night.lease()
        assert await night.tape.again(held) == (503, "replayed")
        assert not night.coordinator.state.members[night.key].left

    asyncio.run(scenario())


def test_the_hosts_requests_count_once_and_two_of_one_second_both_come_through(tmp_path):
    night = Night(tmp_path, "keys/run.key")

    async def scenario():
        assert (await night.admin("pause")).phase == "paused"
        assert (await night.admin("resume")).phase == "running"
        resumed = len(night.tape.seen) - 1
        for _ in range(2):
            assert await night.tape.again(0) == (503, "replayed")
            assert (await night.tape.again(resumed))[0] == 200
            assert night.coordinator.state.phase == "running"
            night.restart()

    asyncio.run(scenario())
    changed = [(body.phase, body.created) for body in night.bodies(RulesChanged)]
    assert changed == [("paused", 10**6), ("running", 10**6 + 1)]


def test_a_node_whose_clock_was_set_back_gets_through_by_itself(night):
    async def scenario():
        await night.join("old")
        client_now = night.now - 20
        late = Client(URL, night.client.key, run=night.run, transport=night.tape, timing=Timing(lambda: client_now))

        async def sleep(seconds):
            nonlocal client_now
            night.now, client_now = night.now + seconds, client_now + seconds

        late._sleep = sleep
        night.client = late
        assert (await night.join()).key == night.key
        assert 20 <= night.now - 10**6 <= 30

    asyncio.run(scenario())


# --- whole runs ---


class AtOnce(httpx.AsyncBaseTransport):
    """A proxy that sends each request twice at the same time, and passes on the second answer."""

    def __init__(self, inner):
        self.inner = inner

    async def handle_async_request(self, request):
        body = await request.aread()
        copies = [httpx.Request(request.method, request.url, headers=request.headers, content=body) for _ in range(2)]
        first = asyncio.create_task(self.inner.handle_async_request(copies[0]))
        try:
            return await self.inner.handle_async_request(copies[1])
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)


def work_through(testbed, transport, clock=time.time):
    """A run whose only worker has another network or clock."""
    worker = testbed.worker("worker")
    inner = httpx.ASGITransport(testbed.app, raise_app_exceptions=False)
    key = load_or_make_key(worker.node.home / "node.key")
    worker.client = worker.node.client = Client(URL, key, transport=transport(inner), timing=Timing(clock, _hurry))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    audit = testbed.audit()
    node = audit.state.members[worker.key]
    assert audit.findings == [] and (node.refused, node.lapsed) == (0, 0)
    return testbed.weights()


@pytest.fixture(scope="module")
def honest_weights(tmp_path_factory):
    return weights_of_one_file(tiny_run(), tmp_path_factory.mktemp("plain") / "run")


def test_a_worker_behind_a_proxy_that_sends_all_twice_gives_the_same_weights(tmp_path, honest_weights):
    assert work_through(RunTestbed(tmp_path / "run", tiny_run()), AtOnce) == honest_weights


@pytest.mark.parametrize("skew_s", first_of(-40.0, 40.0))
def test_a_worker_whose_clock_is_40_seconds_off_works_as_others_do(tmp_path, honest_weights, skew_s):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    assert work_through(testbed, lambda inner: inner, lambda: time.time() + skew_s) == honest_weights


def test_a_worker_and_a_validator_that_stop_say_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1000))
    worker, validator, trainer = testbed.worker("worker"), testbed.validator(), testbed.trainer()

    async def scenario():
        async with asyncio.TaskGroup() as group:
            roles = [group.create_task(role.run()) for role in (worker, validator)]
            life = group.create_task(trainer.run())
            while testbed.coordinator.state.main.version < 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.1)  # else they leave in the second in which they joined, and try again
            for role, task in zip((worker, validator), roles, strict=True):
                role.stopping.set()
                await task
            life.cancel()

    asyncio.run(scenario())
    left = [entry.body.key for entry in testbed.audit().entries if isinstance(entry.body, NodeLeft)]
    assert left[0] == worker.key and len(left) == 2 and testbed.coordinator.state.judges() == []
    assert not testbed.coordinator.state.open_leases and testbed.audit().findings == []
    last = {one.name: one.getMessage() for one in caplog.records if one.name in ("worker", "validator")}
    assert last["worker"].startswith("left credits=") and last["validator"].startswith("left judged="), last


def test_a_stranger_cannot_leave(night):
    with pytest.raises(PeerRefused, match="has not joined"):
        asyncio.run(night.leave())


def test_chunks_of_a_published_version_that_arrive_again_are_refused(tmp_path):
    """Nobody would ever delete them, and the host's disk quota would fill up."""
    night = Night(tmp_path, "keys/trainer.key")
    key = load_or_make_key(night.testbed.folder.keys / "trainer.key")

    async def scenario():
        chunk = digest(b"weights")
        await night.client.send("PUT", f"/v1/blobs/{chunk}", b"weights", t.WriteAck)
        night.now += 1
        files = (t.FileEntry("model.safetensors", 7, chunk, (chunk,)),)
        manifest = t.Manifest(night.run, "policy", 0, (), "float32", "a" * 64, files, 8 << 20, 0.0, 0.0)
        signed = to_json(sign_manifest(manifest, key, now=night.now))
        await night.client.send("POST", "/v1/checkpoints", signed, t.WriteAck)
        assert await night.tape.again(0) == (503, "replayed")
        assert (await night.tape.again(1))[0] == 200, "the same manifest again gets its first answer"
        night.now += 1
        await night.client.send("PUT", f"/v1/blobs/{digest(b'next')}", b"next", t.WriteAck)
        assert night.coordinator.kept.coming == {digest(b"next")}

    asyncio.run(scenario())
