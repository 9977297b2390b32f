"""The end in the other process: it makes one environment, and answers requests about it, in its main thread.

The environment's interpreter imports it first, so it imports nothing that needs another package, except `msgspec`. The
environment's code can change all of it, so nothing here protects anyone: `isolated/connection` believes none of it.

Each call begins with the same global random state for the same task and turn, so code that draws from it repeats.
"""

import faulthandler
import hashlib
import operator
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from shoal.chat.messages import Written
from shoal.env import Action, Env, Score
from shoal.envs.env_from_file import make_env
from shoal.envs.episode import marks_of
from shoal.envs.exceptions import is_unreachable
from shoal.envs.interface import describe, describe_fault, describe_fault_of_call, number_of, players_of, step_of
from shoal.envs.isolated import messages as f
from shoal.errors import ShoalError
from shoal.ipc import OUT_OF_MEMORY, end_with, read_message, take_pipes, write_message

MAKER = make_env.__code__.co_filename
_decode = msgspec.msgpack.Decoder(list[f.AnyRequest]).decode
_encode = msgspec.msgpack.Encoder().encode
_leave = os._exit


class EpisodeState(NamedTuple):
    """A state, and its place in an episode."""

    state: Any
    number: int
    """Number of the task."""
    heldout: bool
    turns: int


class Exited(BaseException):
    """What an `os._exit` of the environment becomes, so that it fails one rollout as `sys.exit` does."""


def serve(file: str, function: str) -> None:
    """A package in the sandbox: what it prints is dropped."""
    path = Path(file)
    _serve(*take_pipes(), path, function, f"{path.parent}/")


def serve_own(parent: int, stack: int, file: str, function: str) -> None:
    """A file of this user in a child process of `parent`: what it prints goes to standard error. Where it is goes to the
    descriptor `stack`: see `write_stacks`."""
    end_with(parent)
    write_stacks(stack)
    _serve(*take_pipes(prints_to=2), Path(file), function, "")


def write_stacks(descriptor: int) -> None:
    """In the process: from now on, where it is goes to this descriptor when it crashes, when an alarm that it set itself
    ends it, and at SIGUSR2, which our end sends before it ends a call that takes long."""
    faulthandler.enable(descriptor, all_threads=False)
    faulthandler.register(signal.SIGUSR2, descriptor, all_threads=False)
    faulthandler.register(signal.SIGALRM, descriptor, all_threads=False, chain=True)


def _serve(requests: int, answers: int, path: Path, function: str, hidden: str) -> None:
    """Make the environment with the arguments in the first frame, then answer until the other end closes. `hidden` is left
    out of the lines about faults."""
    let_exits_raise()
    try:
        args = msgspec.msgpack.decode(_receive(requests))
        try:
            _seed("made")
            env = make_env(path, args, function)
            first = facts_of(env)
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code may raise anything while it is imported
            write_message(
                answers, _encode(f.EnvRefused(_line(error, describe_fault(error, path), hidden), _trace(error)))
            )
            return
        write_message(answers, _encode(first))
        host = Inside(env, path, hidden)
        while True:
            for request in _decode(_receive(requests)):
                write_message(answers, host.answered(request))
    except MemoryError:
        os.kill(os.getpid(), OUT_OF_MEMORY)


def let_exits_raise() -> None:
    """From now on, `os._exit` raises in the main thread of this process. In a process that the environment forks, and in
    other threads, it is what it was."""
    process = os.getpid()

    def exit_or_raise(status: int) -> NoReturn:
        if os.getpid() == process and threading.current_thread() is threading.main_thread():
            raise Exited(f"os._exit({status})")
        _leave(status)

    os._exit = exit_or_raise


_CALLS = {
    f.Pose: "task", f.Begin: "reset", f.Act: "step", f.Compare: "group_scores", f.Play: "players", f.Solve: "solution",
}  # fmt: skip
"""What each request calls; `Judge` names it."""


