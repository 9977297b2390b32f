"""Tables of a page as CSV, line by line.

Called by `app`. Cells that a spreadsheet would take for a formula are quoted by `tables.as_csv`. A table has the rows that
the page shows to the same viewer, all pages of them: what filters the page, in its address, filters the file.
"""

import json
from collections.abc import Callable, Iterable, Iterator

from shoal.metrics import METRICS
from shoal.watch.index import groups
from shoal.watch.index.look import MOST_ROWS
from shoal.watch.index.plain import numbers_of
from shoal.watch.page.asked import Asked, NotHere, asked_nodes, asked_refusals
from shoal.watch.page.charts import family_of, rewards_of
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
    """All metrics by step, or one with its family."""
    known, name = asked.look.names(asked.run), asked.word("name")
    names = ["step", *(family_of(asked.look, asked.run, name, known) if name else (n for n in known if n != "step"))]
    for row in asked.look.db.execute("SELECT line FROM metrics WHERE run = ? ORDER BY step", (asked.run,)):
        told = dict(numbers_of(json.loads(row["line"])))
        yield {name: told.get(name) for name in names}


def _groups(asked: Asked) -> Iterator[Row]:
    """Those of the filter in the address."""
    only = only_of(asked)
    return _paged(lambda after: groups(asked.look, asked.run, only, after, MOST_ROWS, asked.is_host))


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


def _step(asked: Asked) -> Iterator[Row]:
    """The metrics of one step, with what they mean."""
    step = asked.whole("step", 0)
    for row in asked.look.rows("SELECT line FROM metrics WHERE run = ? AND step = ?", asked.run, step):
        for name, value in numbers_of(json.loads(row["line"])):
            told = METRICS.get(name) or METRICS.get(name.partition("/")[0])
            unit, sentence = (told.unit, told.sentence) if told else ("", "")
            yield {"step": step, "name": name, "value": value, "unit": unit, "meaning": sentence}


def _events(asked: Asked) -> Iterator[Row]:
    """Those of the filter in the address."""
    kinds, node, search = asked.words("kind"), asked.word("node"), asked.word("q")
    if kinds or node or search:
        return _paged(lambda after: asked.look.timeline(asked.run, kinds, node, search, after, MOST_ROWS))
    return _all("events", "seq")(asked)


def _refusals(asked: Asked) -> Iterator[Row]:
    """Those of the filter in the address."""
    only = asked_refusals(asked)
    return _paged(lambda after: asked.look.refusals(asked.run, after=after, limit=MOST_ROWS, **only))


def _differences(asked: Asked) -> Iterator[Row]:
    return _paged(lambda after: asked.look.differences(asked.run, after, MOST_ROWS, asked.word("validator")))


def _versions(asked: Asked) -> Iterator[Row]:
    return _paged(lambda after: asked.look.versions(asked.run, after, MOST_ROWS))


def _spread(asked: Asked) -> Iterator[Row]:
    """When workers were leased which versions: of all workers, or of one."""
    worker = asked.word("worker")
    query = "SELECT * FROM spread WHERE run = ? AND (? = '' OR worker = ?) ORDER BY version, seq"
    yield from map(dict, asked.look.db.execute(query, (asked.run, worker, worker)))


def _verdicts(asked: Asked) -> Iterator[Row]:
    """All verdicts, or those of one validator."""
    validator = asked.word("validator")
    query = "SELECT * FROM verdicts WHERE run = ? AND (? = '' OR validator = ?) ORDER BY seq"
    yield from map(dict, asked.look.db.execute(query, (asked.run, validator, validator)))


def _alarms(asked: Asked) -> Iterator[Row]:
    """With the figures of each, and the events of what the host did."""
    for row in asked.look.alarms(asked.run):
        measured = "; ".join(
            f"{one['name']} {one['value']}, limit {one['limit']}" for one in row["evidence"]["measured"]
        )
        yield {**row, "evidence": measured, "acts": " ".join(map(str, row["acts"]))}


def _runs(asked: Asked) -> Iterator[Row]:
    """The runs of this page beside each other: how each does."""
    for row in asked.runs():
        found = asked.look.overview(row["run"])
        facts, metrics = found["facts"], dict(numbers_of(found["metrics"]))
        whole = [one for one in found["heldout"] if not one["env"]]
        yield {
            **row, "phase": found["condition"].get("phase", "starting"), "version": facts.get("version"),
            "steps": facts.get("steps"), "accepted": facts.get("accepted"), "step": found["metrics_step"],
            "reward_mean": metrics.get("reward_mean"), "entropy_nats": metrics.get("entropy_nats"),
            "heldout": whole[-1]["mean"] if whole else None, "heldout_version": whole[-1]["version"] if whole else None,
            "step_s": found["step_s"], "left_s": found["left_s"],
        }  # fmt: skip


def _paged(page_after: Callable[[int | None], Row]) -> Iterator[Row]:
    """The rows of all pages of a list."""
    after: int | None = None
    while True:
        page = page_after(after)
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
    "nodes": _nodes, "metrics": _metrics, "step": _step, "groups": _groups, "rollouts": _rollouts, "events": _events,
    "versions": _versions, "verdicts": _verdicts, "refusals": _refusals, "heldout": _all("heldout", "version, env"),
    "alarms": _alarms, "spread": _spread, "differences": _differences, "runs": _runs,
    "validators": lambda asked: asked.look.validators(asked.run),
    "checks": lambda asked: asked.look.refusal_counts(asked.run, MOST_ROWS),
    "rewards": lambda asked: rewards_of(asked.look, asked.run, asked.word("env")),
    "ages": lambda asked: asked.look.ages(asked.run, MOST_ROWS),
}  # fmt: skip
