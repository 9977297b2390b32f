"""A fast model of a run's pay: workers and validators with plans of their own, turn by turn, under the ledger's rules.

Called by `economics.py`, which compares what the strategies earn. `terms.py` holds the circumstances of a run and its
draws. A turn is the time of one block: a key has a lease judged in it, or waits. Audit rates, quarantines, vesting and
forfeits come from `shoal/ledger/law.py`, decisions from `shoal/ledger/weigh.py`. The same draws are played through the
real `decide` and `apply` in `tests/benchmarks/test_economics.py`. The model has no tokens, prices or checks: a group
pays 1, and a draw says whether a forged one is found.

Axes: B blocks (turns) of a run, G groups of a block, V validators.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from benchmarks.terms import HONEST, Draws, Move, Strategy, Terms
from shoal.ledger.law import LAW
from shoal.ledger.weigh import Weighed, weigh
from shoal.protocol.audits import must_audit
from shoal.protocol.types import GroupVerdict

BLOCK_S, QUARANTINE_S = 20.0, 30.0
"""Seconds to generate a block; seconds of a first quarantine (the run file's default)."""

LEASE_S = BLOCK_S / 2
"""Seconds to fill a block; a worker that lets two leases lapse in a row waits for the next."""

IN_HAND_BLOCKS = 1
"""Blocks that a worker gives back when its quarantine begins: it loses one turn's work."""

LAST = 10 * LAW.vesting_blocks
"""From this many valid blocks on, the audit rate is that of the run, if that is above 0.5 %."""


class Outcome(NamedTuple):
    """Sums of one run over the keys of a worker: groups, except for the last three."""

    credits: int
    vested: int
    burned: int
    honest: int
    """Groups that were generated honestly, paid or not."""
    forged: int
    slashes: int
    refused: int
    """Submissions."""
    faults: tuple[int, ...]
    """By validator."""


# --- what a validator says ---


class Case(NamedTuple):
    """A submission with all that is hidden from some. Sequences have one entry for each group."""

    due: Sequence[bool]
    """Whether the group is drawn for audit."""
    found: Callable[[int], Sequence[bool]]
    """Whether a validator finds the group forged, if it audits it; by validator."""
    order: Sequence[int]
    again: bool
    """Whether a recheck is drawn for it, if it is accepted."""
    friendly: bool
    """Whether it is the cheater's, not a rival's."""


def verdict_of(terms: Terms, case: Case, before: Sequence[Sequence[str]], validator: int) -> list[str]:
    """A validator's outcome for each group of a submission, after the verdicts before its own."""
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
    """Whether fewer than two honest validators will judge, so that none can outvote a lie."""
    return sum(validator >= terms.friends for validator in order[: LAW.most_verdicts]) < 2


# --- the money of a run ---


@dataclass
class Key:
    """An identity in the log. Pay is in groups."""

    valid: int = 0
    escrow: int = 0
    vested: int = 0
    failures: int = 0
    leases: int = 0
    lapsed: int = 0
    """Lapsed leases that cost no pay."""
    dropped: int = 0
    """Leases that lapsed in a row."""
    owes: int = 0
    """Groups of later pay that an earlier lapse costs."""
    free_at: int = 0
    """Turn in which it takes its next lease."""
    slashed: bool = False


@dataclass
class Bench:
    """The validators of a run, shared by all workers."""

    terms: Terms
    faults: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.faults = [0] * self.terms.validators
        self.rate = [LAW.audit_rate(n, self.terms.steady) for n in range(LAST + 1)]

    def sitting(self, order: Sequence[int]) -> list[int]:
        """The validators of an order that are not suspended."""
        return [validator for validator in order if self.faults[validator] < LAW.validator_faults]


class Worker:
    """A strategy at work under its keys."""

    def __init__(self, bench: Bench, strategy: Strategy, draws: Draws, friendly: bool = True) -> None:
        self.bench, self.terms, self.strategy, self.draws, self.friendly = (
            bench, bench.terms, strategy, draws, friendly,
        )  # fmt: skip
        self.keys = [Key() for _ in range(strategy.keys)]
        self.kept = self.vested = self.burned = self.honest = self.forged = self.slashes = self.refused = 0

    def step(self, turn: int) -> None:
        """One turn: take a lease, have it judged, and replace a key that was slashed or refused too often."""
        place = turn % len(self.keys)
        key = self.keys[place]
        if key.free_at > turn:
            return
        move = self.strategy.plan(key.valid, turn, self.slashes, self.draws.coin[turn])
        blocks, leases = in_time(move, self.terms.blocks - turn)
        per_block = (0, 1, self.terms.groups)[move.forged]
        self.forged += leases * blocks * per_block
        self.honest += leases * blocks * (self.terms.groups - per_block)
        key.free_at, key.leases = turn + leases * blocks, key.leases + leases
        if self.draws.late[turn]:
            self._lapse(key, blocks)
            return
        key.dropped = 0
        rate = self.bench.rate[min(key.valid, LAST)]
        danger = self.draws.danger[move.forged]
        for first in range(turn, turn + leases * blocks, blocks):
            calm = rate <= (danger[first] if blocks == 1 else min(danger[first : first + blocks]))
            if calm and not self._has_enemies(first):
                self._accept(key, blocks, self._is_judged_again(first))
            else:
                self._judge(key, first, blocks, move.forged, rate)
        if (key.slashed and self.strategy.renew) or key.failures >= self.strategy.patience:
            self._leave(key)
            self.keys[place] = Key(free_at=turn + leases * blocks)
        key.slashed = False

    def outcome(self) -> Outcome:
        """What came of the run, at its end."""
        credits = self.kept + sum(key.escrow + key.vested for key in self.keys)
        vested = self.vested + sum(key.vested for key in self.keys)
        return Outcome(
            credits, vested, self.burned, self.honest, self.forged, self.slashes, self.refused, tuple(self.bench.faults)
        )

    def _has_enemies(self, turn: int) -> bool:
        """Whether some validator may refuse honest work."""
        if self.friendly or not self.terms.friends:
            return False
        order = self.bench.sitting(self.draws.order[turn])
        if self.terms.sly:
            return is_safe(self.terms, order)
        return any(validator < self.terms.friends for validator in order[: LAW.most_verdicts])

    def _leave(self, key: Key) -> None:
        self.kept += key.escrow + key.vested
        self.vested += key.vested

    def _is_judged_again(self, turn: int) -> bool:
        return self.draws.again[turn] and len(self.bench.sitting(self.draws.order[turn])) > 1

    def _accept(self, key: Key, blocks: int, again: bool) -> None:
        """Nothing vests while a recheck is due."""
        key.valid += blocks
        key.escrow += blocks * self.terms.groups
        self._settle(key)
        if not again:
            self._vest(key)

    def _vest(self, key: Key) -> None:
        due = key.escrow - LAW.vesting_blocks * self.terms.groups
        if due > 0:
            key.vested += due
            key.escrow -= due

    def _lapse(self, key: Key, blocks: int) -> None:
        key.lapsed, key.dropped = key.lapsed + 1, key.dropped + 1
        key.free_at += lapse_turns(key.dropped)
        if key.lapsed > 1 + LAW.free_lapses * key.leases:
            key.lapsed -= 1
            lost = min(key.escrow, blocks * self.terms.groups)
            key.owes = max(key.owes, blocks * self.terms.groups - lost)
            self._burn(key, lost)

    def _settle(self, key: Key) -> None:
        """New pay settles first what an earlier lapse cost."""
        lost = min(key.owes, key.escrow)
        key.owes -= lost
        self._burn(key, lost)

    def _burn(self, key: Key, groups: int) -> None:
        key.escrow -= groups
        self.burned += groups

    def _judge(self, key: Key, turn: int, blocks: int, forged: int, rate: float) -> None:
        """The verdicts on one submission, in their order, until `weigh` decides and no recheck is due."""
        order = self.bench.sitting(self.draws.order[turn])
        case = case_of(self.draws, turn, blocks, forged, rate, order, self.friendly)
        said: list[tuple[str, ...]] = []
        quarantine, decided = 0, False
        for validator in order[: LAW.most_verdicts]:
            said.append(tuple(verdict_of(self.terms, case, said, validator)))
            weighed = _weighed(tuple(said), blocks, self.terms.groups, len(said) < min(LAW.most_verdicts, len(order)))
            if len(said) == 1 and is_quarantined(said[0], key.failures):
                quarantine = quarantine_turns(key.failures + 1)
            if weighed is None:
                continue
            for outvoted in weighed.outvoted:
                self.bench.faults[order[int(outvoted)]] += 1
            if decided:
                if weighed.slash:
                    self._slash(key)
                    quarantine = quarantine_turns(key.failures + 1)
                elif set(weighed.refused) - set(weighed.disputed):
                    self._refuse(key)
                break
            decided = True
            blamed = bool(set(weighed.refused) - set(weighed.disputed))
            if blamed:
                key.valid, key.failures, self.refused = 0, key.failures + 1, self.refused + 1
            again = case.again and not weighed.refused and len(said) == 1 and len(order) > 1
            self._pay(key, weighed, blamed, again)
            if not blamed and _holds_forgery(said, weighed.disputed, self.terms.groups):
                key.valid = 0
            if quarantine and not blamed:
                quarantine = len(said) - 1  # it is lifted as soon as all have judged
            if not again:
                break
        if quarantine:
            key.free_at += quarantine + IN_HAND_BLOCKS

    def _pay(self, key: Key, weighed: Weighed, blamed: bool, again: bool) -> None:
        key.valid += 0 if blamed else len(weighed.accepted)
        key.escrow += len(weighed.accepted) * self.terms.groups
        if weighed.slash:
            self._slash(key)
        elif blamed:
            self._refuse(key)
        else:
            if weighed.accepted:
                self._settle(key)
            if not again:
                self._vest(key)

    def _refuse(self, key: Key) -> None:
        self._burn(key, min(key.escrow, LAW.refused_blocks * self.terms.groups))

    def _slash(self, key: Key) -> None:
        self._burn(key, key.escrow)
        key.valid, key.slashed = 0, True
        self.slashes += 1


_VERDICTS = {
    "accept": GroupVerdict(0, True, "accept", rewards=(0.0, 1.0), tokens=1),
    "soft": GroupVerdict(0, True, "soft"),
    "hard": GroupVerdict(0, True, "hard"),
}


@lru_cache(10_000)
def _weighed(said: tuple[tuple[str, ...], ...], blocks: int, groups: int, more: bool) -> Weighed | None:
    """What verdicts add up to, given by outcome. Validators are named by their place in the order."""
    verdicts = {str(place): [_VERDICTS[outcome] for outcome in verdict] for place, verdict in enumerate(said)}
    return weigh(verdicts, range(blocks), groups, more)


def case_of(
    draws: Draws, turn: int, blocks: int, forged: int, rate: float, order: Sequence[int], friendly: bool
) -> Case:
    """The submission of a lease that began at a turn; each block has the draws of its own turn."""
    turns = range(turn, turn + blocks)
    found = [draws.found[forged][t].tolist() for t in turns]
    return Case(
        due=[must_audit(draw, rate, 1.0, 1.0) for t in turns for draw in draws.audit[t]],
        found=lambda validator: [seen for of_block in found for seen in of_block[validator]],
        order=order,
        again=draws.again[turn],
        friendly=friendly,
    )


def in_time(move: Move, turns_left: int) -> tuple[int, int]:
    """Blocks of each lease and number of leases that fit before the run's end."""
    blocks = min(move.blocks, turns_left)
    return blocks, min(move.leases, turns_left // blocks)


def is_quarantined(first: Sequence[str], failures: int) -> bool:
    """Whether a first verdict quarantines the worker at once, as in `ledger/rules/verdicts`."""
    return "hard" in first or ("soft" in first and (failures + 1) % LAW.soft_failures == 0)


def _holds_forgery(said: Sequence[Sequence[str]], blocks: Sequence[int], groups: int) -> bool:
    """Whether some verdict finds a forgery in one of these blocks."""
    return any("hard" in outcomes[block * groups : (block + 1) * groups] for outcomes in said for block in blocks)


def quarantine_turns(failures: int) -> int:
    """Turns that a worker's n-th quarantine takes, if it is not lifted."""
    return math.ceil(LAW.quarantine_s(failures, QUARANTINE_S) / BLOCK_S)


def lapse_turns(lapses: int) -> int:
    """Turns that a worker waits after its n-th lapse in a row."""
    return math.ceil(LAW.lapse_wait_s(lapses, LEASE_S) / BLOCK_S)


def play(terms: Terms, strategy: Strategy, draws: Draws) -> Outcome:
    """One run of a worker."""
    worker = Worker(Bench(terms), strategy, draws)
    for turn in range(terms.blocks):
        worker.step(turn)
    return worker.outcome()


def play_beside_rival(terms: Terms, strategy: Strategy, seed: Sequence[int]) -> tuple[Outcome, Outcome]:
    """One run of a worker with friends among the validators, and of an honest rival under the same validators."""
    bench = Bench(terms)
    cheat = Worker(bench, strategy, Draws(terms, (*seed, 0)))
    rival = Worker(bench, HONEST, Draws(terms, (*seed, 1)), friendly=False)
    for turn in range(terms.blocks):
        cheat.step(turn)
        rival.step(turn)
    return cheat.outcome(), rival.outcome()
