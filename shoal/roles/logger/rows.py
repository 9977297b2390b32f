"""The figures of a run as rows for loggers: one for each training step, and one for each evaluation on held-out tasks.

Read from the run's folder by `follower`. A row has a name, which it keeps over restarts, so that nothing is logged twice.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import StateError
from shoal.folder import RunFolder, sync_file, write_atomically
from shoal.heldout import AFTER, Heldout, evaluations_in, interval_of, read_heldout, version_of
from shoal.metrics import values_of

STEP, HELDOUT = "step", "heldout"
"""Kinds of rows, and the first words of their names."""


class Row(NamedTuple):
    """What is logged at once."""

    name: str
    """Such as `step 12` or `heldout v000025`."""
    kind: str
    number: int
    """The training step, or the policy version that was evaluated."""
    time_s: float
    """When the step or the evaluation ended, since the epoch."""
    values: dict[str, float]
    """By the names of `metrics.jsonl`, or `heldout/mean` and so on. Only numbers."""


class Rows:
    """Follows a run's folder. It keeps its place in `metrics.jsonl`, and reads no line twice."""

    def __init__(self, folder: RunFolder) -> None:
        self._metrics, self._evaluations = folder.metrics, folder.evaluations
        self._offset = 0
        self._newest = -1
        """The last step that was read."""
        self._read = set[str]()
        """Names of the evaluations that were read."""

    def new(self) -> Iterator[Row]:
        """Rows that were written since the last call, oldest first. Of a repeated step, only the first line counts."""
        for line in self._lines():
            values = values_of(line)
            if values is not None and values["step"] > self._newest:  # guard: repeated-step-is-logged-once
                self._newest = values["step"]
                yield _of_step(values)
        for name in evaluations_in(self._evaluations):
            if name in self._read or (name == AFTER and self._newest < 0):
                continue
            path = self._evaluations / f"{name}.json"
            found = read_heldout(path)
            if found is not None:
                self._read.add(name)
                yield self._of_heldout(name, found, path.stat().st_mtime)

    def _lines(self) -> Iterator[bytes]:
        """Whole lines from the last place on. A line that a killed writer left half ends with the next start."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    yield line
        except FileNotFoundError:
            return

    def _of_heldout(self, name: str, found: Heldout, time_s: float) -> Row:
        version = version_of(name, self._newest + 1) or 0
        values = {"heldout/version": float(version)}
        for prefix, one in (("", found), *((f"{label}/", one) for label, one in found.envs.items())):
            for field in ("mean", "low95", "high95", "episodes", "faults"):
                if (value := getattr(one, field)) is not None:
                    values[f"heldout/{prefix}{field}"] = float(value)
        if (judged := interval_of(found.judge)) is not None:
            values |= dict(
                zip(("heldout/judge_mean", "heldout/judge_low95", "heldout/judge_high95"), judged, strict=True)
            )
        return Row(f"{HELDOUT} {name}", HELDOUT, version, time_s, values)


def _of_step(values: dict[str, Any]) -> Row:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        table = value if isinstance(value, dict) else {}
        numbers |= {f"{name}/{key}": float(part) for key, part in table.items()}
        if isinstance(value, int | float):
            numbers[name] = float(value)
    step = values["step"]
    return Row(f"{STEP} {step}", STEP, step, numbers.get("time_s", 0.0), numbers)


class Journal:
    """Names of the rows that were given to a logger, in order: a line each, durable before the row is given.

    With the number of rows that the logger holds it says which ones these are, wherever a process was killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = set[str]()

    def open(self, held: int) -> None:
        """Read the file, and forget the names beyond those of `held` rows: the logger has lost these, or never had them.

        Raises `StateError` if the file has fewer names.
        """
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        if len(lines) < held:
            raise StateError(
                f"{self._path} names {len(lines)} rows, but the logger has {held}: restore it from a copy, or move "
                f"{self._path.with_suffix('')} away, so that the logger begins anew"
            )
        kept = lines[:held]  # guard: lost-rows-are-logged-again
        write_atomically(self._path, "".join(f"{name}\n" for name in kept).encode())
        self._names = set(kept)

    def add(self, name: str) -> None:
        """Raises OSError; then call `open` again."""
        with self._path.open("a") as file:
            file.write(f"{name}\n")
        sync_file(self._path)
        self._names.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names
