"""The table of workers: those in trouble first, with the checks that refused them, at any width.

Called by `launch/view`. Pure. Names, checks and reasons are strangers' text; from a URL, all of it is.
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.launch.panels import duration
from shoal.launch.snapshot import STARTING, Snapshot, names_apart
from shoal.ledger.rules.members import ASKED_BY_HOST
from shoal.protocol.types import NodeState
from shoal.terminal import brief

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


def workers(snapshot: Snapshot) -> list[NodeState]:
    """The workers: cheaters and those that were refused or shut out first, then those that are silent, then by credits."""

    def rank(node: NodeState) -> tuple[bool, int, bool, int, str]:
        return not in_trouble(node, snapshot), -node.refused, not node.silent_s, -node.credits, node.name

    return sorted((node for node in snapshot.nodes if node.role == "worker"), key=rank)


def in_trouble(node: NodeState, snapshot: Snapshot) -> bool:
    """Whether a reader should look at this worker."""
    return bool(node.refused) or node.standing in _IN_TROUBLE or node.key in snapshot.cheaters


def nodes_table(snapshot: Snapshot, width: int, lines: int | None = None) -> RenderableType:
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


def _cells(node: NodeState, called: str, snapshot: Snapshot, width: int, room: int) -> dict[str, Text]:
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


def _others(left_out: Sequence[NodeState], snapshot: Snapshot) -> str:
    troubled = sum(in_trouble(node, snapshot) for node in left_out)
    of_them = f"{troubled:,} of them refused or shut out" if troubled else "none refused"
    return f"… and {len(left_out):,} more, {of_them}"


def reasons(node: NodeState, most: int = MOST_CHECKS) -> str:
    """Why groups of a node were refused, most frequent first, and how many checks are not named."""
    ranked = sorted(node.reasons.items(), key=lambda item: -item[1])
    said = ", ".join(f"{brief(check, 30)} {count}x" for check, count in ranked[:most])
    return f"{said} +{len(ranked) - most} more" if len(ranked) > most else said
