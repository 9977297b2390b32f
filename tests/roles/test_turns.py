"""Turns at a real coordinator and its stage: what a worker may ask, and what it gets when something is wrong."""

import asyncio
import re
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shoal.config import TinyPolicy
from shoal.errors import PeerError
from shoal.ledger.commands import Admin, AskLease, JoinRun, Publish, ReturnLeases
from shoal.ledger.state_records import LeaseRecord
from shoal.models.random_model import make_tiny
from shoal.net.client import Client, PeerRefused
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import from_msgpack
from shoal.protocol.messages import AdminRequest
from shoal.roles.coordinator import env_server_client
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.env_server import server
from shoal.roles.env_server import server as stage_role
from shoal.verification.encode_submission import encode_submission
from tests.roles.testbed import RunTestbed, tiny_run

HOSTED = [{"name": "arithmetic", "kind": "completions"}]
LIMIT = 1 << 20


class World:
    """A run with a lease for each of two workers, and clients of both."""

    def __init__(self, root, envs=HOSTED) -> None:
        self.testbed = RunTestbed(root, tiny_run(envs=envs))
        self.coordinator, self.folder = self.testbed.coordinator, self.testbed.folder
        make_tiny(TinyPolicy(width=16, layers=1, heads=1, kv_heads=1, mlp_width=16), self.folder.policy, 0, "float32")
        now, log_writer = time.time(), self.coordinator.log_writer
        trainer = load_or_make_key(self.folder.keys / "trainer.key").public
        log_writer.write(JoinRun(trainer, t.Join("trainer", "t", 0.0, "x", "float32", "cpu"), now), now)
        log_writer.write(Publish(trainer, 0, "00" * 32, "11" * 32, {}, now), now)
        self.keys = [load_or_make_key(root / f"worker-{i}.key").public for i in range(2)]
        for key in self.keys:
            log_writer.write(JoinRun(key, t.Join("worker", key[:8], 0.0, "x", "float32", "cpu"), now), now)
            log_writer.write(AskLease(key, (), 0.0, now), now)
        self.leases = [self.coordinator.wire_lease(self.coordinator.state.open_leases_of(key)[0]) for key in self.keys]
        self.block = self.leases[0].blocks[0]
        self.stop = 0

    def client(self, which: int | str = 0) -> Client:
        client = self.testbed.client(self.folder.root / f"worker-{which}.key")
        client.run = self.coordinator.state.run
        return client

    def hurried(self) -> Client:
        """A client whose pauses count but take no time: it gives up after as many attempts on any machine."""
        client, passed = self.client(), [0.0]

        async def sleep(seconds: float) -> None:
            passed[0] += seconds

        client._sleep, client._monotonic = sleep, lambda: passed[0]
        return client

    async def turn(self, turn: int, written=(), which: int = 0, lease="", block=None, client=None, deadline_s=60.0):
        number = self.leases[which].blocks[0].index if block is None else block
        value = t.EnvTurn(number, turn, tuple(written))
        path = f"/v1/leases/{lease or self.leases[which].id}/turns"
        return await (client or self.client(which)).post_packed(
            path, value, t.TurnAnswer, cap=LIMIT, deadline_s=deadline_s
        )

    async def play(self, which: int = 0) -> bytes:
        """Play a lease to its end by stopping at once; returns the submission."""
        lease, size = self.leases[which], self.coordinator.state.rules.group_size
        opening = await self.turn(0, which=which)
        stop = ids([next(iter(self.stops()))])
        answer = await self.turn(1, [stop] * len(opening.said), which=which)
        assert all(said.ending for said in answer.said)
        rollouts = []
        for first, last in zip(opening.said, answer.said, strict=True):
            words, more = opening.texts[first.text], answer.texts[last.text]
            tokens = np.frombuffer(words + stop + more, dtype="<i4")
            author = [0] * (len(words) // 4) + [1] + [0] * (len(more) // 4)
            rollouts.append(t.make_rollout(tokens, author, [-1.0], version=0, ending=last.ending))
        slots = [slot for block in lease.blocks for slot in block.slots]
        groups = [
            t.Group(slot.slot, slot.task, slot.env, tuple(rollouts[i * size : (i + 1) * size]))
            for i, slot in enumerate(slots)
        ]
        self.groups = groups
        return self.body(groups, which)

    def body(self, groups, which: int = 0) -> bytes:
        return encode_submission(
            self.coordinator.state.run, self.leases[which], groups, t.EngineFacts("x", "float32", "cpu")
        )

    async def submit(self, body: bytes, which: int = 0, client=None) -> t.Receipt:
        path = f"/v1/leases/{self.leases[which].id}/submission"
        return await (client or self.client(which)).put_bytes(path, body, t.Receipt, deadline_s=60.0)

    def stops(self) -> frozenset[int]:
        return self.testbed.stage._limits.stop_ids


def ids(tokens) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path / "run")
    yield world
    world.testbed.stage.close()


