"""Panels of the terminal: steps, nodes, refusals, and what the run waits for."""

import textwrap
from collections.abc import Sequence

from rich import get_console
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.evaluation_files import Evaluation, JudgeResult, format_of, interval_of, why_no_mean
from shoal.humanize import duration
from shoal.ledger.fault_rate import FAULTS
from shoal.ledger.members import ASKED_BY_HOST
from shoal.monitors.config_warnings import MANY_OVERLONG
from shoal.protocol.messages import NodeState
from shoal.runs.run_status import STARTING, RunStatus, SampleConversation, names_apart, seconds_left
from shoal.step_metrics import FIGURES, is_number
from shoal.terminal import brief

WATCHDOG_S = 5.0
"""A longer wait is shown in colour, and is printed if the output is piped."""

MAX_CHART_WIDTH, CHART_HEIGHT = 72, 7
FIGURES_WIDTH = 34
WIDE = 72
"""Cells inside the frame from which there is room for the curve beside the figures."""
LAUNCHER_LOG = "logs/launcher.log"
"""Where the host of a run finds whole what was said. See `launch/launcher_log`."""
LOG_LINES = 4
"""Lines for why the log of a run cannot be read, and what to do."""
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SEVERITY_STYLE = {"notice": "dim", "warning": "yellow", "critical": "red"}
_PHASE_STYLE = {"running": "green", "paused": "yellow", "draining": "yellow", "evaluating": "cyan", "ended": "cyan"}


def progress(snapshot: RunStatus, width: int) -> RenderableType:
    """Phase, step, bar, version, time so far and time left, in one line."""
    status = snapshot.status
    # Metrics come less often than the status: a node that looks seldom must not read "step 22 ... policy v33".
    done = max(snapshot.step, min(status.version, snapshot.steps))
    cells: list[RenderableType] = [
        Text(f"● {brief(status.phase, 12)}", style=_PHASE_STYLE.get(status.phase, "yellow")),
        Text(f"step {done}/{snapshot.steps}", style="bold"),
        ProgressBar(total=max(1, snapshot.steps), completed=done, complete_style="green"),
    ]
    if width >= WIDE and snapshot.has_counts and not (status.phase == STARTING and snapshot.metrics):
        cells.append(Text(f"policy v{max(status.version, 0)}"))
    if status.lr_factor != 1.0:
        cells.append(Text(f"lr ×{status.lr_factor:.3g}", style="yellow"))
    if snapshot.elapsed_s:
        cells.append(Text(f"{duration(snapshot.elapsed_s)}{' of steps' if snapshot.times_steps else ''}"))
    if (left_s := seconds_left(snapshot)) is not None:
        of_what = "left" if snapshot.evaluation_s else "of steps left"
        cells.append(Text(f"about {duration(left_s)} {of_what}", style="cyan"))
    row = Table.grid(expand=True, padding=(0, 1))
    for cell in cells:
        row.add_column(ratio=1 if isinstance(cell, ProgressBar) else None, no_wrap=True, overflow="ellipsis")
    row.add_row(*cells)
    return row


