"""Which process plays which rollout: each environment has processes of its own, and more of them if it is slow.

So an environment that waits for a judge holds up no other environment, and few of its own episodes. It knows processes only
through `episode_processes`.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from shoal.protocol.messages import Slot
from shoal.roles.env_server.episode_processes import Player, Shard
from shoal.roles.env_server.replies import FinalScore, Memo, Reply, group_name
from shoal.roles.env_server.turns import TurnRequest

START_PLAYERS = 2
"""Processes of an environment that answers quickly."""

MAX_PLAYERS = 16
"""Processes of a slow environment. Most of them wait, for a judge or a server."""

PINNED = 4096
"""Slots whose process, and groups whose judgement, are remembered."""


class EnvProcessPool:
    """All processes of a stage."""

    def __init__(
        self,
        make: Callable[[str], Player],
        memo: Memo,
        limit_s: Callable[[str], float],
        start: int = START_PLAYERS,
        most: int = MAX_PLAYERS,
    ) -> None:
        """`make` makes a player of an environment, by its label. `limit_s` gives the environment's time for one turn."""
        self._troupe_of = lambda label: EnvProcesses(label, lambda: Shard(make(label), memo, limit_s), start, most)
        self._troupes: dict[str, EnvProcesses] = {}
        self._judged: OrderedDict[bytes, Future[list[FinalScore]]] = OrderedDict()
        """The newest groups that are judged, or were."""
        self._lock = threading.Lock()

    def play(self, asks: Sequence[TurnRequest]) -> list[Reply]:
        """The replies to turns of different rollouts, in order. All processes work at the same time. Raises `StateError` if
        an environment does not open."""
        for label in {ask.slot.env for ask in asks}:
            self._troupe(label).open()
        parts: dict[Shard, list[int]] = {}
        for place, ask in enumerate(asks):
            parts.setdefault(self._troupe(ask.slot.env).place(ask), []).append(place)
        played = [
            (part, shard.submit(partial(shard.replies, [asks[place] for place in part])))
            for shard, part in parts.items()
        ]
        replies = {place: reply for part, done in played for place, reply in zip(part, done.result(), strict=True)}
        return [replies[place] for place in range(len(asks))]

    def judge(self, slot: Slot, paths: Sequence[bytes]) -> list[FinalScore]:
        """What the rollouts of a slot, which have ended, earn beside each other. Raises as `play`."""
        self._troupe(slot.env).open()
        name = group_name(paths)
        with self._lock:
            judged = self._judged.get(name)  # two leases of a slot may end alike  # guard: judged-for-two-leases
            if judged is None or (judged.done() and judged.exception() is not None):
                judged = self._judged[name] = self._troupes[slot.env].judge(slot, paths)
                if len(self._judged) > PINNED:
                    self._judged.popitem(last=False)
        return judged.result()

    def close(self) -> None:
        for troupe in self._troupes.values():
            troupe.close()

    def _troupe(self, label: str) -> "EnvProcesses":
        with self._lock:
            if label not in self._troupes:
                self._troupes[label] = self._troupe_of(label)
            return self._troupes[label]


class EnvProcesses:
    """The processes of one environment."""

    def __init__(self, label: str, make: Callable[[], Shard], start: int, most: int) -> None:
        self._label, self._make, self._start, self._most = label, make, start, most
        self._shards = [make() for _ in range(start)]
        self._pinned: OrderedDict[int, Shard] = OrderedDict()
        self._compares: Future[bool] | None = None
        """Whether its rollouts are judged beside each other."""
        self._lock = threading.Lock()

    def open(self) -> None:
        """Wait until one of its processes has opened. Raises `StateError`; the next call then tries again."""
        with self._lock:
            if self._compares is None or (self._compares.done() and self._compares.exception() is not None):
                first = self._shards[0]
                self._compares = first.submit(lambda: first.compares(self._label))
            compares = self._compares
        compares.result()

    def place(self, ask: TurnRequest) -> Shard:
        """Who is to play a turn."""
        with self._lock:
            shard = self._place(ask.slot, ask.before)
            shard.expect()
            return shard

    def judge(self, slot: Slot, paths: Sequence[bytes]) -> "Future[list[FinalScore]]":
        with self._lock:
            shard = self._place(slot, b"")
            return shard.submit(lambda: shard.judge(slot, paths))

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def _place(self, slot: Slot, before: bytes) -> Shard:
        """Who plays a turn: who holds the conversation, or else who has least to do. The rollouts of a slot are spread; but
        those that are judged beside each other are in one place."""
        assert self._compares is not None, "an open troupe knows how its rollouts are judged"
        if self._compares.result():
            shard = self._pinned.get(slot.slot) or self._least()
            self._pinned[slot.slot] = shard
            if len(self._pinned) > PINNED:
                self._pinned.popitem(last=False)
            return shard
        return next((shard for shard in self._shards if before and shard.holds(before)), None) or self._least()

    def _least(self) -> Shard:
        if len(self._shards) < min(self._most, self._start + sum(shard.slow for shard in self._shards)):
            self._shards.append(self._make())
        return min(self._shards, key=Shard.load)
