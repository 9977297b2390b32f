"""An environment in a sandbox, as seen from outside: it is opened, asked, and opened again if its process ends."""

import random
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

from shoal.chat.messages import Written
from shoal.env import Env, Message, Player, Score, Scored, Step
from shoal.env_packages.installed import Installed
from shoal.envs.interface import AuthorError
from shoal.envs.isolated import messages as f
from shoal.envs.isolated.connection import (
    CODE,
    LIMITS,
    OWN_LIMITS,
    EnvConnection,
    OwnFile,
    PackageSource,
    our_code,
)
from shoal.envs.isolated.pool import EnvProcess, PendingCall, Processes, ProcessPool, StateHandle, TaskHandle, hash_of
from shoal.errors import ConfigError, ShoalError
from shoal.ipc import ChildExited
from shoal.sandbox.filesystem import INTERPRETER_FLAGS, OUTSIDE, SandboxPath, interpreter, standard_paths
from shoal.sandbox.limits import Limits
from shoal.sandbox.sandbox import Resident
from shoal.sandbox.selftest import examined
from shoal.terminal import printable

# --- An environment whose code runs in other processes ---
#
# To all who play, replay or check it, one like any other.
#
# Made by `open`. A state here is a number, the task and the actions so far: the state itself stays in a process, and is
# made again from the actions if it is gone. What comes out of a package is hostile, and is checked where any
# environment's words are: messages by `chat/messages`, rewards by `interface`, seats by `rollout`. `pool` says
# which process answers.


