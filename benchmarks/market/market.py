"""A fast model of a run's pay: workers and validators follow their strategies, turn by turn, under the ledger's rules.

Called by `economics.py`, which compares what the strategies earn. `terms.py` holds the circumstances of a run and its
draws. A turn is the time of one block: in it a lease of a key is judged, or the key waits. Audit rates, quarantines,
vesting and forfeits come from `shoal/ledger/constants.py`, verdicts from `verdicts.py`.
`tests/benchmarks/test_economics.py` plays the same draws by the real `decide` and `apply`. The model has no prices or
checks: an honest group pays 1, a forged group pays its length in honest ones, and a draw decides whether it is found.

Axes: B blocks (turns) of a run, G groups of a block, V validators.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from benchmarks.market.terms import HONEST, Draws, Move, Sight, Strategy, Terms
from benchmarks.market.verdicts import (
    Case,
    Sent,
    case_of,
    holds_forgery,
    is_quarantined,
    is_safe,
    mean_newest_pay,
    recheck_rate,
    verdict_of,
    weigh_said,
)
from shoal.ledger.constants import LAW
from shoal.ledger.verdict_majority import VerdictTally

BLOCK_S, QUARANTINE_S = 20.0, 30.0
"""Seconds to generate a block; seconds of a first quarantine (the run file's default)."""

LEASE_S = BLOCK_S / 2
"""Seconds to fill a block. A worker that lets two leases in a row lapse waits before the next."""

IN_HAND_BLOCKS = 1
"""Blocks that a worker gives back when its quarantine begins: it loses one turn's work."""

LAST = 10 * LAW.vesting_blocks
"""From this many valid blocks on, the audit rate is the run's, if that is above 0.5 %."""


class Outcome(NamedTuple):
    """Sums of one run over the keys of a worker. The first three are pay, in units of an honest group's."""

    credits: int
    vested: int
    burned: int
    honest: int
    """Groups that were generated honestly, paid or not."""
    forged: int
    """Forged groups."""
    slashes: int
    refused: int
    """Refused submissions."""
    faults: tuple[int, ...]
    """Faults of each validator."""


@dataclass(eq=False)
class Key:
    """An identity in the log."""

    valid: int = 0
    stake: list[int] = field(default_factory=list)
    """Pay of each group that has not vested, oldest first."""
    vested: int = 0
    failures: int = 0
    leases: int = 0
    lapsed: int = 0
    """Lapsed leases that cost no pay."""
    dropped: int = 0
    """Number of the latest leases that lapsed in a row."""
    owes: int = 0
    """Groups whose pay it will lose for an earlier lapse."""
    rechecks: int = 0
    """Its accepted submissions that will be judged again."""
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
    """A worker that follows a strategy, with its keys."""

    def __init__(self, bench: Bench, strategy: Strategy, draws: Draws, friendly: bool = True) -> None:
        self.bench, self.terms, self.strategy, self.draws, self.friendly = (
            bench, bench.terms, strategy, draws, friendly,
        )  # fmt: skip
        self.keys = [Key() for _ in range(strategy.keys)]
        self.left: list[Key] = []
        self.sent: list[tuple[int, int, Key, Sent]] = []
        """A heap of (turn in which it is judged, number, key, submission)."""
        self.numbers = self.burned = self.honest = self.forged = self.slashes = self.refused = 0

    def step(self, turn: int) -> None:
        """One turn: settle what is due, and take a lease."""
        self._settle(turn)
        key = self.keys[turn % len(self.keys)]
        if key.free_at > turn:
            return
        stake = sum(key.stake) / (LAW.vesting_blocks * self.terms.groups)
        move = self.strategy.plan(Sight(key.valid, turn, self.slashes, self.draws.coin[turn], stake))
        blocks, leases = in_time(move, self.terms.blocks - turn)
        end = key.free_at = turn + leases * blocks
        key.leases += leases
        pays = pays_of(move, self.terms.groups)
        forged = (0, 1, self.terms.groups)[move.forged]
        if not move.drop:
            self.forged += leases * blocks * forged
            self.honest += leases * blocks * (self.terms.groups - forged)
        if self.draws.late[turn] or move.drop:
            self._lapse(key, blocks)
            return
        key.dropped = 0
        mean_pay = mean_newest_pay(self.terms, key.stake)
        rate = self.bench.rate[min(key.valid, LAST)] if mean_pay else 1.0
        for first in range(turn, end, blocks):
            self._send(end + self.terms.delay, key, Sent(first, blocks, move.forged, pays, rate, mean_pay))
        if not self.terms.delay:
            self._settle(end)

    def _send(self, due: int, key: Key, sent: Sent) -> None:
        self.numbers += 1
        heappush(self.sent, (due, self.numbers, key, sent))

    def _settle(self, turn: float) -> None:
        """Judge the submissions that are due, and replace keys that were slashed or refused too often."""
        while self.sent and self.sent[0][0] <= turn:
            now, _, key, sent = heappop(self.sent)
            if sent.recheck:
                key.rechecks -= 1
                if sent.said:
                    self._judge_again(key, sent, now)
            elif not self.bench.sitting(self.draws.order[sent.first]):
                continue  # all are suspended: nobody judges it
            elif self._is_calm(sent) and not self._has_enemies(sent.first):
                self._accept(key, sent, now)
            else:
                self._judge(key, sent, now)
            gone = (key.slashed and self.strategy.renew) or key.failures >= self.strategy.patience
            if gone and key in self.keys:
                self.left.append(key)
                self.keys[self.keys.index(key)] = Key(free_at=now)
            key.slashed = False

    def outcome(self) -> Outcome:
        """The result of the run, after everything is judged."""
        self._settle(math.inf)
        keys = (*self.keys, *self.left)
        vested = sum(key.vested for key in keys)
        credits = vested + sum(sum(key.stake) for key in keys)
        return Outcome(
            credits, vested, self.burned, self.honest, self.forged, self.slashes, self.refused, tuple(self.bench.faults)
        )

    def _is_calm(self, sent: Sent) -> bool:
        """Whether no validator would find anything, so that the verdicts can be skipped."""
        rate = sent.rate * max(1.0, max(sent.pays) / sent.mean_pay) if sent.mean_pay else sent.rate
        danger = self.draws.danger[sent.forged]
        return rate <= min(danger[sent.first : sent.first + sent.blocks])

    def _has_enemies(self, turn: int) -> bool:
        """Whether some validator may refuse honest work."""
        if self.friendly or not self.terms.friends:
            return False
        order = self.bench.sitting(self.draws.order[turn])
        if self.terms.sly:
            return is_safe(self.terms, order)
        return any(validator < self.terms.friends for validator in order[: LAW.most_verdicts])

    def _accept(self, key: Key, sent: Sent, now: int) -> None:
        drawn = self.draws.again[sent.first] < recheck_rate(self.terms, key.stake, sent)
        key.valid += sent.blocks
        key.stake.extend(sent.pays * sent.blocks)
        self._pay_debt(key)
        if not drawn or len(self.bench.sitting(self.draws.order[sent.first])) < 2:
            self._vest(key)
        elif self.terms.delay:
            self._look_again(key, sent, now)

    def _look_again(self, key: Key, sent: Sent, now: int) -> None:
        """Schedule a recheck. Nothing vests before it."""
        key.rechecks += 1
        self._send(now + self.terms.delay, key, sent._replace(recheck=True))

    def _vest(self, key: Key) -> None:
        due = len(key.stake) - LAW.vesting_blocks * self.terms.groups
        if due > 0 and not key.rechecks:
            key.vested += sum(key.stake[:due])
            del key.stake[:due]

    def _lapse(self, key: Key, blocks: int) -> None:
        key.lapsed, key.dropped = key.lapsed + 1, key.dropped + 1
        key.free_at += lapse_turns(key.dropped)
        if key.lapsed > 1 + LAW.free_lapses * key.leases:
            key.lapsed -= 1
            groups = blocks * self.terms.groups
            key.owes = max(key.owes, groups - len(key.stake))
            self._burn(key, groups)

    def _pay_debt(self, key: Key) -> None:
        """Take what an earlier lapse cost from new pay."""
        groups = min(key.owes, len(key.stake))
        key.owes -= groups
        self._burn(key, groups)

    def _burn(self, key: Key, groups: int) -> None:
        """Take the newest pay that has not vested."""
        lost = key.stake[max(0, len(key.stake) - groups) :]
        self.burned += sum(lost)
        del key.stake[len(key.stake) - len(lost) :]

    def _judge(self, key: Key, sent: Sent, now: int) -> None:
        """Hear the verdicts on a submission, in order, until `weigh` decides."""
        order = self.bench.sitting(self.draws.order[sent.first])
        case = case_of(self.draws, sent, order, self.friendly)
        said: list[tuple[str, ...]] = []
        quarantine, weighed = 0, None
        while weighed is None:
            weighed = self._hear(case, said, sent.blocks)
            if len(said) == 1 and is_quarantined(said[0], key.failures):
                quarantine = quarantine_turns(key.failures + 1)
        blamed = len(set(weighed.refused) - set(weighed.disputed))
        if blamed:
            key.valid, key.failures, self.refused = 0, key.failures + 1, self.refused + 1
        drawn = self.draws.again[sent.first] < recheck_rate(self.terms, key.stake, sent)
        again = drawn and not weighed.refused and len(said) == 1 and len(order) > 1
        self._pay(key, weighed, sent, blamed, again)
        if not blamed and holds_forgery(said, weighed.disputed, self.terms.groups):
            key.valid = 0
        if quarantine and not blamed:
            quarantine = len(said) - 1  # it is lifted as soon as all have judged
        _quarantine(key, quarantine, now)
        sent = sent._replace(said=tuple(said), order=tuple(order))
        if again and self.terms.delay:
            self._look_again(key, sent, now)
        elif again:
            self._judge_again(key, sent, now)

    def _judge_again(self, key: Key, sent: Sent, now: int) -> None:
        """Hear further verdicts on an accepted submission. If two refuse it, that costs as much as any refusal."""
        order = [sent.order[0], *self.bench.sitting(sent.order[1:])]
        case, said = case_of(self.draws, sent, order, self.friendly), list(sent.said)
        weighed = None
        while weighed is None and len(said) < len(order):
            weighed = self._hear(case, said, sent.blocks)
        blamed = len(set(weighed.refused) - set(weighed.disputed)) if weighed else 0
        if weighed and weighed.slash:
            self._slash(key)
            _quarantine(key, quarantine_turns(key.failures + 1), now)
        elif blamed:
            self._refuse(key, blamed)
            if is_quarantined(said[-1], key.failures):
                _quarantine(key, quarantine_turns(key.failures + 1), now)
        elif (weighed is None or weighed.refused) and any("hard" in verdict for verdict in said):
            key.valid = 0  # a forgery that could not be settled
        if blamed:
            key.valid, key.failures, self.refused = 0, key.failures + 1, self.refused + 1

    def _hear(self, case: Case, said: list[tuple[str, ...]], blocks: int) -> VerdictTally | None:
        """Hear one more verdict. Returns what all add up to. Validators that are outvoted are at fault."""
        said.append(tuple(verdict_of(self.terms, case, said, case.order[len(said)])))
        more = len(said) < min(LAW.most_verdicts, len(case.order))
        weighed = weigh_said(tuple(said), blocks, self.terms.groups, more)
        for outvoted in weighed.outvoted if weighed else ():
            self.bench.faults[case.order[int(outvoted)]] += 1
        return weighed

    def _pay(self, key: Key, weighed: VerdictTally, sent: Sent, blamed: int, again: bool) -> None:
        key.valid += 0 if blamed else len(weighed.accepted)
        key.stake.extend(sent.pays * len(weighed.accepted))
        if weighed.slash:
            self._slash(key)
        elif blamed:
            self._refuse(key, blamed)
        else:
            if weighed.accepted:
                self._pay_debt(key)
            if not again:
                self._vest(key)

    def _refuse(self, key: Key, blocks: int) -> None:
        self._burn(key, LAW.refused_blocks * self.terms.groups * blocks)

    def _slash(self, key: Key) -> None:
        self._burn(key, len(key.stake))
        key.valid, key.slashed = 0, True
        self.slashes += 1


def _quarantine(key: Key, turns: int, now: int) -> None:
    if turns:
        key.free_at = max(key.free_at, now + turns + IN_HAND_BLOCKS)


def pays_of(move: Move, groups: int) -> tuple[int, ...]:
    """Pay of each group of a block."""
    forged = (0, 1, groups)[move.forged]
    return (move.length,) * forged + (1,) * (groups - forged)


def in_time(move: Move, turns_left: int) -> tuple[int, int]:
    """Blocks of each lease and number of leases that fit before the run's end."""
    blocks = min(move.blocks, turns_left)
    return blocks, 1 if move.drop else min(move.leases, turns_left // blocks)


def quarantine_turns(failures: int) -> int:
    """Length of a worker's n-th quarantine in turns, if it is not lifted."""
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
