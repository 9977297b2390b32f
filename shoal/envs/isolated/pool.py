"""The processes in which one environment plays: calls of different episodes run beside each other, one in each process.

A state of an episode stays in the process that made it, so the next call goes there, too. Calls that come together go out
together. If calls are slow, the pool starts more processes, and a process without work takes calls that wait for a slow
one: it makes their states again from the actions. So which process answers changes no answer. If the environment is not
reproducible, no state moves, and one that is lost makes its episode undecided.

A call that takes too long, or that ends its process, gets one more try with twice the time, unless its state is lost with
the process. If that ends the same way, it raises `Undecided`, because another machine might not have ended it.
"""

import hashlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import msgspec
import psutil

from shoal.env import Action
from shoal.envs.interface import AuthorError
from shoal.envs.isolated import messages as f
from shoal.envs.isolated.connection import EnvConnection, EnvProcessExited
from shoal.errors import Interrupted, ShoalError, Undecided

TRIES = 2
"""Processes that may end before a call is undecided."""

MAX_PROCESSES = 16
"""Of one environment. Most of them wait, for a judge or a server."""

SLOW_S = 0.1
"""If a call takes longer, or what waits for a process is expected to, other processes take what waits."""

STOP_S = 1.0
"""A node that was told to stop ends calls that have taken this long."""

MAX_STOPPED = 1000
"""Calls that were stopped, of which a pool remembers that."""

TOGETHER_S, MAX_TOGETHER = 0.02, 32
"""Calls go to a process together if they are expected to take no longer than this in all."""

LOOK_S = 0.05

A = TypeVar("A", bound=f.IsolatedAnswer)
T = TypeVar("T")
log = logging.getLogger("envs")


@dataclass(frozen=True)
class Processes:
    """How many processes an environment may have, and how long their user waits."""

    most: int = MAX_PROCESSES
    stopping: Callable[[], bool] = lambda: False
    """Whether the node was told to stop. What waits for a slow call then raises `Interrupted`."""
    left_s: Callable[[], float] = lambda: math.inf
    """Seconds until the work is due. A call that was ended is not tried again if less is left than it took."""


class RaisedValue(AuthorError, ValueError):
    """An IndexError or ValueError of the environment."""


class TaskHandle(NamedTuple):
    """A task: the environment makes it again for each episode."""

    number: int
    heldout: bool
    shown: str
    digest: str

    def __repr__(self) -> str:
        """What it holds, so that equal tasks look equal to `shoal env check`, whatever their index."""
        return self.shown if len(self.shown) < 200 else f"{self.shown}… {self.digest}"


def digest_of(task: Any) -> str:
    """Of a task's content, wherever the task is."""
    if isinstance(task, TaskHandle):
        return task.digest
    return hashlib.sha256(repr(task).encode("utf-8", "replace")).digest()[:16].hex()


@dataclass(eq=False)
class EnvProcess:
    """One process, and what waits for it."""

    line: EnvConnection
    waiting: "deque[PendingCall[Any]]" = field(default_factory=deque)
    sent: "deque[PendingCall[Any]]" = field(default_factory=deque)
    """Calls that went out together and have no answer yet. The first is under way."""
    busy_since: float = math.inf
    """When the call under way began."""

    def is_slow(self, call_s: float) -> bool:
        """Whether what waits here waits for long, if a call takes `call_s`."""
        return time.monotonic() - self.busy_since > SLOW_S or (len(self.waiting) + len(self.sent)) * call_s > SLOW_S


class StateHandle:
    """A state of an episode. It never changes, but may move to another process."""

    def __init__(
        self, number: int, task: TaskHandle, actions: tuple[str, ...], said: bytes, process: EnvProcess
    ) -> None:
        self.number, self.task, self.actions, self.said = number, task, actions, said
        """`said` is a hash of all that the environment said so far."""
        self.process = process
        self.points: list[tuple[str, Any]] = []
        """What came with the last answer and is asked for next."""

    def __del__(self) -> None:
        self.process.line.forget(self.number)


