"""What benchmarks share: arguments, CPU time of alternatives in turn, processes, and the line of JSON at the end."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from shoal.config import child_environment

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


def arguments(doc: str | None, quick: str = "") -> argparse.ArgumentParser:
    """A parser that shows the text of a benchmark; with `quick`, it has `--quick`, and that is its help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def numbers(text: str) -> list[int]:
    """1-3 or 1,2,3 as a list."""
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(one) for one in text.split(",")]


def report(benchmark: str, figures: Mapping[str, Any]) -> None:
    """The last line of a benchmark, which `figures.py` records."""
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


def pin_threads() -> None:
    """Start this process again with one thread that waits passively, unless it has that; it is settled at the start."""
    if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        os.execve(sys.executable, [sys.executable, *sys.argv], child_environment(threads=1))


def cpu_ms(repeats: int, ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median CPU milliseconds of each way. They take turns, so all suffer alike from other work; the first is no repeat."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            began = time.process_time()
            way()
            if repeat:
                times[name].append(1000 * (time.process_time() - began))
    return {name: median(taken) for name, taken in times.items()}


def shoal_command(*words: object) -> list[str]:
    """A command of shoal, for a process."""
    return [sys.executable, "-m", "shoal.cli.main", *map(str, words)]


def wait_for(value: Callable[[], T], what: str, limit_s: float = 120.0) -> T:
    """A value once it is true. Exits after the limit."""
    deadline = time.monotonic() + limit_s
    while not (found := value()):
        if time.monotonic() > deadline:
            raise SystemExit(f"gave up waiting for {what} after {limit_s:.0f} s")
        time.sleep(0.05)
    return found
