"""Where a validator and the others differ: read from the run's public log, from the moment when the validator started.

Called by `launch/node_view`. The events are the host's word, so they are parsed strictly, and only counted.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.ledger.facts.verdicts import VerdictGiven
from shoal.ledger.table import read_entry
from shoal.protocol.wire import WireError

MOST_SUBMISSIONS = 2000
"""Of the newest ones, the verdicts are kept: others judge within minutes."""


@dataclass
class Agreement:
    """Groups that this validator and another one judged, and on how many of them they differ."""

    key: str
    compared: int = 0
    differed: Counter[str] = field(default_factory=Counter)
    """By the other validator's key."""
    last: str = ""
    """The newest difference, in words."""
    _verdicts: "OrderedDict[str, dict[str, dict[int, str]]]" = field(default_factory=OrderedDict)
    """Submission -> validator -> slot -> the check that refused it, or ""."""

    def read(self, lines: Iterable[bytes]) -> int:
        """Count the verdicts among these events; returns how many lines were events."""
        read = 0
        for line in lines:
            try:
                body = read_entry(line)[0].body
            except WireError:
                break  # a host that serves such lines may serve anything after them
            read += 1
            if isinstance(body, VerdictGiven):
                self._take(body)
        return read

    def _take(self, verdict: VerdictGiven) -> None:
        found = {group.slot: group.check if group.outcome in ("soft", "hard") else "" for group in verdict.groups}
        others = self._verdicts.setdefault(verdict.submission, {})
        others[verdict.validator] = found
        while len(self._verdicts) > MOST_SUBMISSIONS:
            self._verdicts.popitem(last=False)
        if self.key not in others:
            return
        pairs = [(self.key, verdict.validator)] if verdict.validator != self.key else []
        pairs = pairs or [(self.key, other) for other in others if other != self.key]
        for ours, other in pairs:
            for slot in others[ours].keys() & others[other].keys():
                mine, theirs = others[ours][slot], others[other][slot]
                self.compared += 1
                if bool(mine) != bool(theirs):
                    self.differed[other] += 1
                    said = f"you refused by {mine}, it accepted" if mine else f"you accepted, it refused by {theirs}"
                    self.last = f"group {slot} of {verdict.submission[:12]}: {said}"
