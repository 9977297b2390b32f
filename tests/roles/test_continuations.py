"""Runs that learn from continuations: the real roles over an in-memory network, honest and not."""

import asyncio

import msgspec
import pytest

from shoal.engine.dishonest import OtherSeed
from shoal.envs.play_continuations import OtherStart
from shoal.errors import ConfigError, NothingYet, PeerError
from shoal.ledger.batches import GroupAccepted, SlotVoid
from shoal.ledger.commands import JoinRun
from shoal.ledger.errors import Refused
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import Composition, Vine
from shoal.protocol.constants import CONTINUATIONS, EPISODES, MAX_SUBMISSION_BYTES
from shoal.protocol.continuations import FIRST_BLOCK, is_continued, is_continued_slot, slot_in_batch
from shoal.protocol.encoding import WireError, digest, to_msgpack
from shoal.protocol.task_draws import TaskList
from shoal.roles.auditor.rejudge_groups import GroupChoice, examine
from shoal.roles.node.lease_client import demand_sound
from shoal.roles.node.session import SOONEST_S
from shoal.roles.validator import Validator
from shoal.roles.worker.worker import VersionExpired, Worker, parents_of
from shoal.runs.log_source import FolderRun
from tests.envs import rivals
from tests.ledger.ledger_fixture import rules
from tests.nightly import first_of
from tests.roles.forgery import forged
from tests.roles.test_session import refusal, saying
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

VINE = {"name": "composition", "credit": {"name": "vine", "continuations": 2, "every": 1, "most": 2}}


def vine_run(**changes):
    return tiny_run(**{"steps": 1, "train": {"algorithm": VINE}, **changes})


@pytest.fixture(scope="module")
def single_file_weights(tmp_path_factory):
    return weights_of_one_file(vine_run(), tmp_path_factory.mktemp("one") / "run")


def bodies(testbed, kind):
    return [entry.body for entry in testbed.audit().entries if isinstance(entry.body, kind)]


@pytest.mark.parametrize("num_workers", first_of(3, 1))
def test_any_number_of_workers_gives_the_bytes_of_one_file(tmp_path, num_workers):
    testbed = RunTestbed(tmp_path / "run", vine_run(steps=2))
    workers = [testbed.worker(f"worker-{i}") for i in range(num_workers)]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))
    assert testbed.weights() == weights_of_one_file(vine_run(steps=2), tmp_path / "one" / "run")
    assert testbed.audit().findings == [] and bodies(testbed, SlotVoid) == []
    continued = [body for body in bodies(testbed, GroupAccepted) if is_continued_slot(body.slot, 2)]
    assert len(continued) >= 6 and any(body.rewards for body in continued) and any(body.tokens for body in continued)
    for version, places in ((step, batch) for step, batch in testbed.coordinator.state.main.batches.items()):
        assert not any(is_continued_slot(slot, 2) for _, slot in places), version


@pytest.mark.slow
def test_continuations_are_proven_as_other_rollouts_are(tmp_path, single_file_weights):
    """With proofs of activations, of which an empty slot has none."""
    testbed = RunTestbed(tmp_path / "run", vine_run(verify={"proofs": "toploc"}))
    worker = testbed.worker("w")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    assert testbed.weights() == single_file_weights and testbed.audit().findings == []
    assert testbed.coordinator.state.members[worker.key].refused == 0


def test_an_asynchronous_run_waits_for_continuations_as_its_log_says(tmp_path):
    testbed = RunTestbed(tmp_path / "run", vine_run(steps=2, rollouts={"max_staleness": 1}))
    workers = [testbed.worker(f"worker-{i}") for i in range(2)]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))
    audit, slots = testbed.audit(), testbed.coordinator.state.main.versions
    assert audit.findings == [] and len(testbed.coordinator.state.main.batches) == 2
    for places in testbed.coordinator.state.main.batches.values():
        for version, slot in places:
            assert slots[version].slots[slot + 2 * FIRST_BLOCK].status == "continued"


def continues(lease):
    return is_continued(lease.blocks[0].index)


class Later:
    """A role that begins once something holds, so that another has come first."""

    def __init__(self, role, holds):
        self.role, self.holds = role, holds

    async def run(self):
        while not self.holds():
            await asyncio.sleep(0.01)
        await self.role.run()


