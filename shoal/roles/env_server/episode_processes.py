"""The processes on the host in which episodes are played. Each loads the environments and has its own conversations.

A process that hangs is killed, one that died is started again, and the episodes that were lost with it are played again
from the store. So a kill at any time changes no reply. An environment that waits for a judge holds up no other environment,
and few of its own episodes.
"""

import itertools
import logging
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.envs.isolated.connection import OwnProcess
from shoal.envs.play_episodes import report_unbegun
from shoal.envs.settings_wrapper import LOWEST
from shoal.errors import StateError
from shoal.ipc import ChildExited, Reason
from shoal.protocol.constants import MAX_ROLLOUT_TOKENS
from shoal.protocol.messages import POLICY, Slot
from shoal.roles.env_server.env_child import Opening, ProcessAnswer, ProcessOpened, ProcessRequest
from shoal.roles.env_server.reply_store import FinalScore, Reply, ReplyStore, group_name
from shoal.roles.env_server.turns import VOID, TurnRequest
from shoal.roles.node.reward_part_files import Tally

log = logging.getLogger("stage")

HELD = 4096
"""Conversations that a process holds. Those that were idle longest are played again when they go on."""

RETRIES = 3
"""A turn that took too long, or in which its process died, is tried so many times more. Then its rollout ends by "error":
where the host plays, no other machine could find out more."""

START_S = 120.0
"""A process may take this long to load its environments."""

SLOW_S = 0.25
"""After a turn that takes longer, an environment gets another process."""

OTHER_WORDS = "it gives other words for the same actions (set reproducible = false)"

MAX_FRAME_BYTES = 4 * MAX_ROLLOUT_TOKENS + (1 << 20)

MAX_KINDS, MAX_KIND_CHARS = 1000, 200
"""Of faults that are counted, and the beginning of a fault that names its kind."""

START_PLAYERS = 2
"""Processes of an environment that answers quickly."""

MAX_PLAYERS = 16
"""Processes of a slow environment. Most of them wait, for a judge or a server."""

PINNED = 4096
"""Slots whose process, and groups whose judgement, are remembered."""

_PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from shoal.roles.env_server.env_child import serve; serve()"

T = TypeVar("T")


class ProcessDied(Exception):
    """A process ended, or had to be killed. The text says how."""

    def __init__(self, why: str, slow: bool = False, call: str = "") -> None:
        super().__init__(why)
        self.slow = slow
        """Whether it took longer than a call may."""
        self.call = call
        """The call of the environment that was under way."""


