"""Questions to an index about a run as a whole: figures, series, nodes, refusals, validators, versions, timeline, alarms.

Each answer is a dict or a list of dicts with plain values. None should take more than 300 ms where a run has 10,000 steps,
1,000 workers and 100,000 rollouts; `benchmarks/page.py` measures that. Lists come page by page: a page's `next` is what
`after` of the next one is, None at the end. Texts are strangers'.
"""

import json
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ConfigError
from shoal.runs.csv_tables import Row
from shoal.step_metrics import pace_of
from shoal.views.web.index.schema import METRIC, open_to_read, query_of, run_word

PAGE = 50
"""Rows of a page unless the caller asks for another number."""

MOST_ROWS = 1000

RATE_STEPS = 20
"""Newest steps from which speed and the time left are computed."""

SCANNED = 20_000
"""Most matches of a search that one page looks at. A page that stops there says where to continue. Of a node's groups, the
newest ones that lead to its steps."""

_TOGETHER = 500
"""Events that one query asks for."""

_PLACES = 1048576
"""More than the groups of a submission."""

RANKINGS = ("credits", "accepted", "refused", "influence", "lapsed", "leases", "pace_s", "place", "name")
"""What nodes may be ordered by; `place` is the order in which they joined."""


class RefusalFilter(NamedTuple):
    """Which refusals, by the columns of their table; what is left out filters nothing."""

    check: str = ""
    worker: str = ""
    validator: str = ""
    """Keys."""
    outcome: str = ""
    seq: int | None = None
    """Of the event of one verdict."""


