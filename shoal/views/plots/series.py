"""What a picture of runs shows: for each metric a panel, and in it a line for each run or for each set of seeds.

Pure but for the reading of runs: `draw` draws what is made here. Names of runs are strangers' text; they leave here in a
form that is safe to print.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from shoal.errors import ConfigError, NothingYet
from shoal.evaluation_files import Evaluation, evaluations_of, interval_of, why_not_comparable
from shoal.ledger.run_events import RunCreated
from shoal.runs.run_reader import RunReader
from shoal.step_metrics import HEADLINES, METRICS, Metric, MetricsLine, declared, is_figure, mean_of_counts, step_of
from shoal.terminal import brief, docs_page

Across = Literal["step", "tokens", "time"]
ACROSS: dict[str, str] = {
    "step": "training step",
    "tokens": "tokens learned from",
    "time": "hours since the start",
}
"""What the horizontal axis may be, and its name."""

HELDOUT, JUDGE = "heldout", "heldout_judge"
"""The names under which evaluations on held-out tasks, and what a judge says of them, are drawn beside METRICS."""
EVALUATED = {
    HELDOUT: "Evaluations on tasks that training does not draw.",
    JUDGE: "What a held-out judge, on which nothing is trained, says of the same episodes.",
}

USUAL = (HEADLINES[0], HELDOUT, JUDGE, *HEADLINES[1:])
"""What is drawn without being asked for."""

AS_MEAN = {"staleness_rollouts": "versions, mean"}
"""Metrics that are tables of counts by a number: they are drawn as the mean of that number, with this unit."""

LABEL_CHARS = 40
MOST_PARTS = 6
"""Of a reward, drawn without being asked for."""

APART = ("seed", "host")
"""Keys of a run file in which runs of one line may differ: `host` is where a run listens."""


class ReadRun(NamedTuple):
    """What is drawn of a run."""

    name: str
    where: str
    config: dict[str, Any]
    """Its run file without the keys in APART; empty before its log begins."""
    lines: list[MetricsLine]
    """Of metrics, in order of step."""
    heldout: list[Evaluation]


class Point(NamedTuple):
    x: float
    y: float
    low: float
    high: float
    """Low and high are those of the band or of the interval; equal to y where there is none."""


class PlotCurve(NamedTuple):
    label: str
    colour: int
    """The same number for the same line in all panels."""
    points: list[Point]
    seeds: int
    """Runs of which it is the mean."""


class Panel(NamedTuple):
    metric: str
    unit: str
    dots: bool
    """Whether points are measured seldom, and are drawn as dots with intervals."""
    curves: list[PlotCurve]


class Picture(NamedTuple):
    across: Across
    panels: list[Panel]
    notes: tuple[str, ...]
    """What a reader must know: what bands and intervals are, and smoothing."""


def read_run(run: RunReader) -> ReadRun:
    """What is drawn of a run. Reads no more of its log than its beginning. Raises `ShoalError`."""
    name, config = "", dict[str, Any]()
    if run.state.seq >= 0 or run.refresh():
        first = next(run.events()).body
        assert isinstance(first, RunCreated), "a log that was replayed begins so"
        name, config = first.name, {key: value for key, value in first.config.items() if key not in APART}
    lines = run.metrics()
    newest = step_of(lines[-1]) + 1 if lines else 0
    where = PurePath(run.name).name or run.name
    return ReadRun(name or where, where, config, lines, evaluations_of(run.evaluation_files(), newest, False))


def picture_of(
    runs: Sequence[ReadRun], metrics: Sequence[str], across: Across = "step", smooth: int = 1, apart: bool = False
) -> Picture:
    """The picture of these runs. Without metrics, those of USUAL that the runs have. `smooth` is a number of steps.
    `apart`: each run is a line of its own, also those that differ in their seed alone.

    Raises `ConfigError` for a metric that does not exist or cannot be drawn, `NothingYet` if no run has it.
    """
    wanted = list(dict.fromkeys(metrics))
    for name in wanted:
        _check(name, runs)
    sets = [[run] for run in runs] if apart else seeds_apart(runs)
    labels = labels_of(sets)
    panels = []
    for name in wanted or (*USUAL, *_parts_of(runs)):
        curves = [
            PlotCurve(label, number, points, len(same))
            for number, (label, same) in enumerate(zip(labels, sets, strict=True))
            if (points := _points(same, name, across, smooth))
        ]
        if curves:
            panels.append(Panel(name, unit_of(name, runs), name in EVALUATED, curves))
        elif wanted:
            raise NothingYet(f"no value of {name} is there to draw: {_why_none(name)}")
    if not panels:
        raise NothingYet("there are no metrics to draw: the first line comes when the first step has ended")
    return Picture(across, panels, tuple(_notes(panels, smooth)))


def _parts_of(runs: Sequence[ReadRun]) -> list[str]:
    """The named parts of rewards that runs have: a reward that rises by one of them alone may be a hack."""
    newest = [run.lines[-1] for run in runs if run.lines]
    return sorted({name for line in newest for name in line if name.startswith("reward_part/")})[:MOST_PARTS]


def seeds_apart(runs: Sequence[ReadRun]) -> list[list[ReadRun]]:
    """The runs in sets of one name and run file, which differ in the seed alone. A run without a log is alone."""
    sets: list[list[ReadRun]] = []
    for run in runs:
        same = (one for one in sets if run.config and (one[0].name, one[0].config) == (run.name, run.config))
        found = next(same, None)
        if found is None:
            sets.append([run])
        else:
            found.append(run)
    return sets


def labels_of(sets: Sequence[Sequence[ReadRun]]) -> list[str]:
    """A name for each set; sets of one name are told apart by their folder, and else by a number."""
    names = [brief(same[0].name, LABEL_CHARS) for same in sets]
    labels = [
        f"{name} ({brief(same[0].where, LABEL_CHARS)})"
        if names.count(name) > 1 and same[0].where != same[0].name
        else name
        for name, same in zip(names, sets, strict=True)
    ]
    return [
        f"{label} #{labels[: i + 1].count(label)}" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def unit_of(name: str, runs: Sequence[ReadRun] = ()) -> str:
    """The unit of a metric, for an axis."""
    if name in EVALUATED:
        measures = {one.measure for run in runs for one in run.heldout if one.measure}
        return brief(measures.pop(), LABEL_CHARS) if len(measures) == 1 else "share or reward"
    return AS_MEAN[name] if name in AS_MEAN else _told(name).unit


def sentence_of(name: str) -> str:
    """What a metric means."""
    if name in EVALUATED:
        return EVALUATED[name]
    return _told(name).sentence


# --- names ---


def _told(name: str) -> Metric:
    found = declared(name)
    assert found is not None, "_check saw to it"
    return found


def _check(name: str, runs: Sequence[ReadRun]) -> None:
    if name in EVALUATED:
        return
    found = {known for run in runs for line in run.lines for known in line}
    if declared(name) is None or ("/" in name and name not in found):
        plain = [known for known in METRICS if "/" not in known and known not in ("step", "time_s", "waiting_for")]
        names = sorted({*plain, *EVALUATED, *found})
        near = [brief(each) for each in difflib.get_close_matches(name, names, n=3, cutoff=0.5)]
        hint = (
            f"did you mean {' or '.join(near)}" if near else f"{docs_page('docs/reference/metrics.md')} has all names"
        )
        raise ConfigError(
            f"there is no metric {brief(name)!r}: {hint}?" if near else f"no metric {brief(name)!r}: {hint}"
        )
    if _told(name).unit == "name":
        raise ConfigError(f"{name} is a word in each step, not a number, and cannot be drawn")


def _why_none(name: str) -> str:
    if name in EVALUATED:
        return (
            "evaluations are read from the host's folder, and are made as its run file says; those with too many faults "
            "are not drawn"
        )
    return _told(name).sentence


# --- numbers ---


def _points(same: Sequence[ReadRun], name: str, across: Across, smooth: int) -> list[Point]:
    """The points of a line: of one run as they are, of several the mean over the steps that all of them have."""
    found = [_heldout(run, across, name) if name in EVALUATED else _series(run, name, across, smooth) for run in same]
    if len(found) == 1:
        return list(found[0].values())
    steps = sorted(set[int]().union(*found)) if name in EVALUATED else sorted(found[0])
    return [
        Point(_mean(p.x for p in at), _mean(p.y for p in at), min(p.y for p in at), max(p.y for p in at))
        for step in steps
        if len(at := [series[step] for series in found if step in series]) == len(found)
    ]


def _series(run: ReadRun, name: str, across: Across, smooth: int) -> dict[int, Point]:
    x_of = _x_of(run, across)
    values = {step_of(line): value for line in run.lines if (value := number_of(line, name)) is not None}
    points, last = dict[int, Point](), list[float]()
    for step, value in values.items():
        last = [*last, value][-smooth:]
        y = math.fsum(last) / len(last)
        points[step] = Point(x_of(step), y, y, y)
    return points


def _heldout(run: ReadRun, across: Across, name: str) -> dict[int, Point]:
    """By version: version v comes after step v - 1. Without evaluations that have too many faults to be compared."""
    x_of = _x_of(run, across)
    evaluations = [(one.version, one if name == HELDOUT else one.judge) for one in run.heldout]
    return {
        version: Point(float(version) if across == "step" else x_of(version - 1), *found)
        for version, one in evaluations
        if one is not None and not why_not_comparable(one)
        if (found := interval_of(one)) is not None and None not in map(_number, found)
    }


def _x_of(run: ReadRun, across: Across) -> Callable[[int], float]:
    """Where a step stands on the horizontal axis; steps before the first are at 0."""
    if across == "step":
        return float
    at, total = dict[int, float](), 0.0
    begun = _begun(run.lines)
    for line in run.lines:
        total += _number(line.get("tokens")) or 0.0
        at[step_of(line)] = total if across == "tokens" else ((_number(line.get("time_s")) or begun) - begun) / 3600
    newest = max(at.values(), default=0.0)
    return lambda step: 0.0 if step < 0 else at.get(step, newest)


def _begun(lines: Sequence[MetricsLine]) -> float:
    """When the first step began, seconds since the epoch."""
    first = lines[0] if lines else {}
    return (_number(first.get("time_s")) or 0.0) - (_number(first.get("step_s")) or 0.0)


def number_of(line: MetricsLine, name: str) -> float | None:
    """The number that is drawn of a metric; None if the line has none."""
    value = line.get(name)
    if name in AS_MEAN and isinstance(value, dict):
        return _number(mean_of_counts(value))
    return _number(value)


def _number(value: object) -> float | None:
    return float(value) if is_figure(value) else None  # guard: drawn-numbers-are-finite


def _mean(values: Any) -> float:
    whole = list(values)
    return math.fsum(whole) / len(whole)


def _notes(panels: Sequence[Panel], smooth: int) -> list[str]:
    notes = []
    if smooth > 1:
        notes.append(f"Lines are means of the last {smooth} steps.")
    seeds = {curve.seeds for panel in panels for curve in panel.curves}
    if max(seeds) > 1:
        notes.append("Bands and bars of several seeds span their lowest and highest.")
    if any(panel.dots and curve.seeds == 1 for panel in panels for curve in panel.curves):
        notes.append("Bars of one run are 95 % confidence intervals.")
    return notes
