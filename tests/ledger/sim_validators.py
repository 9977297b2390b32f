"""A run in simulated time whose validators take time to judge, by the real `decide` and `apply`, without a store.

Workers submit at a fixed rate, validators take what the rules give them, and each has a habit of
its own. A second has no meaning but the clock inside the commands.
"""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from shoal.ledger.commands import AskLease, JoinRun, Publish, Submit, SubmitVerdict, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.event_types import apply, decide, make_entry
from shoal.ledger.members import ValidatorFault
from shoal.ledger.run_decisions import consequent_events
from shoal.ledger.run_events import Create, RunCreated
from shoal.ledger.state import State
from shoal.ledger.verdict_decisions import to_judge
from shoal.ledger.verdicts import Decision, Rechecked
from shoal.protocol.audit_and_pay import influence, must_audit
from shoal.protocol.encoding import digest
from shoal.protocol.messages import GroupVerdict, Join, Rules, Sampling, Verdict

TRAINER = "f" * 64
REWARDS, TOKENS = (0.0, 1.0, 0.0, 1.0), 10


def key_of(name):
    return digest(name.encode())


@dataclass
class Worker:
    """Submits a block every `every_s` seconds. A forger's groups are all forged."""

    name: str
    every_s: float
    forged: float = 0.0
    """Share of its submissions that are forged."""

    @property
    def key(self):
        return key_of(self.name)


@dataclass
class Judging:
    """A validator that judges what comes first, and takes `check_s` seconds for it."""

    name: str
    check_s: float = 20.0
    away: tuple[tuple[float, float], ...] = ()
    """Times at which it does not run."""

    @property
    def key(self):
        return key_of(self.name)

    def pick(self, panel, names):
        """What it judges next, and how long that takes; None to wait."""
        return (names[0], self.check_s) if names else None

    def outcome(self, panel, name):
        return "hard" if panel.is_found(name) else "accept"

    works = True
    """Whether its projections are of the activations."""


class Colluding(Judging):
    """Accepts what its friend sends, at once; judges the rest like anybody, or lets it pass if `idle`."""

    friend = key_of("friend")
    idle = False
    delay_s = 0.0

    def pick(self, panel, names):
        friends = [name for name in names if panel.maker(name) == self.friend]
        if friends:
            return friends[0], 0.0
        return None if self.idle or not names else (names[0], self.delay_s or self.check_s)

    def outcome(self, panel, name):
        return "accept" if panel.maker(name) == self.friend else super().outcome(panel, name)


class Skipping(Colluding):
    """Lets the turns for all but its friend pass."""

    idle = True


class Rolling(Colluding):
    """Judges all but its friend's work just before its turn ends."""

    delay_s = 28.0


class Lazy(Judging):
    """Accepts everything at once, and invents its projections."""

    works = False

    def pick(self, panel, names):
        return (names[0], 0.0) if names else None

    def outcome(self, panel, name):
        return "accept"