class IndexQueries:
    """Answers questions about an index. One thread uses it at a time; opening one is fast."""

    def __init__(self, path: Path) -> None:
        """Raises `StateError` if there is no index."""
        self.db = open_to_read(path)

    def close(self) -> None:
        """Close it."""
        self.db.close()

    def rows(self, query: str, *values: Any) -> list[Row]:
        """Rows of a query of ours."""
        return [dict(row) for row in self.db.execute(query, values)]

    def runs(self) -> list[Row]:
        """All runs of the index: number, place (folder or URL), id, name, and the newest event that is indexed."""
        return self.rows("SELECT run, place, id, name, seq FROM runs ORDER BY run")

    # --- a run as a whole ---

    def overview(self, run: int) -> Row:
        """The figures of the first page: facts of the log, the newest metrics, held-out results, speed and time left."""
        facts, condition = self._told("facts", run), self.condition(run)
        newest = self.rows("SELECT step, line FROM metrics WHERE run = ? ORDER BY step DESC LIMIT ?", run, RATE_STEPS)
        lines = [json.loads(row["line"]) for row in newest]
        counts = self.rows(
            "SELECT role, count(*) AS nodes, sum(away) AS away, sum(standing = 'quarantined') AS quarantined FROM nodes "
            "WHERE run = ? GROUP BY role ORDER BY role", run,
        )  # fmt: skip
        steps_done = newest[0]["step"] + 1 if newest else 0
        return {
            "facts": facts, "condition": condition, "metrics": lines[0] if lines else {},
            "metrics_step": newest[0]["step"] if newest else None, "nodes": counts, "heldout": self.heldout(run),
            **_speed(lines, int(facts.get("steps", 0)) - steps_done), "seq": self._seq(run),
            "texts": self.rows("SELECT state, count(*) AS bodies FROM bodies WHERE run = ? GROUP BY state", run),
        }  # fmt: skip

    def condition(self, run: int) -> Row:
        """How a run does, as it was asked last; empty before. `is_live`: its coordinator said so then. `is_stopped`: nobody
        hosts it. `since_s`: since when it waits."""
        asked = self.rows("SELECT is_live, since_s FROM conditions WHERE run = ?", run)
        return self._told("conditions", run) | (asked[0] if asked else {})

    def _told(self, table: str, run: int) -> dict[str, Any]:
        found = self.rows(f"SELECT told FROM {table} WHERE run = ?", run)
        told: dict[str, Any] = json.loads(found[0]["told"]) if found else {}
        return told

    def _seq(self, run: int) -> int:
        found = self.rows("SELECT seq FROM runs WHERE run = ?", run)
        return int(found[0]["seq"]) if found else -1

    def usual_pace_s(self, run: int) -> float:
        """Seconds that the run's workers need for a block, or 0."""
        return float(self._told("facts", run).get("usual_pace_s", 0.0))

    def heldout(self, run: int) -> list[Row]:
        """Evaluations by version, with 95 % intervals; `env` is empty for all environments together."""
        return self.rows("SELECT * FROM heldout WHERE run = ? ORDER BY version, name = 'after', env", run)

    def envs(self, run: int) -> list[str]:
        """Labels of the run's environments."""
        labels: list[str] = self._told("facts", run).get("envs", [])
        return labels

    def names(self, run: int) -> list[str]:
        """Metrics that the run has numbers of."""
        found, last = list[str](), ""
        while row := self.rows("SELECT name FROM series WHERE run = ? AND name > ? ORDER BY name LIMIT 1", run, last):
            last = row[0]["name"]
            found.append(last)
        return found

    def series(self, run: int, name: str, smooth: float = 0.0, wide: int = 1, counts: bool = False) -> list[Row]:
        """A metric by step: the last step, and the mean, of each point, which is made of `wide` steps. `smooth`, from 0 to
        below 1, is the weight of the smoothed value before: see `smoothed`. `counts`: it is 0 in a step that has others
        of its family."""
        cursor = self.db.cursor()
        cursor.row_factory = None  # tuples take half of the time that rows do
        asked = "SELECT step, value FROM series WHERE run = ? AND name = ? ORDER BY step"
        found = cursor.execute(asked, (run, name)).fetchall()
        if found and counts:
            family = f"{name.partition('/')[0]}/"
            asked = "SELECT DISTINCT step, 0.0 FROM series WHERE run = ? AND substr(name, 1, ?) = ?"
            zeros = cursor.execute(asked, (run, len(family), family)).fetchall()
            found = sorted((dict(zeros) | dict(found)).items())
        if not found:
            return []
        steps, raw = (np.array(column) for column in zip(*found, strict=True))
        starts = np.flatnonzero(np.diff(steps // wide, prepend=-1))
        ends = np.append(starts[1:], len(raw))
        means = np.add.reduceat(smoothed(raw, smooth), starts) / (ends - starts)
        points = zip(steps[ends - 1].tolist(), means.tolist(), strict=True)
        return [{"step": step, "value": value} for step, value in points]

    def last_step(self, run: int, names: Sequence[str]) -> int:
        """The newest step that has one of these metrics; -1 if none has."""
        asked = "SELECT max(step) AS step FROM series WHERE run = ? AND name = ?"
        return max(
            (row["step"] for name in names for row in self.rows(asked, run, name) if row["step"] is not None),
            default=-1,
        )

    # --- nodes ---

    def nodes(
        self, run: int, role: str = "", by: str = "credits", search: str = "", after: int = 0, limit: int = PAGE
    ) -> Row:
        """A page of nodes in order of a ranking, best first. `search` is the beginning of a key, or a part of a name.
        `rank` is a node's place among all nodes of its role, whatever was searched for; equals share one."""
        if by not in RANKINGS:
            raise ConfigError(f"nodes are not ordered by {by!r:.40}: {', '.join(RANKINGS)}")
        order = f"{by} {'ASC' if by in ('place', 'name') else 'DESC'}"
        where, values = ["1"], list[Any]([run])
        if role:
            where, values = [*where, "role = ?"], [*values, role]
        if search:
            where.append("(substr(key, 1, length(?)) = ? OR instr(lower(name), lower(?)) > 0)")
            values += [search.lower(), search.lower(), search]
        ranked = (
            f"SELECT *, rank() OVER (PARTITION BY role ORDER BY {order}) AS rank, "
            "influence / nullif(total(influence) OVER (PARTITION BY role), 0) AS influence_share FROM nodes WHERE run = ?"
        )
        condition, limit = " AND ".join(where), limited(limit)
        found = self.rows(
            f"SELECT * FROM ({ranked}) WHERE {condition} ORDER BY {order}, place LIMIT ? OFFSET ?",
            *values, limit + 1, after,
        )  # fmt: skip
        counted = f"SELECT count(*) FROM nodes WHERE run = ? AND {condition}"
        total = self.db.execute(counted, values).fetchone()[0]
        rows = [{**row, "reasons": json.loads(row["reasons"])} for row in found]
        return {"rows": rows[:limit], "next": after + limit if len(found) > limit else None, "total": total}

    def node(self, run: int, key: str) -> Row | None:
        """One node by its whole key: its row, its rank and share of credits among workers, and the versions that it worked
        on last."""
        found = self.rows("SELECT * FROM nodes WHERE run = ? AND key = ?", run, key)
        if not found:
            return None
        row = {**found[0], "reasons": json.loads(found[0]["reasons"])}
        better, total, influence = self.db.execute(
            "SELECT sum(credits > ?), total(credits), total(influence) FROM nodes WHERE run = ? AND role = ?",
            (row["credits"], run, row["role"]),
        ).fetchone()
        versions = self.rows(
            "SELECT * FROM spread WHERE run = ? AND worker = ? ORDER BY version DESC LIMIT 20", run, key
        )
        # The plus keeps SQLite from looking at the groups of other workers.
        steps = self.rows(
            "SELECT step, count(*) AS groups FROM (SELECT step FROM groups WHERE run = ? AND worker = ? AND +status = "
            "'signal' ORDER BY id DESC LIMIT ?) WHERE step >= 0 GROUP BY step ORDER BY step DESC LIMIT 20",
            run, key, SCANNED,
        )  # fmt: skip
        return {
            **row, "rank": better + 1, "share": row["credits"] / total if total else 0.0,
            "influence_share": row["influence"] / influence if influence else 0.0, "versions": versions, "steps": steps,
            "refusals": self.refusals(run, RefusalFilter(worker=key), limit=20)["rows"],
        }  # fmt: skip

    # --- judgement ---

    def refusal_counts(self, run: int, limit: int = 100) -> list[Row]:
        """Refusals by check and reason: how many groups, of how many workers, and the newest event."""
        return self.rows(
            'SELECT "check", reason, outcome, count(DISTINCT submission || slot) AS groups, '
            "count(DISTINCT worker) AS workers, max(seq) AS seq, max(time_s) AS time_s FROM refusals "
            'WHERE run = ? GROUP BY "check", reason, outcome '
            "ORDER BY groups DESC LIMIT ?", run, limited(limit),
        )  # fmt: skip

    def refusals(
        self, run: int, only: RefusalFilter = RefusalFilter(), after: int | None = None, limit: int = PAGE
    ) -> Row:
        """A page of refusals, newest first, with what became of each group."""
        where, values, limit = ["r.run = ?"], list[Any]([run]), limited(limit)
        for column, value in only._asdict().items():
            if value not in ("", None):
                where, values = [*where, f'r."{column}" = ?'], [*values, value]
        if after is not None:
            at, place = divmod(after, _PLACES)
            where, values = [*where, "(r.seq < ? OR (r.seq = ? AND r.place > ?))"], [*values, at, at, place]
        query = (
            f'SELECT r.*, r.seq * {_PLACES} + r.place AS at, g.status, g.id AS "group" FROM refusals r LEFT JOIN groups g '
            f"ON g.run = r.run AND g.submission = r.submission AND g.slot = r.slot WHERE {' AND '.join(where)} "
            "ORDER BY r.seq DESC, r.place LIMIT ?"
        )
        return page_of(self.rows(query, *values, limit + 1), "at", limit)

    def validators(self, run: int) -> list[Row]:
        """What each validator judged, and how often it differed from the first verdict on a submission."""
        return self.rows(
            "SELECT v.validator, n.name, n.standing, n.last_reason, count(*) AS verdicts, sum(v.groups) AS groups, "
            "sum(v.audited) AS audited, sum(v.accept) AS accept, sum(v.void) AS void, sum(v.soft) AS soft, "
            "sum(v.hard) AS hard, sum(v.differs_from != '') AS accusations, "
            "coalesce(sum(f.outcomes != v.outcomes), 0) AS differed, "
            "max(v.seq) AS seq, max(v.time_s) AS time_s FROM verdicts v LEFT JOIN verdicts f ON f.run = v.run AND "
            "f.seq = v.first_seq LEFT JOIN nodes n ON n.run = v.run AND n.key = v.validator WHERE v.run = ? "
            "GROUP BY v.validator ORDER BY verdicts DESC", run,
        )  # fmt: skip

    def differences(self, run: int, after: int | None = None, limit: int = PAGE, validator: str = "") -> Row:
        """A page of the verdicts that differ from the first one on their submission, newest first; of one validator."""
        limit = limited(limit)
        found = self.rows(
            "SELECT v.*, f.validator AS first_validator, f.outcomes AS first_outcomes FROM verdicts v JOIN verdicts f ON "
            "f.run = v.run AND f.seq = v.first_seq WHERE v.run = ? AND v.seq < ? AND (f.outcomes != v.outcomes OR "
            "v.differs_from != '') AND (? = '' OR v.validator = ?) ORDER BY v.seq DESC LIMIT ?",
            run, before(after), validator, validator, limit + 1,
        )  # fmt: skip
        return page_of(found, "seq", limit)

    # --- versions ---

    def versions(self, run: int, after: int | None = None, limit: int = PAGE) -> Row:
        """A page of versions, newest first: when each was published and batched, what was made with it, and how it spread:
        workers that were leased it, and seconds until the first and until half of them were."""
        limit = limited(limit)
        found = self.rows(
            "SELECT * FROM versions WHERE run = ? AND version < ? ORDER BY version DESC LIMIT ?",
            run,
            before(after),
            limit + 1,
        )
        page = page_of(found, "version", limit)
        for row in page["rows"]:
            times = self.db.execute(
                "SELECT time_s FROM spread WHERE run = ? AND version = ? ORDER BY time_s", (run, row["version"])
            ).fetchall()
            delays = [time[0] - row["time_s"] for time in times] if row["time_s"] is not None else []
            row |= {"workers": len(times), "first_s": delays[0] if delays else None,
                    "half_s": delays[len(delays) // 2] if delays else None}  # fmt: skip
        return page

    def ages(self, run: int, most: int = 20) -> list[Row]:
        """How many workers have which version: by the newest that each was leased, newest version first."""
        return self.rows(
            "SELECT version, count(*) AS workers FROM (SELECT worker, max(version) AS version FROM spread WHERE run = ? "
            "GROUP BY worker) GROUP BY version ORDER BY version DESC LIMIT ?", run, most,
        )  # fmt: skip

    # --- the log ---

    def kinds(self, run: int) -> list[Row]:
        """Number of events of each kind."""
        return self.rows("SELECT kind, count(*) AS events FROM events WHERE run = ? GROUP BY kind ORDER BY kind", run)

    def timeline(
        self, run: int, kinds: Sequence[str] = (), node: str = "", search: str = "", after: int | None = None,
        limit: int = PAGE,
    ) -> Row:  # fmt: skip
        """A page of the log, newest first, of some kinds or one node, or with all words of a search."""
        limit, end = limited(limit), before(after)
        if not search:
            return page_of(self._events(run, kinds, node, "1", end, limit + 1), "seq", limit)
        asked = "SELECT ref FROM words WHERE words MATCH ? AND what = 'event' AND ref < ? ORDER BY rowid DESC LIMIT ?"
        matches = self.rows(asked, query_of(search, run_word(run)), end, SCANNED)  # guard: log-search-ends
        rows: list[Row] = []
        for first in range(0, len(matches), _TOGETHER):
            among = ", ".join(str(int(row["ref"])) for row in matches[first : first + _TOGETHER])
            rows += self._events(run, kinds, node, f"seq IN ({among})", end, limit + 1 - len(rows))
            if len(rows) > limit:
                return page_of(rows, "seq", limit)
        return {"rows": rows, "next": matches[-1]["ref"] if len(matches) == SCANNED else None}

    def _events(self, run: int, kinds: Sequence[str], node: str, more: str, end: int, limit: int) -> list[Row]:
        where, values = ["run = ?", "seq < ?", more], list[Any]([run, end])
        if kinds:
            where.append(f"kind IN ({', '.join('?' * len(kinds))})")
            values += kinds
        if node:
            where, values = [*where, "node = ?"], [*values, node]
        query = f"SELECT * FROM events WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?"
        return self.rows(query, *values, limit)

    def event(self, run: int, seq: int) -> Row | None:
        """One event."""
        found = self.rows("SELECT * FROM events WHERE run = ? AND seq = ?", run, seq)
        return found[0] if found else None

    def metric_names(self, run: int, search: str) -> list[str]:
        """Metrics whose name or meaning has all words of a search."""
        query = "SELECT ref FROM words WHERE words MATCH ? ORDER BY ref LIMIT 100"
        return [row["ref"] for row in self.rows(query, query_of(search, METRIC, run_word(run)))]

    # --- alarms ---

    def alarms(self, run: int, only_open: bool = False) -> list[Row]:
        """Alarms, open ones first, then the newest; `acts` are the events of what the host did because of each."""
        found = self.rows(
            "SELECT * FROM alarms WHERE run = ? AND is_open >= ? ORDER BY is_open DESC, last_s DESC",
            run,
            int(only_open),
        )
        acts = self.acts(run)
        return [
            {**row, "evidence": json.loads(row["evidence"]), "acts": [a["seq"] for a in acts if _led_to(row, a)]}
            for row in found
        ]

    def acts(self, run: int) -> list[Row]:
        """The newest events by which the host acted on alarms: `seq`, and the evidence that it gave."""
        acts: list[Row] = self._told("facts", run).get("acts", [])
        return acts


def _led_to(alarm: Row, act: Row) -> bool:
    """Whether the host acted on this alarm. One that a URL told does not say which node it is about."""
    same_node = alarm["node"] in ("", act["node"])
    return same_node and (alarm["cause"], alarm["since_step"]) == (act["cause"], act["since"])


def smoothed(values: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    """An exponential moving average without the bias of its beginning."""
    weight = min(max(weight, 0.0), 0.9999)
    if weight == 0.0:
        return values
    totals = accumulate(values.tolist(), lambda total, value: weight * total + (1 - weight) * value, initial=0.0)
    return np.fromiter(islice(totals, 1, None), np.float64) / (1 - weight ** np.arange(1, len(values) + 1))


def _speed(lines: Sequence[dict[str, Any]], steps_left: int) -> Row:
    """Seconds a step, tokens a second and seconds left, by these lines, the newest first; None where they do not say."""
    pace = pace_of(lines[::-1], steps_left)
    return {"step_s": pace.step_s, "tokens_per_s": pace.tokens_per_s, "left_s": pace.left_s}


def limited(limit: int) -> int:
    """Rows of a page that somebody asked for."""
    return min(max(1, limit), MOST_ROWS)


def before(after: int | None) -> int:
    """The end of a page that goes on after this place, newest first."""
    return after if after is not None else (1 << 63) - 1


def page_of(found: list[Row], key: str, limit: int) -> Row:
    """A page of `limit` + 1 found rows; the extra one says that another page follows."""
    return {"rows": found[:limit], "next": found[limit - 1][key] if len(found) > limit else None}
