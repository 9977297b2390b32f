"""Mutated submissions in bulk: what the verifier and the coordinator answer, what they cost, and what passes.

The verifier's long version is slow: 10^5 submissions from fixed seeds. Submission `n` of a world is drawn from
`Random(f"{world} {n}")` alone, so that a failure is replayed by its number.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest

from shoal.ledger.commands import AskLease, JoinRun, Publish
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.encoding import digest, from_json, from_msgpack, to_json, to_msgpack
from shoal.protocol.rollout_validation import most_bytes
from shoal.protocol.signing import RequestLine, SenderState, sign_request, verify_signature
from shoal.roles.coordinator.routes import application
from shoal.train.rows import rows_of_group
from shoal.verification.checks_with_model import AUDIT
from shoal.verification.checks_without_model import MODEL_FREE
from shoal.verification.encode_submission import largest_submission_bytes
from tests.attacks.attack_fixture import RULES, World, lease_of, load_engine, make_policy
from tests.attacks.fuzz import KINDS, Specimens, mutated
from tests.roles.testbed import URL, RunTestbed, tiny_run

SLOTS = [[(0, "wordle", 3), (1, "arithmetic", 4), (2, "wordle", 3)]]
"""Slots 0 and 2 hold the same task under different seeds."""

WARM_UP = 1_000
"""The memory of the process is first measured after this many submissions."""

ACCEPTED = "accepted"
"""Of a submission whose groups all are."""

MOST_GROWTH_BYTES = 32 << 20

ACTIVATION_ERROR = 0.01

NEAR_CODES = 16
"""The constant of a proof's polynomial moves all its values by as many bfloat16 codes; further is another size."""


# --- the verifier ---


