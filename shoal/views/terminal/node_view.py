"""The view of `shoal join` and `shoal validate`, in a thread beside the role: a picture on a terminal, else a line now and
then in the log.

It asks the run's host without a key, as anyone may, and seldom: thousands of workers do. It changes nothing but the user's
allowance, at the key p. When the node is told to stop, it gives the terminal back at once.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.control import Control
from rich.live import Live

from shoal.errors import PeerError
from shoal.net.client import Client
from shoal.roles.node.activity import NodeActivity
from shoal.roles.node.throttle import Allowance
from shoal.runs.remote_status import RemoteRun
from shoal.runs.run_status import RunStatus
from shoal.views.terminal.keyboard import Keyboard, keyboard
from shoal.views.terminal.live_view import draws_on, print_lines
from shoal.views.terminal.node_screen import NodeNow, picture, plain

log = logging.getLogger("shoal")

DRAW_EVERY_S, LOOK_EVERY_S, LINE_EVERY_S = 0.5, 5.0, 60.0
METRICS_EVERY_S, NODES_EVERY_S = 15.0, 60.0
KEY_WAIT_S = 0.1
MOST_LOG_LINES = 200
"""Of the log while the picture is shown, so much is printed after it."""
ANSWER_S = 5.0
UNHEARD_AFTER_S = LOOK_EVERY_S + 2 * ANSWER_S
"""A host that has not answered for so long is said to be silent."""


class LogLines(logging.Handler):
    """Keeps the newest lines of the log for the picture."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: deque[str] = deque(maxlen=MOST_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.lines.append(self.format(record))


class NodeView:
    """What is known of a node and its run, put together for the picture."""

    def __init__(self, role: str, url: str, doing: NodeActivity, allowance: Allowance | None = None) -> None:
        self.role, self.url, self.doing, self.allowance = role, url, doing, allowance
        self.snapshot = RunStatus("", url, 0, url=url)
        self._looked_at = -1e9
        self._answered_at: float | None = None
        self._memory = (0, 0)
        self._accepted_before: int | None = None

    def now(self) -> NodeNow:
        """The node at this moment."""
        doing, allowance = self.doing, self.allowance
        if self._accepted_before is None and doing.node is not None:
            self._accepted_before = doing.node.accepted
        seen_s = 0.0 if self._answered_at is None else time.monotonic() - self._answered_at
        answered = max((at for at in (self._answered_at, doing.answered_at()) if at is not None), default=None)
        unheard_s = 0.0 if answered is None else time.monotonic() - answered
        return NodeNow(
            role=self.role, snapshot=self.snapshot, words=doing.words, words_s=doing.clock() - doing.since,
            key=doing.key, name=doing.name, info=doing.info, node=doing.node, tokens_per_s=doing.tokens_per_s,
            memory_mb=self._memory[0], gpu_mb=self._memory[1], up_s=doing.clock() - doing.started,
            accepted_before=self._accepted_before or 0, limits=limits_of(allowance),
            paused=allowance is not None and allowance.paused, judged=doing.judged,
            unheard_s=unheard_s if unheard_s > UNHEARD_AFTER_S else 0.0,
            seen_s=seen_s if seen_s > UNHEARD_AFTER_S else 0.0,
        )  # fmt: skip

    async def look(self, run: RemoteRun) -> None:
        """Ask the host, if it is time. A host that does not answer leaves what was known."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        self._memory = await asyncio.to_thread(self.doing.memory)
        with contextlib.suppress(PeerError):
            self.snapshot = await run.look()
            self._answered_at = run.answered_at


def limits_of(allowance: Allowance | None) -> str:
    """What the user allows, in words; "" if that is all."""
    if allowance is None:
        return ""
    parts = [f"--hours {allowance.hours.text}"] if allowance.hours is not None else []
    return " ".join(parts + ([f"--cpu-share {allowance.cpu_share:g}"] if allowance.cpu_share < 1 else []))


@contextlib.contextmanager
def shown(view: NodeView, console: Console) -> Iterator[None]:
    """Show the node while the role runs."""
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_follow(view, console, ended)), name="view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(ANSWER_S)


async def _follow(view: NodeView, console: Console, ended: threading.Event) -> None:
    try:
        client = Client(view.url, on_wait=lambda line: None)
    except PeerError:  # the role says what is wrong with the URL
        return
    async with client:
        run = RemoteRun(client, metrics_every_s=METRICS_EVERY_S, nodes_every_s=NODES_EVERY_S)
        if draws_on(console):
            with _on_screen(console) as (live, lines), keyboard() as keys:
                await _draw(view, run, live, lines, keys, ended)
        await _log_lines(view, run, ended)


async def _draw(
    view: NodeView, run: RemoteRun, live: Live, lines: LogLines, keys: Keyboard, ended: threading.Event
) -> None:
    """Draw until the role has ended or is told to stop: a second Ctrl-C ends the process, and must find the terminal as it
    was."""
    looking: asyncio.Task[None] | None = None
    drawn_at = 0.0
    while not ended.is_set() and not view.doing.stopping():
        if looking is None or looking.done():
            looking = asyncio.create_task(view.look(run))
        if "p" in keys.pressed().lower() and view.allowance is not None:
            view.allowance.toggle()
            drawn_at = 0.0
        if time.monotonic() - drawn_at >= DRAW_EVERY_S:
            size = live.console.size
            live.update(picture(view.now(), size.width, size.height, tuple(lines.lines)), refresh=True)
            drawn_at = time.monotonic()
        await asyncio.sleep(KEY_WAIT_S)
    if looking is not None:
        looking.cancel()


async def _log_lines(view: NodeView, run: RemoteRun, ended: threading.Event) -> None:
    """A line now and then, once the node has joined."""
    said_at = time.monotonic()
    while not ended.is_set() and not view.doing.stopping():
        await asyncio.sleep(KEY_WAIT_S)
        if view.doing.info is None or time.monotonic() - said_at < LINE_EVERY_S:
            continue
        said_at = time.monotonic()
        await view.look(run)
        log.info("%s", plain(view.now()))


@contextlib.contextmanager
def _on_screen(console: Console) -> Iterator[tuple[Live, LogLines]]:
    """A screen of its own, with the log in it; afterwards the terminal as it was, and the log's newest lines."""
    root = logging.getLogger()
    before: Sequence[logging.Handler] = list(root.handlers)
    formatter = before[0].formatter if before and before[0].formatter is not None else logging.Formatter()
    lines = LogLines(formatter)
    root.handlers = [lines, *(each for each in before if isinstance(each, logging.FileHandler))]
    live = Live(console=console, auto_refresh=False, screen=True, redirect_stdout=False, redirect_stderr=False)
    live.start()
    try:
        yield live, lines
    finally:
        console.control(Control.home(), Control.clear())  # tmux keeps what is there if its size has changed
        live.stop()
        root.handlers = list(before)
        for line in lines.lines:
            print_lines(console, line)
