"""Where a worker's work comes from: it asks for leases, checks each, and gives back what it cannot do.

A lease is a stranger's word: whose it is, how much it asks for and when it was issued are compared with what an honest host
may say.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator

from msgspec import UNSET

from shoal.errors import PeerError, StateError
from shoal.net.client import MAX_REASON_CHARS
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.constants import (
    BOOKED_WITHIN_S,
    CONTINUATIONS,
    EPISODES,
    LONG_POLL_S,
    MAX_LEASE_BLOCKS,
    MAX_OPEN_LEASES,
    MAX_ROLLOUT_TOKENS,
    MAX_SAID_CHARS,
)
from shoal.protocol.continuations import is_continued
from shoal.protocol.encoding import is_digest
from shoal.roles.node.lifecycle import Node
from shoal.roles.node.session import SOONEST_S, Session
from shoal.roles.node.throttle import LOOK_S

log = logging.getLogger("worker")

GIVE_UP_S = 5.0
"""How long a worker tries to return a lease that it will not fill, or to ask while it rests."""
ASK_EVERY_S = 60.0
"""How often a worker that rests asks whether the run goes on."""


class Leases:
    """The leases of one worker."""

    def __init__(self, node: Node, session: Session) -> None:
        self._session, self._stopping, self._clock = session, node.stopping, node.clock
        self._allowance, self._activity = node.allowance, node.activity
        self.tokens_per_s = 0.0
        """What the worker says of its speed."""
        self.holding: list[str] = []
        """Leases that are not filled yet."""
        self.came: dict[str, float] = {}
        """When each of them came, by the monotonic clock."""
        self._places = asyncio.Semaphore(MAX_OPEN_LEASES)
        """For leases: no host asks a worker to hold more."""

    async def granted(self) -> AsyncGenerator[t.Grant]:
        """Signed leases, one after another. The next is requested while one is played. An unplayed one is returned at the
        end."""
        grant = await self._one_more()
        while grant is not None and not self._stopping:
            self.holding.append(grant.lease.id)
            ahead = asyncio.create_task(self._ahead())
            ahead.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it
            try:
                yield grant
            except GeneratorExit:
                ahead.cancel()
                raise
            grant = await ahead
        if grant is not None:
            await self.give_back(grant.lease)

    async def _one_more(self) -> t.Grant | None:
        """The next lease, once there is a place for it."""
        await self._stopping.unless(self._places.acquire())  # guard: leases-in-hand
        return await self.next_grant(tuple(self.holding))

    async def _ahead(self) -> t.Grant | None:
        """The next lease, with its version fetched, while the engine fills the one before."""
        grant = await self._one_more()
        if grant is not None and grant.lease.version != self._session.engine.version:
            with contextlib.suppress(PeerError, StateError):  # loading the version meets the same fault, and tells it
                await self._stopping.unless(self._session.bring(grant.lease.version, grant=grant))
        return grant

    def ended(self, lease: t.Lease) -> None:
        """A lease was filled or dropped."""
        self.holding.remove(lease.id)
        self.came.pop(lease.id, None)
        self._places.release()

    async def give_back(self, lease: t.Lease, stopped: int = -1, why: str = "") -> None:
        """Return a lease that we will not fill; `stopped`: the block in which an environment took too long, or ended its
        process, if one did, and `why` says how."""
        said = t.fact(why, MAX_SAID_CHARS) if why else UNSET
        back = t.LeaseRequest(returning=(lease.id,), stopped=stopped, said=said)
        with contextlib.suppress(PeerError):  # not returned, so it lapses at its deadline
            await self._session.client.post_json("/v1/leases", back, t.LeaseAnswer, deadline_s=GIVE_UP_S)

    async def next_grant(self, holding: tuple[str, ...]) -> t.Grant | None:
        """The next lease, signed; None once the run has ended or we are told to stop."""
        reason = ""
        while await self._until_allowed():
            ask = t.LeaseRequest(holding, self.tokens_per_s)
            answer = await self._stopping.unless(self._session.client.post_json("/v1/leases", ask, t.LeaseAnswer))
            if answer is None:
                return None
            if answer.lease is not None:
                return await self._open_grant(answer, answer.lease)
            if await self._has_ended():
                return None
            self._idle(answer.reason[:MAX_REASON_CHARS])
            if answer.reason != reason:
                reason = answer.reason
                log.info("waiting reason=%.200r", reason)
            await self._stopping.unless(asyncio.sleep(min(max(answer.retry_s, SOONEST_S), LONG_POLL_S)))
        return None

    async def _until_allowed(self) -> bool:
        """Wait while the user lets us take no lease; False if we are told to stop, or if the run ends meanwhile. A request
        that is under way may still bring a lease, which is then filled: to drop it would cost pay."""
        said, rested_s = "", 0.0
        while not self._stopping and (why := self._allowance.forbids()):  # guard: no-lease-while-paused
            self._idle(why)
            if why != said:
                said = why
                log.info("resting reason=%r", why)
            await self._stopping.unless(asyncio.sleep(LOOK_S))
            rested_s += LOOK_S
            if rested_s >= ASK_EVERY_S:
                rested_s = 0.0
                with contextlib.suppress(PeerError):  # a host that is away does not end a rest
                    if await self._has_ended(GIVE_UP_S):  # guard: rest-ends-with-the-run
                        return False
        return not self._stopping

    async def _has_ended(self, deadline_s: float | None = None) -> bool:
        """Whether the run has ended, or we are told to stop while we ask. Raises `PeerError`."""
        asked = self._session.client.get_json("/v1/run", t.RunInfo, deadline_s=deadline_s)
        info = await self._stopping.unless(asked)
        if info is not None and info.phase == "ended":
            log.info("the run has ended")
        return info is None or info.phase == "ended"

    def _idle(self, why: str) -> None:
        """Say why there is no work, if there is none in hand."""
        if not self.holding:
            self._activity.now(f"waiting: {why}")

    async def _open_grant(self, answer: t.LeaseAnswer, lease: t.Lease) -> t.Grant:
        """The grant of a lease. A lease that we may not play is returned, for another worker. Raises `PeerError`."""
        if lease.id in self.came:  # guard: leases-come-once
            raise PeerError(f"the host granted lease {lease.id[:40]!r} twice: leave this run, and tell the host")
        self.came[lease.id] = time.monotonic()
        try:
            demand_sound(lease, self._session.kind, vine_of(self._session.info.rules.algorithm) is not None)
            self.demand_same_time(lease.issued)  # guard: lease-from-the-future
            return self._session.open_grant(answer, lease)
        except PeerError:
            await self.give_back(lease)
            raise

    def demand_same_time(self, time_there: float) -> None:
        """Leave a run whose log is ahead of our clock: its leases end early. Raises `PeerError`."""
        ahead_s = time_there - self._clock()
        if ahead_s > BOOKED_WITHIN_S:
            raise PeerError(
                f"the run's log is {ahead_s:.0f} s ahead of this machine's clock (limit {BOOKED_WITHIN_S:.0f}), so leases "
                "end early: compare both clocks with a third, and ask the host"
            )


def demand_sound(lease: t.Lease, kind: str = EPISODES, continues: bool = False) -> None:
    """Raise `PeerError` for a lease of another kind than the run's, and for one that no honest host grants. `continues`:
    whether the run has continuations."""
    kinds = {CONTINUATIONS if continues and is_continued(block.index) else kind for block in lease.blocks}
    unknown = {block.kind for block in lease.blocks} - kinds
    if unknown:  # guard: known-kinds-of-lease
        raise PeerError(
            f"the lease holds {', '.join(sorted(unknown))}, but this version of shoal knows only {kind} in this run: "
            "install the host's version"
        )
    if len(kinds) > 1:  # guard: one-kind-of-work
        raise PeerError("the lease holds continuations and other work at once: tell the host")
    if len(lease.blocks) > MAX_LEASE_BLOCKS:  # guard: blocks-of-a-lease
        raise PeerError(
            f"a lease has {len(lease.blocks)} blocks, limit {MAX_LEASE_BLOCKS} (MAX_LEASE_BLOCKS): tell the host"
        )
    if max(lease.sampling.max_tokens, lease.sampling.all_tokens) > MAX_ROLLOUT_TOKENS:  # guard: tokens-of-a-lease
        raise PeerError(
            f"a lease allows rollouts of more than {MAX_ROLLOUT_TOKENS} tokens (MAX_ROLLOUT_TOKENS): tell the host"
        )
    for slot in (slot for block in lease.blocks for slot in block.slots):
        if not is_digest(slot.seed):  # guard: seeds-of-a-lease
            raise PeerError(
                f"slot {slot.slot} of the lease has the seed {slot.seed[:20]!r}, not 64 hex digits: tell the host"
            )
