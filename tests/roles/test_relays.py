"""Hosts that call themselves another's run, and pass on to it what the nodes sign for them."""

import asyncio
import contextlib

import httpx
import msgspec
import pytest

from shoal.errors import PeerError
from shoal.net.client import Client
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest, from_json, to_json
from shoal.protocol.host_signatures import sign_promise
from shoal.protocol.signing import Key
from shoal.roles.node.lifecycle import Node
from shoal.roles.worker.worker import Worker
from tests.roles.testbed import URL, RunTestbed, tiny_run

IMPOSTOR = Key(b"\x09" * 32)


class Impostor(httpx.AsyncBaseTransport):
    """Serves another host's run under a key of its own: it changes the seeds of leases, and passes on all else."""

    def __init__(self, testbed):
        self.inner = httpx.ASGITransport(testbed.app, raise_app_exceptions=False)

    async def handle_async_request(self, request):
        body = await request.aread()
        answer = await self.inner.handle_async_request(request)
        data, told = await answer.aread(), None
        if answer.status_code == 200 and request.url.path == "/v1/run":
            told = msgspec.structs.replace(from_json(data, t.RunInfo), run_key=IMPOSTOR.public)
        elif answer.status_code == 200 and request.url.path == "/v1/leases":
            told = self._other_seeds(request, from_json(data, t.LeaseAnswer))
        elif answer.status_code == 200 and request.url.path.endswith("/submission"):
            receipt = from_json(data, t.Receipt)
            assert receipt.digest == digest(body)
            told = sign_promise(msgspec.structs.replace(receipt, signature=""), IMPOSTOR)
        if told is None:
            return httpx.Response(answer.status_code, stream=httpx.ByteStream(data), headers=answer.headers)
        return httpx.Response(200, stream=httpx.ByteStream(to_json(told)), headers={"shoal-protocol": "1"})

    def _other_seeds(self, request, answer):
        if answer.lease is None:
            return answer
        blocks = tuple(
            msgspec.structs.replace(
                block, slots=tuple(msgspec.structs.replace(slot, seed="ab" * 32) for slot in block.slots)
            )
            for block in answer.lease.blocks
        )
        lease = msgspec.structs.replace(answer.lease, blocks=blocks)
        run = request.headers["shoal-run"]
        grant = sign_promise(t.Grant(run, lease, answer.terms, answer.root, answer.content, ""), IMPOSTOR)
        return msgspec.structs.replace(answer, lease=lease, signature=grant.signature)


def guest(testbed, home):
    key = load_or_make_key(home / "node.key")
    make = testbed.worker("x").node.make_engine
    return Worker(Node(Client(URL, key, transport=Impostor(testbed)), key.public, testbed.options(home), make))


def test_a_host_that_names_another_hosts_run_gets_nothing_signed_for_it(tmp_path):
    """Else it could have a member of that run slashed: submissions are signed for the run, and played with other seeds."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=2, rollouts={"max_staleness": 1}))
    worker = testbed.worker("worker")

    async def scenario():
        host = [asyncio.create_task(role.run()) for role in (testbed.trainer(), testbed.validator())]
        ticking = asyncio.create_task(testbed._tick())
        honest = asyncio.create_task(worker.run())
        while (
            not testbed.coordinator.state.members.get(worker.key)
            or not testbed.coordinator.state.members[worker.key].accepted
        ):
            await asyncio.sleep(0.05)
        worker.stopping.set()
        await honest
        credits = testbed.coordinator.state.members[worker.key].credits
        with contextlib.suppress(TimeoutError), pytest.raises(PeerError, match="another run key than before"):
            await asyncio.wait_for(guest(testbed, worker.node.home).run(), 5.0)
        await asyncio.wait_for(testbed.worker("worker").run(), 20.0)  # its own host still has it
        for task in (*host, ticking):
            task.cancel()
        return credits

    credits = asyncio.run(scenario())
    member = testbed.coordinator.state.members[worker.key]
    assert member.credits > credits > 0 and member.refused == 0 and member.standing != "quarantined"
