"""Tables of a page as CSV, line by line.

Called by `app`. Cells that a spreadsheet would take for a formula are quoted by `tables.as_csv`. A table has the rows that
the page shows to the same viewer.
"""

import json
from collections.abc import Callable, Iterable, Iterator

from shoal.watch.index import groups
from shoal.watch.index.look import MOST_ROWS
from shoal.watch.index.plain import numbers_of
from shoal.watch.page.asked import Asked, NotHere, asked_nodes
from shoal.watch.page.group_views import only_of
from shoal.watch.rows import Row
from shoal.watch.tables import as_csv

MOST = 1_000_000
"""Rows of one file."""


def lines_of_csv(asked: Asked, table: str) -> Iterator[str]:
    """A table by its name. Raises `NotHere` for an unknown one, at once."""
    if table not in DOWNLOADS:
        raise NotHere(f"there is no table {table[:40]}: {', '.join(DOWNLOADS)}")
    return _written(DOWNLOADS[table](asked))


def _written(rows: Iterable[Row]) -> Iterator[str]:
    columns: list[str] = []
    for count, row in enumerate(rows):
        if count == MOST:
            return
        if not columns:
            columns = list(row)
            yield as_csv([], columns)
        yield as_csv([{name: row.get(name) for name in columns}], columns).partition("\n")[2]


def _nodes(asked: Asked) -> Iterator[Row]:
    """Those of the filter in the address, by its ranking."""
    role, by, search = asked_nodes(asked)
    after: int | None = 0
    while after is not None:
        page = asked.look.nodes(asked.run, role, by, search, after, MOST_ROWS)
        yield from page["rows"]
        after = page["next"]


def _metrics(asked: Asked) -> Iterator[Row]:
    names = ["step", *(name for name in asked.look.names(asked.run) if name != "step")]
    for row in asked.look.db.execute("SELECT line FROM metrics WHERE run = ? ORDER BY step", (asked.run,)):
        told = dict(numbers_of(json.loads(row["line"])))
        yield {name: told.get(name) for name in names}


def _groups(asked: Asked) -> Iterator[Row]:
    """Those of the filter in the address."""
    after: int | None = None
    while True:
        page = groups(asked.look, asked.run, only_of(asked), after, MOST_ROWS, asked.is_host)
        yield from page["rows"]
        after = page["next"]
        if after is None:
            return


def _rollouts(asked: Asked) -> Iterator[Row]:
    public = "" if asked.is_host else "AND g.public = 1"
    number = asked.whole("group")
    of_one = "" if number is None else f"AND g.id = {number}"
    query = (
        "SELECT g.version, g.slot, r.id % 4096 AS rollout, g.worker, g.env, g.task, g.status, g.step, g.seq, r.reward, "
        "r.advantage, r.ending, r.tokens, r.policy_tokens, r.logprob, r.turns, r.flaw, t.text FROM groups g JOIN rollouts "
        "r ON r.id >= g.id * 4096 AND r.id < (g.id + 1) * 4096 LEFT JOIN texts t ON t.rowid = r.id "
        f"WHERE g.run = ? {public} {of_one} ORDER BY r.id"
    )
    yield from map(dict, asked.look.db.execute(query, (asked.run,)))


def _differences(asked: Asked) -> Iterator[Row]:
    after: int | None = None
    while True:
        page = asked.look.differences(asked.run, after, MOST_ROWS)
        yield from page["rows"]
        after = page["next"]
        if after is None:
            return


def _all(table: str, order: str) -> Callable[[Asked], Iterator[Row]]:
    def rows(asked: Asked) -> Iterator[Row]:
        query = f"SELECT * FROM {table} WHERE run = ? ORDER BY {order}"
        yield from map(dict, asked.look.db.execute(query, (asked.run,)))

    return rows


DOWNLOADS: dict[str, Callable[[Asked], Iterable[Row]]] = {
    "nodes": _nodes, "metrics": _metrics, "groups": _groups, "rollouts": _rollouts, "events": _all("events", "seq"),
    "versions": _all("versions", "version"), "verdicts": _all("verdicts", "seq"),
    "refusals": _all("refusals", "seq, place"), "heldout": _all("heldout", "version, env"),
    "alarms": _all("alarms", "last_s"), "spread": _all("spread", "version, seq"), "differences": _differences,
    "validators": lambda asked: asked.look.validators(asked.run),
    "checks": lambda asked: asked.look.refusal_counts(asked.run, MOST_ROWS),
}  # fmt: skip
