"""A run in time, on the real `decide` and `apply`: honest workers, workers that choose, a validator and a trainer.

Of each two neighbouring slots, every chooser wants the draw of one and not of the other.
A chooser plays what it is leased, and then does not send what it does not want. Everything follows from a seed. There is
no store: events are applied to a state in memory. `python -m tests.ledger.sim_choosy_workers` prints what each plan does to
the mix.
"""

import functools
import heapq
import itertools
import random
from typing import NamedTuple

from shoal.ledger.commands import AskLease, JoinRun, Publish, ReturnLeases, Submit, SubmitVerdict, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.event_types import apply, decide, make_entry
from shoal.ledger.run_decisions import consequent_events
from shoal.ledger.run_events import Create, RunCreated
from shoal.ledger.state import State
from shoal.protocol.encoding import digest
from shoal.protocol.messages import GroupVerdict, Join, Sampling, Verdict
from tests.ledger.ledger_fixture import TRAINER, VALIDATOR, rules

BLOCK_S = 10.0
"""Seconds that a worker of usual speed needs for a block, give or take 30 %."""
TOKENS = 10
"""Of a group."""
RETRY_S = 1.0


class Plan(NamedTuple):
    """What a chooser does with a draw that it does not want, and under which keys."""

    name: str
    drop: str
    """hold: never send it; return: give it back; stop: the same, as if an environment took too long; late: send it when the
    lease is about to lapse; forge: send something else; send: send it all the same; slow: send whatever it is just before
    another worker may be leased the block."""
    honest_blocks: int = 0
    """Accepted blocks before a key begins to choose."""
    drops_a_key: int = 1
    """After which a chooser goes on with a new key. 0: never."""
    eager: bool = False
    """Whether the other choosers ask for a lease at the moment of a drop, so that the block comes to one of them."""


HONEST = Plan("honest", "send")
SLOW = Plan("slow on purpose", "slow")


class Scene(NamedTuple):
    """The circumstances of a run."""

    law: object = LAW
    staleness: int = 1
    batch_blocks: int = 24
    block_groups: int = 1
    train_s: float = 10.0
    honest: tuple[float, ...] = (1.0,) * 8
    """The speed of each, as a multiple of the usual one."""
    vanish: int = 0
    """Honest workers that stop for ever, one after another, with leases in hand."""
    worker_share: float = 1.0
    choosers: int = 4
    plan: Plan = HONEST
    steps: int = 40
    flat: float = 0.2
    lease_s: float = 120.0
    seed: int = 0


class Found(NamedTuple):
    """What came of a run. Shares are in percent."""

    unwanted: float
    """Of the groups that were trained on."""
    void: float
    """Slots of retired versions that have no group."""
    hours: float
    """That the run took."""