def refused(scenario) -> tuple[int, str, str]:
    """How a story that must be refused ends."""
    with pytest.raises(PeerRefused) as caught:
        asyncio.run(scenario)
    return caught.value.status, caught.value.code, str(caught.value)


def test_a_lease_is_played_turn_by_turn_and_its_submission_is_booked_with_a_record(world):
    async def scenario():
        body = await world.play()
        return await world.submit(body), await world.submit(body)

    first, again = asyncio.run(scenario())
    assert first == again
    booked = world.coordinator.state.submissions[first.digest]
    record = from_msgpack(world.coordinator.blobs.get(booked.record), t.Record)
    assert (record.run, record.lease, record.version) == (world.coordinator.state.run, world.leases[0].id, 0)
    assert [len(group.rollouts) for group in record.groups] == [8, 8]
    assert {rollout.ending for group in record.groups for rollout in group.rollouts} == {"environment"}
    assert not world.coordinator.kept.may_read(booked.record, "") and not world.coordinator.kept.may_read(
        booked.record, world.keys[1]
    )
    validator, now = world.coordinator.state.validators[0], time.time()
    world.coordinator.log_writer.write(
        JoinRun(validator, t.Join("validator", "v", 0.0, "x", "float32", "cpu"), now), now
    )
    assert world.coordinator.kept.may_read(booked.record, validator)


@pytest.mark.parametrize(
    ("asked", "status", "why"),
    [
        (lambda w: w.turn(0, lease=w.leases[1].id), 403, "not_yours"),
        (lambda w: w.turn(0, client=w.client("stranger")), 403, "not_joined"),
        (lambda w: w.turn(0, block=10**9), 400, "malformed"),
        (lambda w: w.turn(0, [ids([1])]), 400, "malformed"),
        (
            lambda w: w.turn(1, [ids([1])] * 16),
            409,
            "conflict): turn 1 of block [0-9]+ comes before turn 0, or that one",
        ),
        (lambda w: w.turn(1 << 63, [ids([1])] * 16), 400, "malformed"),
        (lambda w: w.turn(1, [b"x" * 4000]), 400, "malformed): .*more than the"),
    ],
    ids=["another's", "no member", "no block", "words at turn 0", "before turn 0", "beyond all", "long"],
)
def test_a_turn_that_is_not_the_workers_own_is_refused(world, asked, status, why):
    assert re.search(rf"\({status} {why.replace(')', chr(92) + ')')}", refused(asked(world))[2])
    assert asyncio.run(world.turn(0)).said