@dataclass
class Panel:
    """The run, and what came of it."""

    workers: list
    judges: list
    law: object = LAW
    seed: int = 0
    batch_groups: int = 60
    max_staleness: int = 3
    train_s: float = 0.0
    now: float = 0.0
    state: State = field(default_factory=State)
    counts: Counter = field(default_factory=Counter)
    """Of events."""
    faults: dict = field(default_factory=dict)
    """How many submissions were decided by the time of each of a validator's faults."""
    decided: int = 0
    accepted: Counter = field(default_factory=Counter)
    """Submissions, by worker."""
    forged: dict = field(default_factory=dict)
    """Whether a submission is forged."""
    passed: list = field(default_factory=list)
    """Accepted forged submissions."""
    waits: list = field(default_factory=list)
    """Seconds from each submission to its decision."""

    def __post_init__(self):
        self.rng, self.numbers, self.queue = random.Random(self.seed), itertools.count(), []
        rules = Rules(
            group_size=4, block_groups=2, batch_groups=self.batch_groups, max_staleness=self.max_staleness,
            steps=4000, lease_s=120.0, audit_rate=0.05, dtype="float32", bounds={}, quarantine_s=30.0,
        )  # fmt: skip
        keys = tuple(judge.key for judge in self.judges)
        self.do(Create(RunCreated(
            "r" * 32, "panel", "k" * 64, TRAINER, keys, "00" * 32, "11" * 32, (), Sampling(1.0, 8, 64), rules,
            {}, self.law,
        ), 0.0))  # fmt: skip
        members = [(TRAINER, "trainer"), *((key, "validator") for key in keys)]
        for key, role in (*members, *((worker.key, "worker") for worker in self.workers)):
            self.do(JoinRun(key, Join(role, key[:6], 0.0, "test", "float32", "cpu"), 0.0))
        self.publish()
        for index, worker in enumerate(self.workers):
            self.at(worker.every_s * (index + 1) / len(self.workers), self.work, worker)
        for judge in self.judges:
            self.at(0.0, self.look, judge)
        self.at(1.0, self.tick)

    # --- the clock ---

    def at(self, time, act, *facts):
        heapq.heappush(self.queue, (time, next(self.numbers), act, facts))

    def run(self, seconds):
        end = self.now + seconds
        while self.queue and self.queue[0][0] <= end and self.state.phase != "ended":
            self.now, _, act, facts = heapq.heappop(self.queue)
            act(*facts)
        self.now = end
        return self

    def tick(self):
        for _ in range(5):
            if not self.do(Tick(self.now)):
                break
        self.at(self.now + 5.0, self.tick)

    def do(self, command):
        bodies = made = decide(command, self.state)
        while bodies:
            for body in bodies:
                self.note(body)
                apply(self.state, make_entry(self.state.seq + 1, self.now, body, self.state.head))
            bodies = consequent_events(self.state)
        if self.state.seq > 0 and self.state.main.version in self.state.main.batches:
            self.at(self.now + self.train_s, self.publish)
        return made

    def note(self, body):
        match body:
            case Decision():
                record = self.state.submissions[body.submission]
                self.decided += 1
                self.waits.append(self.now - record.time)
                if body.accepted:
                    self.accepted[self.maker(body.submission)] += 1
                    self.passed += [body.submission] * self.forged[body.submission]
                elif self.forged[body.submission]:
                    self.counts["forged and refused"] += 1
            case ValidatorFault():
                self.faults.setdefault(body.validator, []).append(self.decided)
            case Rechecked():
                self.counts[f"rechecked: {body.outcome}"] += 1
            case _:
                pass

    def publish(self):
        if self.state.main.version >= 0 and self.state.main.version not in self.state.main.batches:
            return
        version = self.state.main.version + 1
        self.do(Publish(TRAINER, version, digest(b"root%d" % version), "m", {}, self.now))

    # --- workers ---

    def work(self, worker):
        self.at(self.now + worker.every_s, self.work, worker)
        try:
            self.do(AskLease(worker.key, (), 0.0, self.now))
        except Wait:
            return
        (lease,) = self.state.open_leases_of(worker.key)
        groups = tuple(digest(f"{lease.id}/{i}".encode()) for i in range(len(self.state.slots_of(lease))))
        name = digest("".join(groups).encode())
        self.forged[name] = self.rng.random() < worker.forged
        turns = {judge.key: self.rng.random() for judge in self.judges}
        order, draws = tuple(sorted(turns, key=turns.__getitem__)), tuple(self.rng.random() for _ in groups)
        self.do(Submit(worker.key, lease.id, name, 100, groups, draws, order, self.now, int(self.now), turns))

    def maker(self, name):
        return self.state.lease_of(self.state.submissions[name]).worker

    # --- validators ---

    def due(self, name):
        """Which groups of a submission are audited, if all are accepted."""
        record = self.state.submissions[name]
        weight = influence(REWARDS, TOKENS, self.state.rules.algorithm)
        return [must_audit(draw, record.rate, weight, record.mean_influence) for draw in record.draws]

    def is_found(self, name):
        return self.forged[name] and any(self.due(name))

    def look(self, judge):
        """A validator without work looks for some."""
        back = next((until for since, until in judge.away if since <= self.now < until), None)
        if back is not None:
            self.at(back, self.look, judge)
            return
        names = to_judge(self.state, judge.key, self.now) if judge.key in self.state.judges() else []
        chosen = judge.pick(self, names)
        if chosen is None:
            self.at(self.now + 1.0, self.look, judge)
        else:
            self.at(self.now + chosen[1], self.give, judge, chosen[0])

    def give(self, judge, name):
        if not any(since <= self.now < until for since, until in judge.away):
            record, outcome = self.state.submissions[name], judge.outcome(self, name)
            due, accepted = self.due(name), outcome == "accept"
            facts = {"rewards": REWARDS, "tokens": TOKENS} if accepted else {"check": "sampling", "detail": "why"}
            slots = self.state.slots_of(self.state.lease_of(record))
            groups = tuple(
                GroupVerdict(slot, audited or not accepted, outcome, **facts)
                for slot, audited in zip(slots, due, strict=True)
            )
            honest = {other.key for other in self.judges if other.works}
            differs = tuple(
                other for other in record.verdicts if any(due) and not (judge.key in honest and other in honest)
            )
            try:
                self.do(SubmitVerdict(judge.key, Verdict(name, groups), self.now, "p" * 64, self.rng.random(), differs))
            except Refused:
                pass
        self.look(judge)
