"""The replies of the host's env server: the same turns get the same answers, for all workers and after any kill."""

import hashlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.errors import StateError
from shoal.protocol import messages as t
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.encoding import WireError
from shoal.protocol.messages.host_environments import difference, rollout_digest
from shoal.roles.env_server.reply_store import PlacedReply, Reply, ReplyStore, Taken
from shoal.roles.env_server.turns import Conflict, TurnLimits, TurnRequest, record_of, take_turn

STOP, SIZE = 9, 2
LIMITS = TurnLimits(vocabulary=16, stop_ids=frozenset({STOP}))
BLOCK = t.Block(4, (t.Slot(8, "00" * 32, "toy", 3), t.Slot(9, "11" * 32, "toy", 5)), COMPLETIONS)


class Killed(Exception):
    pass


class Toy:
    """Plays rollouts of three turns. Its words follow from the path; it counts how often it is asked."""

    def __init__(self, die_at: int = -1, salt: bytes = b"", void: int = -1) -> None:
        self.asked: list[TurnRequest] = []
        self.calls, self.die_at, self.salt, self.void = 0, die_at, salt, void

    def __call__(self, asks):
        self.calls += 1
        if self.calls - 1 == self.die_at:
            raise Killed
        self.asked += asks
        return [self.reply(ask, place) for place, ask in enumerate(asks)]

    def reply(self, ask: TurnRequest, place: int) -> Reply:
        hashed = hashlib.sha256(self.salt + ask.path).digest()
        if ask.slot.slot == self.void and not ask.before and place % 2:
            return Reply(b"", 0, "void", 0.0, t.POLICY)
        if ask.written and hashed[0] < 60:
            return Reply(b"", 0, "environment", hashed[1] / 255, t.POLICY)
        return Reply(ids([hashed[2] % 8, 1]), 3, "", 0.0, t.POLICY)


def ids(tokens) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def unjudged(slot, paths):
    raise AssertionError("no environment of these tests compares")


def staged(lease: str = "1", version: int = 0) -> t.Staged:
    return t.Staged(lease, version, (BLOCK,))


def ask(reply_store, turn, play, lease="1", shared=True, version=0):
    return take_turn(reply_store, staged(lease, version), turn, lambda label: shared, SIZE, LIMITS, play)


def write(seed: int, turn: int, place: int) -> bytes:
    """What a worker writes: up to three tokens, ended by a stop token if there are fewer."""
    length = hashlib.sha256(f"{seed} {turn} {place}".encode()).digest()[0] % 3
    return ids([seed % 8, STOP]) if length < 2 else ids([seed % 8, 2, 3])


def play_all(reply_store, play, lease="1", seed=1, shared=True, other_from=99):
    """Take all turns of a block as a worker does; returns its answers. From turn `other_from` on it writes otherwise."""
    answers = [ask(reply_store, t.EnvTurn(BLOCK.index, 0), play, lease, shared)]
    open_ = [i for i, said in enumerate(answers[0].said) if not said.ending]
    while open_:
        turn = len(answers)
        written = tuple(write(seed + (turn >= other_from), turn, place) for place in open_)
        answers.append(ask(reply_store, t.EnvTurn(BLOCK.index, turn, written), play, lease, shared))
        open_ = [place for place, said in zip(open_, answers[-1].said, strict=True) if not said.ending]
    return answers


@pytest.fixture
def reply_store(tmp_path: Path):
    reply_store = ReplyStore(tmp_path / "replies.sqlite")
    yield reply_store
    reply_store.close()


def test_a_killed_stage_answers_the_same_and_plays_nothing_twice(tmp_path: Path) -> None:
    whole, toy = ReplyStore(tmp_path / "whole.sqlite"), Toy()
    expected = play_all(whole, toy)
    assert len(expected) > 2
    for die_at in range(toy.calls):
        file = tmp_path / f"killed-{die_at}.sqlite"
        first, again = Toy(die_at), Toy()
        with pytest.raises(Killed):
            play_all(ReplyStore(file), first)
        assert play_all(ReplyStore(file), again) == expected
        assert not {a.path for a in first.asked} & {a.path for a in again.asked}
        assert record_of(ReplyStore(file), "run", staged(), SIZE, unjudged) == record_of(
            whole, "run", staged(), SIZE, unjudged
        )


def test_a_turn_sent_again_gets_the_same_answer_and_other_tokens_are_refused(reply_store: ReplyStore) -> None:
    toy = Toy()
    answers = play_all(reply_store, toy)
    asked = len(toy.asked)
    assert play_all(reply_store, toy) == answers and len(toy.asked) == asked
    open_ = [place for place, said in enumerate(answers[0].said) if not said.ending]
    other = t.EnvTurn(BLOCK.index, 1, tuple(ids([7, STOP]) for _ in open_))
    with pytest.raises(Conflict, match="taken with other tokens"):
        ask(reply_store, other, toy)
    assert play_all(reply_store, toy) == answers