def test_the_worker_that_takes_a_lapsed_block_over_hears_the_same_and_plays_nothing_twice(world):
    async def scenario():
        first = await world.turn(0)
        now = world.testbed.clock()
        await world.coordinator.log_writer.submit(ReturnLeases(world.keys[0], (world.leases[0].id,), now))
        lapsed = world.leases[0].blocks[0].index
        with pytest.raises(PeerRefused):
            await world.turn(0, which=1, block=lapsed)
        heir = t.Lease(**{**to_dict(world.leases[0]), "id": "77"})
        asked = t.Staged(heir.id, 0, heir.blocks, t.EnvTurn(lapsed, 0))
        world.testbed.stage._players = None  # nothing is played now
        world.testbed.stage._open = lambda: asyncio.sleep(0, SimpleNamespace(play=None))
        return first, await world.coordinator.stage.turn(asked, LIMIT)

    first, again = asyncio.run(scenario())
    assert first == again


def to_dict(lease):
    return {name: getattr(lease, name) for name in lease.__struct_fields__}


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda r: msgspec.structs.replace(r, ending="length"), "another ending"),
        (lambda r: msgspec.structs.replace(r, token_ids=ids([5]) + r.token_ids[4:]), "other tokens"),
        (lambda r: msgspec.structs.replace(r, author=b"\1" * len(r.author)), "other tokens"),
        (None, "7 rollouts where the record has 8"),
    ],
    ids=["ending", "prompt", "author", "left out"],
)
def test_a_submission_that_is_not_what_was_played_is_refused_and_leaves_nothing(world, caplog, forge, reason):
    async def scenario():
        body = await world.play()
        group = world.groups[1]
        forged = group.rollouts[:-1] if forge is None else (*group.rollouts[:-1], forge(group.rollouts[-1]))
        groups = [world.groups[0], msgspec.structs.replace(group, rollouts=forged)]
        for _ in range(2):
            with pytest.raises(PeerRefused, match=reason) as caught:
                await world.submit(world.body(groups))
            assert caught.value.status == 400
        told = [record for record in caplog.records if record.getMessage().startswith("refused worker=")]
        assert len(told) == 1, "the host learns who forges, once"
        assert not [path for path in world.coordinator.blobs.folder.rglob("*") if path.is_file()]
        assert await world.submit(body)

    asyncio.run(scenario())


def test_without_a_stage_workers_are_told_to_come_again_and_nothing_is_lost(world):
    async def scenario():
        body = await world.play()
        address = world.folder.stage_address.read_bytes()
        world.folder.stage_address.unlink()
        for ask in (world.turn(0, client=world.hurried()), world.submit(body, client=world.hurried())):
            with pytest.raises(PeerError, match="the host's stage gives no answer now") as caught:
                await ask
            assert not isinstance(caught.value, PeerRefused)
        world.folder.stage_address.write_bytes(address)
        assert await world.submit(body)

    asyncio.run(scenario())


def test_a_stage_that_does_not_answer_is_no_refusal(world, monkeypatch):
    monkeypatch.setattr(env_server_client, "STAGE_S", 0.05)
    answer = world.testbed.stage._answer
    monkeypatch.setattr(world.testbed.stage, "_answer", lambda asked, turn: asyncio.sleep(3))
    assert "stage" not in StatusCache(world.coordinator).status().waiting_for
    monkeypatch.setattr(env_server_client, "SLOW_TURN_S", 0.0)
    with pytest.raises(PeerError, match="the host's stage gives no answer now") as caught:
        asyncio.run(world.turn(0, client=world.hurried()))
    assert not isinstance(caught.value, PeerRefused) and "http://stage" not in str(caught.value), "a stranger reads it"
    status, block = StatusCache(world.coordinator).status(), world.block
    waits = status.waiting_for
    assert (
        status.waiting_on == "host"
        and waits.startswith("the host's stage: one answer takes ")
        and f" in task {block.slots[0].task} of " in waits
    )
    monkeypatch.setattr(world.testbed.stage, "_answer", answer)
    monkeypatch.setattr(env_server_client, "STAGE_S", 25.0)
    asyncio.run(world.turn(0))
    assert "stage" not in StatusCache(world.coordinator).status().waiting_for


