"""Which process plays what: what fails, or comes twice, leaves nothing behind."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import StateError
from shoal.protocol import messages as t
from shoal.roles.env_server.env_child import ProcessAnswer, ProcessRequest
from shoal.roles.env_server.episode_processes import EnvProcessPool, ProcessDied, Shard
from shoal.roles.env_server.reply_store import FinalScore, PlacedReply, Reply, ReplyStore, Taken
from shoal.roles.env_server.turns import TurnRequest

SLOT = t.Slot(0, "00" * 32, "toy", 0)


class Actor:
    """A player that answers as it is told, and notes what it is asked."""

    generation = 1

    def __init__(self, *opens: "bool | Exception", error: Exception | None = None) -> None:
        self.opens, self.error = [*opens], error
        self.asked: list[ProcessRequest] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def lowest(self, label: str) -> float:
        return 0.0

    def leaves_out(self, label: str) -> bool:
        return True

    def count(self, faults: int) -> None:
        pass

    def compares(self, label: str) -> bool:
        told = self.opens.pop(0) if self.opens else False
        if isinstance(told, Exception):
            raise told
        return told

    def ask(self, request: ProcessRequest, limit_s: float) -> ProcessAnswer:
        self.asked.append(request)
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        return (
            ProcessAnswer(b"word", 1)
            if not request.judge
            else ProcessAnswer(judged=(FinalScore(0.5),) * len(request.judge))
        )


@pytest.fixture
def reply_store(tmp_path):
    reply_store = ReplyStore(tmp_path / "replies.sqlite")
    yield reply_store
    reply_store.close()


def opening(rollout: int = 0, path: bytes = b"") -> TurnRequest:
    return TurnRequest(SLOT, rollout, b"", b"", path or bytes([rollout]) * 32)


def test_a_turn_that_failed_leaves_no_load(reply_store):
    """Otherwise its process would seem to have more and more to do, and get nothing."""
    actor = Actor(error=StateError("the file was changed"))
    players = EnvProcessPool(lambda label: actor, reply_store, lambda label: 1.0, 1, 1)
    for _ in range(3):
        with pytest.raises(StateError, match="was changed"):
            players.play([opening(i) for i in range(4)])
    (shard,) = players._processes_of("toy")._shards
    assert shard.load() == 0
    actor.error = None
    assert [reply.words for reply in players.play([opening(i) for i in range(4)])] == [b"word"] * 4
    assert shard.load() == 4, "four conversations that will go on"


def test_a_turn_that_two_leases_take_at_once_is_held_once(reply_store):
    shard = Shard(actor := Actor(), reply_store, lambda label: 1.0)
    for path in (b"a" * 32, b"a" * 32, b"b" * 32):
        shard.reply(opening(path=path))
    assert shard.load() == 2
    first, _, third = actor.asked
    assert third.forget == (first.number,), "the process drops the first of two equal conversations"


def test_whether_an_environment_compares_is_never_guessed(reply_store):
    """A process that ended while it opened has not said so. Without its siblings beside it no rollout could be judged."""
    actor = Actor(
        *[ProcessDied("its process ended with code -9")] * 4, ProcessDied("it took too long", slow=True), True
    )
    players = EnvProcessPool(lambda label: actor, reply_store, lambda label: 1.0, 2, 2)
    for why in ("ended with code -9", "took too long"):
        with pytest.raises(StateError, match=f"toy does not open: .*{why}"):
            players.play([opening()])
    players.play([opening(i) for i in range(4)])
    assert list(players._processes_of("toy")._pinned) == [0] and not actor.opens


def test_an_environment_that_opens_slowly_blocks_no_lock(reply_store):
    opened, actor = threading.Event(), Actor()
    actor.compares = lambda label: opened.wait(60)  # type: ignore[method-assign]
    players = EnvProcessPool(lambda label: actor, reply_store, lambda label: 1.0, 1, 1)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(players.play, [opening(i)]) for i in range(2)]
        processes = players._processes_of("toy")
        assert processes._lock.acquire(timeout=30)
        processes._lock.release()
        opened.set()
        assert [future.result(60)[0].words for future in waiting] == [b"word"] * 2


def test_a_group_that_two_leases_end_alike_is_judged_once(reply_store):
    actor = Actor(True)
    players = EnvProcessPool(lambda label: actor, reply_store, lambda label: 1.0, 1, 1)
    players.play([opening(0, b"e" * 32)])
    reply_store.keep(
        "1",
        0,
        0,
        0,
        Taken("", ()),
        [PlacedReply(b"e" * 32, b"", b"", Reply(b"word", 1, "", 0.0, t.POLICY, beside=True))],
    )
    actor.go_on.clear()
    with ThreadPoolExecutor(2) as threads:
        judged = [threads.submit(players.judge, SLOT, [b"e" * 32]) for _ in range(2)]
        actor.go_on.set()
        assert [future.result(60) for future in judged] == [[FinalScore(0.5)], [FinalScore(0.5)]]
    assert players.judge(SLOT, [b"e" * 32]) == [FinalScore(0.5)]
    assert sum(bool(request.judge) for request in actor.asked) == 1
