"""A small honest world for the rules: a clock that is a number, nodes that are keys, no network."""

from msgspec import UNSET

from shoal.ledger.commands import AskLease, JoinRun, Publish, Submit, SubmitVerdict, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.log.check import verify
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.run_events import Create, RunCreated
from shoal.ledger.state import state_hash
from shoal.protocol.audit_and_pay import influence, must_audit, paid_tokens
from shoal.protocol.encoding import digest
from shoal.protocol.messages import GroupVerdict, Join, Rules, Sampling, Verdict
from shoal.protocol.seed_chain import AUDIT_CHAIN, SLOT_CHAIN, SecretChain

TRAINER, VALIDATOR = "t" * 64, "v" * 64


def rules(**changes):
    values = dict(
        group_size=4, block_groups=2, batch_groups=4, max_staleness=1, steps=5, lease_s=10.0, audit_rate=1.0,
        dtype="float32", bounds={}, quarantine_s=30.0,
    )  # fmt: skip
    return Rules(**(values | changes))


class World:
    """A log with a clock and honest moves, so that a test contains only what it is about."""

    def __init__(
        self,
        tmp_path,
        validators=(VALIDATOR,),
        law=LAW,
        config=None,
        envs=(),
        difficulty=None,
        secret=b"",
        root="",
        **changes,
    ):
        self.path, self.now, self.rechecks = tmp_path / "log.sqlite", 1000.0, {}
        self.links = []
        self.log_writer = LogWriter(Store(sqlite_url(self.path)))
        ends = "00" * 32, "11" * 32
        if secret:
            self.links = [SecretChain(secret, purpose).links() for purpose in (SLOT_CHAIN, AUDIT_CHAIN)]
            ends = tuple(links[0].hex() for links in self.links)
        created = RunCreated(
            "r" * 32, "test", "k" * 64, TRAINER, tuple(validators), *ends, tuple(envs), Sampling(1.0, 8, 64),
            rules(**changes), config or {}, law, difficulty, root,
        )  # fmt: skip
        self.do(Create(created, self.now))
        self.enter(TRAINER, "trainer")
        for validator in validators:
            self.enter(validator, "validator")

    @property
    def state(self):
        return self.log_writer.state

    def do(self, command):
        return self.log_writer.write(command, self.now)

    def enter(self, key, role="worker"):
        return self.do(JoinRun(key, Join(role, key[:6], 0.0, "test", "float32", "cpu"), self.now))

    def publish(self, version=None):
        version = self.state.main.version + 1 if version is None else version
        secrets = (
            {v: tuple(links[v + 1].hex() for links in self.links) for v in range(version + 1)} if self.links else {}
        )
        return self.do(Publish(TRAINER, version, digest(b"root%d" % version), "m", secrets, self.now))

    def lease(self, key, holding=()):
        self.do(AskLease(key, tuple(holding), 0.0, self.now))
        return next(lease for lease in self.state.open_leases_of(key) if lease.id not in holding)

    def submit(self, key, lease, salt="", draw=0.0, recheck=1.0, order=(), record=UNSET):
        groups = tuple(digest(f"{lease.id}/{i}/{salt}".encode()) for i in range(len(self.state.slots_of(lease))))
        name = digest("".join(groups).encode())
        self.do(Submit(key, lease.id, name, 100, groups, tuple(draw for _ in groups), order, self.now, int(self.now),
                       record=record))  # fmt: skip
        self.rechecks[name] = recheck
        return name

    def judge(self, submission, outcome="accept", rewards=(0.0, 1.0, 0.0, 1.0), by=VALIDATOR, differs_from=(), **facts):
        lease = self.state.leases[self.state.submissions[submission].lease]
        accepted = outcome == "accept"
        facts = {"check": "" if accepted else "sampling", "detail": "why"} | facts
        if accepted:
            facts = {"rewards": rewards, "tokens": 10} | facts
        slots, record = self.state.slots_of(lease), self.state.submissions[submission]
        tokens = min(facts.get("tokens", 0), 10**9)
        of_run = self.state.rules
        weight = influence(facts.get("rewards", ()), tokens, of_run.algorithm)
        shown, paid = (weight, record.mean_influence), (paid_tokens(tokens, of_run), record.mean_pay)
        due = [must_audit(draw, record.rate, *shown, *paid) for draw in record.draws]
        groups = tuple(
            GroupVerdict(slot, outcome=outcome, **({"audited": drawn or not accepted} | facts))
            for slot, drawn in zip(slots, due, strict=True)
        )
        verdict, recheck = Verdict(submission, groups), self.rechecks[submission]
        return self.do(SubmitVerdict(by, verdict, self.now, "p" * 64, recheck, tuple(differs_from)))

    def judge_of(self, submission, envs, faults):
        """Accept the groups of these slots, each with its environment and perhaps with faults."""
        rewards = (0.0, 1.0, 0.0, 1.0)
        groups = tuple(
            GroupVerdict(slot, True, "accept", rewards=rewards, tokens=10, faults=faults.get(slot, UNSET))
            for slot in envs
        )
        return self.do(SubmitVerdict(VALIDATOR, Verdict(submission, groups), self.now, "p" * 64, 1.0, (), envs))

    def serve(self, key, **how):
        lease = self.lease(key)
        self.judge(self.submit(key, lease), **how)
        return lease

    def publish_if_due(self):
        if self.state.main.version in self.state.main.batches:
            self.publish()

    def work(self, key, blocks=1, **how):
        """Serve one block after another, and publish each version whose batch is formed."""
        for _ in range(blocks):
            self.publish_if_due()
            self.serve(key, **how)

    def tick(self, after_s):
        """Events of the clock after some time."""
        self.now += after_s
        return [entry.body for entry in self.do(Tick(self.now))]

    def bodies(self, kind):
        """Of all events of a kind."""
        return [entry.body for entry in self.audit().entries if isinstance(entry.body, kind)]

    def audit(self, receipts=(), now=None):
        """Without the findings on links: this world has no secret from which they could come."""
        audit = verify(self.log_writer.store.read(), receipts, now)
        audit.findings = without_links(audit.findings)
        return audit


def started(tmp_path, workers, *how, **changes):
    """A world with a worker, or several, whose first version is published."""
    world = World(tmp_path, *how, **changes)
    for key in [workers] if isinstance(workers, str) else workers:
        world.enter(key)
    world.publish()
    return world


def assert_holds(world):
    """No auditor finds anything, and a replay gives the same state."""
    audit = world.audit()
    assert audit.findings == [] and state_hash(audit.state) == state_hash(world.state)


def without_links(findings):
    """Findings of a log of a world, other than that its links are missing."""
    return [finding for finding in findings if not finding.startswith("the link of version")]
