"""Markdown tables, for the files beside it, which turn a benchmark's result into the tables of a page.

`benchmarks/figures.py` keeps these tables with the figures and writes them into the pages.
"""

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> str:
    """A table; `right` lists the columns that are aligned to the right."""
    aligned = set(right)
    rule = "|".join("---:" if column in aligned else "---" for column in range(len(headings)))
    lines = [_line(headings), f"|{rule}|", *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def percent(share: float, digits: int) -> str:
    """A share as the pages write it."""
    return f"{100 * share:.{digits}f} %"