class ContainedEnv:
    """An environment in processes of its own. Several threads may use it."""

    source: Path | None = None
    """The file that makes it, if it is this user's."""

    def __init__(
        self, start: Callable[[], EnvConnection], processes: Processes = Processes(), where: str = "the sandbox stopped it",
        remedy: str = "",
    ) -> None:  # fmt: skip
        """See `ProcessPool`."""
        self.pool = ProcessPool(start, processes, where, remedy)
        weakref.finalize(self, self.pool.close)
        facts = self.pool.facts
        self.name = facts.name[:200]
        self.num_tasks, self.num_heldout, self.num_seats = facts.num_tasks, facts.num_heldout, facts.num_seats
        self.reward_bounds, self.weights = facts.reward_bounds, facts.weights
        self.tools, self.template, self.parser, self.history = facts.tools, facts.template, facts.parser, facts.history
        self.max_turn_tokens, self.max_tokens = facts.max_turn_tokens, facts.max_tokens
        optional = {"truncated_score": self._truncated_score, "group_scores": self._group_scores,
                    "success": self._success, "players": self._players, "solution": self._solution}  # fmt: skip
        for name in facts.members:
            if name in optional:
                setattr(self, name, optional[name])

    @property
    def reproducible(self) -> bool:
        """Whether the same actions give the same answers. Its description or the run file may say no, too."""
        return self.pool.reproducible

    @reproducible.setter
    def reproducible(self, reproducible: bool) -> None:
        self.pool.reproducible = reproducible

    def begin(self, name: str, *args: Any) -> "Future[Any]":
        """Begin a call of a method, of an episode or of a group, which goes on beside others."""
        if name in ("score", "truncated_score", "success"):
            known, points = _known(args[0], name)
            if known:
                done: Future[Any] = Future()
                done.set_result(points)
                return done
            return self.pool.submit(self._judging(args[0], name))
        makers: dict[str, Callable[..., PendingCall[Any]]] = {
            "reset": self._beginning,
            "step": self._acting,
            "group_scores": self._comparing,
        }
        return self.pool.submit(makers[name](*args))

    def task(self, index: int, heldout: bool = False) -> TaskHandle:
        fields = {"index": index, "heldout": heldout}
        return self._result(
            f.TaskAnswer,
            f.Pose,
            fields,
            (),
            lambda said: TaskHandle(index, heldout, said.shown[:200], said.digest.hex()[:32]),
        )

    def reset(self, task: TaskHandle) -> tuple[StateHandle, list[Message]]:
        return self.pool.result(self._beginning(task))

    def step(self, state: StateHandle, action: str) -> Step:
        return self.pool.result(self._acting(state, action))

    def score(self, state: StateHandle) -> Scored:
        return self._judge(state, "score")

    def _truncated_score(self, state: StateHandle) -> Scored:
        return self._judge(state, "truncated_score")

    def _success(self, state: StateHandle) -> bool:
        return bool(self._judge(state, "success"))

    def _group_scores(self, states: Sequence[StateHandle]) -> list[Scored]:
        return self.pool.result(self._comparing(states))

    def _players(self) -> Mapping[str, Player]:
        return {name: partial(self._play, name) for name in self.pool.facts.players[:64]}

    def _play(self, player: str, state: StateHandle, rng: random.Random) -> str:
        fields = {"state": state.number, "player": player, "seed": rng.getrandbits(64) >> 1}
        return self._result(f.StepReply, f.Play, fields, [state], lambda said: str(said.text))

    def _solution(self, task: TaskHandle) -> str | tuple[str, ...] | None:
        fields = {"index": task.number, "heldout": task.heldout}
        return self._result(f.Solution, f.Solve, fields, (), lambda said: said.turns)

    def _judge(self, state: StateHandle, how: str) -> Any:
        known, points = _known(state, how)
        return points if known else self.pool.result(self._judging(state, how))

    def _result(
        self, wanted: type[f.IsolatedAnswer], kind: type[f.IsolatedRequest], fields: Mapping[str, Any],
        states: Sequence[StateHandle], finish: Callable[[Any], Any],
    ) -> Any:  # fmt: skip
        return self.pool.result(PendingCall(wanted, kind, fields, states, lambda answer, data, process: finish(answer)))

    # --- calls ---

    def _beginning(self, task: TaskHandle) -> PendingCall[tuple[StateHandle, list[Message]]]:
        number = self.pool.number()

        def finish(answer: f.Begun, data: bytes, process: EnvProcess) -> tuple[StateHandle, list[Message]]:
            return StateHandle(number, task, (), hash_of(b"", answer, data), process), _messages(answer.messages)

        return PendingCall(f.Begun, f.Begin, {"new": number, "index": task.number, "heldout": task.heldout}, (), finish)

    def _acting(self, state: StateHandle, action: str) -> PendingCall[Step]:
        number = self.pool.number()

        def finish(answer: f.Acted, data: bytes, process: EnvProcess) -> Step:
            held = StateHandle(number, state.task, (*state.actions, action), hash_of(state.said, answer, data), process)
            if answer.points is not None:
                held.points = [("score", _scored(answer.points)), ("success", answer.success)]
            reply, acted = _unmarked(answer.reply), answer
            return Step(held, reply, acted.done, acted.reward, acted.learn, acted.seat, acted.restart, acted.steps)

        return PendingCall(f.Acted, f.Act, self.pool.acting(state.number, number, action), [state], finish)

    def _judging(self, state: StateHandle, how: str) -> PendingCall[Any]:
        fields = {"state": state.number, "how": how}
        return PendingCall(
            f.ScoreReply, f.ScoreState, fields, [state], lambda answer, data, process: _scored(answer.points)
        )

    def _comparing(self, states: Sequence[StateHandle]) -> PendingCall[list[Scored]]:
        def finish(answer: f.Compared, data: bytes, process: EnvProcess) -> list[Scored]:
            return [_scored(points) for points in answer.points]

        return PendingCall(f.Compared, f.Compare, {"states": [state.number for state in states]}, states, finish)


# --- plain data and back ---


def _known(state: StateHandle, how: str) -> tuple[bool, Any]:
    """What came with the last answer. Once: `shoal env check` asks again to compare."""
    for known in [known for known in state.points if known[0] == how]:
        state.points.remove(known)
        if known[1] is not None:
            return True, known[1]
    return False, None


def _scored(points: f.Points) -> Scored:
    return Score(points.parts, points.metrics) if isinstance(points, f.Parts) else points


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list):
        raise AuthorError(f"reset() gives {type(messages).__name__} for its messages, not a list")
    return [message if isinstance(message, dict) else {} for message in messages]


def _unmarked(reply: Any) -> Any:
    """A reply with the policy's turns again in the place of their tables."""
    if isinstance(reply, dict) and list(reply) == [f.MARK]:
        return _written(reply[f.MARK])
    return [_unmarked(item) for item in reply] if isinstance(reply, list) else reply


