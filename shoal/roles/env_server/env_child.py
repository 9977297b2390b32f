"""A process in which environments are played. The stage starts several, and kills one that hangs.

It runs the host's own environment files, so it has nothing else of a role: no key, no network, no log. It plays
`Conversation`s by number and reports only what a rollout needs. What an environment prints, and the traceback of what it
raises, goes to standard error, which is the stage's log.

Requests and answers are MessagePack. Its arguments are the process id of the stage, with which it ends, and the descriptor
for `write_stacks`.
"""

import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import numpy as np

from shoal.chat.renderer import Renderer
from shoal.env import Env
from shoal.envs.env_from_file import make_env
from shoal.envs.exceptions import LOCAL_ERRORS, is_unreachable, redact_paths
from shoal.envs.interface import AuthorError, Earned, compares, describe_fault, source_of
from shoal.envs.isolated.connection import LIMITS
from shoal.envs.isolated.environment import ContainedEnv, in_sandbox, show
from shoal.envs.isolated.server import let_exits_raise, write_stacks
from shoal.envs.load import load_run_envs
from shoal.envs.play_episodes import begin
from shoal.envs.replay import judge_talks
from shoal.envs.rollout_rules import Conversation
from shoal.envs.settings_wrapper import WithSettings
from shoal.errors import ShoalError
from shoal.ipc import end_with, read_message, take_pipes, write_message
from shoal.protocol.messages import POLICY, EnvSpec, Sampling
from shoal.roles.env_server.reply_store import FinalScore
from shoal.roles.node.reward_part_files import Tally

PAUSES_S = (0.5, 1.0, 2.0)
"""Before a call that met an endpoint which does not answer is tried again; then it has failed. It fails sooner if a try
that takes as long as the last one would not end within the time of the turn: a kill would hide the cause."""


class Opening(msgspec.Struct):
    """The first frame: what to load."""

    envs: tuple[EnvSpec, ...]
    policy: str
    """Directory with tokenizer and chat template."""
    sampling: Sampling
    call_s: float = LIMITS.wall_s
    """What a turn may take. The sandbox of a package ends no sooner."""


class ProcessOpened(msgspec.Struct):
    """The answer to the first frame."""

    lowest: dict[str, float] = {}
    """Lowest reward of each environment, by label."""
    compare: frozenset[str] = frozenset()
    """Labels of environments that compare an answer with its siblings."""
    source: str = ""
    """The file of this user that runs in this process, if there is one."""
    refused: str = ""


class ProcessRequest(msgspec.Struct):
    """One turn of a conversation, or its opening, or the judgement of a group."""

    number: int = -1
    """Number of the conversation."""
    written: bytes = b""
    label: str = ""
    """Label of the environment; only for an opening."""
    task: int = 0
    forget: tuple[int, ...] = ()
    """Conversations that are not needed any more."""
    judge: tuple[int, ...] = ()
    """Conversations that have ended, to be compared with each other."""


class ProcessAnswer(msgspec.Struct):
    """The conversation after a request."""

    words: bytes = b""
    room: int = 0
    ending: str = ""
    reward: float = 0.0
    author: int = POLICY
    fault: str = ""
    """One line: what the environment raised."""
    left_out: bool = False
    """Whether the rollout counts in nothing because of it."""
    outside: float | None = None
    """Its score, if that is outside the environment's bounds."""
    row: int = 0
    """Row of the words, and of the next turn."""
    beside: bool = False
    """Whether the environment compares it with its siblings."""
    judged: tuple[FinalScore, ...] = ()
    """What a judgement gave."""
    scores: Tally | None = None
    """What the rollouts that got their reward now scored, part by part; None if there is nothing to tell."""


