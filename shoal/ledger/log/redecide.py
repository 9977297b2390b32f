"""Every decision of a log made again: from each event that something outside caused, the rules must give what follows.

Called by `verify`. Pure: it reads entries, runs `decide` and `follow` on a state of its own, and compares. So a credit
that no verdict gave, a batch with other members, an audit that was not drawn, or a penalty that was left out is found
though every hash fits. It does not see bodies: whether a verdict is true is for `shoal audit`.

What the rules take from outside and the log does not hold cannot be made again: a worker's measured speed (any lease
from one block up to the most that the rules allow passes), and draws whose link is not revealed yet (what the log says of
them is taken as true, and all that follows from it is decided again).
"""

from collections.abc import Mapping, Sequence

from shoal.ledger.answers import Refused, Wait
from shoal.ledger.entry import Body, Entry
from shoal.ledger.facts.versions import LinkRevealed
from shoal.ledger.past import Here
from shoal.ledger.rules.run import follow
from shoal.ledger.state import State
from shoal.ledger.table import apply, cause_of, decide, kind_of

FAULTS = (KeyError, IndexError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError)
"""What rules and state raise over events that no run of these rules ever wrote."""


def redecide(entries: Sequence[Entry], links: Mapping[int, LinkRevealed]) -> list[str]:
    """A sentence for each event that the rules do not lead to. `links` are the revealed ones, by version.

    The entries must follow each other by hash and be such that `apply` takes them: `verify` sees to both.
    """
    state, findings = State(), list[str]()
    expected: list[Body] = []
    for place, entry in enumerate(entries):
        expected = expected or _due(Here(state, entries, place, links), findings)
        if expected:
            due = expected.pop(0)
            if entry.body != due:  # guard: event-fits
                findings.append(f"{_name(entry)} is not what the rules give here: {_difference(entry.body, due)}")
                expected = []
        apply(state, entry)
        try:
            expected = expected or follow(state)
        except FAULTS as fault:  # it would be the same after each later event
            findings.append(
                f"the rules cannot say what follows {_name(entry)} ({type(fault).__name__}). No coordinator wrote this; "
                "no later event was decided again"
            )
            return findings
    if expected:  # guard: log-cut-short
        findings.append(f"the log ends in the middle of what its last event led to: due is {kind_of(expected[0])}")
    return findings


def _due(here: Here, findings: list[str]) -> list[Body]:
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
    """What differs, in a few words."""
    if type(body) is not type(due):
        return f"due is {kind_of(due)}"
    fields = [name for name in body.__struct_fields__ if getattr(body, name) != getattr(due, name)]
    said = ", ".join(f"{name} is {_short(getattr(body, name))}, not {_short(getattr(due, name))}" for name in fields)
    return said or "it differs"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
