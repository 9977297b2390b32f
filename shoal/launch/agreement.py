"""Where a validator and the others differ: read from the run's public log, from the moment when the validator started.

Called by `launch/node_view`. The events are the host's word, so they are parsed strictly, and only counted.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.ledger.entry import read_stored
from shoal.ledger.facts.verdicts import VerdictGiven
from shoal.ledger.table import KINDS, typed
from shoal.protocol.audits import CHECKS
from shoal.protocol.types import GroupVerdict
from shoal.protocol.wire import WireError

MOST_SUBMISSIONS = 2000
"""Of the newest ones, the verdicts are kept: others judge within minutes."""

MOST_GROUPS = 50_000
"""Verdicts that are kept, of the newest submissions: each counts for one and for its groups."""

NAME_CHARS = 64
"""Length of a digest and of a key."""

MOST_NAMED = 100
"""Validators whose differences are counted by key, more than a run has. Those of further keys count together."""

OTHERS = "others"
"""In place of their keys."""


@dataclass
class Agreement:
    """Groups that this validator and another one judged, and on how many of them they differ."""

    key: str
    compared: int = 0
    differed: Counter[str] = field(default_factory=Counter)
    """By the other validator's key, at most `MOST_NAMED` of them."""
    unknown: int = 0
    """Events of kinds that a newer host writes: they are left out."""
    last: str = ""
    """The newest difference, in words."""
    _verdicts: "OrderedDict[str, dict[str, dict[int, str]]]" = field(default_factory=OrderedDict)
    """Submission -> validator -> slot -> the check that refused it, or ""."""
    _kept: int = 0
    """How many verdicts it has, counted as for `MOST_GROUPS`."""

    def read(self, lines: Iterable[bytes]) -> int:
        """Count the verdicts among these events; returns how many lines were events."""
        read = 0
        for line in lines:
            try:
                stored = read_stored(line)
                if stored.kind not in KINDS:
                    read, self.unknown = read + 1, self.unknown + 1
                    continue
                body = typed(stored).body
            except WireError:
                break  # a host that serves such lines may serve anything after them
            read += 1
            if isinstance(body, VerdictGiven):
                self._take(body)
        return read

    def _take(self, verdict: VerdictGiven) -> None:
        found = {group.slot: _refused_by(group) for group in verdict.groups}
        submission, validator = verdict.submission[:NAME_CHARS], verdict.validator[:NAME_CHARS]
        others = self._verdicts.setdefault(submission, {})
        self._kept += 1 + len(found) - _size_of(others, validator)
        others[validator] = found
        # guard: few-verdicts-are-kept
        while self._verdicts and (len(self._verdicts) > MOST_SUBMISSIONS or self._kept > MOST_GROUPS):
            _, dropped = self._verdicts.popitem(last=False)
            self._kept -= sum(_size_of(dropped, judge) for judge in dropped)
        if self.key not in others:
            return
        pairs = [(self.key, validator)] if validator != self.key else []
        pairs = pairs or [(self.key, other) for other in others if other != self.key]
        for ours, other in pairs:
            for slot in others[ours].keys() & others[other].keys():
                mine, theirs = others[ours][slot], others[other][slot]
                self.compared += 1
                if bool(mine) != bool(theirs):
                    named = other in self.differed or len(self.differed) < MOST_NAMED  # guard: few-validators-are-named
                    self.differed[other if named else OTHERS] += 1
                    said = f"you refused by {mine}, it accepted" if mine else f"you accepted, it refused by {theirs}"
                    self.last = f"group {slot} of {submission[:12]}: {said}"


def _size_of(verdicts: dict[str, dict[int, str]], validator: str) -> int:
    return 1 + len(verdicts[validator]) if validator in verdicts else 0


def _refused_by(group: GroupVerdict) -> str:
    """The check that refused a group; empty if none did. A host may name any text."""
    if group.outcome not in ("soft", "hard"):
        return ""
    return group.check if group.check in CHECKS else "another check"