def test_a_worker_that_drops_all_continuations_changes_nothing(tmp_path, single_file_weights):
    """It knows the rewards of the parents. Others make what it drops, with the same seeds."""
    testbed = RunTestbed(tmp_path / "run", vine_run(rollouts={"lease_s": 0.5}))
    dropper, play = testbed.worker("dropper"), Worker._play_whole

    async def refuse(grant, before, use):
        return None if continues(grant.lease) else await play(dropper, grant, before, use)

    dropper._play_whole = refuse
    members = testbed.coordinator.state.members
    honest = Later(testbed.worker("honest"), lambda: dropper.key in members and members[dropper.key].lapsed)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), dropper, honest))
    assert testbed.weights() == single_file_weights and testbed.audit().findings == []
    assert members[dropper.key].lapsed and members[honest.role.key].accepted


def test_a_worker_that_picks_seeds_for_continuations_alone_is_quarantined_and_changes_nothing(
    tmp_path, single_file_weights
):
    testbed = RunTestbed(tmp_path / "run", vine_run())
    forger, play = testbed.worker("forger"), Worker._play

    def choose(lease, parents):
        honest = forger.session.policy.engine
        forger.session.policy.engine = OtherSeed(honest) if continues(lease) else honest
        try:
            return play(forger, lease, parents)
        finally:
            forger.session.policy.engine = honest

    forger._play = choose
    members = testbed.coordinator.state.members
    honest = Later(testbed.worker("honest"), lambda: forger.key in members and members[forger.key].reasons)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), forger, honest))
    assert testbed.weights() == single_file_weights and testbed.audit().findings == []
    assert set(members[forger.key].reasons) == {"sampling"} and members[forger.key].failures
    assert members[forger.key].accepted, "its ordinary groups were honest"


class Friend(Validator):
    """Accepts what a forger sends, and is honest about all else."""

    async def _give(self, verdict):
        groups = tuple(
            t.GroupVerdict(group.slot, True, "accept", rewards=(0.0, 1.0) * 4, tokens=8)
            if group.outcome == "hard"
            else group
            for group in verdict.groups
        )
        await super()._give(msgspec.structs.replace(verdict, groups=groups))


def test_a_forged_parent_that_a_validator_accepts_does_not_stop_a_synchronous_run(tmp_path):
    """Nobody can play on from it, so the slots that would continue it are void, by an event for each."""
    testbed = RunTestbed(tmp_path / "run", vine_run())
    forger, play = testbed.worker("forger"), Worker._play

    def forge(lease, parents):
        groups = play(forger, lease, parents)
        return groups if continues(lease) or groups is None else [with_other_prompt(group) for group in groups]

    forger._play = forge
    honest = testbed.validator()
    friend = Friend(honest.node)
    asyncio.run(testbed.live(testbed.trainer(), friend, forger, limit_s=30.0))
    found = bodies(testbed, SlotVoid)
    assert found and all(body.cause.startswith("environment: ") for body in found)
    assert all(is_continued_slot(slot, 2) for body in found for slot in body.slots)
    assert testbed.audit().findings == [] and len(testbed.coordinator.state.main.batches) == 1


def with_other_prompt(group):
    """The group with another first token in each rollout."""
    changed = (
        msgspec.structs.replace(r, token_ids=bytes([r.token_ids[0] ^ 1]) + r.token_ids[1:]) for r in group.rollouts
    )
    return msgspec.structs.replace(group, rollouts=tuple(changed))


@pytest.mark.parametrize(
    ("role", "hostile"),
    [
        ("worker", {"every": 0}),
        ("validator", {"most": -1}),
        ("worker", {"continuations": 10**9}),
        ("validator", {"most": 10**4299}),
    ],
)
def test_a_run_that_continues_otherwise_than_any_host_of_ours_is_refused(tmp_path, monkeypatch, role, hostile):
    testbed = RunTestbed(tmp_path / "run", vine_run())
    algorithm = Composition(credit=msgspec.structs.replace(Vine(), **hostile))
    refused = refusal(saying(testbed, monkeypatch, rules=rules(algorithm=algorithm)), role)
    assert "groups of such continuations" in refused or "Expected `int` >= 1 - at `$.rules.algorithm.credit" in refused


def without_end(lines):
    (time, created), *others = lines
    asked = msgspec.structs.replace(created.rules, algorithm=Composition(credit=Vine(every=0)))
    return [(time, msgspec.structs.replace(created, rules=asked)), *others]


