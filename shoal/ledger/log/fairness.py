"""Whether leases went to workers in turn: a figure, because the log does not hold who asked for a lease.

Used by `verify`, which shows it every event. An honest coordinator serves the worker that has waited longest. A lease is
*out of turn* if by the rules another worker could have had it, which was waiting without any lease already when this worker
got its previous one. Only later events of that worker show that it was there and waited.
"""

from collections import Counter, defaultdict

from shoal.ledger.answers import Refused, Wait
from shoal.ledger.entry import Entry
from shoal.ledger.facts.leases import AskLease, LeaseGranted
from shoal.ledger.facts.members import NodeJoined, NodeLeft, NodeRestored
from shoal.ledger.facts.run import RulesChanged
from shoal.ledger.facts.submissions import SubmissionReceived
from shoal.ledger.log.redecide import FAULTS
from shoal.ledger.state import State
from shoal.ledger.table import decide

ASKS_WITHIN_S = 60.0
"""A worker without a lease asks for one within this time. It may have been told to come back after 20 s."""

WAITS_AT_MOST_S = 3600.0
"""A worker that is not served for longer counts as gone, because it may have ended without a word."""

COUNTED = 100
"""At most this many leases are counted for one wait, so that strangers who join and never ask cost an auditor little."""

SHOWN, SHOWN_SHARE = 5, 0.02
"""At most SHOWN workers are named, and only if at least this many leases, and this share of all, are out of turn."""


class Turns:
    """Who waited while others were served twice."""

    def __init__(self) -> None:
        self.leases = 0
        self.favoured: Counter[str] = Counter()
        """Leases out of turn by the worker that got them."""
        self.passed_over: Counter[str] = Counter()
        """Leases out of turn by a worker that waited; several may wait for one lease."""
        self._waiting: dict[str, float] = {}
        """When each worker without a lease could ask for one, seconds since the epoch."""
        self._served: dict[str, float] = {}
        """When each worker got its latest lease."""
        self._before: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        """By waiting worker: (event, worker) of leases that it could have had. They count once it is seen again."""
        self._counted: set[int] = set()

    def see(self, state: State, entry: Entry) -> None:
        """Take note of an event that comes after this state."""
        match entry.body:
            case LeaseGranted(worker=key):
                self.leases += 1
                self._look_who_waits(state, entry, key)
                self._was_there(key)
                self._served[key] = entry.time
            case SubmissionReceived(worker=key, lease=lease):
                if all(held.id == lease for held in state.open_leases_of(key)):
                    self._waiting[key] = entry.time
            case NodeJoined(key=key, role="worker") | NodeRestored(node=key):
                self._was_there(key)
                if not state.open_leases_of(key):
                    self._waiting[key] = entry.time
            case NodeLeft(key=key):
                self._was_there(key)
            case RulesChanged(phase="running"):
                self._waiting = dict.fromkeys(self._waiting, entry.time)  # guard: pause-is-no-wait
            case _:
                pass

    @property
    def out_of_turn(self) -> int:
        """Leases."""
        return len(self._counted)

    def lines(self, state: State) -> list[str]:
        """For a person: the figure, and the workers that it concerns if it is high."""
        lines = [f"leases: {self.leases} granted, {self.out_of_turn} of them out of turn"]
        if self.out_of_turn < max(SHOWN, SHOWN_SHARE * self.leases):
            return lines
        for what, count in (("given to", self.favoured), ("while these waited", self.passed_over)):
            named = ", ".join(f"{state.members[key].name} ({key[:12]}) {n}" for key, n in count.most_common(SHOWN))
            lines.append(f"  {what}: {named}")
        return [*lines, "  This is not proof: a worker that went away without a word and came back looks the same"]

    def _look_who_waits(self, state: State, entry: Entry, served: str) -> None:
        """Note which others could have had this lease, and were waiting already when its worker got the one before."""
        before = self._served.get(served)
        if before is None:
            return
        for key, since in list(self._waiting.items()):
            if entry.time - since > WAITS_AT_MOST_S:  # guard: gone-waits-no-more
                del self._waiting[key]
                continue
            if key == served or since + ASKS_WITHIN_S > before:  # guard: waits-since-the-last-lease
                continue
            if len(self._before[key]) >= COUNTED:
                continue
            if _could_have(state, key, entry.time):  # guard: could-have-it
                self._before[key].append((entry.seq, served))
            else:
                self._waiting[key] = entry.time

    def _was_there(self, key: str) -> None:
        """A worker is seen again: the leases that it could have had count."""
        self._waiting.pop(key, None)
        for seq, served in self._before.pop(key, ()):
            self.passed_over[key] += 1
            self.favoured[served] += seq not in self._counted
            self._counted.add(seq)


def _could_have(state: State, key: str, now: float) -> bool:
    """Whether the rules would give a worker a lease."""
    try:
        return any(isinstance(event, LeaseGranted) for event in decide(AskLease(key, (), 0.0, now), state))
    except (Refused, Wait, *FAULTS):
        return False
