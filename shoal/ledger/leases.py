"""Leases: granted to a worker, and lapsed when it does not fill them."""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from shoal.ledger.event import Entry
from shoal.ledger.state import State
from shoal.ledger.state_records import BlockRecord, LeaseRecord
from shoal.protocol.constants import MAIN_STREAM, MAX_LEASE_BLOCKS
from shoal.protocol.continuations import is_continued
from shoal.protocol.messages import Message


class LeaseGranted(Message, frozen=True):
    lease: str
    worker: str
    version: int
    # guard: blocks-of-a-logged-lease
    blocks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LEASE_BLOCKS)]
    deadline: float
    """Seconds since the epoch."""
    stream: str = MAIN_STREAM
    soft: float = 0.0
    """From then on, other workers may be leased the same blocks, seconds since the epoch."""


class LeaseLapsed(Message, frozen=True):
    """A lease ended unfilled. Its blocks are free again, unless others hold them or have filled them. Only those in
    `LAPSES` count as lapses."""

    lease: str
    cause: str
    """deadline; returned (by the worker); stopped (the same, because an environment took too long or ended its process,
    which nobody can replay); kicked; quarantine; quarantine by host; stale: its version became too old, which costs
    nothing; held: the same, but the worker's share of such leases is more than `Law.stale_margin` above the run's;
    overtaken: others have filled all of its blocks, which costs nothing; host_hung: by its deadline, the host's
    stage had taken half of its time or more, which costs nothing; host_hung_often: the same, but beyond that margin."""
    block: int | UnsetType = UNSET
    """The block that was stopped, of this lease or of another that was given back with it; only if one was."""
    tasks: str | UnsetType = UNSET
    """What the host says of that block: its tasks and their environments."""


LAPSES = ("deadline", "returned", "stopped", "held", "host_hung_often")
"""Causes that count as lapses."""


def apply_lease_granted(body: LeaseGranted, state: State, entry: Entry) -> None:
    state.leases[body.lease] = LeaseRecord(
        body.lease, body.worker, body.stream, body.version, body.blocks, entry.time, body.deadline, soft=body.soft
    )
    state.open_leases.append(body.lease)
    state.expect(body.deadline, "lease", body.lease)
    state.expect(body.soft, "soft", body.lease)
    member, stream = state.members[body.worker], state.streams[body.stream]
    member.leases, member.given = member.leases + 1, member.given + len(body.blocks)
    for number in body.blocks:
        block = stream.versions[body.version].blocks.setdefault(number, BlockRecord("leased", body.lease))
        block.grant(body.lease, body.worker)
    stream.take(body.version, body.blocks)


def apply_lease_lapsed(body: LeaseLapsed, state: State, entry: Entry) -> None:
    lease = state.leases[body.lease]
    member = state.members[lease.worker]
    lease.status = body.cause if body.cause in ("stale", "overtaken") else "lapsed"
    state.close(lease)
    if body.cause in LAPSES:  # guard: quarantine-is-no-lapse
        member.drop(entry.time)
        for number in lease.blocks:
            state.stream_of(lease).versions[lease.version].blocks[number].dropped_at = entry.time
    elif body.cause in ("stale", "host_hung"):  # guard: hung-costs-nothing
        member.stale += 1
    if body.cause in (*LAPSES, "overtaken"):
        lease.unfilled = _left_to_others(state, lease)
        member.unfilled += lease.unfilled
    if body.cause == "overtaken" and not is_continued(lease.blocks[0]):  # guard: overtaken-is-slow
        member.pace_s = max(member.pace_s, (entry.time - lease.issued) / len(lease.blocks))
    if body.block in lease.blocks:  # guard: only-the-stopped-block-counts
        state.stream_of(lease).versions[lease.version].blocks[body.block].stop(member.key, body.tasks or "")
    state.release(lease, lease.blocks, entry.time)


def _left_to_others(state: State, lease: LeaseRecord) -> int:
    """Blocks of a lease that a worker dropped, or that were made by a worker that got them after the lease's soft time."""
    blocks = state.stream_of(lease).versions[lease.version].blocks
    made_by = [state.leases[blocks[number].lease] for number in lease.blocks if blocks[number].status == "done"]
    # guard: hurried-is-not-late
    return len(lease.blocks) - sum(other.issued < lease.soft for other in made_by)


EVENTS = {
    "lease_granted": (LeaseGranted, apply_lease_granted),
    "lease_lapsed": (LeaseLapsed, apply_lease_lapsed),
}