def without_tasks(lines):
    (time, created), *others = lines
    none = {"arithmetic": TaskList(created.envs[0].digest, {}, created.envs[0].num_tasks, ())}
    return [(time, msgspec.structs.replace(created, task_lists=none)), *others]


def with_other_parents(lines):
    """The groups of ordinary slots are said to be at other places of their submissions."""
    return [
        (time, msgspec.structs.replace(body, index=1 - body.index % 2))
        if isinstance(body, GroupAccepted) and not is_continued_slot(body.slot, 2)
        else (time, body)
        for time, body in lines
    ]


def test_an_auditor_recomputes_continuations_from_the_log_alone(tmp_path):
    testbed = RunTestbed(tmp_path / "run", vine_run(steps=1))
    worker = testbed.worker("w")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    found = asyncio.run(examine(str(testbed.folder.root), GroupChoice(), 1, own_files=True))
    continued = sum(is_continued_slot(body.slot, 2) for body in bodies(testbed, GroupAccepted))
    assert found.disagreements == [] and continued and found.with_model > continued and not found.left_out

    def of(lie, *evidence):
        place = tmp_path / lie.__name__
        if not place.exists():
            forged(testbed.folder.root, place, lie)
        return asyncio.run(examine(str(place), GroupChoice(evidence=evidence), 1, own_files=True)).disagreements

    with pytest.raises(WireError, match=r"Expected `int` >= 1 - at `\$.rules.algorithm.credit.every`"):
        of(without_end)
    assert any("no seed gives what its lease asked for" in line for line in of(without_tasks))
    assert any("that is not there" in line for line in of(with_other_parents))
    signed = [line for line in of(without_tasks, worker.session.evidence.folder) if "the run key signed it" in line]
    assert any("but no seed gives what its lease asked for (" in line for line in signed)


# --- what each side takes from the other ---


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that came as far as its first continuations, with a worker that left them; and a lease of these."""
    testbed = RunTestbed(tmp_path_factory.mktemp("begun") / "run", vine_run())

    async def scenario():
        worker = testbed.worker("first")
        give = worker._play_whole

        async def stop(grant, before, use):
            if continues(grant.lease):
                await asyncio.Event().wait()
            return await give(grant, before, use)

        worker._play_whole = stop
        roles = [asyncio.create_task(role.run()) for role in (testbed.trainer(), testbed.validator(), worker)]
        async with asyncio.timeout(20):
            while not any(is_continued(b) for b in _blocks(testbed)):
                await asyncio.sleep(0.01)
        for role in roles:
            role.cancel()
        await asyncio.gather(*roles, return_exceptions=True)

    asyncio.run(scenario())
    return testbed, next(x for x in testbed.coordinator.state.leases.values() if is_continued(x.blocks[0]))


def _blocks(testbed):
    return testbed.coordinator.state.main.versions[0].blocks if testbed.coordinator.state.main.version >= 0 else {}


def test_only_the_worker_of_a_lease_reads_what_it_continues(begun):
    testbed, name = begun
    lease = testbed.coordinator.wire_lease(name)
    told = asyncio.run(testbed.coordinator.parents(name.worker, name.id))
    found = parents_of(lease, told.groups, testbed.coordinator.state.rules, 10**6)
    assert {slot.slot for block in lease.blocks for slot in block.slots if slot.parent} == found.keys()
    other, now = "b" * 64, max(testbed.clock(), testbed.coordinator.state.time)
    testbed.coordinator.log_writer.write(
        JoinRun(other, t.Join("worker", "other", 0.0, "i", "float32", "cpu"), now), now
    )
    with pytest.raises(Refused, match="not one of yours"):
        asyncio.run(testbed.coordinator.parents(other, name.id))


def test_what_a_lease_continues_is_read_once_at_a_time(begun):
    """Bodies are large: a worker that asks a hundred times must not fill the host's memory or stop its other answers."""
    testbed, lease = begun

    async def often():
        asked = (testbed.coordinator.parents(lease.worker, lease.id) for _ in range(3))
        return await asyncio.gather(*asked, return_exceptions=True)

    first, *others = asyncio.run(often())
    assert isinstance(first, t.Parents) and all("being read" in str(refused) for refused in others)
    assert asyncio.run(often())[0] == first


def test_what_is_continued_stays_on_the_hosts_disk(begun):
    testbed, lease = begun
    parent = next(s.parent for b in testbed.coordinator.wire_lease(lease).blocks for s in b.slots if s.parent)
    kept = testbed.coordinator.kept
    assert parent.submission in kept._continued() and parent.submission not in kept._deletable(kept.bodies)


