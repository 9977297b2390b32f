"""Leases: granted to a worker, and lapsed when it does not fill them."""

from dataclasses import dataclass

from shoal.ledger.entry import Entry
from shoal.ledger.state import BlockRecord, LeaseRecord, State
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.types import Message


class LeaseGranted(Message, frozen=True):
    lease: str
    worker: str
    version: int
    blocks: tuple[int, ...]
    deadline: float
    """Seconds since the epoch."""
    stream: str = MAIN_STREAM


class LeaseLapsed(Message, frozen=True):
    """A lease ended unfilled; its blocks are free again. Only `deadline`, `returned` and `held` count as lapses."""

    lease: str
    cause: str
    """deadline; returned (by the worker); kicked; quarantine; stale: its version became too old, which costs nothing; held:
    the same, but the worker's share of such leases is more than `Law.stale_margin` above the run's."""


@dataclass(frozen=True)
class AskLease:
    """A worker asks for work and names the leases that it knows it holds."""

    key: str
    holding: tuple[str, ...]
    tokens_per_s: float
    now: float


@dataclass(frozen=True)
class ReturnLeases:
    """A worker that stops gives back what it did not fill."""

    key: str
    leases: tuple[str, ...]
    now: float


def apply_lease_granted(body: LeaseGranted, state: State, entry: Entry) -> None:
    state.leases[body.lease] = LeaseRecord(
        body.lease, body.worker, body.stream, body.version, body.blocks, entry.time, body.deadline
    )
    state.open_leases.append(body.lease)
    state.expect(body.deadline, "lease", body.lease)
    state.members[body.worker].leases += 1
    stream = state.streams[body.stream]
    for block in body.blocks:
        held = stream.versions[body.version].blocks.setdefault(block, BlockRecord("leased", body.lease))
        held.status, held.lease = "leased", body.lease
    stream.take(body.version, body.blocks)


def apply_lease_lapsed(body: LeaseLapsed, state: State, entry: Entry) -> None:
    lease = state.leases[body.lease]
    lease.status = "stale" if body.cause == "stale" else "lapsed"
    state.close(lease)
    if body.cause in ("deadline", "returned", "held"):  # guard: quarantine-is-no-lapse
        _book_drop(state, lease, entry.time)
    elif body.cause == "stale":
        state.members[lease.worker].stale += 1
    state.stream_of(lease).give_back(lease.version, lease.blocks)


def _book_drop(state: State, lease: LeaseRecord, now: float) -> None:
    """Leases that end at the same moment are one drop: a node that stops, or a coordinator that was down."""
    member = state.members[lease.worker]
    member.lapsed += 1
    member.dropped += member.dropped == 0 or member.dropped_at != now  # guard: one-moment-one-drop
    member.dropped_at = now
    for number in lease.blocks:
        block = state.stream_of(lease).versions[lease.version].blocks[number]
        block.dropped_by, block.dropped_at = member.key, now


EVENTS = {
    "lease_granted": (LeaseGranted, apply_lease_granted),
    "lease_lapsed": (LeaseLapsed, apply_lease_lapsed),
}