@dataclass
class Fuzzer:
    """A world, its honest work, and a record of what its judge answered to mutations of it."""

    world: World
    name: str
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Submissions by kind of mutation and the first check that refused a group, or `ACCEPTED`."""
    slowest_s: float = 0.0
    slowest: str = ""
    audited: int = 0

    @cached_property
    def specimens(self) -> Specimens:
        """The honest body beside one of the same tasks under other seeds, and one of another policy."""
        world = self.world
        again = world.play(lease=lease_of(SLOTS, seed="again"))
        other = world.play(engine=load_engine(world.other))
        return Specimens(world.encode(world.honest_groups), (world.encode(again), world.encode(other)))

    @cached_property
    def honest(self) -> t.Submission:
        return from_msgpack(self.specimens.honest, t.Submission)

    def judge(self, number: int) -> None:
        """Judge one mutated submission and assert everything that a verdict promises."""
        rng = Random(f"{self.name} {number}")
        kind = list(KINDS)[number % len(KINDS)]
        body = mutated(kind, rng, self.specimens)
        started = time.process_time()
        verdicts = self.world.judge(body, audit=False)  # which sees to it that there is one for each slot, in order
        for place, verdict in enumerate(verdicts):
            if verdict.outcome == "accept":
                self.is_learnable(body, place, verdict)
        if self.is_odd(body, verdicts) or rng.random() < 0.002:
            verdicts = self.world.judge(body, audit=True)
            self.audited += 1
        cost_s = time.process_time() - started
        if cost_s > self.slowest_s:
            self.slowest_s, self.slowest = cost_s, f"{kind} {number}"
        self.outcomes[kind, next((verdict.check for verdict in verdicts if verdict.check), ACCEPTED)] += 1
        for place, verdict in enumerate(verdicts):
            is_well_formed(verdict)
            if verdict.outcome == "accept":
                self.is_honest_in_all_that_matters(body, place)

    def is_odd(self, body: bytes, verdicts: Sequence[t.GroupVerdict]) -> bool:
        """Whether the model-free checks accept a group or a proof that is not byte for byte the honest one."""
        accepted = [place for place, verdict in enumerate(verdicts) if verdict.outcome == "accept"]
        if not accepted:
            return False
        said, honest = from_msgpack(body, t.Submission), self.honest
        return any(
            said.groups[place] != honest.groups[place] or said.proofs[place:][:1] != honest.proofs[place:][:1]
            for place in accepted
        )

    def is_learnable(self, body: bytes, place: int, verdict: t.GroupVerdict) -> None:
        """The trainer takes what was accepted without the model, or one group could stop the run for good."""
        data, lease = from_msgpack(body, t.Submission).groups[place], self.world.lease
        member = t.BatchGroup(lease.version, verdict.slot, "s", place, digest(data), verdict.rewards)
        limits = {"vocabulary": self.world.renderer.vocabulary, "max_tokens": lease.sampling.max_tokens}
        rows = rows_of_group(member, data, algorithm=Grpo(), **limits)
        assert sum(len(row.positions_P) for row in rows) == verdict.tokens

    def is_honest_in_all_that_matters(self, body: bytes, place: int) -> None:
        """An accepted group is of this lease and equals the honest one, but for log-probs and proof within noise."""
        said, honest = from_msgpack(body, t.Submission), self.honest
        assert (said.run, said.lease, said.version) == (honest.run, honest.lease, honest.version)
        assert said.engine.dtype == honest.engine.dtype
        ours, theirs = (from_msgpack(each.groups[place], t.Group) for each in (honest, said))
        assert (theirs.slot, theirs.env, theirs.task) == (ours.slot, ours.env, ours.task)
        assert len(theirs.rollouts) == len(ours.rollouts)
        bound = self.world.rules.bounds["float32/float32"].logprob + 1e-4
        for our, their in zip(ours.rollouts, theirs.rollouts, strict=True):
            assert msgspec.structs.replace(their, logprobs=b"") == msgspec.structs.replace(our, logprobs=b"")
            assert np.abs(their.logprobs_P() - our.logprobs_P()).max() <= bound
        if honest.proofs:
            is_near_proof(said.proofs[place], honest.proofs[place])
        else:
            assert not said.proofs

    def told(self) -> str:
        """Counts by kind and outcome."""
        names = (ACCEPTED, *(check.name for check in (*MODEL_FREE, *AUDIT) if check.name in self.checks))
        lines = [f"{kind:8}" + "".join(f"{self.outcomes[kind, name]:12}" for name in names) for kind in KINDS]
        return "\n".join([f"{self.name:8}" + "".join(f"{name:>12}" for name in names), *lines])

    @property
    def checks(self) -> set[str]:
        """The outcomes that occurred."""
        return {name for _, name in self.outcomes}


def is_well_formed(verdict: t.GroupVerdict) -> None:
    assert verdict.outcome in ("accept", "soft", "hard")
    assert (verdict.outcome == "accept") == (verdict.check == "")
    assert np.isfinite([verdict.figure, verdict.bound]).all()
    assert len(verdict.detail) < 300 and verdict.detail.isprintable()
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=type(verdict)) == verdict


def is_near_proof(said: bytes, honest: bytes) -> None:
    """The honest proof, but for the constants of its polynomials, and those no further than noise could move them."""
    assert len(said) == len(honest)
    moved = np.abs(np.frombuffer(said, ">u2").astype(int) - np.frombuffer(honest, ">u2").astype(int))
    (places,) = np.nonzero(moved)
    ends = np.flatnonzero(np.frombuffer(honest, ">u2") == 65497)  # the modulus opens a polynomial
    assert set(places.tolist()) <= set((ends + 1).tolist())
    assert moved.max() <= NEAR_CODES


def make_world(directory: Any, proofs: str) -> World:
    policy = make_policy(directory / "policy")
    other = make_policy(directory / "other", seed=1)
    rules = msgspec.structs.replace(RULES, group_size=2, proofs=proofs, activation_error=ACTIVATION_ERROR)
    return World(policy, other, policy, lease=lease_of(SLOTS), rules=rules)


def honest_cost_s(fuzzer: Fuzzer) -> float:
    """CPU seconds of judging the honest body, audited in full."""
    costs = []
    for _ in range(5):
        started = time.process_time()
        verdicts = fuzzer.world.judge(fuzzer.specimens.honest)
        costs.append(time.process_time() - started)
        assert {verdict.outcome for verdict in verdicts} == {"accept"}
    return sorted(costs)[2]


def fuzz(fuzzer: Fuzzer, num: int) -> None:
    """Judge `num` submissions, with bounds on the CPU time of each and on the growth of this process."""
    honest_s, process = honest_cost_s(fuzzer), psutil.Process()
    started, warm_bytes, most_bytes = time.process_time(), 0, 0
    for number in range(num):
        fuzzer.judge(number)
        if number == min(WARM_UP, num - 1):
            warm_bytes = process.memory_info().rss
        if number % 1000 == 0 or number == num - 1:
            most_bytes = max(most_bytes, process.memory_info().rss)
    cost_s, growth = time.process_time() - started, (most_bytes - warm_bytes) / 2**20
    print(f"\n{fuzzer.told()}\n{num} submissions in {cost_s:.0f} CPU s, {fuzzer.audited} audited")
    print(f"honest {1000 * honest_s:.1f} ms, slowest {1000 * fuzzer.slowest_s:.1f} ms ({fuzzer.slowest})")
    print(f"memory {warm_bytes >> 20} MiB after {WARM_UP}, then at most {growth:+.1f} MiB")
    assert fuzzer.slowest_s < 20 * honest_s + 1
    assert most_bytes - warm_bytes < MOST_GROWTH_BYTES


@pytest.mark.parametrize("proofs", ["none", "toploc"])
def test_mutated_submissions_are_judged_and_pass_only_as_honest(tmp_path, proofs):
    fuzzer = Fuzzer(make_world(tmp_path, proofs), proofs)
    fuzz(fuzzer, 700)
    reached = {check.name for check in (*MODEL_FREE, *AUDIT)} - {"reward"}  # which no submission can cause
    assert fuzzer.checks == {ACCEPTED, *(reached - {"activations"} if proofs == "none" else reached)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("proofs", ["none", "toploc"])
def test_50_000_mutated_submissions_are_judged_and_pass_only_as_honest(tmp_path, proofs):
    """With both worlds, 10^5."""
    fuzz(Fuzzer(make_world(tmp_path, proofs), proofs), 50_000)


# --- the coordinator's way in ---


@dataclass
class Sender:
    """A worker with a lease in a run of one process, whose signed requests carry any body.

    Its clock advances by itself, so that the gate never limits its rate; another test covers that.
    """

    testbed: RunTestbed
    now: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        coordinator, trainer = (
            self.testbed.coordinator,
            load_or_make_key(self.testbed.folder.keys / "trainer.key").public,
        )
        self.key = load_or_make_key(self.testbed.folder.root / "stranger.key")
        coordinator.clock = self.clock
        self.app = application(coordinator)
        coordinator.log_writer.write(
            JoinRun(trainer, t.Join("trainer", "t", 0.0, "x", "float32", "cpu"), self.now), self.now
        )
        coordinator.log_writer.write(Publish(trainer, 0, digest(b"root"), digest(b"manifest"), {}, self.now), self.now)
        coordinator.log_writer.write(
            JoinRun(self.key.public, t.Join("worker", "w", 0.0, "x", "float32", "cpu"), self.now), self.now
        )

    def clock(self) -> float:
        self.now += 0.01
        return self.now

    def take_lease(self) -> t.Lease:
        coordinator = self.testbed.coordinator
        coordinator.log_writer.write(AskLease(self.key.public, (), 0.0, self.now), self.now)
        return coordinator.wire_lease(coordinator.state.open_leases_of(self.key.public)[0])

    async def put(self, http: httpx.AsyncClient, lease: str, body: bytes) -> httpx.Response:
        path = f"/v1/leases/{lease}/submission"
        signed = sign_request(
            self.key,
            RequestLine("PUT", path),
            digest(body),
            created=int(self.now),
            nonce="0123456789abcdef",
            sender=SenderState(self.testbed.coordinator.state.run),
        )
        return await http.put(URL + path, content=body, headers=signed)

    def specimens(self, lease: t.Lease) -> Specimens:
        """A body that the coordinator takes for honest, and two for other leases."""
        rollout = t.make_rollout([1, 2, 3, 4], [0, 0, 1, 1], [-1.0, -2.0], version=0, ending="length")
        slots = [slot for block in lease.blocks for slot in block.slots]
        groups = tuple(to_msgpack(t.Group(slot.slot, slot.task, slot.env, (rollout,) * 2)) for slot in slots)
        facts = t.EngineFacts("x", "float32", "cpu")
        honest = t.Submission(self.testbed.coordinator.state.run, lease.id, lease.version, groups, (), facts)
        others = (msgspec.structs.replace(honest, lease="77"), msgspec.structs.replace(honest, run="another"))
        return Specimens(to_msgpack(honest), tuple(to_msgpack(other) for other in others))

    def is_due(self, body: bytes, lease: t.Lease) -> bool:
        """Whether a body is a submission for this lease, no larger than it needs, with a group for each slot, none larger
        than that needs, and of the engine that joined."""
        if len(body) > largest_submission_bytes(lease, self.testbed.coordinator.state.rules):
            return False
        try:
            said = msgspec.msgpack.decode(body, type=t.Submission)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        due = sum(len(block.slots) for block in lease.blocks)
        if any(
            len(group) > most_bytes(self.testbed.coordinator.state.rules, lease.sampling, 0) for group in said.groups
        ):
            return False
        return (said.run, said.lease, said.version, len(said.groups), said.engine) == (
            self.testbed.coordinator.state.run, lease.id, lease.version, due, t.EngineFacts("x", "float32", "cpu")
        )  # fmt: skip

    def kept(self) -> tuple[int, int]:
        """Events of the log, and bytes on the disk."""
        return self.testbed.coordinator.state.seq, self.testbed.coordinator.blobs.size_bytes


async def send_mutations(sender: Sender, num: int) -> Counter[tuple[str, int]]:
    """Send `num` bodies to open leases, and after each that is accepted one more to the same lease."""
    statuses: Counter[tuple[str, int]] = Counter()
    coordinator, lease = sender.testbed.coordinator, sender.take_lease()
    transport = httpx.ASGITransport(sender.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport) as http:
        for number in range(num):
            rng, kind = Random(f"coordinator {number}"), list(KINDS)[number % len(KINDS)]
            body = mutated(kind, rng, sender.specimens(lease))
            before = sender.kept()
            answer = await sender.put(http, lease.id, body)
            statuses[kind, answer.status_code] += 1
            assert "shoal-protocol" in answer.headers
            if not sender.is_due(body, lease):
                assert answer.status_code == 400 and from_json(answer.content, t.Refusal).code == "malformed"
                assert sender.kept() == before
                continue
            assert answer.status_code == 200
            receipt = from_json(answer.content, t.Receipt)
            is_kept_and_signed(sender, body, lease, receipt)
            again = await sender.put(http, lease.id, body)
            assert (again.status_code, again.content) == (200, answer.content)
            before, second = sender.kept(), mutated(kind, rng, sender.specimens(lease))
            if second != body:
                answer = await sender.put(http, lease.id, second)
                assert answer.status_code == 409, "a filled lease is refused before the body is read"
                assert sender.kept() == before
            lease = sender.take_lease()
    assert sender.testbed.audit().findings == []
    assert coordinator.state.members[sender.key.public].refused == 0
    return statuses


def is_kept_and_signed(sender: Sender, body: bytes, lease: t.Lease, receipt: t.Receipt) -> None:
    """The receipt names the body and the event that booked it, under the run's signature; the bytes are there."""
    state, name = sender.testbed.coordinator.state, digest(body)
    assert (receipt.run, receipt.lease, receipt.digest) == (state.run, lease.id, name)
    unsigned = msgspec.structs.replace(receipt, signature="")
    assert verify_signature(state.run_key, "receipt", to_json(unsigned), receipt.signature)
    assert sender.testbed.coordinator.blobs.get(name) == body
    groups = msgspec.msgpack.decode(body, type=t.Submission).groups
    assert state.submissions[name].groups == tuple(digest(group) for group in groups)
    assert state.leases[lease.id].submission == name