def _written(fields: Any) -> Written:
    match fields:
        case [int(turn), bool(reasoning), [*calls]]:
            return Written(turn, reasoning, tuple((str(name), str(of)) for name, of in calls))
    raise AuthorError("a turn of the policy in a history has another form")


# --- Opens environments in processes of their own ---
#
# Packages of others in the sandbox, files of this user in plain children.
#
# The sandbox is tried on this machine first.


REMEDY = (
    f". If that happens again, let the method return or raise in {OWN_LIMITS.wall_s:g} s; `shoal env check` tries it"
)
"""What the author of a file may do about a call that was stopped."""


def in_sandbox(
    package: Installed, paths: Sequence[Path], args: Mapping[str, Any], *, processes: Processes = Processes(),
    tell: Callable[[str], None] | None = None, limits: Limits = LIMITS,
) -> Env:  # fmt: skip
    """The environment of an installed package. `tell` gets the tracebacks of its code; without it they are dropped, because
    they are the author's. `limits` are those of each sandbox.

    Raises `ConfigError` if the sandbox does not work here, `ShoalError` if the package does not load in it.
    """
    title = f"{package.name} {package.version}"
    demand_sandbox(title)
    file, _, function = package.entry.partition(":")
    source = PackageSource(paths[0], paths[1], file, function, args, title)
    env = ContainedEnv(lambda: EnvConnection(source, limits, tell or (lambda _: None)), processes)
    env.reproducible &= package.reproducible
    return cast("Env", env)


def in_child(path: Path, args: Mapping[str, Any], function: str, processes: Processes = Processes()) -> Env:
    """The environment of a file of this user. Raises `ShoalError` if it does not load."""
    source = OwnFile(path, function, args)
    env = ContainedEnv(
        lambda: EnvConnection(source, OWN_LIMITS, lambda _: None), processes, "its process was ended", REMEDY
    )
    env.source, env.pool.has_network = path, True
    return cast("Env", env)


def show(trace: str) -> None:
    """A `tell` for who may be the author: on standard error."""
    sys.stderr.write(printable(trace, keep="\n") + "\n")  # at once: other processes write into the same log


def demand_sandbox(what: str) -> None:
    """Raise `ConfigError`, with the remedy, unless foreign code may run here."""
    report = examined()
    if not report.works:  # guard: no-package-without-a-sandbox
        raise ConfigError(
            f"{what} runs only inside the sandbox, which does not work here ({report.found}): {report.remedy}"
        )


def try_code(code: str, paths: Sequence[Path], timeout_s: float) -> str:
    """What a Python program prints in a sandbox that has these paths first in its `sys.path`: a `StartInSandbox` of
    `env_packages/install.py`. Raises `ShoalError` if it fails, is stopped or cannot be started."""
    demand_sandbox("the package")
    shown = [SandboxPath(path, OUTSIDE / path.name) for path in paths]
    places = [*(str(place) for _, place in shown), str(CODE), *standard_paths()]
    program = [str(interpreter()), *INTERPRETER_FLAGS, "-c", _TRY, *places]
    resident = Resident(program, LIMITS, [*shown, *our_code()])
    try:
        told = resident.ask(code.encode(), timeout_s, 1 << 16)
    except ChildExited as gone:
        raise ShoalError(f"it {gone}") from None
    finally:
        resident.end()
    text = " ".join(told[1:].decode("utf-8", "replace").split())[:500]
    if told[:1] != b"+":
        raise ShoalError(text)
    return text


_TRY = """
import contextlib, io, sys
sys.path[:] = sys.argv[1:]
sys.argv[1:] = []
from shoal.ipc import read_message, take_pipes, write_message
requests, answers = take_pipes()
said = io.StringIO()
try:
    with contextlib.redirect_stdout(said): exec(compile(read_message(requests), "probe", "exec"), {})
    answer = "+" + said.getvalue()
except Exception as error:
    answer = f"-{type(error).__name__}: {error}"
write_message(answers, answer.encode("utf-8", "replace")[:60000])
"""
