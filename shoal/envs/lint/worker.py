"""The process in which `shoal env check` plays an environment: it loads it, runs its checks, and records episodes.

It answers requests in JSON, by `shoal/ipc`, and compares nothing with other processes.
"""

import contextlib
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from shoal.chat.messages import as_messages, normal, text_of
from shoal.config.env_settings import EnvConfig
from shoal.env import Env
from shoal.envs.interface import describe, describe_fault, players_of
from shoal.envs.lint.audit import MEMORY_MB, AuditedEnv, EnvAudit
from shoal.envs.lint.checks import FEWER_TASKS, checks_of, pick
from shoal.envs.lint.fake_clock import ELSEWHERE_S, HERE_S, set_clock
from shoal.envs.lint.finding import CheckFailed, find
from shoal.envs.lint.messages import CALL, LoadRequest
from shoal.envs.lint.scripted_episode import HOSTILE, Act, played, replay_actions, scripted_player, while_time
from shoal.envs.load import load_env
from shoal.envs.settings_wrapper import opening_of, with_settings
from shoal.errors import ShoalError
from shoal.ipc import read_message, take_pipes, write_message
from shoal.typed_toml import from_tree

RECORDED = 12
"""Tasks that are played in each process."""

RECORDED_TURNS = 24
METHODS = ("step", "score", "truncated_score")
"""Those whose answers `lint/scripted_episode` judges."""

MAX_TEXT = 2000
"""Characters of a text that are compared."""
_leave = os._exit


