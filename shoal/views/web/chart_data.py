"""What the charts of a page draw: some lines over steps or versions, as numbers, which the page's script draws by uPlot.

Pure, but for the questions to the index. Labels are strangers' text: metrics have names that environments choose.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.evaluation_files import Evaluation, why_not_comparable
from shoal.runs.csv_tables import Row
from shoal.step_metrics import HEADLINES, meaning_of, title_of
from shoal.views.web.index.group_queries import same_task
from shoal.views.web.index.queries import IndexQueries

MOST_LINES = 12
POINTS = 400


class ChartLine(NamedTuple):
    label: str
    values: list[float | None]
    """One for each x of the chart."""
    is_edge: bool = False
    """Whether it is the edge of a band around the first line."""


class Chart(NamedTuple):
    name: str
    title: str
    unit: str
    sentence: str
    x_label: str
    x: list[int]
    lines: list[ChartLine]
    band: str = ""
    """What the band around the first line is."""

    def last(self, line: ChartLine) -> tuple[int, float | None]:
        """The newest value of a line, which may be shorter than others, and its x."""
        pairs = zip(reversed(self.x), reversed(line.values), strict=True)
        return next(((x, value) for x, value in pairs if value is not None), (self.x[-1], None))

    def newest_band(self) -> list[float]:
        """The edges of the band at the newest x, the lower one first; empty without a band."""
        return sorted(edge for line in self.lines if line.is_edge and (edge := line.values[-1]) is not None)

    def summary(self) -> str:
        """The first line in words, for those who do not see it."""
        values = [value for line in self.lines[:1] for value in line.values if value is not None]
        if not values:
            return "no values"
        return (
            f"{len(values)} points from {self.x_label} {self.x[0]} to {self.x[-1]}: first {values[0]:.4g}, last "
            f"{values[-1]:.4g}, lowest {min(values):.4g}, highest {max(values):.4g}"
        )


BY_VERSION = "by-version"

MOST_ENVS = 6
"""Environments of which the first page has a chart each: bands in one chart would cover each other."""

REWARD = HEADLINES[0]

OVERVIEW = (REWARD, BY_VERSION, "heldout", *HEADLINES[1:])
"""Charts of the first page, where the run has their numbers."""


def chart_of(look: IndexQueries, run: int, name: str, smooth: float = 0.0, known: Sequence[str] = ()) -> Chart:
    """A chart by its name: `by-version`, `by-version/LABEL`, `heldout`, or a metric with its family (reward_mean/LABEL).
    `known` are the names of the run's metrics, so that a page of charts asks for them once."""
    if name.partition("/")[0] == BY_VERSION:
        return _by_version(look, run, name.partition("/")[2])
    if name == "heldout":
        return _heldout(look, run)
    family = family_of(look, run, name, known)[:MOST_LINES]
    wide = _wide(look.last_step(run, family))
    series = {metric: _points(look, run, metric, smooth, wide) for metric in family}
    told = meaning_of(name)
    unit, sentence = (told.unit, told.sentence) if told else ("", "")
    drawn = _aligned(Chart(name, title_of(name), unit, sentence, "step", [], []), series, wide)
    lines = [line._replace(label=line.label.partition("/")[2] or "all") for line in drawn.lines]
    return drawn._replace(lines=lines)  # labelled last: an environment may be called "all"


def has_chart(look: IndexQueries, run: int, name: str, known: Sequence[str]) -> bool:
    """Whether a chart has anything to draw; cheaper than drawing it."""
    head, _, env = name.partition("/")
    if head == BY_VERSION:
        only = "AND env = ? AND public = 1" if env else ""
        asked = f"SELECT 1 FROM groups WHERE run = ? AND reward IS NOT NULL {only} LIMIT 1"
        return bool(look.rows(asked, run, *([env] if env else [])))
    if name == "heldout":
        return bool(look.rows("SELECT 1 FROM heldout WHERE run = ? AND env = '' LIMIT 1", run))
    return bool(family_of(look, run, name, known))


def empty_chart(name: str) -> Chart:
    """A chart of which a page needs the address alone."""
    return Chart(name, "", "", "", "", [], [])


def family_of(look: IndexQueries, run: int, name: str, known: Sequence[str] = ()) -> list[str]:
    """A metric and those that are it for one label: `reward_mean` and `reward_mean/LABEL`."""
    return [metric for metric in known or look.names(run) if metric == name or metric.startswith(f"{name}/")]


def compared(look: IndexQueries, runs: Mapping[int, str], name: str, smooth: float = 0.0) -> Chart:
    """One metric of several runs, each a line with the label given."""
    drawn = list(runs.items())[:MOST_LINES]
    wide = _wide(max((look.last_step(run, [name]) for run, _ in drawn), default=-1))
    series = {f"{run} {label}": _points(look, run, name, smooth, wide) for run, label in drawn}
    known = meaning_of(name)
    unit, sentence = (known.unit, known.sentence) if known else ("", "")
    return _aligned(Chart(name, title_of(name), unit, sentence, "step", [], []), series, wide)


