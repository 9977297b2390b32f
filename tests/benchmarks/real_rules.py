"""The same run of workers and validators as `benchmarks/market/market.py` plays it, by the real `decide` and `apply`.

Called by `test_economics.py`. Every event is made and applied to a state in memory, without a store. It uses the
benchmark's strategies, draws and verdicts, but none of its bookkeeping.
"""

from math import ceil, inf

import msgspec

from benchmarks.market.market import (
    BLOCK_S,
    IN_HAND_BLOCKS,
    LEASE_S,
    Outcome,
    in_time,
    lapse_turns,
    pays_of,
)
from benchmarks.market.terms import ALL, ONE, Draws, Sight, Strategy, Terms
from benchmarks.market.verdicts import Sent, case_of, recheck_rate, verdict_of
from shoal.ledger.commands import AskLease, JoinRun, LeaveRun, Publish, Submit, SubmitVerdict, Tick
from shoal.ledger.event_types import apply, decide, make_entry
from shoal.ledger.pay import Forfeited, Slash
from shoal.ledger.run_decisions import consequent_events
from shoal.ledger.run_events import Create, RunCreated
from shoal.ledger.state import State
from shoal.protocol.constants import MAX_LEASE_BLOCKS
from shoal.protocol.encoding import digest
from shoal.protocol.messages import GroupVerdict, Join, Rules, Sampling, Verdict

TRAINER = "f" * 64


def judge_key(index):
    return f"{index:x}" * 64


class Court:
    """A run's state, changed only by commands. Slashes and burned pay are counted by worker, from the events."""

    def __init__(self, terms: Terms):
        self.terms, self.state, self.names = terms, State(), 0
        self.slashes, self.burned = {}, {}
        self.judges = [judge_key(index) for index in range(terms.validators)]
        rules = Rules(
            group_size=4, block_groups=terms.groups, batch_groups=2 * MAX_LEASE_BLOCKS * terms.groups, max_staleness=1,
            steps=10_000, lease_s=LEASE_S, audit_rate=terms.steady, dtype="float32", bounds={}, quarantine_s=30.0,
        )  # fmt: skip
        self.do(Create(RunCreated(
            "r" * 32, "court", "k" * 64, TRAINER, tuple(self.judges), "00" * 32, "11" * 32, (), Sampling(1.0, 8, 64), rules,
            {}, msgspec.structs.replace(terms.law, stranger_share=1.0),  # it only delays those that use many keys
        ), 0.0))  # fmt: skip
        for key, role in ((TRAINER, "trainer"), *((key, "validator") for key in self.judges)):
            self.enter(key, role)
        self.publish()

    def do(self, command):
        bodies = decide(command, self.state)
        while bodies:
            for body in bodies:
                apply(self.state, make_entry(self.state.seq + 1, command.now, body, self.state.head))
                if isinstance(body, Slash):
                    self.slashes[body.node] = self.slashes.get(body.node, 0) + 1
                if isinstance(body, Slash | Forfeited):
                    self.burned[body.node] = self.burned.get(body.node, 0) + body.tokens
            bodies = consequent_events(self.state)

    def enter(self, key, role="worker"):
        self.do(JoinRun(key, Join(role, key[:6], 0.0, "test", "float32", "cpu"), 0.0))

    def publish(self):
        version = self.state.main.version + 1
        self.do(Publish(TRAINER, version, digest(b"root%d" % version), "m", {}, 0.0))


