"""What a node does now, and the log lines of its changes."""

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.errors import NothingYet, PeerError
from shoal.net.client import Client
from shoal.protocol import messages as t

# --- What a worker or a validator is at, and what it has done since it started ---
#
# Written by the role, from its event loop and its threads; read by `views/terminal/node_view`, from another thread.


@dataclass
class JudgingStats:
    """What a validator judged since it started, in groups."""

    submissions: int = 0
    accepted: int = 0
    void: int = 0
    audited: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By check."""
    last_reason: str = ""
    busy_s: float = 0.0
    """Time that it took to judge, without fetching and waiting."""

    def add(self, verdict: t.Verdict, took_s: float) -> None:
        """Count a verdict."""
        self.submissions, self.busy_s = self.submissions + 1, self.busy_s + took_s
        for group in verdict.groups:
            self.accepted += group.outcome == "accept"
            self.void += group.outcome == "void"
            self.audited += group.audited
            if group.outcome in ("soft", "hard"):
                self.refused[group.check] += 1
                self.last_reason = f"{group.check}: {group.detail} ({group.figure:.3g}, limit {group.bound:.3g})"


@dataclass
class NodeActivity:
    """A node of this machine, now."""

    clock: Callable[[], float] = time.monotonic
    words: str = "starting"
    since: float = 0.0
    """When it began to do that."""
    started: float = 0.0
    key: str = ""
    name: str = ""
    info: t.RunInfo | None = None
    node: t.NodeState | None = None
    """As the coordinator said last."""
    tokens_per_s: float = 0.0
    memory: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """What the node takes of the machine's memory and of its GPU's, MB; 0 if unknown."""
    answered_at: Callable[[], float | None] = lambda: None
    """When the host last answered the node anything, by the monotonic clock; None if never."""
    judged: JudgingStats = field(default_factory=JudgingStats)
    stopping: Callable[[], bool] = bool
    """Whether it was told to stop."""

    def __post_init__(self) -> None:
        self.started = self.since = self.clock()

    def joined(self, info: t.RunInfo, node: t.NodeState) -> None:
        """It has joined a run."""
        self.info, self.node = info, node

    def worked(self, node: t.NodeState, tokens_per_s: float) -> None:
        """It has done some work: what the coordinator says of it now, and its speed."""
        self.node, self.tokens_per_s = node, tokens_per_s

    def now(self, words: str) -> None:
        """It begins to do something else. A wait of which only the numbers change goes on."""
        if words != self.words and not (words.startswith("waiting") and _letters(words) == _letters(self.words)):
            self.since = self.clock()
        self.words = words


def _letters(words: str) -> str:
    return re.sub(r"\d+", "", words)


# --- What became of a worker's submissions, told to its user in the log ---
#
# It asks the coordinator, and tells what has changed.


log = logging.getLogger("worker")

ASKED_EVERY_S = 2.0
"""Shortest time between two requests."""

ANSWER_S = 5.0
"""How long to wait for an answer."""


class NodeReport:
    """What the coordinator says of a worker: its accepted, refused and lapsed work, and its credits."""

    def __init__(self, client: Client, key: str, state: t.NodeState) -> None:
        self._client, self._key, self.state = client, key, state
        """`state` is as the coordinator said last."""
        self._asked_at = 0.0

    async def tell(self, tokens_per_s: float, last: bool = False) -> None:
        """Log what was accepted, what was refused and why. `tokens_per_s` is the worker's speed."""
        if not last and time.monotonic() - self._asked_at < ASKED_EVERY_S:
            return
        self._asked_at, before = time.monotonic(), self.state
        with contextlib.suppress(NothingYet, PeerError):
            self.state = await self._client.get_json(f"/v1/nodes/{self._key}", t.NodeState, deadline_s=ANSWER_S)
        now, paid = self.state, self.state.credits - before.credits
        if now.accepted > before.accepted:
            log.info(
                "accepted groups=%d credits=%+d%s total=%d speed=%.0f tokens/s",
                now.accepted - before.accepted, paid, "" if paid > 0 else " (lapsed leases took pay)", now.credits,
                tokens_per_s,
            )  # fmt: skip
        if now.refused > before.refused:
            log.warning("refused groups=%d reason=%r", now.refused - before.refused, now.last_reason)
        if now.lapsed > before.lapsed:
            log.warning(
                "lapsed leases=%d: not filled in time, given back, or closed more often than is usual in this run",
                now.lapsed - before.lapsed,
            )
        if now.stale > before.stale:
            log.warning(
                "closed leases=%d: newer versions came first, or the host's environment hung; this costs nothing",
                now.stale - before.stale,
            )
        if last:
            log.info("left credits=%d accepted=%d refused=%d", now.credits, now.accepted, now.refused)