class Shard:
    """One player, and which conversations it holds."""

    def __init__(self, player: "ChildPlayer", reply_store: ReplyStore, limit_s: Callable[[str], float]) -> None:
        self._player, self._reply_store, self._limit_s = player, reply_store, limit_s
        self._numbers = itertools.count()
        self._held: OrderedDict[bytes, int] = OrderedDict()
        """Numbers of conversations by path; the one that was idle longest comes first."""
        self._forget: list[int] = []
        self._generation = -1
        self._faults = Counter[tuple[str, str]]()
        """How often each fault came, by environment and kind."""
        self._thread = ThreadPoolExecutor(1, "player")
        self._counting, self._waiting = threading.Lock(), 0
        """Turns that are not done."""
        self.slow = 0
        """Turns that took longer than `SLOW_S`."""

    def submit(self, act: Callable[[], T]) -> "Future[T]":
        """Do something after all that was submitted before."""
        return self._thread.submit(act)

    def replies(self, asks: Sequence[TurnRequest]) -> list[Reply]:
        """The replies to turns that it was told to `expect`, one after another."""
        replies, void = list[Reply](), dict[int, Reply]()
        try:
            for ask in asks:
                replies.append(void.get(ask.slot.slot) or self.reply(ask))
                if replies[-1].ending == "void":  # a slot is void as a whole, so the rest of it need not be tried
                    void[ask.slot.slot] = replies[-1]
                self.expect(-1)
        finally:
            self.expect(len(replies) - len(asks))  # guard: failed-turns-wait-no-more
        return replies

    def expect(self, turns: int = 1) -> None:
        """So many more turns are to be played here."""
        with self._counting:
            self._waiting += turns

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def load(self) -> int:
        """How much there is to do: turns that wait, and conversations that will go on."""
        return self._waiting + len(self._held)

    def holds(self, path: bytes) -> bool:
        return path in self._held

    def reply(self, ask: TurnRequest) -> Reply:
        """Play one turn. Whatever the environment does, there is a reply."""
        return self._tried(ask.slot, lambda: self._play(ask), lambda why: self._failed(ask, why))

    def judge(self, slot: Slot, paths: Sequence[bytes]) -> list[FinalScore]:
        """Let the environment judge a group. If it cannot, it fails on all rollouts."""
        return self._tried(slot, lambda: self._judge(slot, paths), lambda why: self._unjudged(slot, len(paths), why))

    def compares(self, label: str) -> bool:
        """Whether an environment compares an answer with its siblings. Raises `StateError` if no process can say so."""
        for _ in range(1 + RETRIES):
            try:
                return self._player.compares(label)
            except ProcessDied as gone:
                why = f"{gone.call}: {gone}"
                if gone.slow:
                    break
        raise StateError(f"environment {label} does not open: {why}. The stage's log may say more")

    def _tried(self, slot: Slot, act: Callable[[], T], failed: Callable[[str], T]) -> T:
        why = ""
        for _ in range(1 + RETRIES):
            try:
                return act()
            except ProcessDied as gone:
                why = f"{gone.call} of task {slot.task}: {gone}"
                log.warning("killed env=%s task=%d reason=%r", slot.env, slot.task, why)
        return failed(why)

    def _play(self, ask: TurnRequest) -> Reply:
        if not ask.before:
            return self._open(ask.slot, ask.path)
        if not self._holds(ask.before) and not self._play_again(ask.slot, ask.before):
            return self._failed(ask, OTHER_WORDS)
        return self._write(ask.slot, ask.before, ask.written, ask.path)

    def _judge(self, slot: Slot, paths: Sequence[bytes]) -> list[FinalScore]:
        replies = self._reply_store.replies(paths)
        whole = [path for path in paths if replies[path].beside]
        for _ in range(2):  # bringing one back may lose another with its process
            if not all(self._holds(path) or self._play_again(slot, path) for path in whole):
                return self._unjudged(slot, len(paths), OTHER_WORDS)
        numbers = tuple(self._held.pop(path) for path in whole)
        answer = self._exchanged(slot, ProcessRequest(judge=numbers))
        scores = iter(answer.judged)
        return [next(scores) if replies[path].beside else replies[path].score for path in paths]

    def _holds(self, path: bytes) -> bool:
        return path in self._held and self._generation == self._player.generation

    def _play_again(self, slot: Slot, path: bytes) -> bool:
        """Play a conversation again, up to this path. Returns whether the environment says the same words as before."""
        before = b""
        for step in self._reply_store.steps_of(path):
            reply = self._write(slot, before, step.written, step.path) if before else self._open(slot, step.path)
            if reply != step.reply:  # guard: same-words-again
                if step.path in self._held:
                    self._forget.append(self._held.pop(step.path))
                return False
            before = step.path
        return True

    def _open(self, slot: Slot, path: bytes) -> Reply:
        return self._asked(slot, path, ProcessRequest(next(self._numbers), label=slot.env, task=slot.task))

    def _write(self, slot: Slot, before: bytes, written: bytes, path: bytes) -> Reply:
        return self._asked(slot, path, ProcessRequest(self._held.pop(before), written))

    def _asked(self, slot: Slot, path: bytes, request: ProcessRequest) -> Reply:
        """Send a turn, and remember the path that its conversation has reached."""
        answer = self._exchanged(slot, request)
        if not answer.ending or answer.beside:
            if path in self._held:  # two leases may take the same turn at the same time  # guard: held-once
                self._forget.append(self._held.pop(path))
            self._held[path] = request.number
            if len(self._held) > HELD:
                self._forget.append(self._held.popitem(last=False)[1])
        return Reply(
            answer.words, answer.room, answer.ending, answer.reward, answer.author,  # type: ignore[arg-type]
            answer.row, answer.beside, answer.fault if answer.left_out or answer.ending == "void" else "", answer.outside,
        )  # fmt: skip

    def _exchanged(self, slot: Slot, request: ProcessRequest) -> ProcessAnswer:
        request.forget, self._forget = tuple(self._forget), []
        began, generation = time.monotonic(), self._player.generation
        answer = self._player.ask(request, self._limit_s(slot.env))
        self.slow += generation == self._player.generation and time.monotonic() - began > SLOW_S
        if self._generation != self._player.generation:  # guard: lost-with-the-process
            self._generation = self._player.generation
            self._held.clear()
        if answer.ending == "void":
            report_unbegun(slot.env, slot.task, answer.fault)
        elif answer.fault:
            self._report(slot, answer)
        return answer

    def _report(self, slot: Slot, answer: ProcessAnswer) -> None:
        """Log a fault; one of the same place and kind at the first time, the second, the fourth, the eighth and so on."""
        kind = slot.env, re.sub(r"[\d.]+", "#", answer.fault)[:MAX_KIND_CHARS]
        if len(self._faults) >= MAX_KINDS and kind not in self._faults:
            self._faults.clear()
        self._faults[kind] += 1
        if (times := self._faults[kind]).bit_count() == 1:  # guard: one-fault-fills-no-log
            often = f", {times} times so far" if times > 1 else ""
            log.warning(
                "fault env=%s task=%d ending=%s fault=%s%s", slot.env, slot.task, answer.ending, answer.fault, often
            )

    def _failed(self, ask: TurnRequest, why: str) -> Reply:
        """The reply for an environment that gave none: an error, or void if it could not begin."""
        log.error("failed env=%s task=%d reason=%r", ask.slot.env, ask.slot.task, why)
        if not ask.before:
            return VOID._replace(fault=why)
        row = self._reply_store.replies([ask.before])[ask.before].row
        score = self._failure(ask.slot, why)
        return Reply(b"", 0, "error", score.reward, POLICY, row, fault=score.fault)

    def _unjudged(self, slot: Slot, count: int, why: str) -> list[FinalScore]:
        log.error("failed env=%s task=%d reason=%r", slot.env, slot.task, f"its rollouts cannot be compared: {why}")
        return [self._failure(slot, why) for _ in range(count)]

    def _failure(self, slot: Slot, why: str) -> FinalScore:
        left_out = self._player.leaves_out(slot.env)
        self._player.count(0 if left_out else 1)
        return FinalScore(self._player.lowest(slot.env), why if left_out else "")