@pytest.mark.slow
def test_what_was_learned_from_stays_with_its_continuations_and_is_audited_at_the_end(tmp_path):
    """With `storage.retain = "batches"`: the credit of a parent's tokens is the rewards of its continuations."""
    storage = {"retain": "batches", "window_steps": 1}
    testbed = RunTestbed(tmp_path / "run", vine_run(steps=4, storage=storage))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("w")))
    testbed.coordinator.kept.forget_old()
    taught = {place for places in testbed.coordinator.state.main.batches.values() for place in places}
    needed = [body for body in bodies(testbed, GroupAccepted) if (body.version, slot_in_batch(body.slot, 2)) in taught]
    assert any(is_continued_slot(body.slot, 2) and body.version == 0 for body in needed)
    assert all(testbed.coordinator.blobs.has(body.submission) for body in needed)
    assert len(testbed.coordinator.kept.bodies) < len(testbed.coordinator.state.submissions), "others are deleted"
    found = asyncio.run(examine(str(testbed.folder.root), GroupChoice(), 1, own_files=True))
    assert found.disagreements == [] and not found.left_out and found.groups >= len(needed)
    testbed.coordinator.blobs.delete(
        next(b.submission for b in needed if is_continued_slot(b.slot, 2) and b.version == 0)
    )
    assert asyncio.run(examine(str(testbed.folder.root), GroupChoice(), 1, own_files=True)).left_out


def test_continuations_of_what_was_learned_from_stay_and_are_expected_to(tmp_path, monkeypatch):
    """What is continued now is looked up once, however many bodies are kept."""
    testbed, asked = (
        RunTestbed(tmp_path / "run", vine_run(steps=2, storage={"retain": "batches", "window_steps": 1})),
        list[int](),
    )
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("w")))
    kept, look_up = testbed.coordinator.kept, testbed.coordinator.kept._continued
    monkeypatch.setattr(kept, "_continued", lambda: asked.append(1) or look_up())
    kept.forget_old()
    assert asked == [1]
    taught = {place for places in testbed.coordinator.state.main.batches.values() for place in places}
    first = {body.submission: body for body in bodies(testbed, GroupAccepted) if not body.version}
    needed = {b.submission for b in bodies(testbed, GroupAccepted) if (b.version, slot_in_batch(b.slot, 2)) in taught}
    assert any(is_continued_slot(body.slot, 2) for name, body in first.items() if name in needed)
    assert {name for name in first if testbed.coordinator.blobs.has(name)} == first.keys() & needed
    unused = first.keys() - needed
    expiry = FolderRun(testbed.folder.root).expiry(testbed.coordinator.state)
    assert unused and expiry is not None and expiry.bodies & first.keys() == unused


def test_a_worker_does_not_ask_without_a_pause_for_parents_that_the_host_lacks(tmp_path, monkeypatch):
    worker, slept = RunTestbed(tmp_path / "run", vine_run()).worker("w"), list[float]()

    async def lacks(seat, lease):
        raise NothingYet("there is no such blob")

    async def sleep(seconds):
        slept.append(seconds)

    worker.session = None
    monkeypatch.setattr("shoal.roles.worker.worker.fetch_parents", lacks)
    monkeypatch.setattr("shoal.roles.worker.worker.asyncio.sleep", sleep)
    with pytest.raises(VersionExpired):
        asyncio.run(worker._parents(leased(b"")))
    assert slept == [SOONEST_S]


OTHER_PARENTS = {
    "other bytes": lambda told: t.Parents(tuple(b"x" + group for group in told.groups)),
    "too few": lambda told: t.Parents(()),
    "too large": lambda told: t.Parents((bytes(MAX_SUBMISSION_BYTES), *told.groups)),
}


def test_parents_that_a_host_serves_wrongly_end_no_worker(tmp_path, single_file_weights):
    """It gives the lease back each time, and goes on when the host serves them."""
    testbed = RunTestbed(tmp_path / "run", vine_run(rollouts={"lease_s": 0.2}))
    wrong, parents = list(OTHER_PARENTS.values()), testbed.coordinator.parents

    async def serve(key, lease):
        told = await parents(key, lease)
        return wrong.pop()(told) if wrong else told

    testbed.coordinator.parents = serve
    worker = testbed.worker("w")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    assert testbed.weights() == single_file_weights and testbed.audit().findings == [] and not wrong
    assert testbed.coordinator.state.members[worker.key].lapsed


