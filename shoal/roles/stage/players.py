"""Where episodes are played: processes of the host's own that hold environments, each with its conversations.

Called by `role`, which passes `Players.play` to `turns`. A process that hangs is killed, one that died is started again,
and the episodes that went with it are played again from the memo. So a kill at any time changes no reply. The rest of the
stage knows environments only through the protocol `Player`: a process in a sandbox can take the place of ours.
"""

import contextlib
import itertools
import logging
import select
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from shoal.config.environ import child_environment
from shoal.errors import StateError
from shoal.protocol.constants import MAX_ROLLOUT_TOKENS
from shoal.protocol.types import POLICY
from shoal.roles.stage.child import Answer, Opened, Opening, Request, send
from shoal.roles.stage.memo import Memo, Reply
from shoal.roles.stage.turns import VOID, Ask

log = logging.getLogger("stage")

HELD = 4096
"""Conversations that a process holds. Those that were idle longest are played again when they go on."""

TRIES = 3
"""A rollout ends by "error" when as many processes in a row died while they played it."""

START_S = 120.0
"""A process may take this long to load its environments."""

MAX_FRAME_BYTES = 4 * MAX_ROLLOUT_TOKENS + (1 << 20)

T = TypeVar("T")


class Gone(Exception):
    """A process ended, or had to be killed. The text is the end of a sentence."""

    def __init__(self, why: str, slow: bool = False) -> None:
        super().__init__(why)
        self.slow = slow
        """Whether it took longer than a call may."""


class Player(Protocol):
    """A place where conversations are played, one request at a time."""

    @property
    def generation(self) -> int:
        """Counts the processes: conversations of an earlier one are lost."""

    def lowest(self, label: str) -> float:
        """The lowest reward of an environment."""

    def ask(self, request: Request, limit_s: float) -> Answer:
        """Raises `Gone`; the next request then meets a fresh process."""


class Players:
    """All players of a stage. A rollout always goes to the same one."""

    def __init__(self, make: Callable[[], Player], number: int, memo: Memo, limit_s: Callable[[str], float]) -> None:
        """`limit_s` gives the time for one turn of an environment, by its label."""
        self._shards = [Shard(make(), memo, limit_s) for _ in range(number)]
        self._threads = [ThreadPoolExecutor(1, f"player-{i}") for i in range(number)]

    def play(self, asks: Sequence[Ask]) -> list[Reply]:
        """The replies to turns of different rollouts, in order. All players work at the same time."""
        waiting = []
        for ask in asks:
            # The rollouts of a slot are spread, so that an environment that waits for a judge waits for several at a time.
            which = (ask.slot.slot + ask.rollout) % len(self._shards)
            waiting.append(self._threads[which].submit(self._shards[which].reply, ask))
        return [one.result() for one in waiting]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)


