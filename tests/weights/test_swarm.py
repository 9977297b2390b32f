"""Relays that fill and clients that fetch at one time, in simulated time: what each sends, and how long it takes."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.weights.fetch.chunks import StoredPiece
from shoal.weights.fetch.scheduler import LAST
from shoal.weights.fetch.sources import ORIGIN, Passing
from shoal.weights.fetch.transfer import Transfer, TransferEvents
from tests.weights.simulated import Link, Server, Version, now, simulate

KB = 1000
CHUNK = 16 << 10


@dataclass
class Relay(Server):
    """It serves what it has verified; `held` grows."""

    async def holds(self):
        return frozenset(self.held)

    def expect(self, versions):
        pass

    async def parts(self, digest: str, start: int, size: int) -> AsyncGenerator[bytes, None]:
        if digest not in self.held:
            raise Passing("does not have the chunk yet")
        async for part in super().parts(digest, start, size):
            yield part


class Swarm:
    """A run with one version, whose coordinator has a line that nothing limits."""

    def __init__(self, folder: Path, version: Version, rate: float, relays: int, clients: int) -> None:
        self.folder, self.version = folder, version
        self.origin = Server("origin", version.held, Link(rate))
        self.coordinator = Server("coordinator", version.held, Link(1000 * rate))
        self.relays = [Relay(f"relay-{i}", {}, Link(rate)) for i in range(relays)]
        self.clients = [Relay(f"client-{i}", {}, Link(rate)) for i in range(clients)]

    async def fetch(self, node: Relay, sources: Sequence[Server]) -> float:
        """Returns when the node had everything."""
        folder = self.folder / node.name
        folder.mkdir()

        def keep(name: str, part: Path) -> None:
            node.held[name] = part.read_bytes()

        missing = [StoredPiece(name, CHUNK, store=keep) for name in self.version.held]
        transfer = Transfer(
            missing,
            sources,
            folder,
            rng=random.Random(node.name),
            events=TransferEvents(on_blame=lambda *told: None, on_progress=lambda line: None),
        )
        await transfer.run()
        assert node.held == self.version.held
        return now()

    async def run(self, few: bool, sharing: bool) -> float:
        """Seconds to the last client."""
        others = [*self.relays, *(self.clients if sharing else [])]
        fetching = []
        for relay in self.relays:
            ranked = [_as(other, ORIGIN if few else 0) for other in others if other is not relay]
            fetching.append(self.fetch(relay, [*ranked, _as(self.origin, 0), _as(self.coordinator, LAST)]))
        for client in self.clients:
            ranked = [_as(other, 0) for other in others if other is not client]
            fetching.append(self.fetch(client, [*ranked, _as(self.origin, ORIGIN), _as(self.coordinator, LAST)]))
        return max((await asyncio.gather(*fetching))[len(self.relays) :])


def _as(server: Server, rank: int) -> Server:
    """A server as a source of this rank."""
    copied = type(server).__new__(type(server))
    copied.__dict__ = server.__dict__ | {"rank": rank}
    copied.parts = server.parts  # type: ignore[method-assign]
    return copied


def test_relays_and_clients_of_a_new_version_ask_the_coordinator_for_nothing(tmp_path):
    """However slow the origin's line is, which all relays share."""
    rate = 20 * KB
    version = Version(tmp_path / "v", 100, CHUNK)
    swarm = Swarm(tmp_path, version, rate, relays=3, clients=4)
    took_s = simulate(swarm.run(few=True, sharing=False))
    assert swarm.coordinator.sent == 0
    assert swarm.origin.sent < 3.1 * version.size
    assert took_s < 1.25 * max(3, 7 / 4) * version.size / rate + 2


def test_clients_that_share_leave_little_to_the_origin(tmp_path):
    version = Version(tmp_path / "v", 100, CHUNK)
    swarm = Swarm(tmp_path, version, 200 * KB, relays=2, clients=3)
    simulate(swarm.run(few=False, sharing=True))
    assert swarm.coordinator.sent == 0
    assert swarm.origin.sent < 1.4 * version.size


def test_the_coordinator_serves_if_the_origin_dies_beside_relays(tmp_path):
    version = Version(tmp_path / "v", 100, CHUNK)
    swarm = Swarm(tmp_path, version, 200 * KB, relays=3, clients=4)
    swarm.origin.is_up = lambda time: time < 4
    simulate(swarm.run(few=True, sharing=False))
    assert swarm.coordinator.sent > 0
