"""One request to the page: which run, who asks, and the numbers and words in its address.

What is in an address is a stranger's: it is limited and parsed here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import QueryParams

from shoal.config.alarm_limits import said_of
from shoal.errors import StateError
from shoal.runs.csv_tables import Row
from shoal.runs.redact import without_paths
from shoal.views.web.index.queries import RANKINGS, IndexQueries, RefusalFilter
from shoal.views.web.served_runs import ServedRun, ServedRuns

ANY_PLACE = "RUN_FOLDER_OR_URL"
"""In a command, for viewers to whom no address of the run is known."""

MOST_CHARS = 200
"""Of a value in an address."""

LARGEST, MOST_DIGITS = 1 << 62, 40

WHOLE, REAL = ("after", "at", "group", "rollout", "seq", "step", "task", "version"), ("from", "to", "smooth")
"""Names in an address whose values are numbers."""


class NotHere(StateError):
    """The address names something that the run does not have."""


class BadNumber(StateError):
    """A value of the address must be a number and is something else."""


@dataclass(frozen=True)
class PageRequest:
    served_runs: ServedRuns
    look: IndexQueries
    run: int
    """Number of the run in the index; 0 for pages of all runs."""
    path: Mapping[str, Any]
    query: QueryParams
    is_host: bool
    now_s: float
    may_compute: bool = False
    """Whether this viewer may have this machine play rollouts again."""

    def __post_init__(self) -> None:
        """Raises `BadNumber`: a table without its filter would show, or save, what nobody asked for."""
        for name in WHOLE:
            self.whole(name)
        for name in REAL:
            self.real(name)

    def runs(self) -> list[Row]:
        """The runs that this page shows. `place` is what a command takes, `where` is for people; the path of a folder is
        in neither, unless its host asks."""
        # By their places: the number of a run is another one in another index, and a request may have the older one open.
        found = [(row, self.served_runs.at(row["place"])) for row in self.look.runs()]  # guard: runs-by-their-places
        return [self._named(row, shown) for row, shown in found if shown is not None]

    def one(self) -> Row:
        """The run of this request."""
        nobody = {"run": 0, "name": "", "place": "", "where": "", "id": "", "seq": -1, "is_own": False}
        return next((row for row in self.runs() if row["run"] == self.run), nobody)

    def _named(self, row: Row, shown: ServedRun) -> Row:
        whole = self.is_host or not shown.is_own  # guard: page-hides-the-folder
        place = row["place"] if whole else shown.address
        folder = f"its host's folder {row['run']}" if len(self.served_runs.runs) > 1 else "its host's folder"
        where, name = place or folder, row["name"] or place or f"Run {row['run']}"
        return {**row, "place": place or ANY_PLACE, "where": where, "name": name, "is_own": shown.is_own}

    def excuse(self, error: Exception) -> str:
        """What an error says to this viewer."""
        shown = self.served_runs.of(self.run)
        if self.is_host or (shown is not None and not shown.is_own):
            return str(error)
        return without_paths(str(error), shown.where if shown is not None else "")  # guard: errors-without-paths

    def alarms(self, only_open: bool = False) -> list[Row]:
        """Alarms as this viewer may know them: its host all of a run's folder, others what a coordinator tells anyone,
        which is not which node one is about, nor its figures. `acts`, which the log has, are for all."""
        found = self.look.alarms(self.run, only_open)
        return found if self.is_host else _as_told(found)  # guard: alarms-as-anyone-may-know

    def name_of(self, key: str) -> str:
        """The name that a node gave itself; empty of an unknown one."""
        found = self.look.rows("SELECT name FROM nodes WHERE run = ? AND key = ?", self.run, key)
        return str(found[0]["name"]) if found else ""

    def word(self, name: str) -> str:
        """A value of the query; empty if it is not there."""
        return self.query.get(name, "").strip()[:MOST_CHARS]

    def words(self, name: str) -> list[str]:
        """All values of a name."""
        return [value[:MOST_CHARS] for value in self.query.getlist(name)[:40] if value]

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number of the query, from 0; the default if it is not there. Raises `BadNumber`."""
        text = self.word(name)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < MOST_DIGITS and int(text) < LARGEST):
            raise BadNumber(
                f"{name} must be a whole number, 0 or more, and is {text[:40]!r}: correct it, or leave it out"
            )
        return int(text)

    def real(self, name: str) -> float | None:
        """A finite number of the query; None if it is not there. Raises `BadNumber`."""
        text = self.word(name)
        if not text:
            return None
        with suppress(ValueError):
            if len(text) < MOST_DIGITS and math.isfinite(found := float(text)):
                return found
        raise BadNumber(f"{name} must be a number such as 0.5, and is {text[:40]!r}: correct it, or leave it out")

    def is_poll(self) -> bool:
        """Whether a page that is open asks for what changed: it keeps its charts, so they are not drawn for it."""
        return self.word("live") == "1"

    def smooth(self) -> float:
        """How much a chart is smoothed, from 0 to 0.99."""
        return min(max(self.real("smooth") or 0.0, 0.0), 0.99)


View = Callable[[PageRequest], tuple[str, Mapping[str, Any]]]
"""A request in, a template and its values out."""


def _as_told(alarms: Sequence[Row]) -> list[Row]:
    """One row for each cause and step, with the general sentence of the cause."""
    told = dict[tuple[str, int], Row]()
    for row in alarms:
        empty = {"node": "", "words": said_of(row["cause"]), "evidence": {"step": row["since_step"], "measured": []}}
        one = told.setdefault((row["cause"], row["since_step"]), {**row, **empty, "acts": []})
        one["acts"] = [*one["acts"], *(seq for seq in row["acts"] if seq not in one["acts"])]
    return list(told.values())


def asked_nodes(asked: PageRequest) -> tuple[str, str, str]:
    """Role, ranking and search of a list of nodes."""
    by = asked.word("by")
    return asked.word("role"), by if by in RANKINGS else "credits", asked.word("q")


def asked_refusals(asked: PageRequest) -> RefusalFilter:
    """The filter of a list of refusals."""
    check, worker, validator, outcome = map(asked.word, ("check", "worker", "validator", "outcome"))
    return RefusalFilter(check, worker, validator, outcome, asked.whole("seq"))
