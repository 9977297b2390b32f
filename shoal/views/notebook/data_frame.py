"""A table of a run for a program or a notebook: rows with documented columns, as polars, pandas, Arrow or `datasets`.

Each library is imported when it is asked for; none is needed for the rows themselves. Cells that hold a list or a table
become JSON. Texts are strangers', as they are: only what a notebook shows is escaped.
"""

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError, how_to_install
from shoal.runs.csv_tables import Column, Row, as_csv
from shoal.terminal import printable

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

SHOWN_ROWS, SHOWN_CHARS = 20, 60
"""Rows of a table, and characters of a cell, that a notebook shows."""


@dataclass(frozen=True)
class Frame:
    """Rows of one table. `columns` says what each column means, and its unit."""

    name: str
    sentence: str
    columns: dict[str, Column]
    rows: Sequence[Row]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def names(self) -> list[str]:
        """The columns that some row has, documented ones first."""
        present = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in self.columns if name in present] + [n for n in present if n not in self.columns]

    def polars(self) -> "polars.DataFrame":
        """As a polars DataFrame. Raises `ShoalError` if polars is not installed."""
        return _library("polars").DataFrame(self._cells(), strict=False)

    def pandas(self) -> "pandas.DataFrame":
        """As a pandas DataFrame. Raises `ShoalError` if pandas is not installed."""
        return _library("pandas").DataFrame(self._cells())

    def arrow(self) -> "pyarrow.Table":
        """As an Arrow table. Raises `ShoalError` if pyarrow is not installed."""
        return _library("pyarrow").table(self._cells())

    def dataset(self) -> Any:
        """As a Dataset of the package `datasets`. Raises `ShoalError` if it is not installed."""
        library, table = _library("datasets"), self.arrow()
        return library.Dataset(table)

    def csv(self) -> str:
        """As CSV, in which no cell is a formula."""
        return as_csv(self.rows, self.names())

    def documented(self) -> "Frame":
        """What the columns mean, as a table."""
        told = {"column": Column("", "Name."), "unit": Column("", "Unit."), "meaning": Column("", "What it means.")}
        rows = [{"column": name, "unit": one.unit, "meaning": one.sentence} for name, one in self.columns.items()]
        return Frame(f"columns of {self.name}", "What each column means.", told, rows)

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self)} rows of {', '.join(printable(name) for name in self.names()) or 'nothing'}>"

    def _repr_html_(self) -> str:
        names = self.names()
        heads = "".join(f'<th title="{escaped(self._title(name))}">{escaped(name)}</th>' for name in names)
        lines = [
            "<tr>" + "".join(f"<td>{escaped(_short(row.get(name)))}</td>" for name in names) + "</tr>"
            for row in self.rows[:SHOWN_ROWS]
        ]
        more = f", the first {SHOWN_ROWS} shown" if len(self) > SHOWN_ROWS else ""
        return (
            f"<table><caption>{escaped(self.sentence)} {len(self)} rows{more}.</caption>"
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        )

    def _title(self, name: str) -> str:
        column = self.columns.get(name)
        return "" if column is None else column.sentence + (f" ({column.unit})" if column.unit else "")

    def _cells(self) -> dict[str, list[Any]]:
        """Cells by column, each column of one kind."""
        return {name: _of_one_kind([_plain(row.get(name)) for row in self.rows]) for name in self.names()}


def escaped(text: str) -> str:
    """Strangers' text as HTML that shows it and does nothing."""
    return html.escape(printable(text, keep="\n"))  # guard: notebook-text-is-text


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ShoalError(f"{name} is not installed: {how_to_install('notebook')}") from None


def _plain(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list | tuple) else value


def _of_one_kind(cells: list[Any]) -> list[Any]:
    """Whole numbers among others become floats; whatever is mixed with texts becomes text."""
    kinds = {type(cell) for cell in cells if cell is not None}
    if len(kinds) < 2:
        return cells
    make: type = float if kinds <= {int, float} else str
    return [None if cell is None else make(cell) for cell in cells]


def _short(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(_plain(value))
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
