"""Records of benchmarks, and the page of headline figures that is made of them.

    python benchmarks/figures.py run decode            run benchmarks/decode.py in full and record it
    python benchmarks/figures.py run decode --repeats 3
    python benchmarks/figures.py read --command '...' < OUTPUT    record a run that was made before
    python benchmarks/figures.py write                 write docs/figures.md

A record has the figures of the benchmark's line of JSON with date, commit, command and machine, in `benchmarks/records/`.
The same command at the same commit replaces its record. Runs with `--quick` are refused: their figures prove nothing. The
exit code of `run` is the benchmark's: a missed bar is recorded, too. `benchmarks/headlines.toml` lists what the page shows.

A figure is a number or a list of numbers. Its name is the benchmark and the keys that lead to it: `beyond.win_rates.rl`.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE = ROOT / "benchmarks/records", ROOT / "docs/figures.md"

IN_FULL = {"whole_system": ("--minutes", "5"), "toploc": ("--long",)}
"""Arguments of a full run, where it needs any."""

MEASURED = ("shoal", "recipes", "benchmarks", "tests/attacks", ":(exclude)benchmarks/records", ":(exclude)*.md")
"""What a benchmark's figures depend on; a change there that is not committed is noted beside the commit."""

HEAD = """# Figures

The headline figures of the benchmarks, each of the newest run that has it. `python benchmarks/figures.py run NAME` runs a
benchmark and writes this page; `benchmarks/README.md` says what each compares. A figure with several values has one for
each seed. More results, also of code that is gone: [claims of papers](design/results-claims.md),
[real models](design/results-real-models.md), [broadcast](design/results-broadcast.md)."""

Value = int | float | list[int | float]


class Record(msgspec.Struct, omit_defaults=True):
    """One run of a benchmark."""

    date: str
    """Of the run's end, as 2026-11-22."""
    commit: str
    """The tree that was measured."""
    command: str
    machine: str
    figures: dict[str, Value]
    """By name, without the benchmark's."""
    note: str = ""


class Records:
    """All runs of all benchmarks, newest first."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.by_benchmark: dict[str, list[Record]] = {
            path.stem: msgspec.json.decode(path.read_bytes(), type=list[Record])
            for path in sorted(folder.glob("*.json"))
        }

    def add(self, benchmark: str, record: Record) -> None:
        """Add the newest run. It replaces a run of the same command at the same commit."""
        same = (record.commit, record.command)
        others = [run for run in self.by_benchmark.get(benchmark, []) if (run.commit, run.command) != same]
        self.by_benchmark[benchmark] = [record, *others]
        self.folder.mkdir(exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(self.by_benchmark[benchmark]), indent=1)
        (self.folder / f"{benchmark}.json").write_bytes(text + b"\n")

    def newest(self, figure: str) -> tuple[Value, Record]:
        """A figure's value in the newest run that has it. Raises `KeyError` if no run has it."""
        benchmark, _, key = figure.partition(".")
        for run in self.by_benchmark.get(benchmark, []):
            if key in run.figures:
                return run.figures[key], run
        raise KeyError(figure)


