"""Twenty hostile registrations against a real coordinator: what leaves for them, on real sockets."""

import asyncio
import contextlib
import time

import httpx
import pytest

from shoal.net import urls
from shoal.net.client import Client, PeerRefused, Timing
from shoal.net.connection_limits import ServerLimits
from shoal.net.urls import is_outside
from shoal.protocol.messages import RelayOffer, RelayStanding
from shoal.protocol.signing import Key
from shoal.roles.coordinator import relays
from shoal.roles.node.serve_chunks import application
from shoal.roles.node.share_weights import SharedVersions
from tests.net.wires import serving
from tests.roles.testbed import URL, RunTestbed, tiny_run

VICTIM, REDIRECTING, MOVING, INSIDE = "127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.0.1"
"""127.0.1.x play the part of public addresses."""


@contextlib.asynccontextmanager
async def counted(address: str, answer: bytes = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"):
    """A server of somebody else; gives its port and the requests that reached it."""
    reached = []

    async def serve(reader, writer):
        reached.append(address)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, address, 0)
    async with server:
        yield server.sockets[0].getsockname()[1], reached


@pytest.fixture
def names(monkeypatch):
    """Where names lead. One leads outside when it is judged, and inside afterwards."""
    leads, asked = {}, []

    async def addresses_of(host, port):
        asked.append(host)
        found = leads.get(host, [host])
        return (
            found[1:] if host == "moves.example.org" and asked.count(host) > 1 else found[: 2 if "half" in host else 1]
        )

    monkeypatch.setattr(urls, "addresses_of", addresses_of)
    monkeypatch.setattr(urls, "is_outside", lambda text: text.startswith("127.0.1.") or is_outside(text))
    monkeypatch.setattr(relays, "CHALLENGES_PER_S", 1000.0)
    return leads


async def offer(testbed: RunTestbed, key: Key, url: str, host: str, port: int = 0) -> RelayStanding | None:
    """What the coordinator answers to an offer from an address; None if it refuses the URL."""
    transport = httpx.ASGITransport(testbed.app, client=(host, 5000))
    async with Client(
        URL, key, run=testbed.coordinator.state.run, transport=transport, timing=Timing(testbed.clock)
    ) as client:
        try:
            return await client.post_json("/v1/relays", RelayOffer(url, port), RelayStanding)
        except PeerRefused as refused:
            assert refused.status == 400
            return None


async def settled(testbed: RunTestbed) -> None:
    """Wait until no challenge is due."""
    while testbed.coordinator.relays.challenges.queue:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)


def test_twenty_hostile_registrations_send_one_request_to_each_server_outside_and_none_inside(tmp_path, names):
    testbed, honest = RunTestbed(tmp_path / "run", tiny_run()), Key.generate()

    async def scenario():
        moved = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:%d/\r\ncontent-length: 0\r\n\r\n"
        app = application(SharedVersions(tmp_path), honest, testbed.coordinator.state.run, time.time)
        async with (
            counted(INSIDE) as (inside, reached_inside),
            counted(VICTIM) as (one, reached_one),
            counted(VICTIM) as (two, reached_two),
            counted(MOVING) as (moving, reached_moving),
            counted(REDIRECTING, moved % inside) as (away, reached_away),
            serving(app, ServerLimits()) as relay,
        ):
            names.update({
                "victim.example.org": [VICTIM], "www.victim.example.org": [VICTIM], "away.example.org": [REDIRECTING],
                "inside.example.org": [INSIDE], "half.example.org": [VICTIM, INSIDE],
                "moves.example.org": [MOVING, INSIDE],
            })  # fmt: skip
            hostile = [f"http://victim.example.org:{one}/{i}" for i in range(4)]
            hostile += [f"http://www.victim.example.org:{two}", f"http://{VICTIM}:{two}"]
            hostile += [f"http://away.example.org:{away}", f"http://away.example.org:{away}/again"]
            hostile += [f"http://{host}:{inside}" for host in (INSIDE, "10.0.0.1", "[::1]", "2130706433", "0x7f.1")]
            hostile += [f"http://{host}.example.org:{inside}" for host in ("inside", "half")]
            hostile += [f"http://moves.example.org:{moving}", "http://169.254.169.254/latest/meta-data"]
            hostile += ["http://victim.example.org:25", f"http://user:word@victim.example.org:{one}"]
            hostile += ["ftp://victim.example.org"]
            assert len(hostile) == 20
            working = asyncio.create_task(testbed.coordinator.relays.run())
            for round_ in range(3):
                for i, url in enumerate(hostile):
                    standing = await offer(testbed, Key.generate(), url, f"198.51.{round_}.{i}")
                    assert standing is None or not standing.listed
                await settled(testbed)
            key = Key.generate()
            flood = [
                await offer(testbed, key, f"http://victim.example.org:{one}/{i}", "203.0.113.9") for i in range(60)
            ]
            assert sum(standing.reason.startswith("too many offers") for standing in flood) >= 26
            await settled(testbed)
            assert len(reached_one) + len(reached_two) == 1 and len(reached_away) == 1 and len(reached_moving) <= 1
            assert reached_inside == []
            for _ in range(2):  # beside all that, an honest relay at its own address is listed at once
                standing = await offer(testbed, honest, "", INSIDE, relay)
                await settled(testbed)
            assert standing.listed and [entry.key for entry in testbed.coordinator.relays.told()] == [honest.public]
            working.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
