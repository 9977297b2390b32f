"""Submissions: a worker fills a lease, and the draws that say how closely it is looked at."""

from msgspec import UNSET, UnsetType

from shoal.ledger.entry import Entry
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, Member, SubmissionRecord
from shoal.protocol.continuations import is_continued
from shoal.protocol.types import Message


class SubmissionReceived(Message, frozen=True):
    lease: str
    worker: str
    digest: str
    """SHA-256 of the body: the submission's name."""
    size_bytes: int
    groups: tuple[str, ...]
    """Digest of each group, in the order of the lease's slots."""
    created: int = 0
    """When the worker signed it, seconds since the epoch by its own clock."""
    record: str | UnsetType = UNSET
    """Digest of the host's `Record` of the lease; only where the host plays the environments."""


class AuditDrawn(Message, frozen=True):
    """How closely a submission is looked at, fixed before anyone has judged it."""

    submission: str
    slots: tuple[int, ...]
    """Drawn for audit. Influence and pay, which the groups show, may add more, see `protocol.audits.must_audit`."""
    rate: float = 1.0
    draws: tuple[float, ...] = ()
    """One for each group, in [0, 1)."""
    mean_influence: float = 0.0
    """Of the groups accepted until now."""
    order: tuple[str, ...] = ()
    """Validators in the order of their turns."""
    mean_pay: float = 0.0
    """Of the worker's newest groups that have not vested, tokens; those that a refusal takes."""


def apply_submission_received(body: SubmissionReceived, state: State, entry: Entry) -> None:
    lease = state.leases[body.lease]
    stream = state.stream_of(lease)
    late = lease.status != "open"
    if not late:
        state.close(lease)
    lease.status, lease.submission = "submitted", body.digest
    member = state.members[lease.worker]
    member.dropped = 0  # guard: submitting-ends-the-wait
    member.unfilled, lease.unfilled = member.unfilled - lease.unfilled, 0
    _measure_pace(member, lease, entry.time)
    for number in lease.blocks:
        block = stream.versions[lease.version].blocks[number]
        if block.status == "done":  # guard: copy-takes-no-block
            continue
        block.status = "submitted"
        if late:
            block.claims = [*block.claims, lease.id]
    stream.take(lease.version, lease.blocks)
    state.submissions[body.digest] = SubmissionRecord(
        body.lease,
        body.digest,
        entry.seq,
        entry.hash,
        entry.time,
        body.groups,
        judged_at=entry.time,
        record=body.record,
    )
    state.pending.append(body.digest)


def _measure_pace(member: Member, lease: LeaseRecord, now: float) -> None:
    """A worker plays one lease after another, so the time of one begins when the one before was sent. How long
    continuations take depends on how many there are, so they say nothing of a worker's usual speed."""
    took_s = (now - max(lease.issued, member.sent_at)) / len(lease.blocks)
    if not is_continued(lease.blocks[0]):  # guard: pace-of-ordinary-blocks
        member.pace_s = (member.pace_s + took_s) / 2 if member.pace_s else took_s
    member.sent_at = now


def apply_audit_drawn(body: AuditDrawn, state: State, entry: Entry) -> None:
    submission = state.submissions[body.submission]
    submission.audited, submission.rate, submission.draws = body.slots, body.rate, body.draws
    submission.mean_influence, submission.order = body.mean_influence, body.order
    submission.mean_pay = body.mean_pay


EVENTS = {
    "submission_received": (SubmissionReceived, apply_submission_received),
    "audit_drawn": (AuditDrawn, apply_audit_drawn),
}