class Shard:
    """One player, and which conversations it holds."""

    def __init__(self, player: Player, memo: Memo, limit_s: Callable[[str], float]) -> None:
        self._player, self._memo, self._limit_s = player, memo, limit_s
        self._numbers = itertools.count()
        self._held: OrderedDict[bytes, int] = OrderedDict()
        """Numbers of conversations by path, the longest idle first."""
        self._forget: list[int] = []
        self._generation = -1

    def reply(self, ask: Ask) -> Reply:
        """Play one turn. Whatever the environment does, there is a reply."""
        why = ""
        for _ in range(TRIES):
            try:
                return self._play(ask)
            except Gone as gone:
                why = str(gone)
                log.warning("killed env=%s task=%d reason=%r", ask.slot.env, ask.slot.task, why)
                if gone.slow:
                    break
        return self._failed(ask, why)

    def _play(self, ask: Ask) -> Reply:
        if not ask.before:
            return self._open(ask, ask.path)
        if not self._holds(ask.before) and not self._play_again(ask):
            return self._failed(ask, "it gives other words for the same actions (set reproducible = false)")
        return self._write(ask, ask.before, ask.written, ask.path)

    def _holds(self, path: bytes) -> bool:
        return path in self._held and self._generation == self._player.generation

    def _play_again(self, ask: Ask) -> bool:
        """Play a conversation again, up to its last turn; whether the environment says the same words as before."""
        before = b""
        for step in self._memo.story(ask.before):
            reply = self._write(ask, before, step.written, step.path) if before else self._open(ask, step.path)
            if reply != step.reply:  # guard: same-words-again
                if step.path in self._held:
                    self._forget.append(self._held.pop(step.path))
                return False
            before = step.path
        return True

    def _open(self, ask: Ask, path: bytes) -> Reply:
        return self._asked(ask, path, Request(next(self._numbers), label=ask.slot.env, task=ask.slot.task))

    def _write(self, ask: Ask, before: bytes, written: bytes, path: bytes) -> Reply:
        return self._asked(ask, path, Request(self._held.pop(before), written))

    def _asked(self, ask: Ask, path: bytes, request: Request) -> Reply:
        """Send a request, and remember where its conversation is then."""
        request.forget, self._forget = tuple(self._forget), []
        answer = self._player.ask(request, self._limit_s(ask.slot.env))
        if self._generation != self._player.generation:  # guard: lost-with-the-process
            self._generation = self._player.generation
            self._held.clear()
        if not answer.ending:
            self._held[path] = request.number
            if len(self._held) > HELD:
                self._forget.append(self._held.popitem(last=False)[1])
        if answer.fault:
            log.warning(
                "fault env=%s task=%d ending=%s fault=%s", ask.slot.env, ask.slot.task, answer.ending, answer.fault
            )
        return Reply(answer.words, answer.room, answer.ending, answer.reward, answer.author)  # type: ignore[arg-type]

    def _failed(self, ask: Ask, why: str) -> Reply:
        """The reply for an environment that gave none: as for one that raises, and void if it could not begin."""
        log.error("failed env=%s task=%d reason=%r", ask.slot.env, ask.slot.task, why)
        if not ask.before:
            return VOID
        return Reply(b"", 0, "error", self._player.lowest(ask.slot.env), POLICY)


class ChildPlayer:
    """A player in a child process of this one, started at the first request. It ends when this process ends."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._child: _Child | None = None
        self.generation = 0
        self._lowest: dict[str, float] = {}

    def lowest(self, label: str) -> float:
        return self._lowest.get(label, 0.0)

    def ask(self, request: Request, limit_s: float) -> Answer:
        """Raises `Gone`, and `StateError` if the environments cannot be loaded."""
        if self._child is None:
            self.generation += 1
            self._child = _Child()
            opened = self._exchange(self._opening, START_S, Opened)
            if opened.refused:
                self._end()
                raise StateError(opened.refused)
            self._lowest = opened.lowest
        return self._exchange(request, limit_s, Answer)

    def _exchange(self, value: object, limit_s: float, kind: type[T]) -> T:
        assert self._child is not None
        try:
            return msgspec.msgpack.decode(self._child.ask(msgspec.msgpack.encode(value), limit_s), type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            self._end()
            raise Gone(f"its process ended or gave a wrong answer ({error})") from None
        except Gone:
            self._end()
            raise

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child, self.generation = None, self.generation + 1


class _Child:
    """A running process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.roles.stage.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=child_environment(1), start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout
        self._answers = select.poll()
        self._answers.register(self._from, select.POLLIN)
        self.end = weakref.finalize(self, _end, self._process)

    def ask(self, data: bytes, limit_s: float) -> bytes:
        """Raises `Gone`, `OSError`."""
        until = time.monotonic() + limit_s
        send(self._to, data)
        size = int.from_bytes(self._read(4, until, limit_s), "big")
        if size > MAX_FRAME_BYTES:  # guard: answer-of-a-player
            raise Gone(f"its process answered with {size} bytes, limit {MAX_FRAME_BYTES}")
        return self._read(size, until, limit_s)

    def _read(self, size: int, until: float, limit_s: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not self._answers.poll(1000 * max(0.0, until - time.monotonic())):  # guard: turn-takes-too-long
                raise Gone(f"a turn took longer than {limit_s:g} s", slow=True)
            piece = self._from.read(size - len(data))
            if not piece:
                raise Gone(f"its process ended with code {self._code()}")
            data += piece
        return bytes(data)

    def _code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self._process.returncode


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