class Stage:
    """A run's state, changed only by commands, and the clock."""

    def __init__(self, scene: Scene):
        self.scene, self.state, self.now = scene, State(), 1000.0
        self.rng, self.order, self.due = random.Random(scene.seed), itertools.count(), []
        self.forged, self.known, self.training = set(), set(), False
        self.do(Create(RunCreated(
            "r" * 32, "stage", "k" * 64, TRAINER, (VALIDATOR,), "00" * 32, "11" * 32, (), Sampling(1.0, 8, 64),
            rules(
                block_groups=scene.block_groups, batch_groups=scene.batch_blocks * scene.block_groups,
                max_staleness=scene.staleness, steps=scene.steps, lease_s=scene.lease_s, worker_share=scene.worker_share,
            ), {}, scene.law,
        ), self.now))  # fmt: skip
        self.enter(TRAINER, "trainer")
        self.enter(VALIDATOR, "validator")
        self.do(Publish(TRAINER, 0, digest(b"root0"), "m", {}, self.now))
        self.workers = [Worker(self, f"h{i}", speed) for i, speed in enumerate(scene.honest)]
        self.choosers = [Chooser(self, f"c{i}", 1.0) for i in range(scene.choosers)]
        for worker in (*self.workers, *self.choosers):
            self.at(self.rng.random() * BLOCK_S, worker.work)
        for index in range(scene.vanish):
            self.at(300.0 + 100.0 * index, self.workers[index].vanish)
        self.at(1.0, self.tick)

    def at(self, after_s, what, *args):
        heapq.heappush(self.due, (self.now + after_s, next(self.order), what, args))

    def play(self):
        while self.state.phase != "ended":
            self.now, _, what, args = heapq.heappop(self.due)
            assert self.now < 1e6, "the run goes on for ever"
            what(*args)
        return self

    def do(self, command):
        bodies = decide(command, self.state)
        while bodies:
            for body in bodies:
                apply(self.state, make_entry(self.state.seq + 1, self.now, body, self.state.head))
            bodies = consequent_events(self.state)
        if self.state.main.version in self.state.main.batches and not self.training:
            self.training = True
            self.at(self.scene.train_s, self.publish)

    def enter(self, key, role="worker"):
        self.do(JoinRun(key, Join(role, key[:6], 0.0, "test", "float32", "cpu"), self.now))

    def publish(self):
        self.training = False
        version = self.state.main.version + 1
        self.do(Publish(TRAINER, version, digest(b"root%d" % version), "m", {}, self.now))

    def tick(self):
        while decide(Tick(self.now), self.state):
            self.do(Tick(self.now))
        self.at(1.0, self.tick)

    def judge(self, name):
        submission = self.state.submissions[name]
        lease = self.state.lease_of(submission)
        said = "hard" if name in self.forged else "accept"
        groups = tuple(
            GroupVerdict(slot, True, "accept", rewards=self.rewards(lease.version, slot), tokens=TOKENS)
            if said == "accept"
            else GroupVerdict(slot, True, said, "sampling", "why")
            for slot in self.state.slots_of(lease)
        )
        self.do(SubmitVerdict(VALIDATOR, Verdict(name, groups), self.now))

    def draw(self, *of):
        return int(digest(f"{self.scene.seed}/{of}".encode())[:8], 16) / 2**32

    def is_unwanted(self, version, slot):
        return (slot + (self.draw(version, slot // 2) < 0.5)) % 2 == 1

    def rewards(self, version, slot):
        return (1.0,) * 4 if self.draw("flat", version, slot) < self.scene.flat else (0.0, 1.0, 0.0, 1.0)

    def found(self):
        stream, size = self.state.main, self.state.rules.block_groups
        trained = [place for step, batch in stream.batches.items() if step >= 3 for place in batch]
        retired = [stream.versions[v] for v in range(2, stream.version - self.scene.staleness)]
        slots = [slot for version in retired for slot in version.slots.values()]
        lost = sum(len(version.blocks) * size - len(version.slots) for version in retired)
        return Found(
            100 * sum(self.is_unwanted(*place) for place in trained) / len(trained),
            100 * (lost + sum(slot.status == "void" for slot in slots)) / (lost + len(slots)),
            (self.now - 1000.0) / 3600,
        )


class Worker:
    """An honest worker: it asks for the next lease while it plays one."""

    def __init__(self, stage, name, speed):
        self.stage, self.name, self.speed = stage, name, speed
        self.keys, self.queue, self.playing, self.gone = [], [], False, False
        self.new_key()

    @property
    def key(self):
        return self.keys[-1]

    def new_key(self):
        self.keys.append(digest(f"{self.name}/{len(self.keys)}".encode()))
        self.queue = []
        self.stage.enter(self.key)

    def vanish(self):
        self.gone = True

    def ask(self):
        state, speed = self.stage.state, TOKENS * self.stage.scene.block_groups / BLOCK_S * self.speed
        holding = tuple(lease.id for lease in state.open_leases_of(self.key))
        try:
            self.stage.do(AskLease(self.key, holding, self.claimed(speed), self.stage.now))
        except (Wait, Refused):
            return
        self.queue += [lease for lease in state.open_leases_of(self.key) if lease.id not in holding]

    def claimed(self, speed):
        return speed

    def work(self):
        """Take the next lease, or ask for one."""
        if self.playing or self.gone:
            return
        if not self.queue:
            self.ask()
        if not self.queue:
            self.stage.at(RETRY_S * (0.5 + self.stage.rng.random()), self.work)
            return
        lease, self.playing = self.queue.pop(0), True
        took = self.block_s(lease) * len(lease.blocks)
        self.stage.at(took, self.end, self.key, lease)
        self.ask()

    def block_s(self, lease):
        return BLOCK_S / self.speed * (0.7 + 0.6 * self.stage.rng.random())

    def end(self, key, lease):
        if self.gone:
            return
        self.playing = False
        self.finish(key, lease)
        self.work()

    def finish(self, key, lease):
        self.send(key, lease)

    def send(self, key, lease, forged=False):
        groups = tuple(digest(f"{lease.id}/{i}".encode()) for i in range(len(self.stage.state.slots_of(lease))))
        name = digest("".join(groups).encode())
        try:
            self.stage.do(
                Submit(
                    key,
                    lease.id,
                    name,
                    100,
                    groups,
                    (0.0,) * len(groups),
                    (VALIDATOR,),
                    self.stage.now,
                    int(self.stage.now),
                )
            )
        except Refused as refused:
            assert refused.code == "superseded", refused
            return
        if forged:
            self.stage.forged.add(name)
        self.stage.at(1.0, self.stage.judge, name)


class Chooser(Worker):
    """A worker that does not send what it does not want, by its plan."""

    def __init__(self, stage, name, speed):
        self.drops, self.accepted = 0, 0
        super().__init__(stage, name, speed)

    def claimed(self, speed):
        return 0.0  # one block at a time lets it choose best

    def chooses(self, key):
        size = self.stage.scene.block_groups
        return self.stage.state.members[key].accepted >= self.stage.scene.plan.honest_blocks * size

    def dislikes(self, lease):
        slots = self.stage.state.slots_of(lease)
        return sum(self.stage.is_unwanted(lease.version, slot) for slot in slots) * 2 > len(slots)

    def block_s(self, lease):
        slow = self.stage.scene.plan.drop == "slow"
        if not slow and (lease.version, lease.blocks) in self.stage.known and self.dislikes(lease):
            return 0.01  # choosers tell each other, so nobody plays it again to know its rewards
        if slow:
            return max(0.1, 0.97 * (lease.soft - self.stage.now) / len(lease.blocks))
        return super().block_s(lease)

    def finish(self, key, lease):
        plan = self.stage.scene.plan
        self.stage.known.add((lease.version, lease.blocks))
        if plan.drop in ("send", "slow") or not self.chooses(key) or not self.dislikes(lease):
            self.send(key, lease)
            return
        match plan.drop:
            case "return":
                self.stage.do(ReturnLeases(key, (lease.id,), self.stage.now))
            case "stop":
                self.stage.do(ReturnLeases(key, (lease.id,), self.stage.now, lease.blocks[0]))
            case "late":
                self.stage.at(max(0.0, lease.deadline - self.stage.now - 0.5), self.send, key, lease)
            case "forge":
                self.send(key, lease, forged=True)
        for friend in self.stage.choosers if plan.eager else ():
            if len(friend.queue) < 2:
                friend.ask()
        self.drops += 1
        if plan.drops_a_key and self.drops % plan.drops_a_key == 0:
            self.new_key()


@functools.cache
def stage_of(**scene):
    return Stage(Scene(**scene)).play()


PLANS = (
    Plan("hold, a new key for each", "hold"),
    Plan("return, a new key for each", "return"),
    Plan("forge, a new key for each", "forge"),
    Plan("hold, one key", "hold", drops_a_key=0),
    Plan("return, one key", "return", drops_a_key=0),
    Plan("send at the deadline, one key", "late", drops_a_key=0),
    Plan("hold, after a block of honest work", "hold", 1),
    Plan("return, after a block of honest work", "return", 1),
    Plan("hold, after 20 blocks of honest work", "hold", 20),
    Plan("return, after 20 blocks, friends ask at once", "return", 20, eager=True),
    Plan("hold half, after 12 blocks, friends ask at once", "hold", 12, drops_a_key=2, eager=True),
    Plan("stop half, after 12 blocks, friends ask at once", "stop", 12, drops_a_key=2, eager=True),
)
"""A third of the workers has one of these."""


def table():
    for staleness in (1, 2):
        print(f"max_staleness {staleness:<34} unwanted groups of those trained, %   void slots, %   hours")
        for plan in (HONEST, *PLANS):
            found = stage_of(staleness=staleness, plan=plan, steps=60).found()
            print(f"{plan.name:<50} {found.unwanted:33.1f} {found.void:15.1f} {found.hours:7.2f}")


if __name__ == "__main__":
    table()