def figures_of(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Numbers and lists of numbers in a benchmark's line of JSON; texts, truth values and lists of rows are left out."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from figures_of(value, f"{prefix}{key}.")
        elif _is_number(value) or (isinstance(value, list) and value and all(map(_is_number, value))):
            yield f"{prefix}{key}", value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def last_line(output: str) -> dict[str, Any]:
    """The line of JSON with which a benchmark ends. Raises `ValueError` if there is none."""
    line = (output.strip().splitlines() or [""])[-1]
    try:
        result = json.loads(line)
    except json.JSONDecodeError:
        result = None
    if not isinstance(result, dict) or not isinstance(result.get("benchmark"), str):
        raise ValueError(f"the last line is not a benchmark's JSON, nothing is recorded: {line[:80]!r}")
    return result


class Headline(NamedTuple):
    """A figure of the page."""

    name: str
    figure: str
    digits: int
    unit: str


def headlines() -> list[Headline]:
    """The figures of the page, in its order."""
    text = (ROOT / "benchmarks/headlines.toml").read_text()
    return [Headline(*row) for row in tomllib.loads(text)["figures"]]


def page(records: Records) -> str:
    """The text of docs/figures.md."""
    lines = ["| Figure | Value | Command | Date | Commit |", "|---|---|---|---|---|"]
    for headline in headlines():
        value, run = records.newest(headline.figure)
        command = run.command.removeprefix("OMP_NUM_THREADS=1 ").removeprefix("nice -n 3 ")
        lines.append(f"| {headline.name} | {shown(headline, value)} | `{command}` | {run.date} | {run.commit[:10]} |")
    return f"{HEAD}\n\n" + "\n".join(lines) + "\n"


def shown(headline: Headline, value: Value) -> str:
    """A figure as the page shows it. A share is shown in per cent."""
    values = value if isinstance(value, list) else [value]
    scale = 100 if headline.unit == "%" else 1
    return f"{', '.join(f'{scale * one:,.{headline.digits}f}' for one in values)} {headline.unit}".strip()


def run_benchmark(records: Records, name: str, arguments: list[str]) -> int:
    """Run a benchmark, show what it prints, and record it. Its exit code."""
    script = ROOT / "benchmarks" / f"{name}.py"
    if not script.is_file():
        raise SystemExit(f"there is no benchmark {name!r}: {script.relative_to(ROOT)} is missing")
    words = ["python", f"benchmarks/{name}.py", *(arguments or IN_FULL.get(name, ()))]
    here, measured = machine(), commit()  # before it makes load, and before anybody commits beside it
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *words[1:]]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        for line in bench.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    add_output(records, "".join(lines), f"OMP_NUM_THREADS=1 {shlex.join(words)}", here, measured)
    return bench.returncode


def add_output(records: Records, output: str, command: str, machine: str, commit: str, date: str = "") -> None:
    """Add the figures of a benchmark's output to its records."""
    if "--quick" in command.split():
        raise SystemExit("figures of --quick prove nothing: run it in full")
    try:
        result = last_line(output)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    figures = dict(figures_of(result))
    records.add(result["benchmark"], Record(date or today, commit, command, machine, figures))
    print(f"recorded {len(figures)} figures of {result['benchmark']} at {commit}", file=sys.stderr)


def machine() -> str:
    """What figures depend on of this machine: cores, kind of processor, torch, load. No names."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = f"load {os.getloadavg()[0]:.1f} before"
    return f"{cores} cores, {platform.machine()}{_vectors()}, torch {_version('torch')}, {load}"


def _vectors() -> str:
    """The widest vector instructions, where the system tells them."""
    file = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", file.read_text())) if file.is_file() else set()
    return next((f" with {name}" for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> str:
    """The commit that is measured, and whether something was changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--", *MEASURED)
    return f"{head} and changes" if head and changed else head or "unknown"


def main() -> int:
    """Run or read a benchmark; then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run a benchmark and record it")
    run.add_argument("name", help="such as decode, for benchmarks/decode.py")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark (default: those of a full run)")
    read = actions.add_parser("read", help="record a benchmark's output, from standard input")
    read.add_argument("--command", required=True, help="what was typed")
    read.add_argument("--commit", default="", help="what was measured (default: the present one)")
    read.add_argument("--date", default="", help="when (default: today)")
    read.add_argument("--machine", default="", help="on what (default: this machine)")
    actions.add_parser("write", help="write the page")
    options = parser.parse_args()
    records, code = Records(), 0
    if options.action == "run":
        code = run_benchmark(records, options.name, options.arguments)
    elif options.action == "read":
        here, measured = options.machine or machine(), options.commit or commit()
        add_output(records, sys.stdin.read(), options.command, here, measured, options.date)
    PAGE.write_text(page(records))
    return code


if __name__ == "__main__":
    sys.exit(main())