def call_of(value: object) -> str:
    """The calls of an environment that a request leads to."""
    if not isinstance(value, ProcessRequest):
        return "loading it"
    return "task() or reset()" if value.label else "group_scores()" if value.judge else "step() or score()"


class ChildPlayer:
    """A player in a child process of this one, started at the first request. It ends when this process ends."""

    def __init__(self, opening: Opening, on_scores: Callable[[Tally], None] = lambda scores: None) -> None:
        """`on_scores` gets what rollouts scored, part by part."""
        self._opening, self._on_scores = opening, on_scores
        self._child: OwnProcess | None = None
        self.generation = 0
        self._opened: ProcessOpened | None = None

    def lowest(self, label: str) -> float:
        return self._opened.lowest[label] if self._opened is not None else 0.0

    def leaves_out(self, label: str) -> bool:
        return all(env.label != label or env.on_fault != LOWEST for env in self._opening.envs)

    def count(self, faults: int) -> None:
        self._on_scores(Tally(faults=faults))

    def compares(self, label: str) -> bool:
        """Raises as `ask`."""
        if self._opened is None:
            self._start()
        assert self._opened is not None
        return label in self._opened.compare

    def ask(self, request: ProcessRequest, limit_s: float) -> ProcessAnswer:
        """Raises `ProcessDied`, and `StateError` if the environments cannot be loaded."""
        if self._child is None:
            self._start()
        answer = self._exchange(request, limit_s, ProcessAnswer)
        if answer.scores is not None:
            self._on_scores(answer.scores)
        return answer

    def _start(self) -> None:
        self.generation += 1
        self._child = OwnProcess(_PROGRAM)
        opened = self._exchange(self._opening, START_S, ProcessOpened)
        if opened.refused:
            self._end()
            raise StateError(opened.refused)
        self._opened = opened

    def _exchange(self, value: object, limit_s: float, kind: type[T]) -> T:
        assert self._child is not None
        try:
            data = self._child.ask(msgspec.msgpack.encode(value), limit_s, MAX_FRAME_BYTES)
            return self._child.decoded(data, partial(msgspec.msgpack.decode, type=kind))
        except ChildExited as gone:
            source = "" if self._opened is None else self._opened.source
            where, method = self._child.stack.place(source)
            where = where.replace(source, Path(source).name)  # others read it
            self._end()
            call = f"{method}()" if method else call_of(value)
            raise ProcessDied(f"its process was ended: it {gone}{where}", gone.reason is Reason.TIMEOUT, call) from None

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child, self.generation = None, self.generation + 1


# --- which process plays which rollout ---