def test_a_turn_that_takes_long_goes_on_while_its_worker_asks_again(world, monkeypatch):
    monkeypatch.setattr(server, "ANSWER_S", 0.05)
    played = []

    def slow(asks):
        played.append(len(asks))
        until = time.monotonic() + 20  # before a client that gets no answer at all asks again
        while len(asked) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        return real(asks)

    async def scenario():
        nonlocal real
        players = await world.testbed.stage._open()
        real, players.play = players.play, slow
        return await world.turn(0)

    real, asked, answer_of = None, [], world.testbed.stage._answer
    monkeypatch.setattr(world.testbed.stage, "_answer", lambda *what: asked.append(what) or answer_of(*what))
    assert len(asyncio.run(scenario()).said) == 16
    assert played == [16] and len(asked) >= 3


def test_time_that_the_stage_takes_costs_an_honest_worker_nothing_and_a_worker_that_idles_pays(world, monkeypatch):
    """The environment hangs on a turn of the first worker past the deadlines. The second asks for nothing any more."""
    monkeypatch.setattr(server, "ANSWER_S", 0.05)
    monkeypatch.setattr(env_server_client, "QUESTION_S", 0.01)
    go_on = threading.Event()
    now = time.time()
    leases = [
        LeaseRecord(lease.id, key, "", 0, (), now, now + 0.5)
        for lease, key in zip(world.leases, world.keys, strict=True)
    ]
    first, second = (world.coordinator.state.members[key] for key in world.keys)

    async def scenario():
        await world.turn(0, which=1)
        world.coordinator.stage._spent.clear()  # of the start of the stage
        players = await world.testbed.stage._open()
        play, players.play = players.play, lambda asks: go_on.wait(60) and play(asks)
        asked = asyncio.create_task(world.turn(0))
        ahead, late = (msgspec.structs.replace(leases[0], id=name) for name in ("ahead", "late"))
        while world.leases[0].id not in world.coordinator.stage.host_hung([*leases, ahead]):
            await asyncio.sleep(0.05)
        found = world.coordinator.stage.host_hung([*leases, ahead, late])
        assert found == (world.leases[0].id, "ahead"), "it was held beside the first while the environment hung"
        monkeypatch.setattr(env_server_client, "HOST_HUNG_SHARE", 1e-9)
        world.coordinator.clock = lambda: max(lease.deadline for lease in world.leases) + 1.0
        await world.coordinator.tick()
        go_on.set()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(scenario())
    assert (first.stale, first.lapsed, first.dropped) == (1, 0, 0)
    assert (second.stale, second.lapsed, second.dropped) == (0, 1, 1)


def test_questions_that_are_answered_at_once_or_beside_each_other_make_no_hang():
    spent = env_server_client.StageTime()
    for tenth in range(1000):  # two at a time for 100 s, and refusals that say busy
        for began in (tenth / 10, tenth / 10 + 0.05):
            spent.begin(began)
        spent.end(tenth / 10, tenth / 10 + 0.09, busy=True)
        spent.end(tenth / 10 + 0.05, tenth / 10 + 0.14, busy=False)
    assert spent.seconds(100.0) == 0.0
    for began, ended in ((100.0, 125.0), (105.0, 130.0), (131.0, 140.0)):
        spent.begin(began)
        spent.end(began, ended, busy=True)
    assert spent.seconds(200.0) == pytest.approx(40.0), (
        "what two took is once in it, and pauses before one asks again are"
    )
    spent.begin(300.0)
    assert spent.seconds(330.0) == pytest.approx(70.0), "a pause of the worker is not"