def test_other_tokens_branch_off_and_only_the_branch_is_played(reply_store: ReplyStore) -> None:
    play_all(reply_store, Toy(), lease="1")
    other = Toy()
    play_all(reply_store, other, lease="2", other_from=2)
    known = {
        step.path
        for lease in "1"
        for path in reply_store.last(lease, BLOCK.index).paths
        for step in reply_store.steps_of(path)
    }
    assert other.asked and {asked.before for asked in other.asked} & known
    assert all(asked.before for asked in other.asked), "the openings are known"
    first, second = (record_of(reply_store, "run", staged(lease), SIZE, unjudged) for lease in "12")
    assert first.groups != second.groups


def test_leases_share_nothing_of_an_environment_that_is_not_reproducible(reply_store: ReplyStore) -> None:
    first = play_all(reply_store, Toy(), lease="1", shared=False)
    other = Toy(salt=b"another mood")
    assert play_all(reply_store, other, lease="2", shared=False) != first
    assert other.asked


def test_a_slot_with_a_rollout_that_cannot_begin_is_void_as_a_whole(reply_store: ReplyStore) -> None:
    answers = play_all(reply_store, Toy(void=9))
    assert [said.ending for said in answers[0].said[2:]] == ["void"] * SIZE
    assert [len(group.rollouts) for group in record_of(reply_store, "run", staged(), SIZE, unjudged).groups] == [
        SIZE,
        0,
    ]


def test_a_record_names_the_rollouts_that_a_worker_makes_of_the_answers(reply_store: ReplyStore) -> None:
    answers = play_all(reply_store, Toy())
    tokens, author = [[bytearray() for _ in range(2 * SIZE)] for _ in range(2)]
    endings, open_ = [""] * 4, list(range(4))
    for turn, answer in enumerate(answers):
        for place, said in zip(open_, answer.said, strict=True):
            wrote = write(1, turn, place) if turn else b""
            tokens[place] += wrote + answer.texts[said.text]
            author[place] += b"\1" * (len(wrote) // 4) + b"\0" * (len(answer.texts[said.text]) // 4)
            endings[place] = said.ending
        open_ = [place for place in open_ if not endings[place]]
    record = record_of(reply_store, "run", staged(), SIZE, unjudged)
    digests = [rollout_digest(bytes(a), bytes(b), c) for a, b, c in zip(tokens, author, endings, strict=True)]
    assert [one.digest for group in record.groups for one in group.rollouts] == digests
    rollouts = [
        t.Rollout(bytes(a), bytes(b), b"", 0, c) for a, b, c in zip(tokens[:2], author[:2], endings[:2], strict=True)
    ]
    group = t.Group(8, 3, "toy", tuple(rollouts))
    assert difference(group, record.groups[0]) is None
    cut = msgspec.structs.replace(rollouts[1], token_ids=rollouts[1].token_ids[:-4])
    found = difference(msgspec.structs.replace(group, rollouts=(rollouts[0], cut)), record.groups[0])
    assert found is not None and found.rollout == 1
    assert difference(msgspec.structs.replace(group, slot=9), record.groups[0]) is not None
    assert difference(msgspec.structs.replace(group, rollouts=(rollouts[0],)), record.groups[0]) is not None


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ((), "0 entries, but 4"),
        ((ids([1, STOP]),) * 3, "3 entries, but 4"),
        ((ids([1, STOP]),) * 5, "5 entries, but 4"),
        ((b"",) * 4, "a turn of 0 bytes"),
        ((ids([1, STOP])[:-1],) * 4, "a turn of 7 bytes"),
        ((ids([1, 1, 1, STOP]),) * 4, "1 to 3 tokens"),
        ((ids([1]),) * 4, "ends it after 3"),
        ((ids([STOP, 1, 1]),) * 4, "ends it after 1"),
        ((ids([16, STOP]),) * 4, "outside the vocabulary"),
        ((ids([-1, STOP]),) * 4, "outside the vocabulary"),
    ],
)
def test_a_turn_that_no_policy_writes_is_refused_and_books_nothing(reply_store: ReplyStore, written, reason) -> None:
    toy = Toy()
    ask(reply_store, t.EnvTurn(BLOCK.index, 0), toy)
    with pytest.raises(WireError, match=reason):
        ask(reply_store, t.EnvTurn(BLOCK.index, 1, written), toy)
    assert toy.calls == 1 and reply_store.taken("1", BLOCK.index, 1) is None
    assert ask(reply_store, t.EnvTurn(BLOCK.index, 1, (ids([1, STOP]),) * 4), toy)


def test_turns_come_in_order_and_nothing_follows_the_end(reply_store: ReplyStore) -> None:
    toy = Toy()
    with pytest.raises(Conflict, match="turn 1 of block 4 comes before turn 0"):
        ask(reply_store, t.EnvTurn(BLOCK.index, 1, (ids([STOP]),) * 4), toy)
    with pytest.raises(WireError, match="nothing is written"):
        ask(reply_store, t.EnvTurn(BLOCK.index, 0, (ids([STOP]),)), toy)
    answers = play_all(reply_store, toy)
    for written in ((), (ids([STOP]),)):
        with pytest.raises(WireError, match="but 0 rollouts are open"):
            ask(reply_store, t.EnvTurn(BLOCK.index, len(answers), written), toy)


