"""What benchmarks measured, as committed files: one a benchmark in `benchmarks/records/`, its runs newest first.

Called by `benchmarks/figures.py`, which adds runs, and by `quotes.py` and `reference.py`, which read them. It does not
deal with pages.

A figure is a number, or a list of numbers, of a benchmark's line of JSON. Its identifier is the benchmark's name and
the keys that lead to it: `decode.ratio_grouped_b64`, `beyond.win_rates.rl`. Truth values, texts and lists of rows
are not figures: they go into tables, which are Markdown under `tables` in the same line.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).resolve().parents[1] / "records"

Value = int | float | list[int | float]

UNITS = (
    (r"tokens_per_cpu_s$", "tokens per CPU-second"),
    (r"completions_per_cpu_s$", "completions per CPU-second"),
    (r"tokens_per_s$", "tokens/s"),
    (r"mb_per_s", "MB/s"),
    (r"(^|\.|_)per_s(\.|_|$)", "1/s"),
    (r"_kb$", "kB"),
    (r"us_per_\w+$", "µs"),
    (r"cpu_s(_|\.|$)", "CPU-seconds"),
    (r"cpu_minutes$", "CPU-minutes"),
    (r"_mb(\.|$)", "MB"),
    (r"_ms$", "ms"),
    (r"minutes$", "minutes"),
    (r"_nats$", "nats"),
    (r"_s(\.|_|$)", "s"),
    (r"(^|\.)ratio|times$", "times"),
    (r"_over_|over$|share|success|reward_of|of_clean|credits$|influence|wins", "share of 1"),
)
"""By the first pattern that an identifier holds; a figure of no unit is a count or a plain number."""


class Record(msgspec.Struct, omit_defaults=True):
    """One run of a benchmark."""

    date: str
    """Of the run's end, as 2026-11-22."""
    commit: str
    """The tree that was measured."""
    command: str
    machine: str
    figures: dict[str, Value]
    """By identifier, without the benchmark's name."""
    tables: dict[str, list[str]] = {}
    """Lines of Markdown; only of the newest run that has the table."""
    note: str = ""
    """What a reader must know of this run, such as that it was entered by hand."""


class Found(msgspec.Struct, frozen=True):
    """A figure in one run."""

    value: Value
    record: Record


def figures_of(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Figures in a benchmark's line of JSON."""
    for key, value in result.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (prefix or key != "tables"):
            yield from figures_of(value, f"{name}.")
        elif _is_number(value) or (isinstance(value, list) and value and all(map(_is_number, value))):
            yield name, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def unit(name: str) -> str:
    """What a figure counts, from its identifier."""
    return next((unit for pattern, unit in UNITS if re.search(pattern, name)), "")


def last_line(output: str) -> dict[str, Any]:
    """The line of JSON with which a benchmark ends. Raises `ValueError` where there is none."""
    line = (output.strip().splitlines() or [""])[-1]
    try:
        result = json.loads(line)
    except json.JSONDecodeError:
        result = None
    if not isinstance(result, dict) or not isinstance(result.get("benchmark"), str):
        raise ValueError(f"the last line is not a benchmark's JSON, nothing is recorded: {line[:80]!r}")
    return result


class Records:
    """All runs of all benchmarks."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.by_benchmark: dict[str, list[Record]] = {
            path.stem: msgspec.json.decode(path.read_bytes(), type=list[Record])
            for path in sorted(folder.glob("*.json"))
        }

    def add(self, benchmark: str, record: Record) -> None:
        """Keep a run as the newest one. It takes the place of a run of the same command at the same commit."""
        others = [
            other
            for other in self.by_benchmark.get(benchmark, [])
            if (other.commit, other.command) != (record.commit, record.command)
        ]
        for other in others:
            other.tables = {name: text for name, text in other.tables.items() if name not in record.tables}
        self.by_benchmark[benchmark] = [record, *others]
        self.folder.mkdir(exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(self.by_benchmark[benchmark]), indent=1)
        (self.folder / f"{benchmark}.json").write_bytes(text + b"\n")

    def find(self, name: str) -> list[Found]:
        """A figure by its whole identifier, in every run that has it, newest first."""
        benchmark, _, key = name.partition(".")
        runs = self.by_benchmark.get(benchmark, [])
        return [Found(run.figures[key], run) for run in runs if key in run.figures]

    def table(self, name: str) -> str | None:
        """A table by its whole identifier, of the newest run that has it."""
        benchmark, _, key = name.partition(".")
        runs = self.by_benchmark.get(benchmark, [])
        return next(("\n".join(run.tables[key]) for run in runs if key in run.tables), None)
