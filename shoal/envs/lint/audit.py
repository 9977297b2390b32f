"""Watches what an environment's code does in the process that checks it, and for how long.

Python tells an audit hook about files, sockets and processes before they are opened, so each is found with its line, and
refused. Code that goes around Python is only enclosed by the sandbox, not seen here.
"""

import builtins
import io
import os
import random
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

CALL_S = 10.0
"""Time for one call of an environment."""

MEMORY_MB = 2048
"""Address space of an environment, beyond what this process had before."""

REFUSED = "shoal env check lets an environment do no such thing"
"""How a refusal begins."""

NETWORK, PROCESSES, FILES, IMPORT = "network", "processes", "files", "import"

_KINDS = {
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo"), NETWORK),
    "socket.gethostbyname": NETWORK,
    "socket.__new__": NETWORK,
    **dict.fromkeys(("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "subprocess.Popen"), PROCESSES),
    **dict.fromkeys(
        ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
         "sqlite3.connect"), FILES
    ),
    **dict.fromkeys(("os.putenv", "os.unsetenv", "os.chdir", "_thread.start_new_thread"), IMPORT),
}  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen"})
_PACKAGES = ("site-packages", "dist-packages")


class AuditFinding(NamedTuple):
    """Something that an environment did or tried."""

    kind: str
    what: str
    place: str
    """Such as "my_env.py line 7"."""


class EnvAudit:
    """What the environment's code does, while it runs."""

    def __init__(
        self, own: Callable[[str], bool], refuses: bool, call_s: float, stuck: Callable[[str], None],
        begins: Callable[[str], None] = lambda call: None,
    ) -> None:  # fmt: skip
        """`own` tells the environment's files by their names. `stuck` is called, from a thread, with what does not end;
        `begins` with each call, before it is made."""
        self._call_s, self._begins = call_s, begins
        self.task = ""
        """The task that was made last, such as "task 3"."""
        self.seen: list[AuditFinding] = []
        self._own, self._refuses, self._stuck = own, refuses, stuck
        self._inside, self._loading, self._until_s = 0, False, float("inf")
        self._call, self._begun_s, self._limit_s, self._thread = "", 0.0, call_s, 0
        self._real_monotonic = time.monotonic
        own_threads = threading.Thread(target=self._time, daemon=True)
        own_threads.start()
        self._ours = {threading.get_ident(), own_threads.ident}
        sys.addaudithook(self._hear)

    @property
    def last(self) -> str:
        """The call that was made last."""
        return self._call

    @contextmanager
    def call(self, what: str, loading: bool = False) -> Iterator[None]:
        """The environment's code runs in this block."""
        if not self._inside:
            self._limit_s = float("inf") if loading else self._call_s
            self._call, self._begun_s, self._thread = what, self._real_monotonic(), threading.get_ident()
            if not loading:
                self._begins(what)
        self._inside, self._loading = self._inside + 1, loading
        try:
            yield
        finally:
            self._inside, self._loading = self._inside - 1, False

    @contextmanager
    def load(self) -> Iterator[None]:
        """The environment's code is imported in this block. Lasting effects on this process are noted."""
        before, said = _world(), _Said(self._note_print)
        shown, sys.stdout = sys.stdout, said
        seed, random.seed = random.seed, self._seeds  # type: ignore[assignment]
        try:
            with self.call("loading", loading=True):
                yield
        finally:
            sys.stdout, random.seed = shown, seed
            for name, value in _world().items():
                if _changed(before[name], value):
                    self._note(AuditFinding(IMPORT, f"it changes {name}", ""))

    def _seeds(self, *arguments: Any) -> None:
        place, its_own = self.place(sys._getframe(1))
        if its_own:
            self._note(AuditFinding(IMPORT, "it seeds Python's global random numbers", place))

    def _note_print(self) -> None:
        self._note(AuditFinding(IMPORT, "it prints", self.place(sys._getframe(1))[0]))

    def _note(self, seen: AuditFinding) -> None:
        if seen not in self.seen and len(self.seen) < 20:
            self.seen.append(seen)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        kind = _KINDS.get(event)
        if kind is None or (not self._inside and threading.get_ident() in self._ours):
            return  # a thread of its own runs on between the calls
        if kind is IMPORT and not self._loading:
            return
        what = _what(event, arguments)
        if what is None:
            return
        frame = sys._getframe(1)
        place, its_own = self.place(frame)
        if kind is FILES and _by_tempfile(frame):
            return
        if self._loading and not its_own and kind is not NETWORK:
            return  # a library that is imported may keep a cache, or look for a compiler
        self._note(AuditFinding(kind, what, place))
        if self._refuses and kind is not IMPORT:
            raise PermissionError(f"{REFUSED}: {what}")

    def place(self, frame: FrameType | None) -> tuple[str, bool]:
        """The environment's line that leads to a frame, and whether only Python's own library is between the two."""
        its_own = True
        while frame is not None:
            name = frame.f_code.co_filename
            if self._own(name):
                return f"{Path(name).name} line {frame.f_lineno}", its_own
            if not name.startswith(_STANDARD) or any(part in name for part in _PACKAGES):
                its_own = its_own and name == __file__
            frame = frame.f_back
        return "", False

    def allow(self, limit_s: float) -> None:
        """What is done now must end within this time, however many calls it makes."""
        self._until_s = self._real_monotonic() + limit_s

    def _time(self) -> None:
        sleep = time.sleep
        while True:
            sleep(0.05)
            call, now_s = self._call, self._real_monotonic()
            if self._inside and (now_s - self._begun_s > self._limit_s or now_s > self._until_s):
                place = self.place(sys._current_frames().get(self._thread))[0]
                late = "was called too slowly or too often"
                if now_s <= self._until_s or self._loading:
                    late = f"did not end within {now_s - self._begun_s:.0f} s"
                self._stuck(f"{call} {late}{f' ({place})' if place else ''}")
                return


class AuditedEnv:
    """An environment under a watch. All else is the environment's own."""

    def __init__(self, env: Any, watch: EnvAudit, own: Mapping[str, Any]) -> None:
        """`own` are members that are set here."""
        self.env, self._watch = env, watch
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.env, name)
        if not callable(value):
            return value
        if name == "players":
            return lambda: {
                key: self._watched(f'the player "{key}"', player) for key, player in self._call(value).items()
            }
        return self._watched(f"{name}()", value)

    def _call(self, function: Callable[..., Any]) -> Any:
        with self._watch.call("players()"):
            return function()

    def _watched(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            words = _told(what, arguments, named)
            if what == "task()" and arguments:
                self._watch.task = f"{'held-out task' if named.get('heldout') else 'task'} {arguments[0]!r:.20}"
            elif self._watch.task:
                words = f"{self._watch.task}, {words}"
            with self._watch.call(words):
                return function(*arguments, **named)

        called.__name__ = getattr(function, "__name__", what)
        return called


def _told(what: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    if what == "step()" and len(arguments) > 1:
        return f"step() with action {arguments[1]!r:.40}"
    if what == "task()" and arguments:
        return f"task({arguments[0]!r:.20}{', heldout=True' if named.get('heldout') else ''})"
    return what


def _what(event: str, arguments: tuple[Any, ...]) -> str | None:
    """What an event does, in words; None if that is harmless."""
    first = arguments[0] if arguments else ""
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        writes = any(sign in mode for sign in "wax+") if isinstance(mode, str) else bool(flags & _WRITING)
        return (
            f"it writes {_text(first)}" if writes and isinstance(first, str | bytes) and first != os.devnull else None
        )
    if event == "sqlite3.connect":
        return None if first in (":memory:", "") else f"it writes {_text(first)}"
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        address = arguments[1] if event != "socket.sendto" else arguments[-1]
        return f"it connects to {address[0]}:{address[1]}" if isinstance(address, tuple) else None
    if event == "socket.__new__":  # the sandbox refuses it, so nothing else is heard of a connection to an address
        return "it opens a socket to other machines" if arguments[1] in (socket.AF_INET, socket.AF_INET6) else None
    if event.startswith("socket."):
        return f"it looks for the host {_text(first)}"
    if event in ("os.putenv", "os.unsetenv"):
        return f"it changes the environment variable {_text(first)}"
    if event == "_thread.start_new_thread":
        return "it starts a thread"
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        return f"it starts the program {_text(first)}"
    if event == "os.fork":
        return "it forks"
    return f"it calls {event} on {_text(first)}" if first else f"it calls {event}"


def _text(value: Any) -> str:
    return (os.fsdecode(value) if isinstance(value, str | bytes) else repr(value))[:80]


def _by_tempfile(frame: FrameType | None) -> bool:
    """Temporary files that Python makes, and deletes."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "tempfile":
            return True
        frame = frame.f_back
    return False


def _world() -> dict[str, Any]:
    """What an import should leave as it was, by what it is called."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    ours = {name: module for name, module in sys.modules.items() if name == "shoal" or name.startswith("shoal.")}
    return {
        "numpy's global random state": numpy.get_state()[1].tolist() if numpy else None,
        "the working directory": os.getcwd(),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "Python's built-in functions": {name: id(value) for name, value in vars(builtins).items() if name != "_"},
        "a function of shoal": {
            (name, key): id(value)
            for name, module in ours.items() if not hasattr(module, "__path__")
            for key, value in vars(module).items() if callable(value)
        },
    }  # fmt: skip


def _changed(before: Any, after: Any) -> bool:
    """Whether something that was there is another now. New modules do not count."""
    if isinstance(before, dict):
        return any(after.get(key) != value for key, value in before.items())
    return before is not None and bool(before != after)


class _Said(io.TextIOBase):
    """Standard output that tells of the first text."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text and self._tell:
            tell, self._tell = self._tell, None
            tell()
        return len(text)
