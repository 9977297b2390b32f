"""What a host could do without breaking a rule: withhold links, and move its clock.

Without its link a version cannot be audited. The rules say when a link is due, but the host alone has it and could leave it
out. Events have the time of the host's clock. So times must not fall, and an auditor of a live run compares the newest one
with its own clock.
"""

from contextlib import suppress

from shoal.ledger.commands import Publish
from shoal.ledger.errors import Refused
from shoal.ledger.event import Entry
from shoal.ledger.run import RunEnded
from shoal.ledger.state import State
from shoal.ledger.verdicts import Decision
from shoal.ledger.versions import CheckpointPublished, LinkRevealed, decide_publish
from shoal.protocol.constants import BOOKED_WITHIN_S

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
        """Why the link of a version is overdue; empty if it is not."""
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
    """Versions whose links the rules reveal when a version is published."""
    versions = (*state.streams[body.stream].versions, body.version)
    publish = Publish(
        state.trainer_key, body.version, body.root, body.manifest, dict.fromkeys(versions, ("", "")), 0.0, body.stream
    )
    with suppress(Refused):  # `redecide` says so
        return [event.version for event in decide_publish(publish, state) if isinstance(event, LinkRevealed)]
    return []