def serve() -> None:
    """Answer requests from standard input until it closes."""
    end_with(int(sys.argv[1]))
    write_stacks(int(sys.argv[2]))
    let_exits_raise()
    requests, answers = _read_requests()
    opening = msgspec.msgpack.decode(requests.get(), type=Opening)
    try:
        time_left = TimeLeft(opening.call_s)
        loaded = _load(opening.envs, opening.call_s)
        source = next(filter(None, map(_source, loaded.values())), "")
        envs = {label: loud(env, time_left) for label, env in loaded.items()}
        playing = Conversations(envs, _renderer(opening), opening.sampling)
    except ShoalError as error:
        write_message(answers, msgspec.msgpack.encode(ProcessOpened(refused=str(error))))
        return
    lowest = {label: float(min(env.reward_bounds)) for label, env in envs.items()}
    compare = frozenset(label for label, env in envs.items() if compares(env))
    write_message(answers, msgspec.msgpack.encode(ProcessOpened(lowest, compare, source)))
    while True:
        request = msgspec.msgpack.decode(requests.get(), type=ProcessRequest)
        time_left.begin()
        try:
            answer = playing.obey(request)
        except LOCAL_ERRORS as why:  # the stage tries it again in another process
            sys.exit(str(why) or type(why).__name__)
        write_message(answers, msgspec.msgpack.encode(answer))


def _renderer(opening: Opening) -> Renderer:
    return Renderer.from_directory(Path(opening.policy), opening.sampling.stops)


def _load(specs: tuple[EnvSpec, ...], call_s: float) -> dict[str, Env]:
    """The run's environments. Packages of others show tracebacks from inside the sandbox."""
    limits = replace(LIMITS, wall_s=max(LIMITS.wall_s, call_s))
    return load_run_envs(specs, own_files=True, opener=partial(in_sandbox, tell=show, limits=limits), own=make_env)


def _source(env: Env) -> str:
    """The file whose code an environment runs in this process; empty if it has processes of its own."""
    inner, file = getattr(env, "env", env), source_of(env)
    return "" if isinstance(inner, ContainedEnv) or file is None else str(file)


class Conversations:
    """The conversations of this process."""

    def __init__(self, envs: Mapping[str, Env], renderer: Renderer, sampling: Sampling) -> None:
        self._envs, self._renderer, self._sampling = envs, renderer, sampling
        self._talks: dict[int, Conversation] = {}

    def obey(self, request: ProcessRequest) -> ProcessAnswer:
        for number in request.forget:
            self._talks.pop(number, None)
        if request.label:
            return self._open(request)
        if request.judge:
            talks = [self._talks.pop(number) for number in request.judge]
            found = judge_talks(talks, talks[0].env)
            fault = next((talk.fault for talk in talks if talk.fault), "")
            judged = tuple(
                FinalScore(float(one.reward), talk.public_fault if talk.left_out else "", talk.outside)
                for one, talk in zip(found, talks, strict=True)
            )
            return ProcessAnswer(judged=judged, fault=fault, scores=_scores(found, talks))
        talk, tokens = self._talks[request.number], np.frombuffer(request.written, dtype="<i4").tolist()
        lengths, row = [len(row.tokens) for row in talk.rows], talk.row
        begin = lengths[row]
        lengths[row] += len(tokens)
        talk.write(tokens)
        return self._answer(request.number, talk, lengths, talk.rows[row].author[begin])

    def _open(self, request: ProcessRequest) -> ProcessAnswer:
        env = self._envs[request.label]
        talk, why = begin(env, self._renderer, request.task, self._sampling)
        if talk is None:
            return ProcessAnswer(ending="void", fault=redact_paths(why, source_of(env)))
        self._talks[request.number] = talk
        return self._answer(request.number, talk, [0], POLICY)

    def _answer(self, number: int, talk: Conversation, lengths: Sequence[int], author: int) -> ProcessAnswer:
        """What a conversation says after a turn, given how long its rows were before."""
        beside = talk.ending in ("environment", "length") and compares(talk.env)
        if talk.ending is not None and not beside:
            del self._talks[number]
        begin = lengths[talk.row] if talk.row < len(lengths) else 0
        row = talk.rows[talk.row]
        assert not any(row.author[begin:]), "only the environment speaks after a turn"
        words = np.asarray(row.tokens[begin:], dtype="<i4").tobytes()
        final = talk.ending is not None and not beside
        scores = _scores([Earned(talk.reward, talk.parts, talk.metrics)], [talk]) if final else None
        return ProcessAnswer(
            words, talk.room, talk.ending or "", float(talk.reward), author, talk.public_fault, talk.left_out,
            talk.outside, talk.row, beside=beside, scores=scores,
        )  # fmt: skip


