"""Workers that wait for a lease: which of them a commit wakes, in which order, and that none is forgotten."""

import asyncio
import contextlib

import pytest

from shoal.ledger.commands import Admin, AskLease, JoinRun, Publish, ReturnLeases
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest
from shoal.protocol.messages import AdminRequest
from shoal.roles.coordinator import lease_queue, routes
from tests.roles.testbed import RunTestbed, tiny_run

BLOCKS = 2
"""Blocks of the tiny run's first version."""


class Crowd:
    """Workers that ask for leases, and a count of how often the rules were asked for one."""

    def __init__(self, testbed, monkeypatch):
        self.testbed, self.coordinator, self.asked, self.polls = testbed, testbed.coordinator, 0, {}
        submit = self.coordinator.log_writer.submit

        async def counted(command):
            self.asked += isinstance(command, AskLease)
            return await submit(command)

        monkeypatch.setattr(self.coordinator.log_writer, "submit", counted)

    async def enter(self, stack, size):
        self.clients = []
        for number in range(size):
            client = self.testbed.client(self.testbed.folder.root / f"{number}.key")
            client.run = self.coordinator.state.run
            await stack.enter_async_context(client)
            await client.post_json("/v1/nodes", t.Join("worker", f"w{number}", 0.0, "x", "float32", "cpu"), t.NodeState)
            self.clients.append(client)

    def key(self, number):
        return load_or_make_key(self.testbed.folder.root / f"{number}.key").public

    async def poll(self, *numbers):
        for number in numbers:
            ask = self.clients[number].post_json("/v1/leases", t.LeaseRequest(), t.LeaseAnswer)
            self.polls[number] = asyncio.create_task(ask)
            await asyncio.sleep(0.01)

    async def publish(self):
        state = self.coordinator.state
        root = digest(b"%d" % state.main.version)
        await self.coordinator.log_writer.submit(
            Publish(state.trainer_key, state.main.version + 1, root, "m", {}, self.coordinator.clock())
        )
        await asyncio.sleep(0.1)

    async def join_event(self, name):
        join = t.Join("worker", name, 0.0, "x", "float32", "cpu")
        await self.coordinator.log_writer.submit(JoinRun(digest(name.encode()), join, self.coordinator.clock()))
        await asyncio.sleep(0.02)

    async def give_back(self, number):
        lease = self.polls.pop(number).result().lease
        await self.coordinator.log_writer.submit(ReturnLeases(self.key(number), (lease.id,), self.coordinator.clock()))
        await asyncio.sleep(0.1)

    def served(self):
        return [n for n, poll in sorted(self.polls.items()) if poll.done() and poll.result().lease is not None]

    def waiting(self):
        return [n for n, poll in sorted(self.polls.items()) if not poll.done()]


def play(tmp_path, monkeypatch, scenario, size=12, **changes):
    """Run a scenario in a testbed with a crowd."""
    crowd = Crowd(RunTestbed(tmp_path / "run", tiny_run(**changes)), monkeypatch)

    async def whole():
        async with asyncio.timeout(30), contextlib.AsyncExitStack() as stack:
            await crowd.enter(stack, size)
            await scenario(crowd)
            for poll in crowd.polls.values():
                poll.cancel()

    asyncio.run(whole())


def test_a_commit_wakes_no_more_polls_for_a_lease_than_there_are_blocks(tmp_path, monkeypatch):
    async def scenario(crowd):
        await crowd.poll(*range(12))
        before = crowd.asked
        for name in "abcde":
            await crowd.join_event(name)
        assert crowd.asked == before
        await crowd.publish()
        assert crowd.asked == before + BLOCKS and crowd.served() == [0, 1]
        for name in "fghij":
            await crowd.join_event(name)
        assert crowd.asked == before + BLOCKS and len(crowd.waiting()) == 10

    play(tmp_path, monkeypatch, scenario)


def test_a_block_that_comes_free_goes_to_the_poll_that_has_waited_longest(tmp_path, monkeypatch):
    async def scenario(crowd):
        await crowd.poll(3, 1, 0, 2)
        await crowd.publish()
        assert crowd.served() == [1, 3]
        await crowd.give_back(3)
        await crowd.poll(4)
        assert crowd.served() == [0, 1]
        await crowd.give_back(1)
        assert crowd.served() == [0, 2] and crowd.waiting() == [4]

    play(tmp_path, monkeypatch, scenario, size=5)


def test_a_poll_that_cannot_use_its_block_wakes_the_next(tmp_path, monkeypatch):
    """The first two in line are quarantined for less than a poll lasts."""

    async def scenario(crowd):
        await crowd.poll(0, 1, 2, 3)
        for number in (0, 1):
            node = crowd.coordinator.state.members[crowd.key(number)]
            node.standing, node.until = "quarantined", crowd.coordinator.clock() + 10.0
        await crowd.publish()
        assert crowd.served() == [2, 3] and crowd.waiting() == [0, 1]
        await crowd.coordinator.tick()
        asked = crowd.asked
        for name in "abc":
            await crowd.join_event(name)
        assert crowd.asked == asked, "a quarantined worker asks again at each commit"

    play(tmp_path, monkeypatch, scenario, size=4)


def test_a_worker_that_was_passed_over_gets_a_block_when_its_quarantine_ends(tmp_path, monkeypatch):
    async def scenario(crowd):
        await crowd.poll(0)
        node = crowd.coordinator.state.members[crowd.key(0)]
        node.standing, node.until = "quarantined", crowd.coordinator.clock() + 0.5
        crowd.coordinator.state.expect(node.until, "quarantine", node.key)
        await crowd.publish()
        assert crowd.waiting() == [0]
        await asyncio.sleep(0.5)
        await crowd.coordinator.tick()
        await asyncio.sleep(0.1)
        assert crowd.served() == [0]

    play(tmp_path, monkeypatch, scenario, size=1)