class RewardCurve:
    """The reward of each step that was done, as wide as there is room, in `lines` lines with its title and axis."""

    def __init__(self, snapshot: RunStatus, lines: int = CHART_HEIGHT + 2) -> None:
        self._snapshot, self._height = snapshot, max(1, lines - 2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rewards, steps = self._snapshot.series("reward_all_mean"), self._snapshot.step
        if not rewards:
            yield Text("reward: the first step is still being made", style="dim")
            return
        width = max(8, min(MAX_CHART_WIDTH, options.max_width - 7))
        low, high = min(0.0, *rewards), max(rewards)
        rows = chart(rewards, len(rewards), width, self._height, low, high)
        text = Text("reward of all groups, per step\n", style="dim")
        for i, row in enumerate(rows):
            label = {0: f"{high:6.2f} ", len(rows) - 1: f"{low:6.2f} "}.get(i, " " * 7)
            text.append(label, style="dim").append(row + "\n", style="green")
        yield text.append(" " * 7 + "0" + str(steps).rjust(width - 1), style="dim")


def figures(snapshot: RunStatus) -> list[tuple[Text, str]]:
    """Label and value of each figure, the most important first."""
    rows = [(Text("at token limit"), cut)] if (cut := at_token_limit(snapshot)) else []
    rows += [
        (Text(f"held-out {brief(version)}"), _heldout(found)) for version, found in _first_and_last(snapshot.heldout)
    ]
    for name, metric in FIGURES.items():
        value = snapshot.latest(name)
        rows.append((Text(metric.title), "-" if value is None else format(value, metric.form)))
    if failed := faults(snapshot):
        rows.append((Text("env faults"), failed))
    speed = snapshot.tokens_per_s()
    rows.append((Text("tokens/s"), "-" if speed is None else f"{speed:,.0f}"))
    rows.append((Text("staleness"), staleness(snapshot) or "-"))
    for _, found in _first_and_last(snapshot.heldout)[-1:]:
        rows += [(_indented(env), _heldout(one)) for env, one in found.envs.items()]
        rows += [(_indented("its judge"), _heldout(found.judge))] if found.judge is not None else []
    if rewards := snapshot.by_env("reward_mean"):
        rows.append((Text("batch reward"), ""))
    rows += [(_indented(env), f"{reward:.3f}") for env, reward in rewards.items()]
    if rates := solved(snapshot):
        rows.append((Text("solved × weight"), ""))
    return rows + [(_indented(env), said) for env, said in rates.items()]


def at_token_limit(snapshot: RunStatus) -> str:
    """The share of the newest step's rollouts that a token limit ended; empty unless they are many."""
    share = snapshot.metrics[-1].get("overlong_share") if snapshot.metrics else None
    return f"{share:.1%}" if is_number(share) and share > MANY_OVERLONG else ""


def faults(snapshot: RunStatus) -> str:
    """On how many rollouts the environment failed, of all steps so far, and in the newest step; empty if on none."""
    failed = sum(int(count) for count in snapshot.series("fault_rollouts"))
    newest = snapshot.metrics[-1].get("fault_rollouts") if snapshot.metrics else None
    return f"{failed:,}" + (f"(+{newest:,})" if isinstance(newest, int) else "") if failed else ""


def figures_table(snapshot: RunStatus, lines: int | None = None) -> RenderableType:
    """At most so many figures, one below another."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = figures(snapshot)
    if lines is not None and len(rows) > lines:
        rows = [row for row in rows if row[1] != "-"][:lines]
    for label, value in rows:
        table.add_row(label, value)
    return table


def figures_in_a_row(snapshot: RunStatus, width: int, lines: int) -> Text:
    """What is known of the figures, in at most so many lines of text; the reward with its curve in one line."""
    known = [f"{label.plain.strip()} {value}" for label, value in figures(snapshot) if value not in ("", "-")]
    rewards = snapshot.series("reward_all_mean")
    if rewards:
        curve = chart(rewards, len(rewards), min(16, len(rewards)), 1, min(0.0, *rewards), max(rewards))[0]
        known = [f"{said} {curve}" if said.startswith("reward ") else said for said in known]
        known.sort(key=lambda said: not said.startswith("reward "))
    shown, line = list[str](), ""
    for said in known:
        if line and len(line) + 3 + len(said) > width:
            shown.append(line)
            line = ""
        line = f"{line} · {said}" if line else said
    shown = [*shown, line][:lines] if known else ["reward: the first step is still being made"]
    return Text("\n".join(shown), style="dim", no_wrap=True, overflow="ellipsis")


def solved(snapshot: RunStatus) -> dict[str, str]:
    """Solve rate and weight of each environment, by label; empty where a run has one environment."""
    weights = snapshot.by_env("draw_weight")
    return {
        env: f"{rate:.1%} × {weights[env]:.3g}" for env, rate in snapshot.by_env("solve_rate").items() if env in weights
    }


def watchdog(snapshot: RunStatus, width: int, lines: int) -> Text:
    """What the run waits for, and since when, or in its place the launcher's own notice, in so many lines; what the host
    may do about environment faults, whole; then up to two alarms, each with what to do about it in two lines."""
    status, waits = snapshot.status, _waits(snapshot, in_flight=snapshot.has_counts)
    lines = lines if snapshot.has_counts else LOG_LINES
    if len(waits.wrap(get_console(), width)) > lines:
        waits = _waits(snapshot, in_flight=False)  # no half of it behind a long cause
    text = cropped(waits, width, lines)
    most = lines + 2 * min(len(snapshot.alarms), 2)
    if snapshot.remedy:
        advice = Text("\n").join(Text(brief(snapshot.remedy, 1000), style="bold").wrap(get_console(), width))
        text.append("\n").append_text(advice)
        most += advice.plain.count("\n") + 1
    for alarm in snapshot.alarms:
        style = _SEVERITY_STYLE[alarm.severity]
        named = f"alarm {brief(alarm.cause)} since step {alarm.since}: "
        text.append(f"\n{named}", style=f"bold {style}")
        # Of what it paused for, the wait says more.
        is_paused_for = status.phase == "paused" and status.pause_cause == alarm.cause.replace("_", " ")
        summary = "the run has paused" if is_paused_for else brief(alarm.summary, 400)
        said = _in_two_lines(named + summary, brief(alarm.remedy, 400), width)
        text.append(said[len(named) :], style=style)
    return cropped(text, width, most)


def cropped(text: Text, width: int, lines: int) -> Text:
    """The first lines of a text, broken as the terminal breaks them. Its last one ends by … if there were more, unless it
    is a whole command in a line of its own, whose last word the … would seem to cut."""
    whole = list(text.wrap(get_console(), width))
    if len(whole) > lines > 0:
        whole[lines - 1].rstrip()
        last = whole[lines - 1].plain
        is_command = last.startswith("    ") and last in text.plain.splitlines()
        if not last.endswith("…") and not is_command:
            whole[lines - 1].truncate(width - 2)
            whole[lines - 1].append(" …")
    return Text("\n").join(whole[:lines])


def _in_two_lines(cause: str, remedy: str, width: int) -> str:
    """Cause and remedy in two lines of a terminal, broken between words as the terminal view breaks it. If they do not fit,
    each has a line."""

    def lines(text: str, most: int, end: str = " …") -> list[str]:
        return textwrap.wrap(text, width, max_lines=most, placeholder=end, break_on_hyphens=False)

    whole = f"{cause}. {remedy}" if remedy else cause
    if not remedy or len(textwrap.wrap(whole, width, break_on_hyphens=False)) <= 2:
        return "\n".join(lines(whole, 2))
    return "\n".join(lines(cause, 1) + lines(remedy, 1, f" … ({LAUNCHER_LOG})"))


def _waits(snapshot: RunStatus, in_flight: bool = True) -> Text:
    status, text = snapshot.status, Text()
    if snapshot.notice:
        text.append(brief(snapshot.notice, 400))
    elif status.phase == "ended":
        return text.append("the run has ended", style="dim")
    elif status.phase == "evaluating":
        return text.append("all steps are done", style="dim")
    elif status.waiting_for:
        style = "yellow" if status.waiting_s >= WATCHDOG_S else "dim"
        # room for the error itself: the words after it say that an environment fails
        waits = brief(status.waiting_for.replace(f"the host: {FAULTS}", "the host: ", 1), 400)
        text.append(f"waiting {status.waiting_s:.0f} s for {waits}", style=style)
    else:
        text.append("waiting for nothing", style="dim")
    if in_flight:
        text.append(f"   in flight: {status.in_flight} groups", style="dim")
    if snapshot.restarts:
        again = ", ".join(f"{role} {times}x" for role, times in sorted(snapshot.restarts.items()))
        text.append(f"   restarted: {again}", style="yellow")
    return text


BLANK = "(blank)"
"""What is shown of a turn that holds spaces alone, which would look as if the picture were broken."""


def conversation(sample: SampleConversation, lines: int) -> Text:
    """The beginning of a conversation, in at most so many lines of one terminal line each."""
    text = Text(brief(sample.title, 120), style="bold", no_wrap=True, overflow="ellipsis")
    for who, said in sample.turns:
        for line in said.strip().splitlines() or [BLANK]:
            if len(text.plain.splitlines()) >= lines:
                return text
            text.append(f"\n{brief(who, 12):>11} ", style="dim").append(brief(line, 300), style="none")
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


def staleness(snapshot: RunStatus) -> str:
    """The newest step's rollouts by age in policy versions."""
    ages = snapshot.metrics[-1].get("staleness_rollouts") if snapshot.metrics else None
    if not isinstance(ages, dict) or not ages:
        return ""
    total = sum(ages.values()) or 1
    return ", ".join(f"{age}:{count / total:.0%}" for age, count in sorted(ages.items(), key=lambda item: int(item[0])))


def _first_and_last(evaluations: tuple[tuple[str, Evaluation], ...]) -> tuple[tuple[str, Evaluation], ...]:
    return evaluations if len(evaluations) < 3 else (evaluations[0], evaluations[-1])


def _heldout(found: Evaluation | JudgeResult) -> str:
    if (figures := interval_of(found)) is None:
        return why_no_mean(found) if isinstance(found, Evaluation) else "failed on all episodes"
    mean, low, high = figures
    faults = f", {found.faults} faults" if isinstance(found, Evaluation) and found.faults else ""
    if (form := format_of(found)) == ".3f":
        return f"{mean:{form}} ({low:.2f} to {high:.2f}){faults}"
    return f"{mean:.1%} ({low:.0%}-{high:.0%}){faults}"


def _indented(label: str) -> Text:
    return Text(f"  {brief(label)}", no_wrap=True, overflow="ellipsis")


# --- The table of workers: those in trouble first, with the checks that refused them, at any width ---

ALL_COLUMNS, WITH_REASON, WITHOUT_CREDITS = 104, 120, 66
"""Widths in cells: from the first, every figure has a column; from the second, the last refusal follows in full; below the
third, only the checks and what was accepted are left."""

NAME_CELLS, MOST_CHECKS = 28, 6
MOST_ROWS = 40
"""Where nothing limits the height, as in a picture that is saved."""

WITH_STANDING = "refused by; standing"
"""Heading of the column of checks where the standing has no column of its own."""

_STANDING_STYLE = {"good": "green", "new": "dim", "quarantined": "red", "suspended": "red", "kicked": "red"}
_IN_TROUBLE = ("quarantined", "suspended", "kicked")


def workers(snapshot: RunStatus) -> list[NodeState]:
    """The workers: cheaters and those that were refused or shut out first, then those that are silent, then by credits."""

    def rank(node: NodeState) -> tuple[bool, int, bool, int, str]:
        return not in_trouble(node, snapshot), -node.refused, not node.silent_s, -node.credits, node.name

    return sorted((node for node in snapshot.nodes if node.role == "worker"), key=rank)


def in_trouble(node: NodeState, snapshot: RunStatus) -> bool:
    """Whether a reader should look at this worker."""
    return bool(node.refused) or node.standing in _IN_TROUBLE or node.key in snapshot.cheaters


def nodes_table(snapshot: RunStatus, width: int, lines: int | None = None) -> RenderableType:
    """Heading and at most so many lines; the last one says how many workers are not shown."""
    found = workers(snapshot)
    if not found:
        is_known = snapshot.has_counts and not (snapshot.status.phase == STARTING and snapshot.metrics)
        return Text("no worker has joined yet" if is_known else "the workers are not known", style="dim")
    rows = (MOST_ROWS if lines is None else max(2, lines)) - 1
    shown = found if len(found) <= rows else found[: max(1, rows - 1)]
    called = names_apart(found, min(NAME_CELLS, width // 3))
    columns = _columns(width, max(len(brief(called[node.key], NAME_CELLS)) for node in shown))
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1), header_style="dim")
    for heading, cells in columns.items():
        right = cells is not None and heading not in ("worker", "standing")
        table.add_column(
            heading, width=cells, ratio=None if cells else 1, no_wrap=True, overflow="ellipsis",
            justify="right" if right else "left",
        )  # fmt: skip
    room = width - sum(cells or 0 for cells in columns.values()) - 2 * (len(columns) - 1)
    for node in shown:
        row = _cells(node, called[node.key], snapshot, width, room)
        table.add_row(*(row[heading] for heading in columns))
    left_out = found[len(shown) :]
    return Group(table, Text(_others(left_out, snapshot), style="dim")) if left_out else table


def _columns(width: int, longest_name: int) -> dict[str, int | None]:
    """Headings with their widths; None takes what is left."""
    names = min(NAME_CELLS, max(8, longest_name + 9), width // 3)
    if width >= ALL_COLUMNS:
        return {"worker": names, "standing": 17, "accepted": 8, "refused": 7, "lapsed": 6, "credits": 11,
                "refused by": None}  # fmt: skip
    if width >= WITHOUT_CREDITS:
        return {"worker": names, WITH_STANDING: None, "accepted": 8, "credits": 10}
    return {"worker": names, WITH_STANDING: None, "accepted": 8}


def last_reason(node: NodeState) -> str:
    """What the coordinator said last against a node, and of what; empty if nothing."""
    if node.last_reason == ASKED_BY_HOST:
        return f"last quarantine: {ASKED_BY_HOST}"
    return f"last refusal: {brief(node.last_reason, 240)}" if node.last_reason else ""


def _cells(node: NodeState, called: str, snapshot: RunStatus, width: int, room: int) -> dict[str, Text]:
    """What each column says; `room` are the cells of the last one, where the standing is where it has no column."""
    cheats = node.key in snapshot.cheaters
    standing = brief(node.standing, 12) + (", left" if node.left else "")
    said = "not proven yet" + standing.removeprefix("new") if node.standing == "new" else standing
    said = said if width < ALL_COLUMNS and standing != "good" else ""
    if node.silent_s:
        said = f"silent for {duration(node.silent_s)}" + (f", {said}" if said else "")
    if width < ALL_COLUMNS and node.lapsed and not node.reasons:  # checks need the room
        said += ("; " if said else "") + f"{node.lapsed:,} lapsed"
    comma = "; " if said and node.reasons else ""
    fitting = (
        text for most in range(MOST_CHECKS, 1, -1) if cell_len(text := reasons(node, most) + comma + said) <= room
    )
    why = Text(next(fitting, reasons(node, 1) + comma + said).removesuffix(said), style="red")
    why.append(said, style="yellow" if node.silent_s else _STANDING_STYLE.get(node.standing, ""))
    if width >= WITH_REASON and node.last_reason:
        why.append(f" · {brief(node.last_reason, 200)}", style="dim")
    return {
        "worker": Text(brief(called, NAME_CELLS) + (" (cheats)" if cheats else ""), style="red" if cheats else ""),
        "standing": Text(standing, style=_STANDING_STYLE.get(node.standing, "")),
        "accepted": Text(f"{node.accepted:,}"),
        "refused": Text(f"{node.refused:,}", style="red" if node.refused else ""),
        "lapsed": Text(f"{node.lapsed:,}"),
        "credits": Text(f"{node.credits:,}"),
        "refused by": why,
        WITH_STANDING: why,
    }


def _others(left_out: Sequence[NodeState], snapshot: RunStatus) -> str:
    troubled = sum(in_trouble(node, snapshot) for node in left_out)
    of_them = f"{troubled:,} of them refused or shut out" if troubled else "none refused"
    return f"… and {len(left_out):,} more, {of_them}"


def reasons(node: NodeState, most: int = MOST_CHECKS) -> str:
    """Why groups of a node were refused, most frequent first, and how many checks are not named."""
    ranked = sorted(node.reasons.items(), key=lambda item: -item[1])
    said = ", ".join(f"{brief(check, 30)} {count}x" for check, count in ranked[:most])
    return f"{said} +{len(ranked) - most} more" if len(ranked) > most else said
