"""The processes on the host in which episodes are played. Each loads the environments and has its own conversations.

A process that hangs is killed, one that died is started again, and the episodes that were lost with it are played again
from the memo. So a kill at any time changes no reply. The rest of the stage knows environments only through the protocol
`Player`, so a process in a sandbox could replace ours.
"""

import contextlib
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from shoal.config.process_environment import SAME_EVERYWHERE, child_environment
from shoal.envs.isolated.stack_trace import StackFile
from shoal.envs.play import report_unbegun
from shoal.envs.run_settings import LOWEST
from shoal.errors import StateError, cause_of
from shoal.pipes import Late, Pipes
from shoal.protocol.constants import MAX_ROLLOUT_TOKENS
from shoal.protocol.messages import POLICY, Slot
from shoal.roles.env_server.env_process import Opening, ProcessAnswer, ProcessOpened, ProcessRequest
from shoal.roles.env_server.replies import FinalScore, Memo, Reply
from shoal.roles.env_server.turns import VOID, TurnRequest
from shoal.roles.node.reward_parts import Tally

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

T = TypeVar("T")


class ProcessDied(Exception):
    """A process ended, or had to be killed. The text says how."""

    def __init__(self, why: str, slow: bool = False, call: str = "") -> None:
        super().__init__(why)
        self.slow = slow
        """Whether it took longer than a call may."""
        self.call = call
        """The call of the environment that was under way."""


class Player(Protocol):
    """A place where conversations are played, one request at a time."""

    @property
    def generation(self) -> int:
        """Number of the current process. Conversations of an earlier one are lost."""

    def lowest(self, label: str) -> float:
        """The lowest reward of an environment."""

    def leaves_out(self, label: str) -> bool:
        """Whether rollouts on which an environment fails count in nothing."""

    def count(self, faults: int) -> None:
        """So many more rollouts are learned from although the environment failed on them."""

    def compares(self, label: str) -> bool:
        """Whether an environment compares an answer with its siblings. Raises as `ask`."""

    def ask(self, request: ProcessRequest, limit_s: float) -> ProcessAnswer:
        """Raises `Gone`; the next request then meets a fresh process."""


class Shard:
    """One player, and which conversations it holds."""

    def __init__(self, player: Player, memo: Memo, limit_s: Callable[[str], float]) -> None:
        self._player, self._memo, self._limit_s = player, memo, limit_s
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
        replies = self._memo.replies(paths)
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
        for step in self._memo.story(path):
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
        row = self._memo.replies([ask.before])[ask.before].row
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
        self._child: _EnvProcess | None = None
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
        """Raises `Gone`, and `StateError` if the environments cannot be loaded."""
        if self._child is None:
            self._start()
        answer = self._exchange(request, limit_s, ProcessAnswer)
        if answer.scores is not None:
            self._on_scores(answer.scores)
        return answer

    def _start(self) -> None:
        self.generation += 1
        try:
            self._child = _EnvProcess()
        except OSError as error:
            why = f"the stage cannot start a process ({cause_of(error)}): let it have more processes or memory"
            raise StateError(why) from None  # the environment is not to blame  # guard: no-process-fails-no-rollout
        opened = self._exchange(self._opening, START_S, ProcessOpened)
        if opened.refused:
            self._end()
            raise StateError(opened.refused)
        self._opened = opened

    def _exchange(self, value: object, limit_s: float, kind: type[T]) -> T:
        assert self._child is not None
        try:
            return msgspec.msgpack.decode(self._child.ask(msgspec.msgpack.encode(value), limit_s), type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            self._end()
            raise ProcessDied(f"its process ended or gave a wrong answer ({error})", call=call_of(value)) from None
        except ProcessDied as gone:
            source = "" if self._opened is None else self._opened.source
            where, method = self._child.stack.place(source)
            where = where.replace(source, Path(source).name)  # others read it
            self._end()
            raise ProcessDied(f"{gone}{where}", gone.slow, f"{method}()" if method else call_of(value)) from None

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child, self.generation = None, self.generation + 1


class _EnvProcess:
    """A running process. It ends when this object is freed, and with the thread that started it."""

    def __init__(self) -> None:
        self.stack = StackFile()
        stack = self.stack.descriptor
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.roles.env_server.env_process", str(os.getpid()), str(stack)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=child_environment(1) | SAME_EVERYWHERE,
            pass_fds=[stack], start_new_session=True,
        )  # fmt: skip
        self._pipes = Pipes(self._process)
        self.end = self._pipes.end

    def ask(self, data: bytes, limit_s: float) -> bytes:
        """Raises `Gone`, `OSError`."""
        until = time.monotonic() + limit_s  # guard: turn-takes-too-long
        try:
            self._pipes.send(data, until)
            size = self._pipes.size(until)
            if size > MAX_FRAME_BYTES:  # guard: answer-of-a-player
                raise ProcessDied(f"its process answered with {size} bytes, limit {MAX_FRAME_BYTES}")
            return self._pipes.read(size, until)
        except Late:
            self.stack.ask(self._process)
            raise ProcessDied(f"its process was ended: it took longer than {limit_s:g} s", slow=True) from None
        except EOFError:
            raise ProcessDied(f"its process ended with {self._code()}") from None

    def _code(self) -> str:
        """The signal that ended it, by name, or its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return "SIGKILL, as the system does when memory runs out"
        with contextlib.suppress(ValueError, TypeError):
            return signal.Signals(-code).name
        return f"code {code}"
