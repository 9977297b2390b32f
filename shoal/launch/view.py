"""The terminal view of a running run: a snapshot becomes a picture, or a line when the output is piped to a file.

Called by `launch/local`. Pure: it starts nothing, reads nothing and asks nobody, so tests and the picture in the
README are made from snapshots. `launch/finale` shows the end of a run.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.launch.snapshot import Heldout, Snapshot
from shoal.protocol.types import NodeState
from shoal.terminal import printable

WATCHDOG_S = 5.0
"""A longer wait is shown in colour, and is printed if the output is piped."""

MAX_CHART_WIDTH, CHART_HEIGHT = 72, 7
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PHASE_STYLE = {"running": "green", "paused": "yellow", "draining": "yellow", "ended": "cyan"}
_STANDING_STYLE = {"good": "green", "new": "dim", "quarantined": "red", "kicked": "red"}


def render(snapshot: Snapshot) -> RenderableType:
    """The whole picture: progress, reward curve and figures, workers, and what is waited for."""
    middle = Table.grid(expand=True, padding=(0, 2))
    middle.add_column(ratio=1)
    middle.add_column(width=34)
    middle.add_row(Curve(snapshot), _figures(snapshot))
    body = Group(_progress(snapshot), Text(), middle, Text(), _workers(snapshot), Text(), _watchdog(snapshot))
    folder = f"{snapshot.out} · Ctrl-C stops cleanly, the same command resumes"
    title = Text.assemble(("shoal", "bold"), f" · {printable(snapshot.name)}")
    return Panel(body, title=title, subtitle=Text(printable(folder), style="dim"), box=box.ROUNDED)


def plain(snapshot: Snapshot) -> str:
    """The newest training step as one line."""
    parts = [f"step {snapshot.step}/{snapshot.steps}"]
    for label, name, form in _FIGURES:
        value = snapshot.latest(name)
        if value is not None:
            parts.append(f"{label.replace(' ', '_')}={_format(value, form)}")
    for env, value in snapshot.by_env("reward_mean").items():
        parts.append(f"batch_reward_{env.replace(' ', '_')}={_format(value, '3f')}")
    parts += [f"solved_{env.replace(' ', '_')}={said.replace(' ', '')}" for env, said in _solved(snapshot).items()]
    if speed := snapshot.tokens_per_s():
        parts.append(f"tokens/s={speed:.0f}")
    if spread := _staleness(snapshot):
        parts.append(f"staleness={spread.replace(', ', ',')}")
    if snapshot.heldout:
        version, found = snapshot.heldout[-1]
        parts.append(f"held-out_{version}={found.mean:.1%}")
        parts += [f"held-out_{version}_{env.replace(' ', '_')}={one.mean:.1%}" for env, one in found.envs.items()]
    refused = sum(snapshot.status.refused.values())
    parts.append(f"accepted={snapshot.status.accepted} refused={refused}")
    parts.append(f"elapsed={duration(snapshot.elapsed_s)}")
    return "  ".join(parts)


def plain_wait(snapshot: Snapshot) -> str:
    """The line about a long wait, or "" if there is none."""
    status = snapshot.status
    if snapshot.notice:
        return f"{snapshot.notice}  elapsed={duration(snapshot.elapsed_s)}"
    if not status.waiting_for or status.waiting_s < WATCHDOG_S:
        return ""
    return f"waiting {status.waiting_s:.0f} s for {status.waiting_for}  in_flight={status.in_flight}"


class View(Protocol):
    """Where a launcher reports its run: a terminal or a program."""

    def show(self, snapshot: Snapshot) -> None:
        """The run as it is now; called about once a second."""
        ...

    def say(self, line: str) -> None:
        """Something that a person should read."""
        ...

    def end(self, picture: RenderableType, text: str) -> None:
        """The last table of a run that has ended, in two forms."""
        ...

    def close(self) -> None:
        """No more snapshots come; `say` and `end` may still be called."""
        ...


class LiveView:
    """Shows snapshots as they come: redrawn in place on a terminal, new lines only when piped."""

    def __init__(self, console: Console, wait_line_every_s: float = 10.0) -> None:
        self._console = console
        self._wait_line_every_s = wait_line_every_s
        self._shown_step = 0
        self._said_wait = 0.0
        self._live = None
        if console.is_terminal:
            from rich.live import Live

            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Draw, or print what is new."""
        if self._live is not None:
            self._live.update(render(snapshot), refresh=True)
            return
        if snapshot.step > self._shown_step:
            self._shown_step = snapshot.step
            self.say(plain(snapshot))
        line, now = plain_wait(snapshot), time.monotonic()
        if line and now - self._said_wait >= self._wait_line_every_s:
            self._said_wait = now
            self.say(line)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(printable(line, keep="\n"), markup=False, highlight=False, soft_wrap=True)

    def end(self, picture: RenderableType, text: str) -> None:
        """The picture on a terminal, the text when piped."""
        if self._console.is_terminal:
            self._console.print(picture)
        else:
            self.say(text)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()


