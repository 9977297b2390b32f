"""Simulated time, the links of the simulated network, and the relays that share them."""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.plan.simulation_input import SimulationInput


class Clock:
    """The present, in seconds, and what comes later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order, self._later = itertools.count(), list[tuple[float, int, Callable[[], None]]]()

    def after(self, wait_s: float, then: Callable[[], None]) -> None:
        """Let something happen after this time; of two things at the same time, the first that was planned comes first."""
        heapq.heappush(self._later, (self.now + wait_s, next(self._order), then))

    def next_at(self) -> float:
        """When the next thing happens; infinite if there is none."""
        return self._later[0][0] if self._later else math.inf

    def go_on(self) -> None:
        """Let the next thing happen."""
        self.now, _, then = heapq.heappop(self._later)
        then()


# --- transfers, at rates that are max-min fair ---


DONE_BYTES = 1e-3
"""A transfer with less left is over: rates are floats."""


@dataclass
class Flow:
    """One transfer."""

    left_bytes: float
    links: tuple[str, ...]
    done: Callable[[], None]
    rate: float = 0.0


class Network:
    """The transfers that are under way."""

    def __init__(self, bytes_per_s: Mapping[str, float]) -> None:
        """The capacity of each link; 0 is no limit."""
        self._capacity = {name: rate for name, rate in bytes_per_s.items() if rate > 0}
        self._flows: list[Flow] = []
        self._now = 0.0

    def start(self, now: float, size_bytes: float, links: tuple[str, ...], done: Callable[[], None]) -> None:
        """Begin a transfer over all of these links; `done` is called when its last byte has come."""
        self._advance(now)
        self._flows.append(Flow(size_bytes, tuple(link for link in links if link in self._capacity), done))
        self._share()

    def next_end(self) -> float:
        """When the next transfer ends, if none begins before; infinite if there is none."""
        return min((self._now + _time_left(flow) for flow in self._flows), default=float("inf"))

    def end_due(self, now: float) -> list[Callable[[], None]]:
        """Take out the transfers that have ended by now; returns what to call."""
        self._advance(now)
        ended = [flow for flow in self._flows if flow.left_bytes <= DONE_BYTES or _time_left(flow) <= 1e-9]
        self._flows = [flow for flow in self._flows if flow not in ended]
        if ended:
            self._share()
        return [flow.done for flow in ended]

    def _advance(self, now: float) -> None:
        for flow in self._flows:
            flow.left_bytes = max(0.0, flow.left_bytes - flow.rate * (now - self._now)) if flow.links else 0.0
        self._now = now

    def _share(self) -> None:
        """Max-min fair rates: the link with the least for each of its transfers fixes theirs, then the next."""
        left = dict(self._capacity)
        users: dict[str, list[Flow]] = {}
        for flow in self._flows:
            flow.rate = -1.0 if flow.links else float("inf")
            for link in flow.links:
                users.setdefault(link, []).append(flow)
        waiting = {link: len(flows) for link, flows in users.items()}
        while waiting:
            narrow = min(waiting, key=lambda link: left[link] / waiting[link])
            rate = left[narrow] / waiting[narrow]
            for flow in (flow for flow in users[narrow] if flow.rate < 0):
                flow.rate = rate
                for link in flow.links:
                    left[link] = max(0.0, left[link] - rate)
                    waiting[link] -= 1
            waiting = {link: count for link, count in waiting.items() if count}


def _time_left(flow: Flow) -> float:
    if not flow.links or flow.left_bytes <= DONE_BYTES:
        return 0.0
    return flow.left_bytes / flow.rate if flow.rate else float("inf")


# --- relays ---
#
# Clients take chunks from all relays at once, so their uplinks are one link. Each relay fetches the chunks in a random
# order, so together they have all of them before any of them has.


@dataclass
class _Filling:
    """How far the relays are with a version, and who waits for that."""

    size_bytes: float
    enough_bytes: float
    """When each relay has so many, they have all together."""
    lacking: int
    """Relays that have fewer."""
    has_chunk: bool = False
    for_chunk: list[Callable[[], None]] = field(default_factory=list)
    for_all: list[Callable[[], None]] = field(default_factory=list)


class SimulatedRelays:
    """All relays. Where versions are patches, they fetch the patch first, and then what else is published."""

    def __init__(self, clock: Clock, net: Network, setting: SimulationInput, rng: random.Random) -> None:
        self._clock, self._net, self._s, self._rng = clock, net, setting, rng
        self._versions: dict[int, _Filling] = {}
        self._behind = 0
        """Relays that still fetch a whole version, which workers that follow by patches do not need."""
        self.fetched_bytes = 0.0

    def fill(self, version: int) -> None:
        """A version was published. Each relay is told so, and asks for the manifest."""
        s = self._s
        size = s.patch_bytes if s.patch_bytes and version else s.full_bytes
        chunks = math.ceil(size / s.chunk_bytes)
        self._versions[version] = _Filling(size, size * self._enough(chunks) / chunks, len(s.relays_up))
        for _ in s.relays_up:
            self._clock.after(2 * s.request_s, lambda: self._begin(version))

    def _enough(self, chunks: int) -> int:
        """How many chunks each relay has when each chunk is at one relay at least.

        Drawn at random: when each of n relays lacks a share x of the chunks, all n lack a chunk with probability x^n.
        """
        if len(self._s.relays_up) == 1:
            return chunks
        none_lacks = 1.0 - self._rng.random()  # the probability (1 - x^n)^chunks that no chunk is lacking
        share = (-math.expm1(math.log(none_lacks) / chunks)) ** (1 / len(self._s.relays_up))
        return math.ceil(chunks * (1 - share))

    def _begin(self, version: int) -> None:
        filling = self._versions[version]
        first = min(filling.enough_bytes, self._s.chunk_bytes)
        self.fetched_bytes += filling.size_bytes

        def has_chunk() -> None:
            filling.has_chunk = True
            self._tell(filling.for_chunk)
            self._net.start(self._clock.now, filling.enough_bytes - first, ("origin",), has_enough)

        def has_enough() -> None:
            filling.lacking -= 1
            if not filling.lacking:
                self._tell(filling.for_all)
            left = filling.size_bytes - filling.enough_bytes
            self._net.start(self._clock.now, left, ("origin",), lambda: self._go_on(version))

        self._net.start(self._clock.now, first, ("origin",), has_chunk)

    def _tell(self, waiting: list[Callable[[], None]]) -> None:
        """Clients ask now and then what relays have."""
        for then in waiting:
            self._clock.after(self._s.relay_ask_s, then)
        waiting.clear()

    def _go_on(self, version: int) -> None:
        """Fetch the whole version, too, if it is an anchor. A relay that is still at an earlier one leaves this one out."""
        s = self._s
        is_more = 0 < s.patch_bytes < s.full_bytes and version and version % s.anchor_every == 0
        if is_more and self._behind < len(s.relays_up):
            self._behind += 1
            self.fetched_bytes += s.full_bytes
            self._net.start(self._clock.now, s.full_bytes, ("origin",), self._caught_up)

    def _caught_up(self) -> None:
        self._behind -= 1

    def when_begun(self, version: int, then: Callable[[], None]) -> None:
        """Call as soon as a client knows that a relay has a chunk of a version."""
        filling = self._versions[version]
        if filling.has_chunk:
            then()
        else:
            filling.for_chunk.append(then)

    def when_whole(self, version: int, then: Callable[[], None], at_once: Callable[[], None]) -> None:
        """Call `then` when a client knows that the relays together have a version, or now `at_once` if they have."""
        filling = self._versions[version]
        if filling.lacking:
            filling.for_all.append(then)
        else:
            at_once()
