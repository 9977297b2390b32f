"""Tables of a page as CSV, line by line.

`tables.csv_line` quotes cells that a spreadsheet would take for a formula. A table has the rows that the page shows to the
same viewer, all pages of them: what filters the page, in its address, filters the file.

A download may take long, in any thread. So it has a connection of its own, and no query of it stays open between two lines:
that would show an old state to the thread's other viewers, and keep the index's journal growing.
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from itertools import chain
from typing import Any

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from shoal.runs.csv_tables import Row, csv_line
from shoal.step_metrics import meaning_of
from shoal.views.web.chart_data import family_of, rewards_of
from shoal.views.web.group_pages import only_of
from shoal.views.web.index.group_queries import GroupFilter, groups
from shoal.views.web.index.queries import MOST_ROWS, IndexQueries
from shoal.views.web.index.schema import MOST_ROLLOUTS, numbers_of
from shoal.views.web.page_request import NotHere, PageRequest, asked_nodes, asked_refusals

log = logging.getLogger(__name__)

MOST = 1_000_000
"""Maximum number of rows of a file."""

TEXTS = 100
"""Number of rollouts, with their texts, that are read at a time."""

MOST_DOWNLOADS = 4
"""Maximum number of downloads at a time by viewers that are not the host: each holds a page of rows while its reader is
slow."""

MOST_S = 600.0
"""Maximum seconds of such a download."""

TURN_S = 60.0
"""Maximum seconds of such a download if another viewer was turned away meanwhile."""


class Places:
    """The places for downloads by viewers that are not the host.

    Strangers who read slowly can fill them, so a viewer who is turned away shortens the oldest download to TURN_S.
    Strangers who ask all the time can still be quicker than others to take the place: the host alone needs none.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[float, asyncio.Timeout]] = []
        """When each download began, by the event loop's clock, and its limit; the oldest first."""

    def turn_away(self) -> float:
        """Shorten the oldest download if all places are taken.

        Returns the seconds until it must end; 0 if there is a place.
        """
        if len(self._taken) < MOST_DOWNLOADS:  # guard: few-downloads-at-a-time
            return 0.0
        now = asyncio.get_running_loop().time()
        began, limit = self._taken[0]
        end = max(now, began + TURN_S)
        if not limit.expired() and (limit.when() or 0.0) > end:
            limit.reschedule(end)  # guard: downloads-take-turns
        return max(1.0, end - now)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold a place. Raises `TimeoutError` when the time for it is over."""
        async with asyncio.timeout(MOST_S) as limit:
            self._taken.append(place := (asyncio.get_running_loop().time(), limit))
            try:
                yield
            finally:
                self._taken.remove(place)


class Download(StreamingResponse):
    """A file, line by line. If its time is over, the connection ends, so its reader sees that the file is not whole."""

    def __init__(self, lines: Iterator[str], places: Places | None, headers: Mapping[str, str]) -> None:
        """`places`: None for the host, who needs none."""
        super().__init__(lines, media_type="text/csv", headers=headers)
        self._lines, self._places, self._is_begun = lines, places, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._places is None:
            await self._send(scope, receive, send)
        elif wait_s := math.ceil(self._places.turn_away()):
            busy = f"All places for downloads are taken: try again in {wait_s} seconds.\n"
            await PlainTextResponse(busy, 503, {"retry-after": str(wait_s)})(scope, receive, send)
        else:
            try:
                async with self._places.taken():
                    await self._send(scope, receive, send)
            except TimeoutError:
                log.warning("a download took too long and was cut off path=%s", scope["path"])
                if not self._is_begun:
                    late = "This table took too long: filter it, and ask for a part.\n"
                    await PlainTextResponse(late, 503)(scope, receive, send)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A table that cannot be read raises here, so that its answer can still have another status.
        first = await run_in_threadpool(next, self._lines, "")
        self.body_iterator, self._is_begun = iterate_in_threadpool(chain([first], self._lines)), True
        await super().__call__(scope, receive, send)


def lines_of_csv(asked: PageRequest, table: str) -> Iterator[str]:
    """A table by its name. Raises `NotHere` for an unknown one, at once."""
    if table not in DOWNLOADS:
        raise NotHere(f"there is no table {table[:40]}: {', '.join(DOWNLOADS)}")
    return _apart(asked, table)


def _apart(asked: PageRequest, table: str) -> Iterator[str]:
    with closing(asked.served_runs.look_apart()) as look:
        yield from _written(DOWNLOADS[table](replace(asked, look=look)))


def _written(rows: Iterable[Row]) -> Iterator[str]:
    columns: list[str] = []
    for count, row in enumerate(rows):
        if count == MOST:
            return
        if not columns:
            columns = list(row)
            yield csv_line(columns)
        yield csv_line(row.get(name) for name in columns)


def _nodes(asked: PageRequest) -> Iterator[Row]:
    """Those of the filter in the address, by its ranking."""
    only = asked_nodes(asked)
    return _paged(lambda after: asked.look.nodes(asked.run, *only, after or 0, MOST_ROWS))


def _metrics(asked: PageRequest) -> Iterator[Row]:
    """All metrics by step, or one with its family."""
    known, name = asked.look.names(asked.run), asked.word("name")
    names = ["step", *(family_of(asked.look, asked.run, name, known) if name else (n for n in known if n != "step"))]
    for row in _in_order(asked.look, "SELECT step, line FROM metrics WHERE run = ?", (asked.run,), ("step",)):
        told = dict(numbers_of(json.loads(row["line"])))
        yield {name: told.get(name) for name in names}


def _groups(asked: PageRequest) -> Iterator[Row]:
    """Those of the filter in the address."""
    only = only_of(asked)
    return _paged(lambda after: groups(asked.look, asked.run, only, after, MOST_ROWS, asked.is_host))


def _rollouts(asked: PageRequest) -> Iterator[Row]:
    """Of one group, of the groups of the filter in the address, or all."""
    number = asked.whole("group")
    if number is not None:
        return _rollouts_of(asked, number)
    if only_of(asked) != GroupFilter():
        return (rollout for row in _groups(asked) for rollout in _rollouts_of(asked, row["id"]))
    return _rollouts_of(asked, None)


def _rollouts_of(asked: PageRequest, number: int | None) -> Iterator[Row]:
    public = "" if asked.is_host else "AND g.public = 1"
    first = (number or 0) * MOST_ROLLOUTS
    of_one = "" if number is None else f"AND r.id >= {first} AND r.id < {first + MOST_ROLLOUTS}"
    query = (
        f"SELECT r.id AS id, g.version, g.slot, r.id % {MOST_ROLLOUTS} AS rollout, g.worker, g.env, g.task, g.status, "
        "g.step, g.seq, r.reward, r.advantage, r.failed, r.ending, r.tokens, r.policy_tokens, r.logprob, r.turns, r.flaw, "
        f"t.text FROM rollouts r CROSS JOIN groups g ON g.id = r.id / {MOST_ROLLOUTS} LEFT JOIN texts t ON t.rowid = r.id "
        f"WHERE r.run = ? {public} {of_one}"
    )
    for row in _in_order(asked.look, query, (asked.run,), ("r.id",), TEXTS):
        yield {name: value for name, value in row.items() if name != "id"}


def _step(asked: PageRequest) -> Iterator[Row]:
    """The metrics of one step, with what they mean."""
    step = asked.whole("step", 0)
    for row in asked.look.rows("SELECT line FROM metrics WHERE run = ? AND step = ?", asked.run, step):
        for name, value in numbers_of(json.loads(row["line"])):
            told = meaning_of(name)
            unit, sentence = (told.unit, told.sentence) if told else ("", "")
            yield {"step": step, "name": name, "value": value, "unit": unit, "meaning": sentence}


def _events(asked: PageRequest) -> Iterator[Row]:
    """Those of the filter in the address."""
    kinds, node, search = asked.words("kind"), asked.word("node"), asked.word("q")
    if kinds or node or search:
        return _paged(lambda after: asked.look.timeline(asked.run, kinds, node, search, after, MOST_ROWS))
    return _in_order(asked.look, "SELECT * FROM events WHERE run = ?", (asked.run,), ("seq",))


def _refusals(asked: PageRequest) -> Iterator[Row]:
    """Those of the filter in the address."""
    only = asked_refusals(asked)
    return _paged(lambda after: asked.look.refusals(asked.run, only, after, MOST_ROWS))


def _spread(asked: PageRequest) -> Iterator[Row]:
    """When workers were leased which versions: of all workers, or of one."""
    worker = asked.word("worker")
    query = "SELECT * FROM spread WHERE run = ? AND (? = '' OR worker = ?)"
    return _in_order(asked.look, query, (asked.run, worker, worker), ("version", "worker"))


def _verdicts(asked: PageRequest) -> Iterator[Row]:
    """All verdicts, or those of one validator."""
    validator = asked.word("validator")
    query = "SELECT * FROM verdicts WHERE run = ? AND (? = '' OR validator = ?)"
    return _in_order(asked.look, query, (asked.run, validator, validator), ("seq",))


def _alarms(asked: PageRequest) -> Iterator[Row]:
    """With the figures of each for the host, and the events of what the host did."""
    for row in asked.alarms():
        measured = "; ".join(
            f"{one['name']} {one['value']}, limit {one['limit']}" for one in row["evidence"]["measured"]
        )
        yield {**row, "evidence": measured, "acts": " ".join(map(str, row["acts"]))}


def _runs(asked: PageRequest) -> Iterator[Row]:
    """The runs of this page beside each other: how each does."""
    for row in asked.runs():
        found = asked.look.overview(row["run"])
        facts, metrics = found["facts"], dict(numbers_of(found["metrics"]))
        condition = found["condition"]
        present = "stopped" if condition.get("is_stopped") else condition.get("phase", "starting")
        phase = asked.served_runs.being_read(row["run"]) or present
        whole = [one for one in found["heldout"] if not one["env"]]
        yield {
            **row, "phase": phase, "version": facts.get("version"),
            "steps": facts.get("steps"), "accepted": facts.get("accepted"), "step": found["metrics_step"],
            **{name: metrics.get(name) for name in ("reward_all_mean", "reward_mean", "entropy_nats")},
            "heldout": whole[-1]["mean"] if whole else None, "heldout_version": whole[-1]["version"] if whole else None,
            "step_s": found["step_s"], "left_s": found["left_s"] if condition.get("is_live") else None,
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


def _in_order(
    look: IndexQueries, query: str, values: Sequence[Any], keys: Sequence[str], most: int = MOST_ROWS
) -> Iterator[Row]:
    """The rows of a query in order of its keys, together unique, of which each row has the value by its last name."""
    names, order = [key.rpartition(".")[2] for key in keys], ", ".join(keys)
    after, last = "", list[Any]()
    while True:
        page = look.rows(f"{query} {after} ORDER BY {order} LIMIT ?", *values, *last, most)
        yield from page
        if len(page) < most:
            return
        after, last = f"AND ({order}) > ({', '.join('?' * len(keys))})", [page[-1][name] for name in names]


DOWNLOADS: dict[str, Callable[[PageRequest], Iterable[Row]]] = {
    "nodes": _nodes, "metrics": _metrics, "step": _step, "groups": _groups, "rollouts": _rollouts, "events": _events,
    "verdicts": _verdicts, "refusals": _refusals, "alarms": _alarms, "spread": _spread, "runs": _runs,
    "versions": lambda asked: _paged(lambda after: asked.look.versions(asked.run, after, MOST_ROWS)),
    "heldout": lambda asked: asked.look.heldout(asked.run),
    "differences": lambda asked: _paged(
        lambda after: asked.look.differences(asked.run, after, MOST_ROWS, asked.word("validator"))
    ),
    "validators": lambda asked: asked.look.validators(asked.run),
    "checks": lambda asked: asked.look.refusal_counts(asked.run, MOST_ROWS),
    "rewards": lambda asked: rewards_of(asked.look, asked.run, asked.word("env")),
    "ages": lambda asked: asked.look.ages(asked.run, MOST_ROWS),
}  # fmt: skip
