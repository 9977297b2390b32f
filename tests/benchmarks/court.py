"""The same run of workers and validators as `benchmarks/market.py` plays it, by the real `decide` and `apply`.

Called by `test_economics.py`. Every event is made and applied to a state in memory, without a store. It uses the
benchmark's strategies, draws and verdicts, but none of its bookkeeping.
"""

from benchmarks.market import BLOCK_S, IN_HAND_BLOCKS, LEASE_S, Outcome, case_of, in_time, lapse_turns, verdict_of
from benchmarks.terms import ALL, ONE, Draws, Strategy, Terms
from shoal.ledger.facts.leases import AskLease
from shoal.ledger.facts.members import Enter
from shoal.ledger.facts.pay import Forfeited, Slash
from shoal.ledger.facts.run import Create, RunCreated, Tick
from shoal.ledger.facts.submissions import Submit
from shoal.ledger.facts.verdicts import Judge
from shoal.ledger.facts.versions import Publish
from shoal.ledger.rules.run import follow
from shoal.ledger.state import State
from shoal.ledger.table import apply, decide, make_entry
from shoal.protocol.constants import MAX_LEASE_BLOCKS
from shoal.protocol.types import GroupVerdict, Join, Rules, Sampling, Verdict
from shoal.protocol.wire import digest

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
            {}, terms.law,
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
            bodies = follow(self.state)

    def enter(self, key, role="worker"):
        self.do(Enter(key, Join(role, key[:6], 0.0, "test", "float32", "cpu"), 0.0))

    def publish(self):
        version = self.state.main.version + 1
        self.do(Publish(TRAINER, version, digest(b"root%d" % version), "m", {}, 0.0))


class Defendant:
    """A worker with a strategy, as `market.Worker`."""

    def __init__(self, court: Court, strategy: Strategy, draws: Draws, name: str = "a", friendly: bool = True):
        self.court, self.strategy, self.draws, self.name, self.friendly = court, strategy, draws, name, friendly
        self.made: list[str] = []
        self.keys = [self.new_key() for _ in range(strategy.keys)]
        self.free_at = [0] * strategy.keys
        self.honest = self.forged = 0

    def new_key(self):
        key = digest(f"{self.name}{len(self.made)}".encode())
        self.made.append(key)
        self.court.enter(key)
        return key

    def slashes(self):
        return sum(self.court.slashes.get(key, 0) for key in self.made)

    def step(self, turn):
        court, terms, place = self.court, self.court.terms, turn % len(self.keys)
        key, now = self.keys[place], turn * BLOCK_S
        court.do(Tick(now))
        if court.state.members[key].standing == "quarantined":
            self.free_at[place] = turn + 1 + IN_HAND_BLOCKS
        if self.free_at[place] > turn:
            return
        move = self.strategy.plan(court.state.members[key].valid_blocks, turn, self.slashes(), self.draws.coin[turn])
        blocks, leases = in_time(move, terms.blocks - turn)
        if court.state.main.version in court.state.main.batches:
            court.publish()
        per_block = {ALL: terms.groups, ONE: 1}.get(move.forged, 0)
        self.forged += leases * blocks * per_block
        self.honest += leases * blocks * (terms.groups - per_block)
        end = turn + leases * blocks
        self.free_at[place] = end
        sent = []
        for first in range(turn, end, blocks):
            court.do(AskLease(key, (), (blocks + 0.5) * terms.groups / 20.0, now))
            (lease,) = court.state.open_leases_of(key)
            assert len(lease.blocks) == blocks
            if self.draws.late[turn]:
                court.do(Tick(end * BLOCK_S))
                self.free_at[place] += lapse_turns(court.state.members[key].dropped)
                return
            sent.append((first, self.submit(key, lease, first, blocks, now)))
        before = self.slashes()
        for first, name in sent:
            self.judge(key, first, blocks, move.forged, name, end * BLOCK_S)
        if court.state.members[key].standing == "quarantined":
            self.free_at[place] = terms.blocks  # a tick will tell
        elif (waited := self.waited) > 0:
            self.free_at[place] += waited + IN_HAND_BLOCKS
        slashed = self.slashes() > before
        if (slashed and self.strategy.renew) or court.state.members[key].failures >= self.strategy.patience:
            self.keys[place], self.free_at[place] = self.new_key(), end

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

    def judge(self, key, turn, blocks, forged, name, end):
        """Give verdicts in the drawn order until the submission is closed, a turn apart if the worker is quarantined."""
        court, terms, said, self.waited = self.court, self.court.terms, [], 0
        submission = court.state.submissions[name]
        order = [court.judges.index(judge) for judge in submission.order]
        case = case_of(self.draws, turn, blocks, forged, submission.rate, order, self.friendly)
        slots = court.state.slots_of(court.state.leases[submission.lease])
        now, stopped = end, False
        for validator in order:
            if submission.decided and name not in court.state.rechecks:
                break
            if stopped:
                now, self.waited = now + BLOCK_S, self.waited + 1
            said.append(verdict_of(terms, case, said, validator))
            groups = tuple(
                GroupVerdict(slot, due, "accept", rewards=(0.0, 1.0, 0.0, 1.0), tokens=1)
                if outcome == "accept"
                else GroupVerdict(slot, due, outcome, "sampling", "why")
                for slot, due, outcome in zip(slots, case.due, said[-1], strict=True)
            )
            again = 0.0 if self.draws.again[turn] else 1.0  # the model has none of the rechecks of new validators
            court.do(Judge(judge_key(validator), Verdict(name, groups), now, recheck=again))
            stopped = court.state.members[key].standing == "quarantined"
        assert name not in court.state.pending and name not in court.state.rechecks

    def outcome(self):
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
