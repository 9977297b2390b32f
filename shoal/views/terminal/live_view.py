"""The terminal view of a running run: a snapshot becomes a picture, or a line when the output is piped to a file.

It starts nothing, reads nothing and asks nobody, so tests and the picture in the README are made from snapshots. Its parts
are in `views/terminal/panels`; here each gets its place, so that at every size the point is
kept: who was refused, by which check, and what the run waits for. `views/terminal/end_screen` shows the end of a run.
"""

import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from rich import box, get_console
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.evaluation_files import Evaluation, format_of, interval_of
from shoal.humanize import duration
from shoal.runs.run_status import STARTING, RunStatus, left_label, seconds_left
from shoal.step_metrics import FIGURES
from shoal.terminal import brief, printable, wrapped
from shoal.views.terminal import panels
from shoal.views.terminal.panels import (
    LAUNCHER_LOG,
    WATCHDOG_S,
    in_trouble,
    nodes_table,
    workers,
)

FRAME = 2
"""Lines of the frame, and cells between it and what is in it, on each side."""

LEAST_CURVE_LINES, COMPACT_LINES, SAMPLE_LINES = 5, 3, 9
LEAST_LINES_WITH_LEAD = 20
"""Lines inside the frame from which one is always free above the table of workers."""
LARGE_LINES = 34
"""Lines inside the frame from which an alarm that stands is also shown in full when it is new."""
LEAST_LINES_WITH_MORE = 3
"""Lines for messages from which one says how many are left out."""
TURN_S = 10.0
"""Where there is no room for both, a conversation is shown for so long, then the curve and more workers."""

MOST_WAIT_LINE_S = 300.0
"""Between two lines about one wait, when piped: twice as long after each."""

LONG_CHARS, MOST_LONG_CHARS = 200, 20_000
"""A longer line about a wait is printed once, and repeated without what the host may do."""

MOST_NEW_LINES = 100
"""Steps that come at once get at most so many lines, the newest."""

MOST_HELD_LINES = 200
"""What is said while the picture fills the screen is printed after it; so much of it is kept."""


def render(
    snapshot: RunStatus, height: int | None = None, said: Sequence[str] = (), talks: bool = False
) -> RenderableType:
    """The whole picture, in at most `height` lines: progress, workers, reward curve and figures, what is waited for.

    `said` are the messages to the user, the newest last. A smaller terminal shows fewer figures, fewer messages, and fewer
    workers without refusals.
    `talks`: where there is no room for a conversation, it takes that of the curve and of workers without refusals.
    """
    return _Picture(snapshot, height, said, talks)


class _Picture:
    def __init__(self, snapshot: RunStatus, height: int | None, said: Sequence[str], talks: bool) -> None:
        self._snapshot, self._height, self._said, self._talks = snapshot, height, said, talks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        snapshot, inside = self._snapshot, max(8, options.max_width - 2 * FRAME)
        body = None if self._height is None else max(4, self._height - FRAME)
        parts, has_talk = _parts(snapshot, inside, body, self._said)
        if self._talks and body is not None and snapshot.sample is not None and not has_talk:
            parts, _ = _parts(snapshot, inside, body, self._said, talk_lines=SAMPLE_LINES)
        title = Text.assemble(("shoal", "bold"), f" · {brief(snapshot.name, 40)}")
        stops = "" if snapshot.status.phase == "ended" else "Ctrl-C stops cleanly, the same command resumes · "
        hint = snapshot.hint or f"{stops}{snapshot.out}"
        subtitle = Text(brief(hint, 200), style="dim")
        height = None if body is None else min(self._height or 0, _height(console, options, parts, inside) + FRAME)
        yield Panel(Group(*parts), title=title, subtitle=subtitle, box=box.ROUNDED, height=height)


def _height(console: Console, options: ConsoleOptions, parts: list[RenderableType], width: int) -> int:
    return len(console.render_lines(Group(*parts), options.update(width=width, height=None)))