def sender_in(directory: Any) -> Sender:
    """A run with room for another lease after each accepted body."""
    rollouts = {"group_size": 2, "block_rollouts": 6, "batch_groups": 6_000, "max_staleness": 0, "lease_s": 3600.0}
    return Sender(RunTestbed(directory / "run", tiny_run(rollouts=rollouts)))


def test_the_coordinator_takes_what_fills_the_lease_and_keeps_nothing_else(tmp_path):
    statuses = asyncio.run(send_mutations(sender_in(tmp_path), 150))
    assert {status for _, status in statuses} == {200, 400}


@pytest.mark.slow
def test_the_coordinator_answers_2_000_mutated_bodies_alike(tmp_path):
    started = time.process_time()
    statuses = asyncio.run(send_mutations(sender_in(tmp_path), 2_000))
    print(f"\n{time.process_time() - started:.0f} CPU s, by kind and status:", dict(sorted(statuses.items())))
    assert {status for _, status in statuses} == {200, 400}


def test_a_million_empty_groups_cost_the_coordinator_almost_nothing(tmp_path):
    """Each group would be hashed and drawn for, and a body of 64 MiB can hold 33 million of them."""
    rollouts = {"group_size": 512, "block_rollouts": 1024}
    sender = Sender(RunTestbed(tmp_path / "run", tiny_run(rollouts=rollouts, sampling={"max_tokens": 512})))
    lease = sender.take_lease()
    crowd = t.Submission(
        sender.testbed.coordinator.state.run, lease.id, 0, (b"",) * 1_000_000, (), t.EngineFacts("", "", "")
    )
    bodies = [to_msgpack(crowd), to_msgpack(msgspec.structs.replace(crowd, groups=(b"",) * 4_000_000))]
    before = sender.kept()

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(sender.app)) as http:
            return [await sender.put(http, lease.id, body) for body in bodies]

    started = time.process_time()
    answers = asyncio.run(scenario())
    assert time.process_time() - started < 1.0
    assert [answer.status_code for answer in answers] == [400, 400]
    reasons = [from_json(answer.content, t.Refusal).error for answer in answers]
    assert "1000000 groups" in reasons[0] and "more than the" in reasons[1]
    assert sender.kept() == before