class Defendant:
    """A worker with a strategy, as `market.Worker`."""

    def __init__(self, court: Court, strategy: Strategy, draws: Draws, name: str = "a", friendly: bool = True):
        self.court, self.strategy, self.draws, self.name, self.friendly = court, strategy, draws, name, friendly
        self.made: list[str] = []
        self.keys = [self.new_key() for _ in range(strategy.keys)]
        self.free_at = dict.fromkeys(self.keys, 0)
        self.sent = []
        self.honest = self.forged = 0

    def new_key(self):
        key = digest(f"{self.name}{len(self.made)}".encode())
        self.made.append(key)
        self.court.enter(key)
        return key

    def slashes(self):
        return sum(self.court.slashes.get(key, 0) for key in self.made)

    def step(self, turn):
        court, terms, key = self.court, self.court.terms, self.keys[turn % len(self.keys)]
        now = turn * BLOCK_S
        court.do(Tick(now))
        self.settle(turn)
        key = self.keys[turn % len(self.keys)]
        if self.free_at[key] > turn:
            return
        member = court.state.members[key]
        stake = sum(member.stake) / (terms.law.vesting_blocks * terms.groups)
        move = self.strategy.plan(Sight(member.valid_blocks, turn, self.slashes(), self.draws.coin[turn], stake))
        blocks, leases = in_time(move, terms.blocks - turn)
        if court.state.main.version in court.state.main.batches:
            court.publish()
        per_block = {ALL: terms.groups, ONE: 1}.get(move.forged, 0)
        if not move.drop:
            self.forged += leases * blocks * per_block
            self.honest += leases * blocks * (terms.groups - per_block)
        end = self.free_at[key] = turn + leases * blocks
        mean = court.state.block_tokens / max(1, court.state.accepted_groups)
        for first in range(turn, end, blocks):
            court.do(AskLease(key, (), (blocks + 0.5) * terms.groups * max(1, mean) / 20.0, now))
            (lease,) = court.state.open_leases_of(key)
            assert len(lease.blocks) == blocks
            if self.draws.late[turn] or move.drop:
                court.do(Tick(end * BLOCK_S))
                self.free_at[key] += lapse_turns(court.state.members[key].dropped)
                return
            name = self.submit(key, lease, first, blocks, now)
            record = court.state.submissions[name]
            sent = Sent(first, blocks, move.forged, pays_of(move, terms.groups), record.rate, record.mean_pay)
            self.send(end + terms.delay, key, name, sent)
        if not terms.delay:
            self.settle(end)

    def send(self, due, key, name, sent):
        self.sent.append((due, len(self.sent), key, name, sent))

    def settle(self, turn):
        """Have judged what is due, in the order in which it was sent."""
        while due := sorted(item for item in self.sent if item and item[0] <= turn):
            now, place, key, name, sent = due[0]
            self.sent[place] = None
            before = self.slashes()
            self.judge(key, name, sent, now)
            gone = self.slashes() > before and self.strategy.renew
            if (gone or self.court.state.members[key].failures >= self.strategy.patience) and key in self.keys:
                place = self.keys.index(key)
                self.court.do(LeaveRun(key, now * BLOCK_S, 1))
                self.keys[place] = self.new_key()
                self.free_at[self.keys[place]] = now

    def submit(self, key, lease, turn, blocks, now):
        court = self.court
        court.names += 1
        groups = tuple(digest(f"{court.names}/{index}".encode()) for index in range(blocks * court.terms.groups))
        draws = tuple(draw for t in range(turn, turn + blocks) for draw in self.draws.audit[t])
        sitting = court.state.judges()
        order = tuple(judge_key(v) for v in self.draws.order[turn] if judge_key(v) in sitting)
        name = digest("".join(groups).encode())
        court.do(Submit(key, lease.id, name, 100, groups, draws, order, now, int(now)))
        return name

    def judge(self, key, name, sent, turn):
        """Give verdicts in the drawn order until the submission is closed, a turn apart if the worker is quarantined; or,
        if validators are behind, until a recheck is left."""
        court, terms, waited = self.court, self.court.terms, 0
        submission = court.state.submissions[name]
        order = [court.judges.index(judge) for judge in submission.order if judge in court.state.judges()]
        order = [*sent.order, *(judge for judge in order if judge not in sent.order)]
        case, said = case_of(self.draws, sent, order, self.friendly), list(sent.said)
        slots = court.state.slots_of(court.state.leases[submission.lease])
        for validator in order[len(said) :]:
            if submission.decided and name not in court.state.rechecks:
                break
            waited += court.state.members[key].quarantined_for == name and len(said) > 0
            said.append(verdict_of(terms, case, said, validator))
            groups = tuple(
                GroupVerdict(slot, due, "accept", rewards=(0.0, 1 / pay, 0.0, 1 / pay), tokens=pay)
                if outcome == "accept"
                else GroupVerdict(slot, due, outcome, "sampling", "why")
                for slot, due, outcome, pay in zip(slots, case.due, said[-1], sent.pays * sent.blocks, strict=True)
            )
            # The model has none of the rechecks of new validators.
            rate = recheck_rate(terms, court.state.members[key].stake, sent)
            again = 0.0 if self.draws.again[sent.first] < rate else 1.0
            verdict = Verdict(name, groups)
            court.do(SubmitVerdict(judge_key(validator), verdict, (turn + waited) * BLOCK_S, recheck=again))
            if name in court.state.rechecks and terms.delay and len(said) == 1:
                self.send(turn + terms.delay, key, name, sent._replace(order=(validator,), said=tuple(said)))
                return
        assert name not in court.state.pending and name not in court.state.rechecks
        member = court.state.members[key]
        until = ceil(member.until / BLOCK_S) if member.standing == "quarantined" else turn + waited
        if member.quarantined_for == name:
            self.free_at[key] = max(self.free_at[key], until + IN_HAND_BLOCKS)

    def outcome(self):
        self.settle(inf)
        nodes = [self.court.state.members[key] for key in self.made]
        return Outcome(
            credits=sum(node.credits for node in nodes),
            vested=sum(node.vested for node in nodes),
            burned=sum(self.court.burned.get(key, 0) for key in self.made),
            honest=self.honest,
            forged=self.forged,
            slashes=self.slashes(),
            refused=sum(node.failures for node in nodes),
            faults=tuple(self.court.state.members[judge].failures for judge in self.court.judges),
        )


def try_case(terms: Terms, strategy: Strategy, seed) -> Outcome:
    """One run of a worker, as `market.play`."""
    worker = Defendant(Court(terms), strategy, Draws(terms, seed))
    for turn in range(terms.blocks):
        worker.step(turn)
    return worker.outcome()


def try_case_beside_rival(terms: Terms, strategy: Strategy, rival: Strategy, seed) -> tuple[Outcome, Outcome]:
    """One run of two workers, as `market.play_beside_rival`."""
    court = Court(terms)
    workers = (
        Defendant(court, strategy, Draws(terms, (*seed, 0)), "cheat"),
        Defendant(court, rival, Draws(terms, (*seed, 1)), "rival", friendly=False),
    )
    for turn in range(terms.blocks):
        for worker in workers:
            worker.step(turn)
    return workers[0].outcome(), workers[1].outcome()