def _parts(
    snapshot: RunStatus, width: int, body: int | None, said: Sequence[str], talk_lines: int = 0
) -> tuple[list[RenderableType], bool]:
    """What is inside the frame, from the top, and whether a conversation is among it. Lines are given out by importance:
    what is waited for, workers in trouble, the messages, the figures, the other workers, a conversation. `talk_lines` are
    kept free for it before figures and other workers get theirs."""
    watched = panels.watchdog(snapshot, width, 3 if body is None else 2)
    is_small = body is not None and body < LARGE_LINES
    waits = snapshot.status.waiting_for
    # What stands on the screen already is not said again.
    headings = tuple(alarm.heading for alarm in snapshot.alarms) if is_small else ()
    is_said = bool(snapshot.status.remedy)
    said = [one for one in said if not (one.startswith(headings) or (is_said and waits in one))]
    found = workers(snapshot)
    if body is None:
        body = 1000
    lead = body >= LEAST_LINES_WITH_LEAD
    troubled = sum(in_trouble(node, snapshot) for node in found)
    least = 1 + min(len(found), max(3, min(troubled, body // 3))) + 1  # a heading, and the line about the others
    left = body - 1 - lead - _lines(watched)
    most_said = body // (4 if snapshot.metrics else 2)  # before the first step there are no figures
    message = _messages(said, width, 8 if body == 1000 else max(1, min(most_said, left - least - 1)))
    left -= _lines(message)
    figures = len(panels.figures(snapshot)) if width >= panels.WIDE else COMPACT_LINES
    room = left - least - 2 - talk_lines
    middle: RenderableType
    if width >= panels.WIDE and room >= LEAST_CURVE_LINES:
        lines = min(room, max(figures, panels.CHART_HEIGHT + 2))
        middle = Table.grid(expand=True, padding=(0, 2))
        middle.add_column(ratio=1)
        middle.add_column(width=panels.FIGURES_WIDTH)
        curve = panels.RewardCurve(snapshot, min(lines, panels.CHART_HEIGHT + 2))
        middle.add_row(curve, panels.figures_table(snapshot, lines))
    else:
        middle = panels.figures_in_a_row(snapshot, width, max(1, min(COMPACT_LINES, left - least - talk_lines)))
        lines = _lines(middle)
    left -= lines
    gaps = 2 if left - least >= 2 else 0
    of_table = max(min(left - gaps, least), left - gaps - talk_lines)
    shown = min(of_table, len(found) + 1) if body < 1000 else None
    left -= gaps + (shown or 0)
    space = [Text()] if gaps else []
    talk: list[RenderableType] = []
    if snapshot.sample is not None and left >= 4:
        talk = [Text(), panels.conversation(snapshot.sample, min(left - 1, SAMPLE_LINES))]
    table = nodes_table(snapshot, width, shown)
    said_parts = [message] if message else []
    # The table is above all that comes and goes, so that it keeps its place.
    top = [panels.progress(snapshot, width), *([Text()] if lead else []), table]
    parts = [*top, *space, middle, *talk, *said_parts, *space, watched]
    return parts, bool(talk)


def _messages(said: Sequence[str], width: int, lines: int) -> Text:
    """The newest messages, in so many lines. If not all fit whole, each has at most half of the lines, or two, and a line
    before them says how many more there are, and where. All are printed when the picture ends."""
    texts = [text for one in said if (text := _message(one))]
    heights = [len(text.wrap(get_console(), width)) for text in texts]
    if sum(heights) <= lines:
        return panels.cropped(Text("\n").join(texts), width, lines)
    room = lines - (lines >= LEAST_LINES_WITH_MORE)
    most, shown = room if len(texts) == 1 else max(2, lines // 2), list[Text]()
    for text, height in zip(reversed(texts), reversed(heights), strict=True):
        if shown and room < min(2, height):
            break
        shown.insert(0, panels.cropped(text, width, min(most, room)))
        room -= min(most, room, height)
    if lines >= LEAST_LINES_WITH_MORE:
        left_out = len(texts) - len(shown)
        shown.insert(0, Text(f"{f'{left_out} more' if left_out else 'whole'} in {LAUNCHER_LOG}", style="dim"))
    return Text("\n").join(shown)


def _message(said: str) -> Text:
    return Text("\n".join([brief(line, 400) for line in said.splitlines() if line.strip()][:20]), style="bold")


def _lines(text: Text) -> int:
    return text.plain.count("\n") + 1 if text else 0


def plain(snapshot: RunStatus) -> str:
    """The newest training step as one line."""
    parts = [f"step {snapshot.step}/{snapshot.steps}"]
    if cut := panels.at_token_limit(snapshot):
        parts.append(f"at_token_limit={cut}")
    for name, metric in FIGURES.items():
        if (value := snapshot.latest(name)) is not None:
            parts.append(f"{metric.title.replace(' ', '_')}={value:{metric.form}}")
    for env, value in snapshot.by_env("reward_mean").items():
        parts.append(f"batch_reward_{_word(env)}={value:.3f}")
    parts += [f"solved_{_word(env)}={said.replace(' ', '')}" for env, said in panels.solved(snapshot).items()]
    if failed := panels.faults(snapshot):
        parts.append(f"env_faults={failed}")
    if speed := snapshot.tokens_per_s():
        parts.append(f"tokens/s={speed:.0f}")
    if spread := panels.staleness(snapshot):
        parts.append(f"staleness={spread.replace(', ', ',')}")
    if snapshot.heldout:
        version, found = snapshot.heldout[-1]
        parts += _of_heldout(f"held-out_{_word(version)}", found)
        parts += [
            part
            for env, one in found.envs.items()
            for part in _of_heldout(f"held-out_{_word(version)}_{_word(env)}", one)
        ]
    if snapshot.has_counts:
        parts.append(f"accepted={snapshot.status.accepted} refused={sum(snapshot.status.refused.values())}")
    if snapshot.status.lr_factor != 1.0:
        parts.append(f"lr_factor={snapshot.status.lr_factor:.3g}")
    if snapshot.elapsed_s:
        parts.append(f"{'steps_took' if snapshot.times_steps else 'elapsed'}={duration(snapshot.elapsed_s)}")
    if (left_s := seconds_left(snapshot)) is not None:
        parts.append(f"{left_label(snapshot)}={duration(left_s)}")
    return "  ".join(parts)


def _each_new(snapshot: RunStatus, after: int) -> list[str]:
    """A line for each step that came since so many steps. Only the newest has what is known of the run as it is now."""
    old = [place for place, line in enumerate(snapshot.metrics[:-1], 1) if after >= 0 and int(line["step"]) >= after]
    status = msgspec.structs.replace(snapshot.status, lr_factor=1.0)
    then = dict[str, Any](heldout=(), has_counts=False, elapsed_s=0.0, status=status)
    return [
        *(plain(replace(snapshot, metrics=snapshot.metrics[:place], **then)) for place in old[-MOST_NEW_LINES:]),
        plain(snapshot),
    ]


def _of_heldout(name: str, found: Evaluation) -> list[str]:
    """The mean of an evaluation, and on how many of its episodes the environment failed."""
    figures = interval_of(found)
    mean = f"{name}={figures[0]:{format_of(found)}}" if figures else f"{name}=none"
    return [mean, f"{name}_faults={found.faults}/{found.episodes}"] if found.faults else [mean]


def _word(label: str) -> str:
    """A stranger's label as a word of a line."""
    return brief(label).replace(" ", "_")  # guard: labels-make-no-lines


def plain_wait(snapshot: RunStatus, said: str = "") -> str:
    """The line about a long wait, or "" if there is none. What the host may do is left out if the text `said` has
    it."""
    status = snapshot.status
    if snapshot.notice:
        return f"{brief(snapshot.notice_in_words, 2000)}  elapsed={duration(snapshot.elapsed_s)}"
    if not status.waiting_for or status.waiting_s < WATCHDOG_S or status.waiting_for.startswith("nothing"):
        return ""
    waits = brief(status.wait_in_words, 2000)
    waits = brief(status.waiting_for, 2000) if waits in said else waits
    return f"waiting {status.waiting_s:.0f} s for {waits}  in_flight={status.in_flight}"


def plain_pause(snapshot: RunStatus) -> str:
    """That the run is paused, for how long and why, and what its host may do, whole; else the line about a long wait."""
    status = snapshot.status
    if status.phase != "paused":
        return plain_wait(snapshot)
    return f"paused for {duration(status.waiting_s)}, and waits for {brief(status.wait_in_words, 2000)}"


class RunView(Protocol):
    """Where a launcher reports its run: a terminal or a program."""

    def show(self, snapshot: RunStatus) -> None:
        """The run as it is now; called about once a second."""
        ...

    def say(self, line: str, passes: bool = False) -> None:
        """Something that a person should read. What `passes` makes room for what does not, such as a warning."""
        ...

    def end(self, picture: RenderableType, text: str) -> None:
        """The last table of a run that has ended, in two forms."""
        ...

    def close(self) -> None:
        """No more snapshots come; `say` and `end` may still be called."""
        ...


def draws_on(console: Console) -> bool:
    """Whether a picture can be drawn there."""
    return console.is_terminal and not console.is_dumb_terminal


def print_lines(console: Console, text: str) -> None:
    """Print lines that contain text from elsewhere, broken at spaces only to fit a terminal."""
    shown = printable(text, keep="\n")
    shown = wrapped(shown, console.width) if console.is_terminal else shown
    console.print(shown, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """Shows snapshots as they come: on a terminal redrawn on a screen of its own, new lines only when piped.

    The screen of its own is left as it was found: nothing of the picture stays, whatever size the terminal had meanwhile.
    Where there is no room for both, a conversation and the curve take turns.
    """

    def __init__(self, console: Console, wait_line_every_s: float = 10.0) -> None:
        self._console = console
        self._wait_line_every_s = wait_line_every_s
        self._shown_step = -1
        """-1 until something was shown: what came before a viewer is not news."""
        self._said_wait = 0.0
        self._waits, self._wait_lines = "", 0
        """The wait that was said last, without its numbers, and in how many lines: the more, the longer until the next."""
        self._said: list[str] = []
        """The messages to show, with the most important last."""
        self._long = ""
        """The newest lines that were printed and would fill a terminal if they were repeated."""
        self._held: deque[str] = deque(maxlen=MOST_HELD_LINES)
        self._live = None
        if draws_on(console):
            from rich.live import Live

            self._live = Live(console=console, auto_refresh=False, screen=True, redirect_stdout=False,
                              redirect_stderr=False)  # fmt: skip
            self._live.start()

    @property
    def is_picture(self) -> bool:
        """Whether it draws; otherwise it prints lines."""
        return self._live is not None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        return self._console.width, self._console.height

    def show(self, snapshot: RunStatus) -> None:
        """Draw, or print what is new."""
        if self._live is not None:
            talks = int(time.monotonic() / TURN_S) % 2 == 1
            self._live.update(render(snapshot, self._console.height, self._said, talks), refresh=True)
            return
        if snapshot.step > max(0, self._shown_step):
            for line in _each_new(snapshot, self._shown_step):
                self.say(line)
        if snapshot.step or snapshot.status.phase != STARTING:  # the steps of an earlier start are not read yet
            self._shown_step = max(snapshot.step, self._shown_step)
        line, now = plain_wait(snapshot, self._long), time.monotonic()
        waits = re.sub(r"\d+", "", snapshot.notice or snapshot.status.waiting_for)
        if not line or waits != self._waits:
            self._waits, self._wait_lines = waits, 0
        every_s = min(MOST_WAIT_LINE_S, self._wait_line_every_s * 2 ** max(0, self._wait_lines - 1))
        if line and now - self._said_wait >= every_s:
            self._said_wait, self._wait_lines = now, min(self._wait_lines + 1, 16)
            self.say(line)

    def say(self, line: str, passes: bool = False) -> None:
        """A line that stays. While the picture is shown it is a part of it, and it is printed when the picture is gone."""
        if self._live is None:
            if len(line) > LONG_CHARS:
                self._long = f"{self._long}\n{line}"[-MOST_LONG_CHARS:]
            print_lines(self._console, line)
        elif line.strip():
            self._said = [line, *self._said] if passes else [*self._said, line][-MOST_HELD_LINES:]
            self._held.append(line)

    def end(self, picture: RenderableType, text: str) -> None:
        """The picture on a terminal, the text when piped."""
        if self._console.is_terminal:
            self._console.print(picture, crop=False)  # a command that is cut off cannot be copied
        else:
            self.say(text)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._console.control(Control.home(), Control.clear())  # tmux keeps what is there if its size has changed
            self._live.stop()
            self._live = None
        while self._held:
            print_lines(self._console, self._held.popleft())