@dataclass(eq=False)
class PendingCall(Generic[T]):
    """A call."""

    wanted: type[f.IsolatedAnswer]
    kind: type[f.IsolatedRequest]
    fields: Mapping[str, Any]
    states: Sequence[StateHandle]
    finish: Callable[[Any, bytes, EnvProcess], T]
    """Makes the result of the answer, its bytes, and the process that gave it."""
    process: EnvProcess | None = None
    future: "Future[T]" = field(default_factory=Future)

    def words(self, method: str = "") -> str:
        """Which call of which task, for people. `method` is known if the process said within which one it was."""
        number, heldout = self.fields.get("index", -1), self.fields.get("heldout", False)
        if self.states:
            number, heldout = self.states[0].task.number, self.states[0].task.heldout
        name = f"{method}()" if method else CALLS.get(self.kind, "") or f"{self.fields['how']}()"
        return f"{name} of {'held-out ' if heldout else ''}task {number}"

    def retry_key(self) -> int:
        """Equal for calls that ask the same of episodes with the same actions."""
        told = sorted((name, value) for name, value in self.fields.items() if name not in ("state", "states", "new"))
        return hash(repr((self.words(), told, [(state.task.number, state.actions) for state in self.states])))


CALLS: Mapping[type[f.IsolatedRequest], str] = {
    f.Pose: "task()", f.Begin: "task() or reset()", f.Act: "step() or score()", f.Compare: "group_scores()",
    f.Play: "a player", f.Solve: "solution()",
}  # fmt: skip
"""The methods that a request leads to; those of a `Judge` are in it."""