def test_parents_that_a_host_serves_wrongly_end_no_validator(tmp_path, single_file_weights):
    testbed = RunTestbed(tmp_path / "run", vine_run())
    validator, refused = testbed.validator(), list[str]()
    read = validator.client.get_blob

    async def serve(name, *, cap, deadline_s=None):
        booked = testbed.coordinator.state.submissions.get(name)
        if booked is not None and booked.decided and len(refused) < 4:
            refused.append(name)
            raise PeerError(f"it answered with more than {cap} bytes: it was not read")
        return await read(name, cap=cap, deadline_s=deadline_s)

    validator.client.get_blob = serve
    asyncio.run(testbed.live(testbed.trainer(), validator, testbed.worker("w")))
    assert testbed.weights() == single_file_weights and testbed.audit().findings == [] and len(refused) == 4


def a_parent(num=2, tokens=(5, 6, 7)):
    rollouts = [
        t.make_rollout(tokens, [0] + [1] * (len(tokens) - 1), [-1.0] * (len(tokens) - 1), version=0, ending="stop")
    ]
    return t.Group(0, 0, "e", tuple(rollouts * num))


def leased(data, index=FIRST_BLOCK, kind=CONTINUATIONS):
    slot = t.Slot(2 * index, "0" * 64, "e", 0, t.Parent("s", 0, digest(data)))
    return t.Lease("l", "w", 0, (t.Block(index, (slot,), kind),), t.Sampling(1.0, 8, 64), 0.0, 1.0)


def test_a_worker_continues_nothing_but_what_its_lease_names(tmp_path):
    of_run, group = rules(), a_parent()
    data = to_msgpack(group)
    assert parents_of(leased(data), [data], of_run, 10) == {2 * FIRST_BLOCK: group}
    with pytest.raises(WireError, match="other bytes came"):
        parents_of(leased(data), [to_msgpack(a_parent(tokens=(5, 6, 8)))], of_run, 10)
    with pytest.raises(WireError, match="0 groups came"):
        parents_of(leased(data), [], of_run, 10)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no group",
        to_msgpack(a_parent(num=5)),
        to_msgpack(a_parent(tokens=(5, 6, 99))),
        to_msgpack(msgspec.structs.replace(a_parent(), env="e" * 10_000)),
    ],
)
def test_in_a_slot_whose_parent_no_model_may_read_nothing_is_due(data):
    """A validator that lies may accept any bytes, of any size. Workers that stopped at them would all be gone soon."""
    assert parents_of(leased(data), [data], rules(), 10) == {}


def test_a_worker_gives_back_what_it_cannot_play_on_and_goes_on(tmp_path, single_file_weights):
    testbed = RunTestbed(tmp_path / "run", vine_run(rollouts={"lease_s": 0.5}))
    other, play = testbed.worker("other"), Worker._play

    def differs(lease, parents):
        if continues(lease):
            raise OtherStart("the environment plays otherwise here")
        return play(other, lease, parents)

    other._play = differs
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), other, testbed.worker("honest")))
    assert testbed.weights() == single_file_weights and testbed.audit().findings == []


def test_a_worker_takes_leases_of_continuations_only_where_the_run_has_some():
    lease = leased(b"")
    demand_sound(lease, EPISODES, continues=True)
    with pytest.raises(PeerError, match="holds continuations"):
        demand_sound(lease, EPISODES)
    plain = leased(b"", 3, EPISODES)
    demand_sound(plain, EPISODES, continues=True)
    for wrong in (leased(b"", FIRST_BLOCK, EPISODES), leased(b"", 3, CONTINUATIONS)):
        with pytest.raises(PeerError, match="install the host's version"):
            demand_sound(wrong, EPISODES, continues=True)
    both = t.Lease("l", "w", 0, lease.blocks + plain.blocks, lease.sampling, 0.0, 1.0)
    with pytest.raises(PeerError, match="other work at once"):
        demand_sound(both, EPISODES, continues=True)


def test_an_environment_that_compares_rollouts_is_not_continued(tmp_path):
    with pytest.raises(ConfigError, match="compares the rollouts of a group"):
        RunTestbed(tmp_path / "run", vine_run(envs=[{"name": rivals.__file__}]))