def _scores(earned: Sequence[Earned], talks: Sequence[Conversation]) -> Tally | None:
    tally = Tally().add(earned)
    tally.faults = sum(bool(talk.fault) and not talk.left_out for talk in talks)
    return None if tally.is_empty else tally


class TimeLeft:
    """What is left of the time of the turn in hand, in seconds."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self._limit_s, self._until = limit_s, math.inf

    def begin(self) -> None:
        """A turn begins."""
        self._until = time.monotonic() + self._limit_s

    def __call__(self) -> float:
        return self._until - time.monotonic()


def loud(env: Env, time_left: TimeLeft = TimeLeft()) -> Env:
    """The same environment, which also prints the traceback of what it raises, and repeats a call whose endpoint does
    not answer: states never change, so a call may be repeated."""
    if isinstance(env, WithSettings):
        env.env = loud(env.env, time_left)
        return cast(Env, env)
    of_env = {"__module__": type(env).__module__}  # so that `describe_fault` names the author's line
    return cast(Env, type("Loud", (_Loud,), of_env)(env, time_left))


class _Loud:
    def __init__(self, env: Env, time_left: TimeLeft) -> None:
        self.env, self._time_left = env, time_left

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.env, name)
        return _printing(value, source_of(self.env), self._time_left) if callable(value) else value


def _printing(act: Callable[..., Any], source: Path | None, time_left: TimeLeft) -> Callable[..., Any]:
    def played(*args: Any, **kwargs: Any) -> Any:
        pauses_s = iter(PAUSES_S)
        while True:
            began = time.monotonic()
            try:
                return act(*args, **kwargs)
            except AuthorError:
                raise  # its traceback was shown already
            except Exception as error:
                _print(error)
                pause_s = next(pauses_s, None) if is_unreachable(error, source) else None
                if pause_s is None:  # guard: silence-is-tried-again
                    raise
                if time.monotonic() - began + pause_s > time_left():  # guard: tries-end-within-the-turn
                    raise
            except BaseException as error:  # noqa: BLE001  SystemExit and its like
                _print(error)
                raise AuthorError(describe_fault(error, source)) from None
            time.sleep(pause_s)

    return played


_seen: Counter[tuple[str, int]] = Counter()
"""How often an exception came from a place: the file and line that raised it."""


def _print(error: BaseException) -> None:
    """The traceback, but of the same place only at the first time, the second, the fourth, the eighth and so on."""
    deepest = traceback.extract_tb(error.__traceback__)[-1]
    place = (deepest.filename, deepest.lineno or 0)
    _seen[place] += 1
    if _seen[place].bit_count() == 1:  # guard: one-place-fills-no-log
        often = f"the same place, {_seen[place]} times so far\n" if _seen[place] > 1 else ""
        with suppress(OSError, ValueError):  # the environment may have closed it
            sys.stderr.write(traceback.format_exc() + often)  # at once: other processes write into the same log


def _read_requests() -> tuple["SimpleQueue[bytes]", int]:
    """Requests as they come, and the descriptor for answers.

    A thread reads the requests: it ends this process when the stage closes the pipe.
    """
    pipe, answers = take_pipes(prints_to=2)
    requests = SimpleQueue[bytes]()

    def read() -> None:
        while (request := read_message(pipe)) is not None:
            requests.put(request)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    return requests, answers