class ProcessPool:
    """All processes of an environment. Any thread may use it."""

    def __init__(self, start: Callable[[], EnvConnection], processes: Processes, where: str, remedy: str = "") -> None:
        """`where` begins the sentence about a process that had to be ended, and `remedy` says what its user may do."""
        self._start, self._most, self._where, self._remedy = start, processes.most, where, remedy
        self._stopped = set[int]()
        """Calls that were stopped at all their tries, as `PendingCall.retry_key`."""
        self._told = set[str]()
        """What was logged of such calls."""
        self._stopping, self._left_s = processes.stopping, processes.left_s
        self._changed = threading.Condition()
        self._processes: list[EnvProcess] = []
        self._starting = 0
        self._free = deque[PendingCall[Any]]()
        """Calls that any process may take."""
        self._unwanted = weakref.WeakSet[Future[Any]]()
        self._closed = False
        self._call_s = TOGETHER_S / 4
        """What a call took lately."""
        self._numbers = itertools.count(1)
        self.reproducible = True
        """Whether a state may be made again from its actions. See `facts`."""
        self.has_network = False
        """Whether the environment may ask endpoints, so that a replay may find otherwise whether one answers."""
        self.facts = self._add().result()
        self.reproducible = self.facts.reproducible
        self.called = self.facts.name
        """What messages call the environment: its name, or its label in a run."""

    def number(self) -> int:
        """For a new state."""
        return next(self._numbers)

    def submit(self, job: PendingCall[T]) -> "Future[T]":
        """Begin a call."""
        with self._changed:
            if not self._closed:
                holds = [state.process for state in job.states[:1] if state.process in self._processes]
                (holds[0].waiting if holds else self._free).append(job)
                self._changed.notify_all()
                return job.future
        _settle(job, self._refuse)
        return job.future

    def result(self, job: PendingCall[T]) -> T:
        """Make a call, and wait for it. Raises `AuthorError`, `Undecided`, `Interrupted`."""
        self.submit(job)
        while True:
            try:
                return job.future.result(LOOK_S)
            except NotYet:
                if job.future.done():
                    raise
                try:
                    self.look()
                except BaseException:
                    self.give_up(job.future)
                    raise

    def look(self) -> None:
        """Start more processes if calls are slow, while somebody waits. Raises `Interrupted` when told to stop."""
        now = time.monotonic()
        with self._changed:
            slow = [process for process in self._processes if process.is_slow(self._call_s)]
            waiting = len(self._free) + sum(len(process.waiting) + len(process.sent) for process in slow)
            count = len(self._processes)
            # to be compared, states of one group must be in one process
            most = self._most if self.reproducible or "group_scores" not in self.facts.members else 1
            room = min(count, most - count) - self._starting
            more = min(waiting, room) if len(slow) == count else 0
            longest_s = max((now - process.busy_since for process in slow), default=0.0)
        for _ in range(more if more > 0 and self._has_memory() else 0):
            self._add(self.facts)
        if longest_s > STOP_S and self._stopping():  # guard: stop-waits-for-no-call
            raise Interrupted(f"{self.called}: told to stop while a call took {longest_s:.0f} s")

    def give_up(self, future: "Future[Any]") -> None:
        """Nobody waits for a call any more. It is not begun, or not tried again."""
        with self._changed:
            self._unwanted.add(future)

    def close(self) -> None:
        """End all processes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for process in self._processes:
                process.line.kill()

    def _has_memory(self) -> bool:
        """Whether this machine has room for another process, twice over."""
        most = max((process.line.memory_bytes() for process in self._processes), default=0)
        return bool(psutil.virtual_memory().available > 4 * most)

    # --- the thread of a process ---

    def _add(self, wanted: f.EnvFacts | None = None) -> "Future[f.EnvFacts]":
        """Start one more process. Its thread starts it and lives as long: the system ends a child with that thread. If the
        process has another environment than the `wanted` one, it answers nothing, and the pool starts no more."""
        opened: Future[f.EnvFacts] = Future()
        with self._changed:
            self._starting += 1
        try:
            threading.Thread(target=self._serve, args=(opened, wanted), name="environment", daemon=True).start()
        except RuntimeError as error:  # the system has no room for another thread
            self._stay(error, opened)
        return opened

    def _serve(self, opened: "Future[f.EnvFacts]", wanted: f.EnvFacts | None) -> None:
        try:
            process = EnvProcess(self._start())
        except BaseException as error:  # noqa: BLE001  raised again by who waits for the first process
            self._stay(error, opened)
            return
        facts = process.line.facts
        with self._changed:
            self._starting -= 1
            if is_same := wanted is None or facts == wanted:
                self._processes.append(process)
            else:
                self._most = len(self._processes)
        opened.set_result(facts)
        if not is_same:  # guard: other-environment-answers-nothing
            process.line.end()
            return
        try:
            while jobs := self._take(process):
                began = time.monotonic()
                self._run(process, jobs)
                self._call_s += 0.2 * ((time.monotonic() - began) / len(jobs) - self._call_s)
                del jobs  # with the states in them
        finally:
            self._leave(process)

    def _stay(self, error: BaseException, opened: "Future[f.EnvFacts]") -> None:
        """A process did not start, so the pool tries no other."""
        with self._changed:
            self._starting -= 1
            self._most = len(self._processes)
        opened.set_exception(error)

    def _leave(self, process: EnvProcess) -> None:
        """End a process whose thread ends. What waits for it gets no answer, nor does what waits for the last one."""
        process.line.end()
        with self._changed:
            self._processes.remove(process)
            left = [*process.sent, *process.waiting, *(() if self._processes else self._free)]
            process.sent.clear()
            process.waiting.clear()
            if not self._processes:
                self._closed = True
                self._free.clear()
        for job in left:
            _settle(job, self._refuse)

    def _refuse(self) -> NoReturn:
        raise Undecided(f"{self.called}: its process is closed")

    def _take(self, process: EnvProcess) -> list[PendingCall[Any]]:
        """The next calls for a process; empty once the pool is closed."""
        with self._changed:
            process.busy_since = math.inf
            while not self._closed:
                queue = process.waiting or self._free
                if jobs := self._together(queue) or self._behind_a_slow_one():
                    for job in jobs:
                        job.process = process
                    process.sent.extend(jobs)
                    process.busy_since = time.monotonic()
                    return jobs
                others_wait = any(other.waiting or len(other.sent) > 1 for other in self._processes)
                self._changed.wait(LOOK_S if others_wait else None)
            return []

    def _together(self, queue: "deque[PendingCall[Any]]") -> list[PendingCall[Any]]:
        share = -(-len(queue) // len(self._processes)) if queue is self._free else len(queue)
        count = max(1, min(share, MAX_TOGETHER, int(TOGETHER_S / max(self._call_s, 1e-6))))
        jobs: list[PendingCall[Any]] = []
        while queue and len(jobs) < count:
            job = queue.popleft()
            if job.future not in self._unwanted:
                jobs.append(job)
        return jobs

    def _behind_a_slow_one(self) -> list[PendingCall[Any]]:
        """A call that waits behind a slow one. Those come first whose states have the fewest actions to be made from."""
        slow = [process for process in self._processes if process.is_slow(self._call_s)]
        for process in sorted(slow, key=lambda process: -len(process.waiting) - len(process.sent)):
            queue = [*(process.waiting or list(process.sent)[1:])]
            if queue := [job for job in queue if self._may_move(job)]:
                job = min(queue, key=lambda job: sum(len(state.actions) for state in job.states))
                (process.waiting if process.waiting else process.sent).remove(job)
                return [job]
        return []

    def _may_move(self, job: PendingCall[Any]) -> bool:
        return job.future not in self._unwanted and (self.reproducible or not job.states)

    def _run(self, process: EnvProcess, jobs: Sequence[PendingCall[Any]]) -> None:
        """Answer calls: all at once if they are several, and each by itself that got no answer so. Those that another
        process has taken meanwhile are that one's."""
        ended, tries, why, again = None, 1, "", deque[PendingCall[Any]]()
        if len(jobs) > 1:
            told = process.line.ask_all([(job.kind, job.fields) for job in jobs])
            try:
                for job, (answer, data) in zip(jobs, told, strict=True):
                    if not self._has(process, job):
                        process.line.forget(job.fields.get("new", 0))
                    elif isinstance(answer, job.wanted | f.EnvFault):
                        _settle(job, partial(self._checked, process, job, answer, data))
                    else:
                        again.append(job)
            except (EnvProcessExited, ShoalError, OSError) as error:
                ended, why = next(iter(process.sent), None), str(error)  # the call under way
                if isinstance(error, EnvProcessExited) and ended is not None:
                    tries = TRIES + 1 - self._most_tries(process, ended)
                    why = self._tell(ended, error, tries < TRIES)
        while (one := again.popleft() if again else self._next(process)) is not None:
            _settle(one, partial(self._asked, process, one, *((tries, why) if one is ended else ())))

    def _has(self, process: EnvProcess, job: PendingCall[Any]) -> bool:
        """Whether a call that has its answer is still this process's. The one after it begins."""
        with self._changed:
            process.busy_since = time.monotonic()
            if job.process is process:
                process.sent.remove(job)
            return job.process is process

    def _next(self, process: EnvProcess) -> PendingCall[Any] | None:
        with self._changed:
            process.busy_since = time.monotonic()
            return process.sent.popleft() if process.sent else None

    def _most_tries(self, process: EnvProcess, job: PendingCall[Any]) -> int:
        """One for a call that was stopped before, that took what is left of the time, or whose states are lost."""
        late = self._left_s() < 2 * (time.monotonic() - process.busy_since)  # guard: call-beyond-the-lease
        lost = job.states and not self.reproducible
        return 1 if late or lost or (self._stopped and job.retry_key() in self._stopped) else TRIES

    def _asked(self, process: EnvProcess, job: PendingCall[Any], tries: int = 0, why: str = "nobody waits") -> Any:
        """One answer, from a second process if the first one has to be ended. `tries` were made, and `why` the last one
        failed. Raises `AuthorError` or `Undecided`."""
        most = self._most_tries(process, job)
        while tries < most and not (job.future in self._unwanted or self._closed):
            tries += 1
            try:
                return self._checked(process, job, *self._answer(process, job, float(tries)))
            except Undecided:
                raise
            except EnvProcessExited as gone:
                if tries == most and len(self._stopped) < MAX_STOPPED:
                    self._stopped.add(job.retry_key())
                most = self._most_tries(process, job)
                why = self._tell(job, gone, tries < most)
            except (ShoalError, OSError) as error:  # no new process starts
                why = str(error)
        raise Undecided(f"{self.called}: {why}")  # guard: stopped-is-no-verdict

    def _tell(self, job: PendingCall[Any], gone: EnvProcessExited, once_more: bool) -> str:
        """What happened in a call. It is logged once for each, if the call is tried `once_more`."""
        why = f"{job.words(gone.method)}: {self._where}: it {gone}"
        wanted = once_more and not (self._closed or job.future in self._unwanted or self._stopping())
        if wanted and why not in self._told and len(self._told) < MAX_STOPPED:
            self._told.add(why)
            log.warning("%s: %s. It gets one more try, with twice the time%s", self.called, why, self._remedy)
        return why

    def _checked(self, process: EnvProcess, job: PendingCall[Any], answer: f.AnyAnswer, data: bytes) -> Any:
        return job.finish(_demanded(process.line, job.wanted, answer, self.has_network), data, process)

    def _answer(self, process: EnvProcess, job: PendingCall[Any], patience: float) -> tuple[f.AnyAnswer, bytes]:
        answer, data = process.line.ask(job.kind, job.fields, patience)
        if isinstance(answer, f.Unknown) and job.states:
            for state in job.states:
                if state.number in answer.states:
                    self._revive(process, state, patience)
            answer, data = process.line.ask(job.kind, job.fields, patience)
        return answer, data

    def _revive(self, process: EnvProcess, state: StateHandle, patience: float) -> None:
        """Make a state again that a process does not keep, from the actions. The last gets its old number."""
        if not self.reproducible:  # guard: lost-is-not-repeated
            raise Undecided(f"{self.called}: it is not reproducible, and the process of this episode was ended")
        task, line = state.task, process.line
        numbers = [*(self.number() for _ in state.actions), state.number]
        fields: dict[str, Any] = {"new": numbers[0], "index": task.number, "heldout": task.heldout}
        answer, data = line.ask(f.Begin, fields, patience)
        said = hash_of(b"", _demanded(line, f.Begun, answer, self.has_network), data)
        for action, before, number in zip(state.actions, numbers, numbers[1:], strict=False):
            answer, data = line.ask(f.Act, self.acting(before, number, action), patience)
            said = hash_of(said, _demanded(line, f.Acted, answer, self.has_network), data)
            line.forget(before)
        if said != state.said:
            line.end()  # it keeps another state under this number
            raise Undecided(
                f"{self.called}: it is not deterministic: it answered the same actions differently the second time"
            )
        if state.process is not process:
            state.process.line.forget(state.number)
            state.process = process

    def acting(self, state: int, new: int, action: str) -> dict[str, Any]:
        """The fields of an `Act`."""
        fields: dict[str, Any] = {"state": state, "new": new, "text": str(action)}
        if isinstance(action, Action):
            own = list(action._tools) == self.facts.tools
            fields |= {"notation": action._notation, "thinking": action._thinking}
            fields |= {"tools": None if own else list(action._tools)}
        return fields


