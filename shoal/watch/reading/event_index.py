"""Where the log says what: the numbers of the events behind what a page shows, and how each submission ended.

Kept by `run` while it replays the log, because a state does not remember which event changed it. Pure.
"""

from dataclasses import dataclass, field

from msgspec import UNSET

from shoal.ledger.batches import BatchFormed, GroupAccepted, SlotVoid
from shoal.ledger.event import Entry
from shoal.ledger.records import LeaseRecord
from shoal.ledger.state import State
from shoal.ledger.verdicts import Decision
from shoal.ledger.versions import CheckpointPublished
from shoal.protocol import messages as t
from shoal.watch.reading.rollouts import Standing


@dataclass
class Marks:
    """Numbers of events."""

    finals: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (version, slot): what made the slot final."""
    batches: dict[int, int] = field(default_factory=dict)
    """By step."""
    versions: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By version: the event that published it first, and its time."""
    decisions: dict[str, tuple[int, Decision]] = field(default_factory=dict)
    """By submission."""
    faults: dict[tuple[int, int], t.Faults] = field(default_factory=dict)
    """By (version, slot): where the environment failed on the accepted group, if it did."""

    def see(self, entry: Entry) -> None:
        """Note one event."""
        match entry.body:
            case GroupAccepted(version=version, slot=slot, faults=faults):
                self.finals[version, slot] = entry.seq
                if faults is not UNSET:
                    self.faults[version, slot] = faults
            case SlotVoid(version=version, slots=slots):
                self.finals.update({(version, slot): entry.seq for slot in slots})
            case BatchFormed(step=step):
                self.batches[step] = entry.seq
            case CheckpointPublished(version=version):
                self.versions.setdefault(version, (entry.seq, entry.time))
            case Decision(submission=submission):
                self.decisions[submission] = entry.seq, entry.body
            case _:
                pass


def slot_of(state: State, lease: LeaseRecord, index: int) -> int:
    """The slot of a group by its place in the submission that fills the lease."""
    size = state.rules.block_groups
    return lease.blocks[index // size] * size + index % size


def standing_of(state: State, marks: Marks, submission: str, index: int) -> tuple[Standing, int]:
    """What became of a group of a submission, and the number of the event that says so; -1 before there is one."""
    if submission not in marks.decisions:
        return "pending", -1
    seq, decision = marks.decisions[submission]
    lease = state.leases[state.submissions[submission].lease]
    block, slot = lease.blocks[index // state.rules.block_groups], slot_of(state, lease, index)
    if block in decision.disputed:
        return "disputed", seq
    if block in decision.refused:
        return "refused", seq
    if block in decision.copied:
        return "copied", seq
    record = state.main.versions[lease.version].slots.get(slot)
    if record is None or (record.submission != submission and record.status != "void"):
        return "copied", seq
    status: Standing = record.status  # type: ignore[assignment]
    return status, marks.finals.get((lease.version, slot), seq)
