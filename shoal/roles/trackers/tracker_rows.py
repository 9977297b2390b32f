"""The figures of a run as rows for loggers: one for each training step, with an evaluation on held-out tasks if one is new.

A row is given when the next step has a line. A step that a trainer repeats after that is given again: the last line counts.
`Given` says how far a logger has come, so that the next start goes on there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from shoal.evaluation_files import AFTER, Evaluation, evaluations_in, interval_of, read_evaluation, version_of
from shoal.run_folder import RunFolder
from shoal.step_metrics import MetricsFollower, MetricsLine, step_of

HELDOUT = "heldout"
"""First part of the names of an evaluation's figures."""


class EvaluationRow(NamedTuple):
    """A policy version's figures on held-out tasks."""

    name: str
    """Such as v000025."""
    version: int
    time_s: float
    """When it ended, since the epoch."""
    values: dict[str, float]
    """`heldout/version`, `heldout/mean` and so on."""


class Row(NamedTuple):
    """What is logged at once."""

    step: int
    """Of training; rows of a run rise by it. After the last step, each further evaluation counts as one."""
    time_s: float
    """When the step ended, since the epoch."""
    values: dict[str, float]
    """By the names of `metrics.jsonl`, only numbers; empty after the last step."""
    evaluation: EvaluationRow | None = None
    """One that came since the row before. Its version may be older than the step."""


class Given(msgspec.Struct, frozen=True):
    """What a logger was given."""

    step: int = -1
    evaluations: tuple[str, ...] = ()
    """By name."""


class Rows:
    """Follows a run's folder, from what was given before. It reads no line twice."""

    def __init__(self, folder: RunFolder, given: Given) -> None:
        self._evaluations, self._final = folder.evaluations, folder.checkpoints / "final"
        self._tail = MetricsFollower(folder.metrics)
        self.given = given
        """With the newest row that `new` gave."""
        self._newest: MetricsLine | None = None
        """The newest line, until its row was given."""
        self._steps = 0  # so far

    def new(self, is_stopping: bool = False) -> Iterator[Row]:
        """Rows that are final since the last call, in order. That of the newest step follows with the next step's line, or
        when the run has ended. `is_stopping`: the trainer has ended, too."""
        has_ended = self._final.exists()
        while lines := self._tail.read():
            for line in lines:
                step = step_of(line)
                if self._newest is not None and step > step_of(self._newest):  # guard: last-line-is-logged
                    yield self._row(self._newest, self._evaluation())
                # guard: step-is-logged-once
                self._newest = line if step > self.given.step or step < self._steps else None
                self._steps = step + 1
        if has_ended and self._newest is not None:
            yield self._row(self._newest, self._evaluation(of_all=True))
            self._newest = None
        while has_ended and is_stopping and (left := self._evaluation(of_all=True)) is not None:
            yield self._taken(Row(self.given.step + 1, left.time_s, {}, left))

    def _row(self, line: MetricsLine, evaluation: EvaluationRow | None) -> Row:
        values = _numbers_in(line)
        return self._taken(Row(step_of(line), values.get("time_s", 0.0), values, evaluation))

    def _taken(self, row: Row) -> Row:
        names = () if row.evaluation is None else (row.evaluation.name,)
        self.given = Given(row.step, self.given.evaluations + names)
        return row

    def _evaluation(self, of_all: bool = False) -> EvaluationRow | None:
        """The oldest that was not given yet, of versions that the steps so far have made, or `of_all`."""
        for name in evaluations_in(self._evaluations):
            version = version_of(name, self._steps) or 0
            if name in self.given.evaluations or not (of_all or (name != AFTER and version <= self._steps)):
                continue
            path = self._evaluations / f"{name}.json"
            if (found := read_evaluation(path)) is not None:
                return EvaluationRow(name, version, path.stat().st_mtime, _values_of(found, version))
        return None


def _numbers_in(line: MetricsLine) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in line.items():
        table = value if isinstance(value, dict) else {}
        numbers |= {f"{name}/{key}": float(part) for key, part in table.items()}
        if isinstance(value, int | float):
            numbers[name] = float(value)
    return numbers


def _values_of(found: Evaluation, version: int) -> dict[str, float]:
    values = {f"{HELDOUT}/version": float(version)}
    for prefix, one in (("", found), *((f"{label}/", one) for label, one in found.envs.items())):
        for field in ("mean", "low95", "high95", "episodes", "faults"):
            if (value := getattr(one, field)) is not None:
                values[f"{HELDOUT}/{prefix}{field}"] = float(value)
    if (judged := interval_of(found.judge)) is not None:
        names = (f"{HELDOUT}/judge_{name}" for name in ("mean", "low95", "high95"))
        values |= dict(zip(names, judged, strict=True))
    return values