def test_there_is_no_record_of_a_block_that_has_not_ended(reply_store: ReplyStore) -> None:
    with pytest.raises(Conflict, match="not played to its end"):
        record_of(reply_store, "run", staged(), SIZE, unjudged)
    ask(reply_store, t.EnvTurn(BLOCK.index, 0), Toy())
    with pytest.raises(Conflict, match="not played to its end"):
        record_of(reply_store, "run", staged(), SIZE, unjudged)


def test_the_first_of_two_replies_holds(reply_store: ReplyStore) -> None:
    """Two workers may take one block at the same time."""
    late = Toy(salt=b"late")

    first = []

    def overtaken(asks):
        if late.calls == 0:
            first.append(play_all(reply_store, Toy(), lease="1"))
        return late(asks)

    assert play_all(reply_store, overtaken, lease="2") == first[0]
    assert play_all(reply_store, Toy(), lease="1") == first[0]


def test_a_memory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "replies.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StateError, match=r"replies.sqlite cannot be used"):
        ReplyStore(tmp_path / "replies.sqlite")


def test_one_that_cannot_be_booked_leaves_nobody_waiting(reply_store: ReplyStore) -> None:
    """A process that plays may answer any number. SQLite has room for 63 bits."""
    step = PlacedReply(b"p" * 32, b"", b"", Reply(b"", 1 << 63, "", 0.0, t.POLICY))
    with reply_store._writing, ThreadPoolExecutor(3) as threads:
        booked = [
            threads.submit(reply_store.keep, str(lease), 0, 4, 0, Taken("one", ()), [step] if lease == 1 else [])
            for lease in range(3)
        ]
        while reply_store._waiting.qsize() < 3:
            time.sleep(0.01)
        reply_store._writing.release()
        failed = [future.exception(60) for future in booked]
        reply_store._writing.acquire()
    assert isinstance(failed[1], OverflowError) and failed[::2] == [None, None]
    assert [reply_store.taken(str(lease), 4, 0) is None for lease in range(3)] == [False, True, False]


CLOSING = """
import sys, threading
from pathlib import Path
from shoal.errors import StateError
from shoal.roles.env_server.reply_store import ReplyStore, Taken

def write(store, lease, begun):
    for turn in range(10_000):
        try:
            store.keep(lease, 0, 4, turn, Taken("one", (b"p" * 32,)), [])
            store.last(lease, 4)
        except StateError as error:
            assert "closed" in str(error), error
            return
        begun.set()

for number in range(30):
    store, begun = ReplyStore(Path(sys.argv[1]) / f"{number}.sqlite"), threading.Event()
    threads = [threading.Thread(target=write, args=(store, str(lease), begun)) for lease in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    store.close()
    for thread in threads:
        thread.join()
print("closed")
"""


def test_a_stage_that_is_stopped_while_turns_are_booked_ends_in_order(tmp_path: Path) -> None:
    """SQLite crashes the process if a connection is closed while another thread uses it."""
    ended = subprocess.run([sys.executable, "-c", CLOSING, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("closed\n", "", 0)


def test_old_versions_are_forgotten_little_by_little(reply_store: ReplyStore, monkeypatch) -> None:
    """Each piece leaves room for turns that wait to be booked."""
    monkeypatch.setattr("shoal.roles.env_server.reply_store._FORGOTTEN_AT_ONCE", 3)
    for lease in range(5):
        ask(reply_store, t.EnvTurn(BLOCK.index, 0), Toy(), lease=str(lease), shared=False, version=lease // 4)
    pieces, write = [], reply_store._write
    monkeypatch.setattr(reply_store, "_write", lambda *changes: pieces.append(changes) or write(*changes))
    reply_store.forget(before=1)
    left = [reply_store.last(str(lease), BLOCK.index) is not None for lease in range(5)]
    assert left == [False] * 4 + [True] and len(pieces) == 6 + 2, "16 replies and 4 turns"
    reply_store.forget(before=1)
    assert len(pieces) == 8


def test_a_full_disk_books_nothing(reply_store: ReplyStore) -> None:
    toy = Toy()
    reply_store._database.execute(
        f"PRAGMA max_page_count = {reply_store._database.execute('PRAGMA page_count').fetchone()[0]}"
    )
    reply_store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    try:
        for lease in range(200):
            ask(reply_store, t.EnvTurn(BLOCK.index, 0), toy, lease=str(lease), shared=False)
    except StateError as error:
        assert "full" in str(error)
        assert reply_store.taken(str(lease), BLOCK.index, 0) is None
    else:
        pytest.fail("the disk was never full")