class EnvProcessPool:
    """All processes of a stage."""

    def __init__(
        self,
        make: Callable[[str], ChildPlayer],
        reply_store: ReplyStore,
        limit_s: Callable[[str], float],
        start: int = START_PLAYERS,
        most: int = MAX_PLAYERS,
    ) -> None:
        """`make` makes a player of an environment, by its label. `limit_s` gives the environment's time for one turn."""
        self._make_processes = lambda label: EnvProcesses(
            label, lambda: Shard(make(label), reply_store, limit_s), start, most
        )
        self._processes_by_env: dict[str, EnvProcesses] = {}
        self._judged: OrderedDict[bytes, Future[list[FinalScore]]] = OrderedDict()
        """The newest groups that are judged, or were."""
        self._lock = threading.Lock()

    def play(self, asks: Sequence[TurnRequest]) -> list[Reply]:
        """The replies to turns of different rollouts, in order. All processes work at the same time. Raises `StateError` if
        an environment does not open."""
        for label in {ask.slot.env for ask in asks}:
            self._processes_of(label).open()
        parts: dict[Shard, list[int]] = {}
        for place, ask in enumerate(asks):
            parts.setdefault(self._processes_of(ask.slot.env).place(ask), []).append(place)
        played = [
            (part, shard.submit(partial(shard.replies, [asks[place] for place in part])))
            for shard, part in parts.items()
        ]
        replies = {place: reply for part, done in played for place, reply in zip(part, done.result(), strict=True)}
        return [replies[place] for place in range(len(asks))]

    def judge(self, slot: Slot, paths: Sequence[bytes]) -> list[FinalScore]:
        """What the rollouts of a slot, which have ended, earn beside each other. Raises as `play`."""
        self._processes_of(slot.env).open()
        name = group_name(paths)
        with self._lock:
            judged = self._judged.get(name)  # two leases of a slot may end alike  # guard: judged-for-two-leases
            if judged is None or (judged.done() and judged.exception() is not None):
                judged = self._judged[name] = self._processes_by_env[slot.env].judge(slot, paths)
                if len(self._judged) > PINNED:
                    self._judged.popitem(last=False)
        return judged.result()

    def close(self) -> None:
        for processes in self._processes_by_env.values():
            processes.close()

    def _processes_of(self, label: str) -> "EnvProcesses":
        with self._lock:
            if label not in self._processes_by_env:
                self._processes_by_env[label] = self._make_processes(label)
            return self._processes_by_env[label]


class EnvProcesses:
    """The processes of one environment."""

    def __init__(self, label: str, make: Callable[[], Shard], start: int, most: int) -> None:
        self._label, self._make, self._start, self._most = label, make, start, most
        self._shards = [make() for _ in range(start)]
        self._pinned: OrderedDict[int, Shard] = OrderedDict()
        self._compares: Future[bool] | None = None
        """Whether its rollouts are judged beside each other."""
        self._lock = threading.Lock()

    def open(self) -> None:
        """Wait until one of its processes has opened. Raises `StateError`; the next call then tries again."""
        with self._lock:
            if self._compares is None or (self._compares.done() and self._compares.exception() is not None):
                first = self._shards[0]
                self._compares = first.submit(lambda: first.compares(self._label))
            compares = self._compares
        compares.result()

    def place(self, ask: TurnRequest) -> Shard:
        """Who is to play a turn."""
        with self._lock:
            shard = self._place(ask.slot, ask.before)
            shard.expect()
            return shard

    def judge(self, slot: Slot, paths: Sequence[bytes]) -> "Future[list[FinalScore]]":
        with self._lock:
            shard = self._place(slot, b"")
            return shard.submit(lambda: shard.judge(slot, paths))

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def _place(self, slot: Slot, before: bytes) -> Shard:
        """Who plays a turn: who holds the conversation, or else who has least to do. The rollouts of a slot are spread; but
        those that are judged beside each other are in one place."""
        assert self._compares is not None, "an open environment knows how its rollouts are judged"
        if self._compares.result():
            shard = self._pinned.get(slot.slot) or self._least()
            self._pinned[slot.slot] = shard
            if len(self._pinned) > PINNED:
                self._pinned.popitem(last=False)
            return shard
        return next((shard for shard in self._shards if before and shard.holds(before)), None) or self._least()

    def _least(self) -> Shard:
        if len(self._shards) < min(self._most, self._start + sum(shard.slow for shard in self._shards)):
            self._shards.append(self._make())
        return min(self._shards, key=Shard.load)
