"""Rows of what single events say: the timeline, verdicts, refusals.

Pure. A row is a dict of plain values; its `seq` is the number of the event that says so.
"""

from collections.abc import Iterator
from typing import Any

from shoal.ledger.event import Body, Entry
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.records import NodeRecord
from shoal.ledger.run import RulesChanged
from shoal.ledger.state import State
from shoal.ledger.verdicts import VerdictGiven
from shoal.protocol.constants import MAX_NODES
from shoal.runs.event_text import sentence_of

Row = dict[str, Any]

_NODE = ("worker", "node", "validator", "key")
"""Fields of events that name a node, the first one that an event has."""


def event_row(entry: Entry, state: State) -> Row:
    """An event in the timeline."""
    return {
        "seq": entry.seq,
        "time_s": entry.time,
        "kind": entry.kind,
        "node": node_of(entry.body, state),
        "version": version_of(entry.body, state),
        "words": sentence_of(entry.body),
        "hash": entry.hash,
    }


def node_of(body: Body, state: State) -> str:
    """Key of the node that an event is about; empty if it is about none."""
    for name in _NODE:
        key = getattr(body, name, "")
        if key:
            return str(key)
    if isinstance(body, LeaseLapsed):
        return state.leases[body.lease].worker
    if isinstance(body, RulesChanged):
        return body.quarantined or body.kicked or body.admitted_validator
    submission = getattr(body, "submission", "")
    return state.lease_of(state.submissions[submission]).worker if submission in state.submissions else ""


def node_note(node: NodeRecord, state: State) -> str:
    """What a worker's standing does not say: whether the host announced it as a cheater, and that it was quarantined."""
    workers = state.config.get("workers")
    cheating = workers.get("cheating") if isinstance(workers, dict) else 0
    cheaters = {f"cheater-{i}" for i in range(min(cheating, MAX_NODES))} if isinstance(cheating, int) else set()
    notes = ["cheats"] if node.role == "worker" and node.name in cheaters else []
    if node.standing != "quarantined" and node.role == "worker" and node.until:
        notes.append("was quarantined")
    return ", ".join(notes)


def version_of(body: Body, state: State) -> int | None:
    """The policy version that an event is about, if it is about one."""
    version = getattr(body, "version", None)
    if isinstance(version, int):
        return version
    lease = getattr(body, "lease", "")
    submission = state.submissions.get(getattr(body, "submission", ""))
    name = lease or (submission.lease if submission is not None else "")
    return state.leases[name].version if name in state.leases else None


def verdict_row(entry: Entry, body: VerdictGiven, state: State) -> Row:
    """A validator's verdict on a submission."""
    lease = state.lease_of(state.submissions[body.submission])
    outcomes = [group.outcome for group in body.groups]
    return {
        "seq": entry.seq,
        "time_s": entry.time,
        "validator": body.validator,
        "submission": body.submission,
        "worker": lease.worker,
        "version": lease.version,
        "groups": len(outcomes),
        "audited": sum(group.audited for group in body.groups),
        **{outcome: outcomes.count(outcome) for outcome in ("accept", "void", "soft", "hard")},
        "differs_from": " ".join(body.differs_from),
    }


def refusal_rows(entry: Entry, body: VerdictGiven, state: State) -> Iterator[Row]:
    """The groups that a verdict refuses."""
    submission = state.submissions[body.submission]
    lease = state.lease_of(submission)
    for index, group in enumerate(body.groups):
        if group.outcome in ("soft", "hard"):
            yield {
                "seq": entry.seq,
                "time_s": entry.time,
                "validator": body.validator,
                "submission": body.submission,
                "index": index,
                "worker": lease.worker,
                "version": lease.version,
                "slot": group.slot,
                "outcome": group.outcome,
                "check": group.check,
                "reason": group.detail,
                "rollout": group.rollout,
                "position": group.position,
                "figure": group.figure,
                "bound": group.bound,
            }