def _wide(last_step: int) -> int:
    """How many steps a point stands for: the same in all lines of a chart."""
    return max(1, math.ceil((last_step + 1) / POINTS))


def _points(look: IndexQueries, run: int, name: str, smooth: float, wide: int) -> dict[int, tuple[int, float]]:
    """The points by their places: the last step of each, and its value."""
    is_age = name.startswith("staleness_rollouts/")  # one that a step does not name has no rollouts
    found = look.series(run, name, smooth, wide, counts=is_age)
    return {row["step"] // wide: (row["step"], row["value"]) for row in found}


def _aligned(empty: Chart, series: Mapping[str, Mapping[int, tuple[int, float]]], wide: int) -> Chart:
    """Lines over the same steps. A place between the first and the last that no line has is a gap, too."""
    at = [place for points in series.values() for place in points]
    places = range(min(at), max(at) + 1) if at else range(0)
    x = [max((points[i][0] for points in series.values() if i in points), default=(i + 1) * wide - 1) for i in places]
    lines = [
        ChartLine(label, [points[i][1] if i in points else None for i in places])
        for label, points in series.items()
        if points
    ]
    return empty._replace(x=x, lines=lines)


def overview_charts(look: IndexQueries, run: int) -> list[str]:
    """Names of the charts of the first page: also the rewards of each of several environments, and the parts of rewards."""
    envs = look.envs(run)
    more = [f"{BY_VERSION}/{env}" for env in envs[:MOST_ENVS]] if len(envs) > 1 else []
    names = look.names(run)
    more += ["reward_part"] if any(name.startswith("reward_part/") for name in names) else []
    return [part for name in OVERVIEW for part in ([name, *more] if name == BY_VERSION else [name])]


def rewards_of(look: IndexQueries, run: int, env: str = "") -> list[Row]:
    """Accepted groups by version: how many, their mean reward, and the mean standard deviation within one. Of all, or of
    one environment: then of the groups whose body is public, because it says of which environment they are."""
    only = "AND env = ? AND public = 1" if env else ""
    return look.rows(
        "SELECT version, count(*) AS groups, avg(reward) AS mean, avg(spread) AS spread FROM groups WHERE run = ? "
        f"AND reward IS NOT NULL {only} GROUP BY version ORDER BY version", run, *([env] if env else []),
    )  # fmt: skip


def _by_version(look: IndexQueries, run: int, env: str) -> Chart:
    rows = rewards_of(look, run, env)
    width = max(1, math.ceil(len(rows) / POINTS))
    rows = rows[width - 1 :: width]
    lines = [
        ChartLine("mean", [row["mean"] for row in rows]),
        ChartLine("mean + spread", [row["mean"] + row["spread"] for row in rows], True),
        ChartLine("mean - spread", [row["mean"] - row["spread"] for row in rows], True),
    ]
    sentence = (
        f"Mean reward of the accepted groups of each version{', in this environment' if env else ''}, from the log; the "
        "band is the mean standard deviation within a group."
    )
    x, name = [row["version"] for row in rows], f"{BY_VERSION}/{env}" if env else BY_VERSION
    title = f"Reward and spread, {env}" if env else "Reward and spread"
    return Chart(name, title, "reward", sentence, "version", x, lines if rows else [], "± spread")


def of_task(look: IndexQueries, run: int, env: str, task: int) -> Chart:
    """The mean reward of one task by version; of several groups of a version, their mean."""
    by_version = dict[int, list[float]]()
    for row in same_task(look, run, env, task):
        if row["reward"] is not None:
            by_version.setdefault(row["version"], []).append(row["reward"])
    x = sorted(by_version)
    line = ChartLine("mean", [math.fsum(by_version[version]) / len(by_version[version]) for version in x])
    return Chart("task", "Reward of this task", "reward", "", "version", x, [line] if len(x) > 1 else [])


def _heldout(look: IndexQueries, run: int) -> Chart:
    found = look.heldout(run)
    faulty = {
        row["version"]
        for row in found
        if why_not_comparable(Evaluation(None, None, None, row["episodes"], faults=row["faults"] or 0))
    }
    rows = [row for row in found if not row["env"] and row["version"] not in faulty]
    rows = list({row["version"]: row for row in rows}.values())
    measure = rows[-1]["measure"] if rows else ""
    lines = [
        ChartLine("mean", [row["mean"] for row in rows]),
        ChartLine("95 %, high", [row["high95"] for row in rows], True),
        ChartLine("95 %, low", [row["low95"] for row in rows], True),
    ]
    if any(row["judge"] is not None for row in rows):
        lines.append(ChartLine("judge", [row["judge"] for row in rows]))
    kinds = " and ".join(sorted({"held-out" if row["tasks"] == "heldout" else row["tasks"] for row in rows}))
    sentence = f"Evaluations on {kinds or 'held-out'} tasks, with 95 % intervals; the host's word."
    sentence += f" Not drawn, because of faults: {len(faulty)}." if faulty else ""
    x = [row["version"] for row in rows]
    return Chart("heldout", "Held-out results", measure, sentence, "version", x, lines if rows else [], "95 %")