def hash_of(before: bytes, answer: f.Begun | f.Acted, data: bytes) -> bytes:
    """Of what an environment said before, and now. What it thinks of the whole episode is not part of that: a judge may
    give another score the second time."""
    if isinstance(answer, f.Acted) and answer.done:
        data = msgspec.msgpack.encode(msgspec.structs.replace(answer, points=None, success=None))
    return hashlib.blake2b(before + data, digest_size=16).digest()


def _settle(job: PendingCall[Any], act: Callable[[], Any]) -> None:
    try:
        result = act()
    except BaseException as error:  # noqa: BLE001  raised again by who waits
        job.future.set_exception(error)
    else:
        job.future.set_result(result)


def _demanded(line: EnvConnection, wanted: type[A], answer: f.AnyAnswer, has_network: bool) -> A:
    if isinstance(answer, f.EnvFault):
        text = " ".join(answer.line.split())[: f.MAX_LINE_CHARS]
        if answer.unreachable and has_network:
            raise Undecided(f"an endpoint of the environment did not answer: {text}")  # guard: silence-is-no-fault
        raise (RaisedValue if answer.usual else AuthorError)(text)
    if not isinstance(answer, wanted):
        line.end()  # guard: answer-to-this-request
        raise EnvProcessExited("answered something else than was asked")
    return answer
