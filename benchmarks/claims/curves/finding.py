"""What is said of a claim once its runs are made, and how its figures are written.

Called by `findings` and `findings_beside`. It measures nothing.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.claims.curves.harness import Curve

Reports = Mapping[tuple[str, int], Sequence[Curve]]
"""The reporting runs by arm and staleness, one for each seed."""


class Finding(NamedTuple):
    """What is said of a claim."""

    figures: dict[str, Any]
    reproduced: bool | None
    """None: nothing was to be reproduced."""
    sentence: str
    table: list[str]
    """Lines of Markdown."""
    picture: str


def spread(values: Sequence[float], digits: int = 3) -> str:
    """A mean, and the lowest and highest of several."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else text


def rounded(values: Sequence[float]) -> list[float]:
    """Four digits after the point."""
    return [round(value, 4) for value in values]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