# --- the parts of the picture ---

_FIGURES = (
    ("reward", "reward_all_mean", "3f"),
    ("entropy", "entropy_nats", "3f"),
    ("clipped", "clip_share", "%"),
    ("max |log ratio|", "log_ratio_abs_max_nats", "3f"),
    ("solved", "solve_rate", "%"),
    ("no signal", "zero_signal_share", "%"),
    ("trainer waits", "waiting_share", "%"),
)
"""Label, name in metrics.jsonl, format."""


def _progress(snapshot: Snapshot) -> RenderableType:
    status = snapshot.status
    row = Table.grid(expand=True, padding=(0, 1))
    for ratio in (None, None, 1, None, None):
        row.add_column(ratio=ratio)
    row.add_row(
        Text(f"● {status.phase}", style=_PHASE_STYLE.get(status.phase, "yellow")),
        Text(f"step {snapshot.step}/{snapshot.steps}", style="bold"),
        ProgressBar(total=max(1, snapshot.steps), completed=snapshot.step, complete_style="green"),
        Text(f"policy v{max(status.version, 0)}"),
        Text(duration(snapshot.elapsed_s)),
    )
    return row


class Curve:
    """The reward of each step, as wide as there is room."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rewards, steps = self._snapshot.series("reward_all_mean"), self._snapshot.steps
        if not rewards:
            yield Text("reward: the first step is still being made", style="dim")
            return
        width = max(8, min(MAX_CHART_WIDTH, options.max_width - 7))
        low, high = min(0.0, *rewards), max(rewards)
        rows = chart(rewards, steps, width, CHART_HEIGHT, low, high)
        text = Text("reward per step\n", style="dim")
        for i, row in enumerate(rows):
            label = {0: f"{high:6.2f} ", len(rows) - 1: f"{low:6.2f} "}.get(i, " " * 7)
            text.append(label, style="dim").append(row + "\n", style="green")
        yield text.append(" " * 7 + "0" + str(steps).rjust(width - 1), style="dim")


def _figures(snapshot: Snapshot) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for version, found in _first_and_last(snapshot.heldout):
        table.add_row(f"held-out {version}", _heldout(found))
        for env, one in found.envs.items():
            table.add_row(_indented(env), _heldout(one))
    for label, name, form in _FIGURES:
        value = snapshot.latest(name)
        table.add_row(label, "-" if value is None else _format(value, form))
    if rewards := snapshot.by_env("reward_mean"):
        table.add_row("batch reward")
    for env, reward in rewards.items():
        table.add_row(_indented(env), _format(reward, "3f"))
    if solved := _solved(snapshot):
        table.add_row("solved × weight")
    for env, said in solved.items():
        table.add_row(_indented(env), said)
    speed = snapshot.tokens_per_s()
    table.add_row("tokens/s", "-" if speed is None else f"{speed:,.0f}")
    table.add_row("staleness", _staleness(snapshot) or "-")
    return table


def _solved(snapshot: Snapshot) -> dict[str, str]:
    """Solve rate and weight of each environment, by label; empty where a run has one environment."""
    weights = snapshot.by_env("draw_weight")
    return {
        env: f"{rate:.1%} × {weights[env]:.3g}" for env, rate in snapshot.by_env("solve_rate").items() if env in weights
    }


def _heldout(found: Heldout) -> str:
    return f"{found.mean:.1%} ({found.low95:.0%}-{found.high95:.0%})"


def _indented(label: str) -> Text:
    return Text(f"  {printable(label)}", no_wrap=True, overflow="ellipsis")


def _workers(snapshot: Snapshot) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1))
    table.add_column("worker")
    table.add_column("standing")
    for heading in ("accepted", "refused", "lapsed", "credits"):
        table.add_column(heading, justify="right")
    table.add_column("refused by", ratio=1, no_wrap=True)
    for node in snapshot.nodes:
        if node.role != "worker":
            continue
        cheats = node.name in snapshot.cheaters
        table.add_row(
            Text(printable(node.name) + (" (cheats)" if cheats else ""), style="red" if cheats else ""),
            Text(node.standing + (", left" if node.left else ""), style=_STANDING_STYLE.get(node.standing, "")),
            f"{node.accepted:,}",
            Text(f"{node.refused:,}", style="red" if node.refused else ""),
            f"{node.lapsed:,}",
            f"{node.credits:,}",
            Text(reasons(node), style="red"),
        )
    if not table.row_count:
        return Text("no worker has joined yet", style="dim")
    return table


def _watchdog(snapshot: Snapshot) -> RenderableType:
    status, text = snapshot.status, Text()
    if snapshot.notice:
        text.append(snapshot.notice)
    elif status.waiting_for:
        style = "yellow" if status.waiting_s >= WATCHDOG_S else "dim"
        text.append(f"waiting {status.waiting_s:.0f} s for {status.waiting_for}", style=style)
    else:
        text.append("waiting for nothing", style="dim")
    text.append(f"   in flight: {status.in_flight} groups", style="dim")
    if snapshot.restarts:
        again = ", ".join(f"{role} {times}x" for role, times in sorted(snapshot.restarts.items()))
        text.append(f"   restarted: {again}", style="yellow")
    return text


def chart(values: Sequence[float], total: int, width: int, height: int, low: float, high: float) -> list[str]:
    """A column chart as `height` lines of `width` characters, top line first.

    The x axis is the whole run: value i is at i / `total` of the width, and values in one column are averaged. Heights
    are in eighths of a character.
    """
    columns = [0] * width
    total = max(total, len(values))
    for column in range(width):
        first = column * total // width
        last = max(first + 1, (column + 1) * total // width)
        inside = values[first:last]
        if inside:
            share = (sum(inside) / len(inside) - low) / ((high - low) or 1.0)
            columns[column] = max(1, round(min(1.0, max(0.0, share)) * height * 8))
    return [
        "".join(_EIGHTHS[min(8, max(0, eighths - 8 * row))] for eighths in columns) for row in reversed(range(height))
    ]


def reasons(node: NodeState) -> str:
    """Why groups of a node were refused, most frequent first."""
    ranked = sorted(node.reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{printable(check)} {count}x" for check, count in ranked)


def duration(seconds: float) -> str:
    """Such as 7s, 2m03s, 1h02m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _first_and_last(evaluations: tuple[tuple[str, Heldout], ...]) -> tuple[tuple[str, Heldout], ...]:
    return evaluations if len(evaluations) < 3 else (evaluations[0], evaluations[-1])


def _staleness(snapshot: Snapshot) -> str:
    """The newest step's rollouts by age in policy versions."""
    ages = snapshot.metrics[-1].get("staleness_rollouts") if snapshot.metrics else None
    if not isinstance(ages, dict) or not ages:
        return ""
    total = sum(ages.values()) or 1
    return ", ".join(f"{age}:{count / total:.0%}" for age, count in sorted(ages.items(), key=lambda item: int(item[0])))


def _format(value: float, form: str) -> str:
    if form == "%":
        return f"{value:.1%}"
    return f"{value:,.0f}" if form == "0f" else f"{value:.{form}}"