class LintedEnv:
    """The environment of this process."""

    def __init__(self, answer: Callable[[Any], None], begins: Callable[[str], None] = lambda call: None) -> None:
        """`begins` gets the name of each call of the environment, before it is made."""
        self._answer, self._begins = answer, begins
        self._env: Any = None
        self._bare: Any = None
        """The environment as its author wrote it."""
        self.source: Path | None = None
        self._watch: EnvAudit | None = None
        self.limit_s = 0.0
        """Time for the request in hand."""
        self._checks: Mapping[str, Callable[[], str]] = {}

    @property
    def last(self) -> str:
        """The call of the environment that was made last."""
        return self._watch.last if self._watch else ""

    def place_of(self, frame: FrameType | None) -> str:
        """The line of the environment that leads to a frame; empty if it is in none."""
        return self._watch.place(frame)[0] if self._watch else ""

    def allow(self) -> None:
        """The request in hand begins."""
        if self._watch:
            self._watch.allow(self.limit_s)

    def ask_load(self, what: dict[str, Any]) -> Any:
        """Load the environment, as a `LoadRequest` says."""
        asked = msgspec.convert(what, LoadRequest)

        def own(file: str) -> bool:
            return any(file == source or file.startswith(source + "/") for source in asked.sources)

        watch = self._watch = EnvAudit(own, asked.refuses, asked.call_s, self._stop, self._begins)
        set_clock(ELSEWHERE_S if asked.elsewhere else HERE_S, own, asked.elsewhere)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        _limit_memory()
        self.source = Path(asked.sources[0])
        self.allow()
        with watch.load():
            env: Any = load_env(asked.name, asked.args)
        self._bare = env
        by_class = describe(env).reproducible
        promised = asked.reproducible and by_class
        watched: Env = AuditedEnv(env, watch, {"reproducible": promised, "source": self.source})
        self._env = watched
        if asked.settings is not None:
            self._env = with_settings(watched, from_tree(asked.settings, EnvConfig, "envs"))
        self._checks = checks_of(self._env)
        return {
            "checks": list(self._checks),
            "promised": promised,
            "by_class": by_class,
        }

    def ask_check(self, name: str) -> Any:
        _, outcome, detail = find(name, self._checks[name], self._env)
        located = self.located(detail) if outcome == "failed" else detail
        is_of_call = outcome == "failed" and (located != detail or detail.startswith("raised "))
        return outcome, f"{self.last}: {located}" if is_of_call else detail

    def located(self, detail: str) -> str:
        """What a call gave that it may not, with the line where its author wrote the method."""
        method, _, problem = detail.partition("() ")
        code = getattr(getattr(self._bare, method, None), "__code__", None) if method in METHODS else None
        return f"{code.co_filename} line {code.co_firstlineno}: it {problem}" if code is not None else detail

    def ask_record(self, actions: Sequence[Sequence[Sequence[str]]] | None, backwards: bool) -> Any:
        """Openings and episodes of a few tasks, played forwards or backwards. `actions` are those of each episode of each
        task; if there are none, players and hostile texts choose them."""
        env, count = self._env, RECORDED if describe(self._env).reproducible else FEWER_TASKS
        tasks = [(index, False) for index in pick(env, count, 1)]
        tasks += [(index, True) for index in range(min(env.num_heldout, count // 4))]
        numbers = list(range(len(tasks)) if actions is None else range(len(actions)))
        recorded = {}
        for number in while_time(numbers[::-1] if backwards else numbers, 60.0 if actions else 3.0):
            chosen = None if actions is None else actions[number]
            recorded[number] = self._episodes(*tasks[number], chosen)
        return [recorded[number] for number in sorted(recorded)]

    def ask_seen(self) -> Any:
        return self._watch.seen if self._watch else []

    def _episodes(self, index: int, heldout: bool, chosen: Sequence[Sequence[str]] | None) -> Any:
        env = self._env
        task = env.task(index, heldout=True) if heldout else env.task(index)
        acts: list[Act] = [replay_actions(actions) for actions in chosen or ()]
        if chosen is None:
            acts = [
                *(scripted_player(player, 0, index) for _, player in sorted(players_of(env).items())),
                replay_actions(HOSTILE[::-1]),
            ]
        messages = env.reset(task)[1]
        told: dict[str, Any] = {"index": index, "heldout": heldout, "opens": _texts(messages), "episodes": []}
        facts = describe(env)
        told["prompt"] = _plain([opening_of(env, messages, task), facts.arguments, facts.max_tokens])
        for act in acts:
            walk = played(env, task, act, turns=RECORDED_TURNS)
            told["episodes"].append({
                "actions": walk.actions, "replies": [None if r is None else _reply(r) for r in walk.replies],
                "end": [walk.done, float(walk.score), walk.success],
                "earned": [[float(number) for number in of_turn] for of_turn in walk.earned],
            })  # fmt: skip
        return told

    def _stop(self, what: str) -> None:
        """A call does not end: tell it, and end this process, since nothing else would end the call."""
        self._answer({"stuck": what, "seen": self.ask_seen()})
        _leave(0)


def _plain(value: Any) -> Any:
    """The value, if it is JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return value


def main() -> None:
    """Answer requests until the other end closes."""
    requests, answers = take_pipes()

    def answer(value: Any) -> None:
        write_message(answers, json.dumps(value).encode())

    def begins(call: str) -> None:
        write_message(answers, CALL + call.encode("utf-8", "replace"))

    def report_exit(code: int) -> None:
        frame = sys._getframe(1)
        call = f"{child.last}, " if child.last else ""
        begins(f"{call}os._exit({code!r:.20}) at {Path(frame.f_code.co_filename).name} line {frame.f_lineno}")
        _leave(code)

    def report_alarm(number: int, frame: FrameType | None) -> None:
        call, place = (f"{child.last}, " if child.last else ""), child.place_of(frame)
        begins(f"{call}at {place}" if place else child.last)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    child = LintedEnv(answer, begins)
    signal.signal(signal.SIGALRM, report_alarm)
    os._exit = report_exit  # type: ignore[assignment]
    while (data := read_message(requests)) is not None:
        request = json.loads(data)
        try:
            child.limit_s = request.pop("limit_s")
            child.allow()
            answer({"value": getattr(child, f"ask_{request.pop('ask')}")(**request)})
        except ShoalError as error:
            answer({"failed": str(error) or type(error).__name__})
        except CheckFailed as error:
            answer({"failed": child.located(str(error))})
        except MemoryError as error:
            answer({"failed": _short_of_memory(error, child.source)})
        except BaseException as error:  # noqa: BLE001  foreign code may even ask to end the process
            answer({"failed": f"it raised {describe_fault(error, child.source)}"})


def _short_of_memory(error: MemoryError, source: Path | None) -> str:
    try:
        return describe_fault(error, source)
    except MemoryError:
        return type(error).__name__


def _limit_memory() -> None:
    used = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = used + (MEMORY_MB << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _texts(messages: Any) -> list[str]:
    told = []
    for message in normal(messages):
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        told.append(_short(f"{message['role']}: {text_of(message)}{json.dumps(more, sort_keys=True) if more else ''}"))
    return told


def _reply(reply: Any) -> Any:
    try:
        return _texts(as_messages(reply))
    except ShoalError:
        return _short(repr(reply))


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... {len(text)} {hash_of(text)}"


def hash_of(text: str) -> str:
    """A digest of a long text, so that all of it is compared."""
    from hashlib import sha256

    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
