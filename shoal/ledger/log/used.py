"""Whether batches used groups as a run's rules allow: at most so often, in time, and again only after an audit.

Called by `verify` for each event. `redecide` makes every batch again by the same code that formed it, and so also finds a
wrong order. This file counts on its own: from verdicts, acceptances, slashes and batches alone.
"""

from collections import Counter

from shoal.ledger.entry import Entry
from shoal.ledger.facts.batches import BatchFormed, GroupAccepted
from shoal.ledger.facts.pay import Slash
from shoal.ledger.facts.run import RulesChanged
from shoal.ledger.facts.verdicts import Rechecked, VerdictGiven
from shoal.ledger.state import State
from shoal.ledger.uses import Place


class Used:
    """What batches did with groups so far."""

    def __init__(self) -> None:
        self.times: Counter[Place] = Counter()
        self._found: list[str] = []
        self._accepted: dict[Place, GroupAccepted] = {}
        self._audited = set[tuple[str, int]]()
        """Submission and slot of the groups that an accepting verdict audited."""
        self._barred: dict[Place, str] = {}
        """Why no further batch may take a group."""

    def see(self, state: State, entry: Entry) -> None:
        """Count what an event says about groups; `state` is the one before it."""
        match entry.body:
            case GroupAccepted(version=version, slot=slot):
                self._accepted[version, slot] = entry.body
            case VerdictGiven(submission=submission, groups=groups):
                judged = (group.slot for group in groups if group.audited and group.outcome == "accept")
                self._audited |= {(submission, slot) for slot in judged}
            case Slash(node=node):
                self._bar(self._made_by(state, node), "its maker was slashed")
            case RulesChanged(kicked=node) if node:
                self._bar(self._made_by(state, node), "its maker was kicked")
            case Rechecked(submission=submission, outcome=outcome) if outcome != "confirmed":
                self._bar({submission}, f"a recheck of it ended: {outcome}")
            case BatchFormed():
                self._see_batch(state, entry.body)
            case _:
                pass

    def _see_batch(self, state: State, batch: BatchFormed) -> None:
        again = [place for place in batch.groups if self.times[place]]
        step = f"the batch of step {batch.step}"
        for version, slot in batch.groups:
            age = batch.step - version
            if age > state.rules.max_staleness:  # guard: used-in-time
                self._say(f"{step} used version {version} slot {slot}, which is {age} versions old, limit "
                          f"{state.rules.max_staleness}")  # fmt: skip
        for place in again:
            what, accepted = f"{step} used version {place[0]} slot {place[1]} again", self._accepted.get(place)
            # guard: audited-before-its-second
            if accepted is None or (accepted.submission, place[1]) not in self._audited:
                self._say(f"{what}, but no accepting verdict audited it")
            if place in self._barred:  # guard: barred-is-not-used
                self._say(f"{what}, but {self._barred[place]}")
        # guard: repeated-within-their-places
        if len(again) > state.rules.repeated_groups and state.rules.group_uses > 1:
            self._say(f"{step} used {len(again)} groups again, limit {state.rules.repeated_groups}")
        if sorted(again) != sorted(batch.repeated or ()):  # guard: repeated-is-said
            self._say(f"{step} says that it repeats {len(batch.repeated or ())} groups, and it repeats {len(again)}")
        self.times.update(batch.groups)

    def findings(self, state: State) -> list[str]:
        """A sentence for each use that the rules do not allow."""
        most, found = state.rules.group_uses, list(self._found)
        for place, count in self.times.items():
            accepted = place in self._accepted
            if count > most or not accepted:  # guard: used-once
                found.append(f"group of version {place[0]} slot {place[1]}: used {count} times, accepted {accepted:d}, "
                             f"limit {most}")  # fmt: skip
        return found

    def _made_by(self, state: State, node: str) -> set[str]:
        """A node's submissions with accepted groups."""
        names = {accepted.submission for accepted in self._accepted.values()}
        return {name for name in names if state.lease_of(state.submissions[name]).worker == node}

    def _bar(self, submissions: set[str], why: str) -> None:
        places = (place for place, accepted in self._accepted.items() if accepted.submission in submissions)
        self._barred.update(dict.fromkeys(places, why))

    def _say(self, finding: str) -> None:
        self._found.append(finding)