def test_a_poll_whose_worker_was_cut_off_wakes_the_next(tmp_path, monkeypatch):
    """One poll is cancelled. Another's connection is closed, which the server only learns when it asks."""

    async def scenario(crowd):
        await crowd.poll(0, 1, 2, 3)
        crowd.polls.pop(0).cancel()
        gone = crowd.key(1)

        async def is_gone(request):
            return gone in request.headers["signature-input"]

        monkeypatch.setattr(routes.Request, "is_disconnected", is_gone)
        await crowd.publish()
        assert crowd.served() == [2, 3]
        leases = crowd.coordinator.state.leases.values()
        assert {lease.worker for lease in leases} == {crowd.key(2), crowd.key(3)}

    play(tmp_path, monkeypatch, scenario, size=4)


def test_a_call_that_is_cancelled_before_it_asks_goes_to_the_next(tmp_path, monkeypatch):
    async def scenario(crowd):
        await crowd.poll(0, 1, 2)
        state = crowd.coordinator.state
        publish = Publish(state.trainer_key, 0, digest(b"0"), "m", {}, crowd.coordinator.clock())
        crowd.coordinator.log_writer.write(publish, crowd.coordinator.clock())
        crowd.polls.pop(0).cancel()
        await asyncio.sleep(0.1)
        assert crowd.served() == [1, 2]

    play(tmp_path, monkeypatch, scenario, size=3)


def test_a_newcomer_does_not_overtake_a_poll_that_is_called(tmp_path, monkeypatch):
    """There is a block, but the poll that was called for it has not asked yet."""

    async def scenario(crowd):
        await crowd.poll(0, 1, 2)
        oldest = crowd.key(0)

        async def is_gone_in_a_while(request):
            if oldest in request.headers["signature-input"]:
                await asyncio.sleep(0.2)
            return False

        monkeypatch.setattr(routes.Request, "is_disconnected", is_gone_in_a_while)
        await crowd.publish()
        await crowd.poll(3)
        await asyncio.sleep(0.3)
        assert crowd.served() == [0, 1] and crowd.waiting() == [2, 3]

    play(tmp_path, monkeypatch, scenario, size=4)


@pytest.mark.parametrize("action", ["drain", "kick"])
def test_a_change_that_concerns_all_is_told_to_all_at_once(tmp_path, monkeypatch, action):
    async def scenario(crowd):
        await crowd.poll(*range(8))
        await crowd.publish()
        who = crowd.key(7) if action == "kick" else ""
        await crowd.coordinator.log_writer.submit(Admin(action, AdminRequest(who), crowd.coordinator.clock()))
        await asyncio.sleep(0.2)
        if action == "kick":
            assert "removed" in str(crowd.polls.pop(7).exception()) and crowd.waiting() == [2, 3, 4, 5, 6]
        else:
            assert crowd.waiting() == [2, 3, 4, 5, 6, 7], "they are told at the end, which comes soon"
            for lease in [crowd.coordinator.state.leases[name] for name in list(crowd.coordinator.state.open_leases)]:
                await crowd.coordinator.log_writer.submit(
                    ReturnLeases(lease.worker, (lease.id,), crowd.coordinator.clock())
                )
            await asyncio.sleep(0.2)
            assert not crowd.waiting() and "ended" in crowd.polls[7].result().reason

    play(tmp_path, monkeypatch, scenario, size=8)


def test_workers_that_wait_in_line_get_blocks_whose_holders_are_late(tmp_path, monkeypatch):
    """No event tells that time has passed. The polls of real workers do not end all at once, so one always waits."""
    monkeypatch.setattr(lease_queue, "LOOK_S", 0.1)

    async def scenario(crowd):
        await crowd.poll(0, 1)
        await crowd.publish()
        for lease in crowd.coordinator.state.leases.values():
            crowd.coordinator.state.forget(lease.soft, "soft", lease.id)
            lease.soft = crowd.coordinator.clock() + 0.5
            crowd.coordinator.state.expect(lease.soft, "soft", lease.id)
        for number in (2, 3, 4):
            crowd.coordinator.state.members[crowd.key(number)].accepted = 2
        await crowd.poll(2, 3, 4)
        assert crowd.served() == [0, 1]
        await asyncio.sleep(1.0)
        assert crowd.served() == [0, 1, 2, 3] and crowd.waiting() == [4]

    play(tmp_path, monkeypatch, scenario, size=5)


def test_an_honest_slow_worker_in_a_crowd_gets_its_lease(tmp_path, monkeypatch):
    """Its polls end without a lease and it is slow to ask again, while a crowd polls without a pause."""
    monkeypatch.setattr(routes, "LONG_POLL_S", 1.2)

    async def scenario(crowd):
        await crowd.poll(0)
        await asyncio.sleep(1.3)
        assert crowd.polls[0].result().lease is None
        await crowd.poll(*range(1, 12))
        await crowd.poll(0)
        await crowd.publish()
        assert crowd.served() == [0, 1]

    play(tmp_path, monkeypatch, scenario)


def test_a_commit_wakes_a_poll_for_a_batch_only_if_it_forms_one(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(routes, "batch_of", lambda state, step: looks.append(step))

    async def scenario(crowd):
        poll = asyncio.create_task(crowd.clients[0].get("/v1/batches/0"))
        await asyncio.sleep(0.05)
        for name in "abcde":
            await crowd.join_event(name)
        assert looks == [0]
        poll.cancel()

    play(tmp_path, monkeypatch, scenario, size=1)
