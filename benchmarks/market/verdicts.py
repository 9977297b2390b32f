"""The verdicts of a model run's validators on a submission, and what they add up to.

Called by `market.py`, which plays workers and their pay. Honest validators find what the draws decide; friends of the
cheater lie. Decisions come from `shoal/ledger/verdict_majority.py`, rates from `shoal/ledger/constants.py`.
It does not deal with keys or turns.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from benchmarks.market.terms import Draws, Terms
from shoal.ledger.constants import LAW
from shoal.ledger.verdict_majority import VerdictTally, tally_verdicts
from shoal.protocol.audit_and_pay import must_audit
from shoal.protocol.messages import GroupVerdict


class Sent(NamedTuple):
    """A submission that awaits verdicts."""

    first: int
    """Turn in which its lease began."""
    blocks: int
    forged: int
    pays: tuple[int, ...]
    """Pay of each group of a block. All its blocks are alike."""
    rate: float
    mean_pay: float
    said: tuple[tuple[str, ...], ...] = ()
    """The verdicts so far; empty for a recheck in which no honest validator would refuse anything."""
    order: tuple[int, ...] = ()
    """The validators of these verdicts, then of those that may follow."""
    recheck: bool = False


class Case(NamedTuple):
    """A submission, with facts that not everybody knows. Sequences have one entry for each group."""

    due: Sequence[bool]
    """Whether the group is drawn for audit."""
    found: Callable[[int], Sequence[bool]]
    """For a validator: whether it finds each group forged, if it audits it."""
    order: Sequence[int]
    friendly: bool
    """Whether it is the cheater's, and not a rival's."""


def verdict_of(terms: Terms, case: Case, before: Sequence[Sequence[str]], validator: int) -> list[str]:
    """A validator's outcome for each group of a submission, given the earlier verdicts on it."""
    bad = "soft" if terms.mild else "hard"
    if validator >= terms.friends:
        return [bad if due and found else "accept" for due, found in zip(case.due, case.found(validator), strict=True)]
    good = ["accept"] * len(case.due)
    if not terms.sly:
        return good if case.friendly else ["hard"] * len(good)
    safe = is_safe(terms, case.order)
    if not case.friendly:
        return ["hard"] * len(good) if safe else good
    exposed = [due and found for due, found in zip(case.due, case.found(validator), strict=True)]
    if safe or not any(exposed) or not before:
        return good
    return ["soft" if group else "accept" for group in exposed]


def is_safe(terms: Terms, order: Sequence[int]) -> bool:
    """Whether fewer than two honest validators will judge, so that they cannot outvote a lie."""
    return sum(validator >= terms.friends for validator in order[: LAW.most_verdicts]) < 2


_VERDICTS = {
    "accept": GroupVerdict(0, True, "accept", rewards=(0.0, 1.0), tokens=1),
    "soft": GroupVerdict(0, True, "soft"),
    "hard": GroupVerdict(0, True, "hard"),
}


@lru_cache(10_000)
def weigh_said(said: tuple[tuple[str, ...], ...], blocks: int, groups: int, more: bool) -> VerdictTally | None:
    """What the verdicts add up to. Validators are named by their place in the order."""
    verdicts = {str(place): [_VERDICTS[outcome] for outcome in verdict] for place, verdict in enumerate(said)}
    return tally_verdicts(verdicts, range(blocks), groups, more)


def case_of(draws: Draws, sent: Sent, order: Sequence[int], friendly: bool) -> Case:
    """A submission as its validators find it. Each block has the draws of its own turn."""
    turns = range(sent.first, sent.first + sent.blocks)
    found = [draws.found[sent.forged][t].tolist() for t in turns]
    return Case(
        due=[
            must_audit(draw, sent.rate, 1.0, 1.0, pay, sent.mean_pay)
            for t in turns
            for draw, pay in zip(draws.audit[t], sent.pays, strict=True)
        ],
        found=lambda validator: [seen for of_block in found for seen in of_block[validator]],
        order=order,
        friendly=friendly,
    )


def mean_newest_pay(terms: Terms, stake: Sequence[int]) -> float:
    """The mean pay with which a group's pay is compared, as in `ledger/submissions`."""
    groups = LAW.refused_blocks * terms.groups
    return sum(stake[-groups:]) / groups


def recheck_rate(terms: Terms, stake: Sequence[int], sent: Sent) -> float:
    """Share of submissions like this one that are judged again, as in `ledger/pay`."""
    pay, least = sum(sent.pays) * sent.blocks, terms.law.recheck_rate
    return max(least, pay / (pay + sum(stake)))


def is_quarantined(first: Sequence[str], failures: int) -> bool:
    """Whether a first verdict quarantines the worker at once, as in `ledger/verdict_decisions`."""
    return "hard" in first or ("soft" in first and (failures + 1) % LAW.soft_failures == 0)


def holds_forgery(said: Sequence[Sequence[str]], blocks: Sequence[int], groups: int) -> bool:
    """Whether some verdict finds a forgery in one of these blocks."""
    return any("hard" in outcomes[block * groups : (block + 1) * groups] for outcomes in said for block in blocks)
