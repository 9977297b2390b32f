"""What became of a worker's submissions, told to its user in the log.

Called by `worker` after each lease and when it leaves. It asks the coordinator, and tells what has changed.
"""

import contextlib
import logging
import time

from shoal.errors import NothingYet, PeerError
from shoal.net.client import Client
from shoal.protocol import types as t

log = logging.getLogger("worker")

ASKED_EVERY_S = 2.0
"""Shortest time between two requests."""

ANSWER_S = 5.0
"""How long to wait for an answer."""


class Standing:
    """What the coordinator says of a worker: its accepted, refused and lapsed work, and its credits."""

    def __init__(self, client: Client, key: str, name: str) -> None:
        self._client, self._key = client, key
        self.state = t.NodeState(key, "worker", name, "new", 0, 0, 0, 0, {}, "")
        """As the coordinator said last."""
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