class Inside:
    """The environment and the states of its episodes."""

    def __init__(self, env: Env, path: Path, hidden: str) -> None:
        self.env, self._path, self._hidden = env, path, hidden
        self._kept: dict[int, EpisodeState] = {}
        self._acts: Mapping[type, Callable[[Any], f.IsolatedAnswer]] = {
            f.Pose: self._pose, f.Begin: self._begin, f.Act: self._act, f.ScoreState: self._judge,
            f.Compare: self._compare, f.Play: self._play, f.Solve: self._solve,
        }  # fmt: skip

    def answered(self, request: f.AnyRequest) -> bytes:
        for number in request.drop:
            self._kept.pop(number, None)
        try:
            try:
                answer = _encode(self._acts[type(request)](request))
            finally:
                signal.alarm(0)  # one that goes off later would fail another rollout  # guard: alarm-of-one-call
            if len(answer) > f.MAX_ANSWER_BYTES:
                raise ValueError(f"the environment says {len(answer)} bytes at once, limit {f.MAX_ANSWER_BYTES}")
            return answer
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code may raise anything, or exit
            usual = isinstance(error, IndexError | ValueError)
            name = _CALLS.get(type(request)) or str(getattr(request, "how", ""))
            said = describe_fault_of_call(error, self.env, name, self._path)
            line, trace = _line(error, said, self._hidden), _trace(error)
            return _encode(f.EnvFault(line, trace, usual, is_unreachable(error, self._path)))

    def _pose(self, request: f.Pose) -> f.IsolatedAnswer:
        text = repr(self._task(request.index, request.heldout))
        return f.TaskAnswer(_plain(text[:200]), hashlib.sha256(text.encode("utf-8", "replace")).digest()[:16])

    def _begin(self, request: f.Begin) -> f.IsolatedAnswer:
        task = self._task(request.index, request.heldout)
        _seed("reset", request.index, request.heldout)
        state, messages = self.env.reset(task)
        self._keep(request.new, EpisodeState(state, request.index, request.heldout, 0))
        return f.Begun(_marked(messages))

    def _act(self, request: f.Act) -> f.IsolatedAnswer:
        if (before := self._kept.get(request.state)) is None:
            return f.Unknown([request.state])
        tools = getattr(self.env, "tools", ()) if request.tools is None else request.tools
        _seed("step", *before[1:])
        told = step_of(self.env.step(before.state, Action(request.text, request.notation, request.thinking, tools)))
        after = before._replace(state=told.state, turns=before.turns + 1)
        self._keep(request.new, after)
        done = bool(told.done)
        reply = None if done and not isinstance(told.reply, str) else _marked(told.reply)
        steps = marks_of(told.steps, request.text)
        earned, seat = number_of(told.reward or 0.0, "the reward of a step"), operator.index(told.seat)
        answer = f.Acted(reply, done, earned, bool(told.learn), seat, bool(told.restart), steps=steps)
        if done:
            try:
                answer.points = self._points(after, "score")
                answer.success = self._success(after)
            except MemoryError:
                raise
            except BaseException:  # noqa: BLE001  it is asked for by itself next, and then raises again
                answer.points = None
        return answer

    def _judge(self, request: f.ScoreState) -> f.IsolatedAnswer:
        if (kept := self._kept.get(request.state)) is None:
            return f.Unknown([request.state])
        if request.how == "success":
            return f.ScoreReply(self._success(kept) or False)
        return f.ScoreReply(self._points(kept, request.how))

    def _compare(self, request: f.Compare) -> f.IsolatedAnswer:
        if missing := [number for number in request.states if number not in self._kept]:
            return f.Unknown(missing)
        states = [self._kept[number].state for number in request.states]
        _seed("group_scores")
        scores = self.env.group_scores(states)  # type: ignore[attr-defined]
        return f.Compared([_points(score) for score in scores])

    def _play(self, request: f.Play) -> f.IsolatedAnswer:
        if (kept := self._kept.get(request.state)) is None:
            return f.Unknown([request.state])
        return f.StepReply(str(players_of(self.env)[request.player](kept.state, random.Random(request.seed))))

    def _solve(self, request: f.Solve) -> f.IsolatedAnswer:
        turns = self.env.solution(self._task(request.index, request.heldout))  # type: ignore[attr-defined]
        return f.Solution(turns if turns is None or isinstance(turns, str) else tuple(turns))

    def _task(self, index: int, heldout: bool) -> Any:
        _seed("task", index, heldout)
        return self.env.task(index, heldout=True) if heldout else self.env.task(index)

    def _points(self, kept: EpisodeState, how: str) -> f.Points:
        _seed(how, *kept[1:])
        return _points(getattr(self.env, how)(kept.state))

    def _success(self, kept: EpisodeState) -> bool | None:
        decide = getattr(self.env, "success", None)
        return None if decide is None else bool(decide(kept.state))

    def _keep(self, number: int, kept: EpisodeState) -> None:
        self._kept[number] = kept
        if len(self._kept) > f.MAX_STATES:
            del self._kept[next(iter(self._kept))]


def facts_of(env: Env) -> f.EnvFacts:
    """What the other end needs to know before the first task. Raises what the environment raises."""
    return msgspec.structs.replace(describe(env), players=tuple(map(str, players_of(env))))


def _points(score: Any) -> f.Points:
    if isinstance(score, Score):
        parts, metrics = ({str(k): number_of(v, str(k)) for k, v in named.items()} for named in score)
        return f.Parts(parts, metrics)
    return number_of(score, "the score")


def _marked(told: Any) -> Any:
    """A reply in which plain tables replace each `Written`."""
    if isinstance(told, Written):
        return {f.MARK: [told.turn, told.reasoning, told.calls]}
    if isinstance(told, list | tuple):
        return [_marked(item) for item in told]
    return dict(told) if isinstance(told, Mapping) else told


def _seed(*where: object) -> None:
    """The global random state of `random`, and of numpy if the package has imported it."""
    seed = repr(where).encode()
    random.seed(seed)
    if numpy := getattr(sys.modules.get("numpy"), "random", None):
        numpy.seed(int.from_bytes(hashlib.sha256(seed).digest()[:4], "big"))


def _line(error: BaseException, described: str, hidden: str) -> str:
    text = " ".join(str(error).split()) if isinstance(error, ShoalError) else described
    return _plain(text.replace(hidden, "") if hidden else text)[: f.MAX_LINE_CHARS]


def _trace(error: BaseException) -> str:
    """The traceback, without our own frames above the package's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in (__file__, MAKER):
        trace = trace.tb_next
    return _plain("".join(traceback.format_exception(type(error), error, trace))[-f.MAX_TRACE_CHARS :])


def _plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _receive(pipe: int) -> bytes:
    """The next request. Ends this process if the other end is closed."""
    if (data := read_message(pipe)) is None:
        _leave(0)
    return data
