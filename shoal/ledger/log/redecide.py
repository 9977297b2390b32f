"""Every decision of a log made again: from each event that something outside caused, the rules must give what follows.

Pure: it reads entries, runs `decide` and `consequent_events` on a state of its own, and compares. So a credit that no
verdict gave, a batch with other members, an audit that was not drawn, or a penalty that was left out is found though every
hash fits. It does not see bodies: whether a verdict is true is for `shoal audit`.

What the rules take from outside and the log does not hold cannot be made again: a worker's measured speed (any lease
from one block up to the most that the rules allow passes), and draws whose link is not revealed yet (what the log says of
them is taken as true, and all that follows from it is decided again).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from shoal.ledger.commands import Publish
from shoal.ledger.errors import FAULTS, Refused, Wait
from shoal.ledger.event import Body, Entry
from shoal.ledger.event_types import apply, cause_of, decide, kind_of
from shoal.ledger.replay_context import LogPosition
from shoal.ledger.run_decisions import consequent_events
from shoal.ledger.run_events import RunEnded
from shoal.ledger.state import State
from shoal.ledger.verdicts import Decision
from shoal.ledger.versions import CheckpointPublished, LinkRevealed, decide_publish
from shoal.protocol.constants import BOOKED_WITHIN_S


def redecide(entries: Sequence[Entry], links: Mapping[int, tuple[str, str]]) -> list[str]:
    """A sentence for each event that the rules do not lead to. `links` are the revealed ones, by version.

    The entries must follow each other by hash and be such that `apply` takes them: `verify` sees to both.
    """
    state, findings = State(), list[str]()
    expected: list[Body] = []
    for place, entry in enumerate(entries):
        expected = expected or _due(LogPosition(state, entries, place, links), findings)
        if expected:
            due = expected.pop(0)
            if entry.body != due:  # guard: event-fits
                findings.append(f"{_name(entry)} is not what the rules give here: {_difference(entry.body, due)}")
                expected = []
        apply(state, entry)
        try:
            expected = expected or consequent_events(state)
        except FAULTS as fault:  # it would be the same after each later event
            findings.append(
                f"the rules cannot say what follows {_name(entry)} ({type(fault).__name__}). No coordinator wrote this; "
                "no later event was decided again"
            )
            return findings
    if expected:  # guard: log-cut-short
        findings.append(f"the log ends in the middle of what its last event led to: due is {kind_of(expected[0])}")
    return findings


def _due(here: LogPosition, findings: list[str]) -> list[Body]:
    """Events that the rules give here, this one first; none if nothing can be said of it."""
    entry = here.entries[here.place]
    try:
        cause = cause_of(entry.body, here)
        if cause is None:
            findings.append(f"{_name(entry)} follows from nothing before it")  # guard: event-has-a-cause
            return []
        if cause.command is None:
            return []
        events = decide(cause.command, here.state)
    except (Refused, Wait) as refusal:
        findings.append(f"{_name(entry)} is against the rules: {refusal}")  # guard: event-against-rules
    except FAULTS as fault:
        findings.append(f"{_name(entry)} is nothing that the rules know how to take ({type(fault).__name__})")
    else:
        if not events:
            findings.append(f"{_name(entry)} changes nothing: the rules give no event here")
        return events
    return []


def _name(entry: Entry) -> str:
    return f"event {entry.seq} ({entry.kind})"


def _difference(body: Body, due: Body) -> str:
    if type(body) is not type(due):
        return f"due is {kind_of(due)}"
    fields = [name for name in body.__struct_fields__ if getattr(body, name) != getattr(due, name)]
    said = ", ".join(f"{name} is {_short(getattr(body, name))}, not {_short(getattr(due, name))}" for name in fields)
    return said or "it differs"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


# --- what a host could do without breaking a rule: withhold links, and move its clock ---
#
# Without its link a version cannot be audited. The rules say when a link is due, but the host alone has it and could leave
# it out. Events have the time of the host's clock. So times must not fall, and an auditor of a live run compares the newest
# one with its own clock.


REVEALED_WITHIN_S = 60.0
"""An ended run reveals all links within this time, except those that an unjudged submission keeps hidden."""

JUDGED_WITHIN_S = 3600.0
"""A submission keeps a link hidden for at most this long after the first later submission was judged, or after the run's
end. Validators judge the oldest first, and a dispute ends after ten minutes."""


class HostCheck:
    """What the events of one log say about its host."""

    def __init__(self) -> None:
        self.due: dict[int, int] = {}
        """Versions whose link was due, with the event that it was due after."""
        self.falls: list[tuple[int, float]] = []
        """(event, seconds) where the time falls."""
        self.ended = 0.0
        """When the run ended."""
        self.decided: list[tuple[float, int]] = []
        """(time, number of the submission's event) of each decision."""

    def see(self, state: State, entry: Entry) -> None:
        """Take note of an event that comes after this state."""
        if entry.time < state.time:
            self.falls.append((entry.seq, state.time - entry.time))
        match entry.body:
            case CheckpointPublished():
                for version in _links_due(entry.body, state):
                    self.due.setdefault(version, entry.seq)
            case RunEnded():
                self.ended = entry.time
            case Decision(submission=name) if name in state.submissions:
                self.decided.append((entry.time, state.submissions[name].seq))
            case _:
                pass

    def findings(self, state: State, now: float | None) -> list[str]:
        """A sentence for each, of a log that ends with this state; `now` is the reader's time, None for that of the log."""
        found = []
        if self.falls:  # guard: falls-are-found
            seq, fall_s = self.falls[0]
            more = f", and {len(self.falls) - 1} times after that" if len(self.falls) > 1 else ""
            found.append(f"the time falls by {fall_s:.3f} s at event {seq}{more}: no coordinator writes this")
        ahead_s = state.time - (now or state.time)
        if ahead_s > BOOKED_WITHIN_S:  # guard: future-is-found
            found.append(
                f"the newest event is {ahead_s:.0f} s ahead of this machine's clock (limit {BOOKED_WITHIN_S:.0f}): the "
                "host moved its clock, which ends leases early, or this clock is wrong"
            )
        for version, record in state.main.versions.items():
            why = "" if record.revealed else self._overdue(state, version, max(state.time, now or 0.0))
            if why:
                found.append(f"the link of version {version} is not revealed, so its groups cannot be audited: {why}")
        return found

    def _overdue(self, state: State, version: int, now: float) -> str:
        if version in self.due:  # guard: due-link
            return f"it was due after event {self.due[version]}"
        ended = state.phase == "ended"
        if not ended and version >= state.main.version - state.rules.max_staleness:
            return ""  # it is in use
        since_end_s = now - self.ended if ended else 0.0
        waiting = map(state.submissions.__getitem__, state.pending)
        unjudged = [submission for submission in waiting if state.lease_of(submission).version == version]
        if not unjudged:
            if since_end_s <= REVEALED_WITHIN_S:  # guard: link-after-the-end
                return ""
            return f"the run ended {since_end_s:.0f} s ago. If its host starts it again, the link comes out"
        later = [time for time, seq in self.decided if seq > unjudged[0].seq]
        waited_s = max(since_end_s, later[-1] - later[0] if later else 0.0)
        if waited_s <= JUDGED_WITHIN_S:  # guard: link-kept-by-a-submission
            return ""
        after = "the run ended" if waited_s == since_end_s else "later ones were judged"
        return f"submission {unjudged[0].digest[:12]} is still not judged, {waited_s:.0f} s after {after}"


def _links_due(body: CheckpointPublished, state: State) -> list[int]:
    versions = (*state.streams[body.stream].versions, body.version)
    publish = Publish(
        state.trainer_key, body.version, body.root, body.manifest, dict.fromkeys(versions, ("", "")), 0.0, body.stream
    )
    with suppress(Refused):  # `redecide` says so
        return [event.version for event in decide_publish(publish, state) if isinstance(event, LinkRevealed)]
    return []
