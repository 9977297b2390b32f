"""A run in simulated time: how long its steps take, who waits for whom, and how many bytes go where.

Leases, batches and versions are decided by the ledger's own rules, so only machines and links are models: they take the
times that `SimulationInput` gives. The same setting gives the same outcome.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from shoal.ledger.batches import BatchFormed
from shoal.ledger.commands import AskLease, JoinRun, Publish, Submit, SubmitVerdict, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.event import Body
from shoal.ledger.event_types import apply, decide, make_entry
from shoal.ledger.lease_granting import blocks_to_give
from shoal.ledger.lease_sizing import work_of
from shoal.ledger.leases import LeaseGranted
from shoal.ledger.run_decisions import consequent_events
from shoal.ledger.run_events import Create, RunCreated
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord
from shoal.plan.links import Clock, Network, SimulatedRelays
from shoal.plan.simulation_input import Outcome, SimulationInput, Stalled, WorkerMachine
from shoal.protocol.algorithm_config import step_credit_of
from shoal.protocol.audit_and_pay import influence, must_audit, paid_tokens
from shoal.protocol.constants import MAX_OPEN_LEASES
from shoal.protocol.encoding import digest
from shoal.protocol.messages import GroupVerdict, Join, Sampling, StepReward, Verdict

TRAINER = "t" * 64
TICK_S = 1.0
"""How often leases lapse and polls are asked again, in simulated seconds; longer in runs whose steps take long."""

MOST_EVENTS = 2_000_000
"""A simulation that needs more does not end."""

LONGEST_S = 1e9
"""Nor does one in which nothing happens for so long."""


@dataclass
class _Worker:
    key: str
    machine: WorkerMachine
    index: int
    queue: deque[LeaseRecord] = field(default_factory=deque)
    busy: bool = False
    asking: bool = False
    loaded: int = -1
    disk: set[int] = field(default_factory=set)
    coming: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    """By version that it fetches: what comes then."""
    seen: set[int] = field(default_factory=set)
    fetching_s: float = 0.0
    playing_s: float = 0.0
    fetched_bytes: float = 0.0


def simulate(setting: SimulationInput) -> Outcome:
    """Simulate a run until its measured steps are done. Raises `Stalled` if it does not get there."""
    run = _SimulatedRun(setting)
    run.live()
    return run.outcome()


class _SimulatedRun:
    def __init__(self, setting: SimulationInput) -> None:
        self.s, self.state, self.clock = setting, State(), Clock()
        self.rng = random.Random(setting.seed)
        rates = {f"down{i}": machine.down for i, machine in enumerate(setting.workers)}
        rates |= {f"up{i}": machine.up for i, machine in enumerate(setting.workers)}
        rates |= {"origin": setting.origin_up, "relays": sum(setting.relays_up)}
        self.net = Network(rates)
        self.relays = SimulatedRelays(self.clock, self.net, setting, self.rng) if setting.relays_up else None
        self.trainer = SimulatedTrainer(self.clock, setting.train_s, setting.publish_s, self._publish)
        self.workers = [_Worker(f"{i:064x}", machine, i) for i, machine in enumerate(setting.workers)]
        self.line: deque[_Worker] = deque()
        self.free_judges = deque(f"{i:0>63}v" for i in range(setting.validators))
        self.unjudged: deque[tuple[str, LeaseRecord]] = deque()
        self.published: dict[int, float] = {}
        self.arrived: dict[int, list[float]] = {}
        self.stale: list[tuple[int, int]] = []
        """(step, versions between) of each group that a batch took."""
        self.sent_bytes = 0.0
        """By the origin to workers."""
        self.since: tuple[float, float, list[tuple[float, float, float]]] = (0.0, 0.0, [])
        """When the warm-up ended, what the origin had sent, and what each worker had done."""
        self._begin()

    def _begin(self) -> None:
        steps = self.s.warmup_steps + self.s.measured_steps + self.s.rules.max_staleness + 2
        rules = msgspec.structs.replace(self.s.rules, steps=steps, max_flat_groups=0)
        created = RunCreated(
            "0" * 32, "plan", "k" * 64, TRAINER, tuple(self.free_judges), "00" * 32, "11" * 32, (),
            Sampling(1.0, 1 << 16, 1 << 16), rules, {}, LAW,
        )  # fmt: skip
        self.do(Create(created, self.now))
        for key, role in ((TRAINER, "trainer"), *((key, "validator") for key in self.free_judges),
                          *((worker.key, "worker") for worker in self.workers)):  # fmt: skip
            self.do(JoinRun(key, Join(role, key[-8:], 0.0, "plan", rules.dtype, "any"), self.now))  # type: ignore[arg-type]
        self.after(0.0, self._tick)
        for worker in self.workers:
            self.after(0.0, partial(self._ask, worker))

    @property
    def now(self) -> float:
        return self.clock.now

    def after(self, wait_s: float, then: Callable[[], None]) -> None:
        self.clock.after(wait_s, then)

    @property
    def origin_bytes(self) -> float:
        return self.sent_bytes + (self.relays.fetched_bytes if self.relays else 0.0)

    def do(self, command: object) -> list[Body]:
        """Decide a command, as `LogWriter` does. Raises `Refused`, `Wait`."""
        made: list[Body] = []
        bodies = decide(command, self.state)
        while bodies:
            for body in bodies:
                apply(self.state, make_entry(self.state.seq + 1, self.now, body, self.state.head))
                if isinstance(body, BatchFormed):
                    self.stale += [(body.step, body.step - version) for version, _ in body.groups]
            made += bodies
            bodies = consequent_events(self.state)
        return made

    def live(self) -> None:
        for _ in range(MOST_EVENTS):
            if self.state.main.version >= self.s.warmup_steps + self.s.measured_steps:
                return
            at, end = self.clock.next_at(), self.net.next_end()
            if min(at, end) > LONGEST_S:
                break
            if end <= at:
                self.clock.now = max(self.now, end)
                for done in self.net.end_due(self.now):
                    done()
            else:
                self.clock.go_on()
            self._go_on()
        raise Stalled(f"no end in sight at version {self.state.main.version}, {self.now:.0f} s")

    def _go_on(self) -> None:
        """Let those begin whose work is there."""
        stream = self.state.main
        if self.trainer.wants in stream.batches:
            self.trainer.learn()
        while self.free_judges and self.unjudged:
            judge, (name, lease) = self.free_judges.popleft(), self.unjudged.popleft()
            check_s = self.s.check_s * len(lease.blocks) + self.s.request_s
            self.after(check_s, partial(self._judge, judge, name, lease))
        if self.line and stream.version >= 0:
            for _ in range(min(len(self.line), blocks_to_give(self.state, stream, self.now))):
                self._ask(self.line.popleft())

    def _tick(self) -> None:
        self.do(Tick(self.now))
        waited_s = self.now - max(self.published.values(), default=0.0)
        self.after(max(TICK_S, self.s.train_s / 20, waited_s / 50), self._tick)

    # --- versions ---

    def _publish(self) -> None:
        version = self.state.main.version + 1
        self.do(Publish(TRAINER, version, digest(b"root %d" % version), "m", {}, self.now))
        self.published[version] = self.now
        self.arrived[version] = []
        if self.relays:
            self.relays.fill(version)
        if version == self.s.warmup_steps:
            done = [(worker.fetching_s, worker.playing_s, worker.fetched_bytes) for worker in self.workers]
            self.since = self.now, self.origin_bytes, done

    def _load(self, worker: _Worker, version: int, then: Callable[[], None]) -> None:
        """Let a worker's engine have a version, which may have to be fetched first."""
        began = self.now

        def loaded() -> None:
            worker.loaded = version
            worker.fetching_s += self.now - began
            if version not in worker.seen:
                worker.seen.add(version)
                self.arrived[version].append(self.now - self.published[version])
            then()

        self._bring(worker, version, lambda: self.after(worker.machine.load_s, loaded))

    def _bring(self, worker: _Worker, version: int, then: Callable[[], None]) -> None:
        """Get a version to a worker's disk, by the cheaper way."""
        if version in worker.disk:
            then()
            return
        if version in worker.coming:
            worker.coming[version].append(then)
            return
        worker.coming[version] = [then]
        steps = version - max(worker.disk, default=-1)
        by_patch = bool(worker.disk) and steps > 0 and 0 < steps * self.s.patch_bytes < self.s.full_bytes
        size = steps * self.s.patch_bytes if by_patch else self.s.full_bytes
        apply_s = steps * self.s.apply_s if by_patch else 0.0
        worker.fetched_bytes += size
        if not self.relays:
            self.sent_bytes += size

        def there() -> None:
            worker.disk = {*sorted(worker.disk | {version})[-2:]}
            for go_on in worker.coming.pop(version):
                go_on()

        def fetched() -> None:
            self.after(apply_s, there)

        links = "relays" if self.relays else "origin", f"down{worker.index}"
        relays = self.relays
        if relays is None:
            self.after(self.s.request_s, lambda: self.net.start(self.now, size, links, fetched))
            return
        hop_s = self._hop_s(worker.machine, min(size, self.s.chunk_bytes))

        def came() -> None:
            """A relay forwards what it has: the last chunk takes one hop more."""
            relays.when_whole(version, lambda: self.after(hop_s + apply_s, there), fetched)

        def begin() -> None:
            self.after(self.s.request_s, lambda: self.net.start(self.now, size, links, came))

        relays.when_begun(version, begin)

    def _hop_s(self, machine: WorkerMachine, chunk_bytes: float) -> float:
        """From a relay's last chunk until its clients have it, who all ask for it."""
        together = sum(self.s.relays_up)
        own = chunk_bytes / machine.down if machine.down else 0.0
        shared = chunk_bytes * len(self.workers) / together if together else 0.0
        return max(own, shared)

    # --- leases ---

    def _ask(self, worker: _Worker) -> None:
        """Ask for a lease, or wait in line."""
        held = self.state.open_leases_of(worker.key)
        if len(held) >= MAX_OPEN_LEASES:
            worker.asking = False
            return
        worker.asking = True
        try:
            ask = AskLease(worker.key, tuple(lease.id for lease in held), worker.machine.tokens_per_s, self.now)
            granted = next((body for body in self.do(ask) if isinstance(body, LeaseGranted)), None)
        except (Wait, Refused):
            granted = None
        if granted is None:
            self.line.append(worker)
            return
        worker.asking = False
        lease = self.state.leases[granted.lease]
        self.after(self.s.request_s, lambda: self._take(worker, lease))

    def _take(self, worker: _Worker, lease: LeaseRecord) -> None:
        worker.queue.append(lease)
        if not worker.busy:
            self._next(worker)
        elif lease.version != worker.loaded:
            self._bring(worker, lease.version, lambda: None)

    def _next(self, worker: _Worker) -> None:
        """Play the next lease, and ask for the one after it."""
        worker.busy = bool(worker.queue)
        if not worker.asking:
            self._ask(worker)
        if not worker.queue:
            return
        lease = worker.queue.popleft()
        if worker.loaded == lease.version:
            self._play(worker, lease)
        else:
            self._load(worker, lease.version, lambda: self._play(worker, lease))

    def _play(self, worker: _Worker, lease: LeaseRecord) -> None:
        rules = self.s.rules
        tokens = work_of(self.state, lease.blocks) * rules.block_groups * rules.group_size * self.s.rollout_tokens
        play_s = tokens / worker.machine.tokens_per_s
        worker.playing_s += play_s

        def send() -> None:
            self.net.start(self.now, tokens * self.s.token_bytes, (f"up{worker.index}",), sent)

        def sent() -> None:
            self.after(self.s.request_s, lambda: self._submit(worker, lease))

        self.after(play_s, send)

    def _submit(self, worker: _Worker, lease: LeaseRecord) -> None:
        groups = tuple(digest(f"{lease.id}/{i}".encode()) for i in range(len(self.state.slots_of(lease))))
        name, draws = digest("".join(groups).encode()), tuple(self.rng.random() for _ in groups)
        try:
            self.do(Submit(worker.key, lease.id, name, 100, groups, draws, (), self.now, int(self.now)))
            self.unjudged.append((name, lease))
        except Refused:  # its version became too old meanwhile
            pass
        self._next(worker)

    def _judge(self, judge: str, name: str, lease: LeaseRecord) -> None:
        record, rules = self.state.submissions[name], self.s.rules
        tokens, groups = max(1, round(self.s.rollout_tokens * rules.group_size)), []
        for slot, draw in zip(self.state.slots_of(lease), record.draws, strict=True):
            teaches = self.rng.random() < self.s.signal_share
            rewards = tuple(float(teaches and i % 2) for i in range(rules.group_size))
            steps = tuple((StepReward(0, reward),) for reward in rewards) if step_credit_of(rules.algorithm) else UNSET
            weight = influence(rewards, tokens, rules.algorithm, steps)
            shown = weight, record.mean_influence
            audited = must_audit(draw, record.rate, *shown, paid_tokens(tokens, rules), record.mean_pay)
            groups.append(
                GroupVerdict(slot, outcome="accept", audited=audited, rewards=rewards, tokens=tokens, steps=steps)
            )
        if not record.decided:
            self.do(SubmitVerdict(judge, Verdict(name, tuple(groups)), self.now, "p" * 64, 1.0, ()))
        self.free_judges.append(judge)

    # --- figures ---

    def outcome(self) -> Outcome:
        """Figures of the steps after the warm-up."""
        first, last = self.s.warmup_steps, self.state.main.version
        (began, sent, done), steps = self.since, last - first
        lasted = self.now - began
        versions = [v for v in range(first, last) if self.arrived[v]]
        slowest = sorted(max(self.arrived[v]) for v in versions) or [0.0]
        lags = [lag for v in versions for lag in self.arrived[v]] or [0.0]
        gained = [
            (w.fetching_s - f, w.playing_s - p, w.fetched_bytes - b)
            for w, (f, p, b) in zip(self.workers, done, strict=True)
        ]
        time_of_all = max(1e-9, lasted * len(self.workers))
        fetching, playing = (sum(of[i] for of in gained) / time_of_all for i in (0, 1))
        between = [between for step, between in self.stale if first <= step < last]
        taken = self.trainer.steps[first:last]
        all_s = max(1e-9, sum(step.all_s for step in taken))
        return Outcome(
            step_s=lasted / steps,
            idle_share=sum(step.batch_s for step in taken) / all_s,
            publish_wait_share=sum(step.publication_s for step in taken) / all_s,
            staleness=sum(between) / max(1, len(between)),
            broadcast_s=slowest[len(slowest) // 2],
            lag_s=sum(lags) / len(lags),
            followed=len(lags) / max(1, (last - first) * len(self.workers)) if versions else 0.0,
            origin_bytes=(self.origin_bytes - sent) / steps,
            worker_bytes=sum(of[2] for of in gained) / steps / len(self.workers),
            worker_idle=max(0.0, 1 - fetching - playing),
            worker_fetch=fetching,
        )


class StepTimes(NamedTuple):
    """How a step's time passed, seconds."""

    batch_s: float
    """Waiting for the batch."""
    publication_s: float
    """Waiting until the version before was published."""
    all_s: float


class SimulatedTrainer:
    """The trainer, as `roles/trainer` works: it takes a step, waits until the version before is published, and begins to
    publish its own beside the next step."""

    def __init__(self, clock: Clock, train_s: float, publish_s: float, publish: Callable[[], None]) -> None:
        """`publish` is called when a version can be fetched; the first one is version 0, before any step."""
        self._clock, self._train_s, self._publish_s, self._publish = clock, train_s, publish_s, publish
        self.steps: list[StepTimes] = []
        self._asked_at = 0.0
        """When it asked for the batch of the next step."""
        self._is_training = True
        self._is_publishing = True
        self._then: Callable[[], None] | None = None
        """What waits for the publication."""
        clock.after(publish_s, self._first)

    @property
    def wants(self) -> int | None:
        """The step whose batch it waits for, if any."""
        return None if self._is_training else len(self.steps)

    def learn(self) -> None:
        """Begin the step that it waits for: its batch is there."""
        self._is_training = True
        waited_s, ends = self._clock.now - self._asked_at, self._clock.now + self._train_s
        self._clock.after(self._train_s, partial(self._learned, waited_s, ends))

    def _learned(self, waited_s: float, ended: float) -> None:
        if self._is_publishing:
            self._then = partial(self._learned, waited_s, ended)
            return
        now = self._clock.now
        self.steps.append(StepTimes(waited_s, now - ended, now - self._asked_at))
        self._is_training, self._is_publishing, self._asked_at = False, True, now
        self._clock.after(self._publish_s, self._published)

    def _first(self) -> None:
        self._is_training, self._asked_at = False, self._clock.now
        self._published()

    def _published(self) -> None:
        self._is_publishing = False
        self._publish()
        then, self._then = self._then, None
        if then is not None:
            then()