def test_other_tokens_for_a_turn_that_is_being_played_are_not_answered_with_it(world):
    async def scenario():
        opening = await world.turn(0)
        stop = next(iter(world.stops()))
        letter = next(i for i in range(16, 60) if i not in world.stops())
        players = await world.testbed.stage._open()
        play, players.play = players.play, lambda asks: time.sleep(0.3) or play(asks)
        turns = [[ids([stop])] * len(opening.said), [ids([letter, stop])] * len(opening.said)]
        ends = await asyncio.gather(
            *(world.turn(1, written, deadline_s=60.0) for written in turns), return_exceptions=True
        )
        return sorted(type(end).__name__ for end in ends)

    assert asyncio.run(scenario()) == ["PeerRefused", "TurnAnswer"]


def test_a_worker_has_a_bounded_number_of_turns_at_a_time(world, monkeypatch):
    monkeypatch.setattr(env_server_client, "MAX_WORKER_TURNS", 2)
    most = 0

    async def count(asked, cap):
        nonlocal most
        most = max(most, world.coordinator.stage._asking[world.keys[0]])
        await asyncio.sleep(0.05)
        return await real(asked, cap)

    async def scenario():
        return await asyncio.gather(*(world.turn(0, deadline_s=60.0) for _ in range(8)), world.turn(0, which=1))

    real = world.coordinator.stage.turn
    monkeypatch.setattr(world.coordinator.stage, "turn", count)
    answers = asyncio.run(scenario())
    assert most == 2 and len({str(answer) for answer in answers[:8]}) == 1
    assert not world.coordinator.stage._asking


def test_a_stage_that_comes_back_listens_where_the_coordinator_still_asks(tmp_path):
    address = tmp_path / "stage.json"
    with stage_role._listen(address) as first:
        port = first.getsockname()[1]
        address.write_text(f'{{"url": "http://127.0.0.1:{port}"}}')
        with stage_role._listen(address) as taken:
            assert taken.getsockname()[1] != port
    with stage_role._listen(address) as again:
        assert again.getsockname() == ("127.0.0.1", port)


def test_the_stage_answers_nobody_but_the_coordinator(world):
    async def scenario():
        worker = load_or_make_key(world.folder.root / "worker-0.key")
        client = world.testbed.to_stage("http://stage")
        client.key = worker
        asked = t.Staged("1", 0, (world.block,), t.EnvTurn(world.block.index, 0))
        await client.post_packed("/v1/turns", asked, t.TurnAnswer, cap=LIMIT, deadline_s=60.0)

    assert refused(scenario())[:2] == (403, "not_admitted")


def test_a_run_whose_workers_play_has_no_turns(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    key = tmp_path / "worker.key"

    async def scenario():
        client = testbed.client(key)
        client.run = testbed.coordinator.state.run
        await client.post_packed("/v1/leases/0/turns", t.EnvTurn(0, 0), t.TurnAnswer, cap=LIMIT, deadline_s=60.0)

    status, code, reason = refused(scenario())
    assert (status, code) == (400, "malformed") and "workers play the environments themselves" in reason


def test_what_can_still_be_leased_is_not_forgotten(world):
    async def scenario():
        first = await world.turn(0)
        world.testbed.stage._config = msgspec.structs.replace(
            world.testbed.stage._config,
            rollouts=msgspec.structs.replace(world.testbed.stage._config.rollouts, max_staleness=1),
        )
        world.testbed.stage._forget_old(1)
        await world.testbed.stage._forgetting
        assert world.testbed.stage._reply_store.last(world.leases[0].id, world.block.index) is not None
        assert await world.turn(0) == first
        world.testbed.stage._forget_old(2)
        await world.testbed.stage._forgetting
        return world.testbed.stage._reply_store.last(world.leases[0].id, world.block.index)

    assert asyncio.run(scenario()) is None


def test_a_run_that_is_drained_says_how_many_leases_it_waits_for(world):
    now = world.testbed.clock()
    world.coordinator.log_writer.write(Admin("drain", AdminRequest(), now), now)
    waiting_for = StatusCache(world.coordinator).status().waiting_for
    assert waiting_for == "workers: 2 leases to finish, then the run ends"
