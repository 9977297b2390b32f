"""Random runs with every kind of move, on the real rules: after each move the books, the blocks and the clock agree.

Nodes join, leave, drop, lie and are kicked; hosts pause, drain, admit and restart. Afterwards everybody is honest, the run
ends, and all pay vests.
"""

import random
from collections import Counter

import pytest

from shoal.ledger.batch_selection import groups_a_worker
from shoal.ledger.commands import Admin, AskLease, JoinRun, LeaveRun, ReturnLeases, Tick
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.state import state_hash
from shoal.ledger.verdict_decisions import to_judge
from shoal.protocol.messages import AdminRequest, Join
from tests.ledger.ledger_fixture import World

WORKERS = tuple(letter * 64 for letter in "abcd")
JUDGES = tuple(digit * 64 for digit in "123")
HONEST, ANY = (6, 6, 6, 2), (8, 8, 8, 2, 1, 1, 1, 1, 1, 1)
"""How often each move of `Walk.move` is made, in its order."""


class Walk(World):
    """A world in which the next move is drawn."""

    def __init__(self, tmp_path, seed, validators, staleness):
        self.rng, self.signed = random.Random(seed), 0
        self.judges = JUDGES[:validators]
        share = 0.5 if staleness and seed % 2 else 1.0
        super().__init__(
            tmp_path, self.judges, steps=8, max_staleness=staleness, audit_rate=0.3, worker_share=share,
            batch_groups=4 + 2 * (seed % 2),
        )  # fmt: skip
        for key in WORKERS:
            self.enter(key)
        self.publish()

    def sign(self):
        """A time at which a request is signed, later than the one before."""
        self.signed += 2
        return self.signed

    def move(self, honest):
        rng, state, key = self.rng, self.state, self.rng.choice(WORKERS)
        held, node = tuple(lease.id for lease in state.open_leases_of(key)), rng.choice((*WORKERS, *self.judges))
        kinds = ("ask", "submit", "judge", "publish", "return", "late", "leave", "join", "host", "restart")
        weights = HONEST if honest else ANY
        match rng.choices(kinds[: len(weights)], weights)[0]:
            case "ask":
                self.do(AskLease(key, held, rng.choice([0.0, 1e9]), self.now))
            case "submit" if state.open_leases:
                self.send(state.leases[rng.choice(state.open_leases)])
            case "late" if state.leases:
                self.send(rng.choice([*state.leases.values()]))
            case "judge" if self.judges:
                judge = rng.choice(self.judges)
                outcome = "accept" if honest else rng.choice(["accept"] * 9 + ["soft", "hard", "void"])
                for name in to_judge(state, judge, self.now)[:1]:
                    differs = () if honest or rng.random() < 0.9 else tuple(state.submissions[name].verdicts)
                    check = "environment" if outcome == "void" else "sampling"
                    facts = {"check": check} if outcome != "accept" else {}
                    self.judge(name, outcome, by=judge, differs_from=differs, **facts)
            case "publish" if state.main.version in state.main.batches:
                self.publish()
            case "return":
                self.do(ReturnLeases(key, held[:1], self.now))
            case "leave":
                self.do(LeaveRun(node, self.now, self.sign()))
            case "join":
                self.join(node, rng.choice("xy"))
            case "host":
                action = rng.choice(["pause", "resume", "resume", "kick"])
                whom = WORKERS[-1] if rng.random() < 0.2 else "0" * 64
                self.do(Admin(action, AdminRequest(whom if action == "kick" else ""), self.now, self.sign()))
            case "restart":
                before = state_hash(state)
                self.log_writer = LogWriter(Store(sqlite_url(self.path)))
                assert state_hash(self.state) == before

    def send(self, lease):
        order = tuple(self.rng.sample(self.judges, len(self.judges)))
        self.submit(lease.worker, lease, draw=self.rng.random(), recheck=self.rng.random(), order=order)

    def join(self, key, name):
        role = "validator" if key in self.judges else "worker"
        self.do(JoinRun(key, Join(role, name, 0.0, "test", "float32", "cpu"), self.now, self.sign()))

    def step(self, honest=False):
        try:
            self.move(honest)
        except (Wait, Refused):
            pass
        self.now += self.rng.choice([0.0, 0.5, 1.0, 4.0] if honest or self.rng.random() < 0.97 else [100.0, 700.0])
        while self.do(Tick(self.now)):
            pass
        assert_agrees(self.state)

    def forgive(self):
        """Everybody comes back, and the host lets the run go on."""
        for key in (*WORKERS, *self.judges):
            try:
                self.join(key, "z")
            except Refused:
                pass
        if self.state.phase != "ended":
            self.do(Admin("resume", AdminRequest(), self.now, self.sign()))


def assert_agrees(state):
    for member in state.members.values():
        assert member.credits == member.vested + sum(member.stake)
        assert min(member.credits, member.vested, member.owes, *member.stake) >= 0
        mine = [lease for lease in state.leases.values() if lease.worker == member.key]
        assert (member.leases, member.unfilled) == (len(mine), sum(lease.unfilled for lease in mine))
    assert sum(member.credits for member in state.members.values()) + state.burned == state.issued
    assert state.open_leases == [name for name, lease in state.leases.items() if lease.status == "open"]
    assert state.pending == [name for name, record in state.submissions.items() if not record.decided]
    assert state.due == sorted(_due(state))
    used = Counter(place for batch in state.main.batches.values() for place in batch)
    assert max(used.values(), default=1) == 1 and not used.keys() & set(state.main.pool)
    for groups in state.main.batches.values():
        makers = Counter(state.maker_of(state.main, place) for place in groups)
        assert max(makers.values()) <= groups_a_worker(state.rules)
    for number, version in state.main.versions.items():
        for block, record in version.blocks.items():
            slots = [version.slots.get(slot) for slot in range(block * 2, block * 2 + 2)]
            assert all((slot is not None) == (record.status == "done") for slot in slots)
            assert ((number, block) in state.main.free) == (record.status == "free")
            claims = {state.leases[name].status for name in record.claims}
            due = "submitted" if "submitted" in claims else "leased" if claims else record.status
            assert claims <= {"open", "submitted"} and record.status == due
            assert bool(claims) == (record.status in ("leased", "submitted"))
            assert record.lease == (record.claims or [record.lease])[-1]


def _due(state):
    """What the clock must end, told from the records alone."""
    for lease in map(state.leases.__getitem__, state.open_leases):
        yield from ((lease.deadline, "lease", lease.id), (lease.soft, "soft", lease.id))
    for member in state.members.values():
        if member.standing == "quarantined":
            yield member.until, "quarantine", member.key
    for record in map(state.submissions.__getitem__, (*state.pending, *state.rechecks)):
        if record.verdicts:
            yield record.judged_at, "judged", record.digest


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("validators", [0, 1, 2, 3])
def test_after_any_moves_all_agrees_and_the_run_ends_with_all_pay_vested(tmp_path, validators, staleness):
    walk = Walk(tmp_path, validators + staleness, validators, staleness)
    for _ in range(200):
        walk.step()
    walk.forgive()
    for _ in range(3000):
        state = walk.state
        if not {*state.panel()} or (state.phase == "ended" and not state.pending and not state.rechecks):
            break
        walk.step(honest=True)
    assert walk.audit().findings == []
    if state.panel():
        assert state.phase == "ended" and not any(member.stake for member in state.members.values())
