"""Joins of one key under changing names: an attacker writes little of the log, and nobody honest is shut out."""

import pytest

from shoal.ledger.commands import JoinRun, LeaveRun
from shoal.ledger.errors import Refused
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.members import NodeJoined
from shoal.protocol.messages import Join
from tests.ledger.ledger_fixture import World

WORKER = "a" * 64


def join(world, name="w", device="cpu", key=WORKER):
    return JoinRun(key, Join("worker", name, 0.0, "test", "float32", device), world.now, int(world.now))


def taken(world, *commands):
    """Whether the log takes the commands, one after another."""
    try:
        for command in commands:
            world.do(command)
    except Refused as refusal:
        assert refusal.code == "joins_too_often"
        return False
    return True


def written_in_an_hour(world, leaves):
    """Bytes of log by one key that tries to join each second under another name, or to leave and join again."""
    begun = world.state.seq
    for second in range(3600):
        world.now += 1
        taken(world, join(world, "w" if leaves else f"w{second}"))
        world.now += 1 if leaves else 0
        if leaves and not world.state.members[WORKER].left:
            world.do(LeaveRun(WORKER, world.now, int(world.now)))
    return sum(len(data) for data, _ in world.log_writer.store.read(begun))


@pytest.mark.parametrize("leaves", [False, True])
def test_a_key_that_joins_again_and_again_writes_little_of_the_log(tmp_path, leaves):
    world = World(tmp_path)
    assert written_in_an_hour(world, leaves) < 100_000
    assert world.audit().findings == []


def test_somebody_who_tries_names_and_engines_gets_in(tmp_path):
    """Ten starts in a minute, and the eleventh after a wait, also by a host that has started again."""
    world = World(tmp_path)
    assert taken(world, join(world))
    for start in range(10):
        world.now += 6
        assert taken(world, join(world, f"try-{start}", "cuda" if start % 2 else "cpu"))
    world.now += 1
    again = LogWriter(Store(sqlite_url(world.path)))
    for log_writer in (world.log_writer, again):
        with pytest.raises(Refused, match=r"joined 10 times in a short time.*join again in 5 s, or unchanged"):
            log_writer.write(join(world, "eleventh"), world.now)
    assert taken(world, join(world, "try-9", "cuda")), "the same again writes nothing"
    assert taken(world, join(world, "other", key="b" * 64)), "each key has its own limit"
    world.now += 6
    assert [type(entry.body) for entry in world.do(join(world, "eleventh"))] == [NodeJoined]
    assert world.audit().findings == []


def test_a_worker_that_stops_each_evening_and_starts_each_morning_never_waits(tmp_path):
    world = World(tmp_path)
    for _ in range(30):
        assert taken(world, join(world), LeaveRun(WORKER, world.now + 1, int(world.now) + 1))
        world.now += 12 * 3600
