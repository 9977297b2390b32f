"""Transfers that share links, in simulated time: each moment has the rates that are max-min fair.

Used by `simulate`. Pure: the caller has the clock. A link is a name with a capacity, such as a worker's downlink or the
uplinks of all relays together: a client takes chunks from several sources at once, so they are one link to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
