"""The relays of a simulated run. Few relays take each version from the origin, and pass on each chunk that they have.

Used by `simulate`. Clients take chunks from all relays at once, so their uplinks are one link; see `flows`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.plan.clock import Clock
from shoal.plan.flows import Network
from shoal.plan.setting import Setting


@dataclass
class _Filling:
    """How far the relays are with a version, and who waits for that."""

    lacking: int
    has_chunk: bool = False
    for_chunk: list[Callable[[], None]] = field(default_factory=list)
    for_all: list[Callable[[], None]] = field(default_factory=list)


class SimulatedRelays:
    """All relays. Where versions are patches, they fetch the patch first, and then what else is published."""

    def __init__(self, clock: Clock, net: Network, setting: Setting) -> None:
        self._clock, self._net, self._s = clock, net, setting
        self._versions: dict[int, _Filling] = {}
        self._behind = 0
        """Relays that still fetch a whole version, which workers that follow by patches do not need."""
        self.fetched_bytes = 0.0

    def fill(self, version: int) -> None:
        """A version was published."""
        self._versions[version] = _Filling(len(self._s.relays_up))
        for _ in self._s.relays_up:
            self._clock.after(self._s.relay_look_s, lambda: self._begin(version))

    def _begin(self, version: int) -> None:
        s, filling = self._s, self._versions[version]
        size = s.patch_bytes if s.patch_bytes and version else s.full_bytes
        first = min(size, s.chunk_bytes)
        self.fetched_bytes += size

        def has_chunk() -> None:
            filling.has_chunk = True
            waiting, filling.for_chunk = filling.for_chunk, []
            for then in waiting:
                self._clock.after(s.relay_ask_s, then)
            self._net.start(self._clock.now, size - first, ("origin",), has_all)

        def has_all() -> None:
            filling.lacking -= 1
            if not filling.lacking:
                waiting, filling.for_all = filling.for_all, []
                for then in waiting:
                    self._clock.after(s.relay_ask_s, then)
            self._go_on(version)

        self._net.start(self._clock.now, first, ("origin",), has_chunk)

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
        """Call `then` when a client knows that all relays have a version, or now `at_once` if they have."""
        filling = self._versions[version]
        if filling.lacking:
            filling.for_all.append(then)
        else:
            at_once()
