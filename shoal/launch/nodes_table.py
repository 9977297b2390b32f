"""The table of workers: those in trouble first, with the checks that refused them, at any width.

Called by `launch/view`. Pure. Names, checks and reasons are strangers' text; from a URL, all of it is.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.launch.snapshot import Snapshot
from shoal.protocol.types import NodeState
from shoal.terminal import brief

ALL_COLUMNS, WITH_REASON, WITHOUT_CREDITS = 104, 120, 66
"""Widths in cells: from the first, every figure has a column; from the second, the last refusal follows in full; below the
third, only the checks and what was accepted are left."""

NAME_CELLS = 28
MOST_ROWS = 40
"""Where nothing limits the height, as in a picture that is saved."""

_STANDING_STYLE = {"good": "green", "new": "dim", "quarantined": "red", "suspended": "red", "kicked": "red"}
_IN_TROUBLE = ("quarantined", "suspended", "kicked")


def workers(snapshot: Snapshot) -> list[NodeState]:
    """The workers: cheaters and those that were refused or shut out first, then by credits."""

    def rank(node: NodeState) -> tuple[bool, int, int, str]:
        return not in_trouble(node, snapshot), -node.refused, -node.credits, node.name

    return sorted((node for node in snapshot.nodes if node.role == "worker"), key=rank)


def in_trouble(node: NodeState, snapshot: Snapshot) -> bool:
    """Whether a reader should look at this worker."""
    return bool(node.refused) or node.standing in _IN_TROUBLE or node.name in snapshot.cheaters


def nodes_table(snapshot: Snapshot, width: int, lines: int | None = None) -> RenderableType:
    """Heading and at most so many lines; the last one says how many workers are not shown."""
    found = workers(snapshot)
    if not found:
        return Text("no worker has joined yet", style="dim")
    rows = (MOST_ROWS if lines is None else max(2, lines)) - 1
    shown = found if len(found) <= rows else found[: max(1, rows - 1)]
    columns = _columns(width, max(len(brief(node.name, NAME_CELLS)) for node in shown))
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1), header_style="dim")
    for heading, cells in columns.items():
        right = cells is not None and heading not in ("worker", "standing")
        table.add_column(
            heading, width=cells, ratio=None if cells else 1, no_wrap=True, overflow="ellipsis",
            justify="right" if right else "left",
        )  # fmt: skip
    for node in shown:
        row = _cells(node, snapshot, width)
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
        return {"worker": names, "refused by": None, "accepted": 8, "credits": 11}
    return {"worker": names, "refused by": None, "accepted": 8}


def _cells(node: NodeState, snapshot: Snapshot, width: int) -> dict[str, Text]:
    cheats = node.name in snapshot.cheaters
    standing = brief(node.standing, 12) + (", left" if node.left else "")
    why = Text(reasons(node), style="red")
    if width < ALL_COLUMNS and standing != "good":
        said = "not proven yet" + standing.removeprefix("new") if node.standing == "new" else standing
        why.append(f"{', ' if why else ''}{said}", style=_STANDING_STYLE.get(node.standing, ""))
    if width >= WITH_REASON and node.last_reason:
        why.append(f" · {brief(node.last_reason, 200)}", style="dim")
    return {
        "worker": Text(brief(node.name, NAME_CELLS) + (" (cheats)" if cheats else ""), style="red" if cheats else ""),
        "standing": Text(standing, style=_STANDING_STYLE.get(node.standing, "")),
        "accepted": Text(f"{node.accepted:,}"),
        "refused": Text(f"{node.refused:,}", style="red" if node.refused else ""),
        "lapsed": Text(f"{node.lapsed:,}"),
        "credits": Text(f"{node.credits:,}"),
        "refused by": why,
    }


def _others(left_out: Sequence[NodeState], snapshot: Snapshot) -> str:
    troubled = sum(in_trouble(node, snapshot) for node in left_out)
    of_them = f"{troubled:,} of them refused or shut out" if troubled else "none refused"
    return f"… and {len(left_out):,} more, {of_them}"


def reasons(node: NodeState, most: int = 6) -> str:
    """Why groups of a node were refused, most frequent first."""
    ranked = sorted(node.reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{brief(check, 30)} {count}x" for check, count in ranked[:most])
