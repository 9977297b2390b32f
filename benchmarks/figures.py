"""Record what benchmarks measure, and write it into the pages that quote it.

    python benchmarks/figures.py run decode            run benchmarks/decode.py in full and record it
    python benchmarks/figures.py run decode --repeats 3
    python benchmarks/figures.py read --command '...' < OUTPUT    record a run that was made before
    python benchmarks/figures.py write                 bring docs/reference/figures.md and all quotes up to date

A record holds the figures of the benchmark's line of JSON with date, commit, command and machine. The same command at
the same commit replaces its record. `run` and `read` end with `write`. Runs with `--quick` are refused: their figures
prove nothing. The exit code of `run` is the benchmark's: a missed bar is recorded, too.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a file, as benchmarks are

from benchmarks.pages.quotes import pages, updated  # noqa: E402
from benchmarks.pages.records import Record, Records, figures_of, last_line  # noqa: E402
from benchmarks.pages.reference import PAGE, figures_page  # noqa: E402

IN_FULL = {"whole_system": ("--minutes", "5"), "toploc": ("--long",)}
"""Arguments of a full run, where it needs any."""

MEASURED = ("shoal", "recipes", "benchmarks", "tests/attacks", ":(exclude)benchmarks/records", ":(exclude)*.md")
"""What a benchmark's figures depend on; a change there that is not committed is told with the commit."""


def main() -> int:
    """Run or read a benchmark; then write the pages."""
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
    actions.add_parser("write", help="write the pages anew")
    asked = parser.parse_args()
    records, code = Records(), 0
    if asked.action == "run":
        code = run_benchmark(records, asked.name, asked.arguments)
    elif asked.action == "read":
        keep(records, sys.stdin.read(), asked.command, asked.machine or machine(), asked.commit or commit(), asked.date)
    write(records)
    return code


def run_benchmark(records: Records, name: str, arguments: list[str]) -> int:
    """Run a benchmark, show what it prints, and record it. Its exit code."""
    script = ROOT / "benchmarks" / f"{name}.py"
    if not script.is_file():
        raise SystemExit(f"there is no benchmark {name!r}: {script.relative_to(ROOT)} is missing")
    words = ["python", f"benchmarks/{name}.py", *(arguments or IN_FULL.get(name, ()))]
    here, measured = machine(), commit()  # before it makes load, and before anybody commits beside it
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    lines = []
    with subprocess.Popen(
        [sys.executable, *words[1:]], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stdout is not None
        for line in bench.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    keep(records, "".join(lines), f"OMP_NUM_THREADS=1 {shlex.join(words)}", here, measured)
    return bench.returncode


def keep(records: Records, output: str, command: str, machine: str, commit: str, date: str = "") -> None:
    """Add the figures of a benchmark's output to its records."""
    if "--quick" in command.split():
        raise SystemExit("figures of --quick prove nothing: run it in full")
    try:
        result = last_line(output)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    tables = {name: text.split("\n") for name, text in result.get("tables", {}).items()}
    figures = dict(figures_of(result))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    records.add(result["benchmark"], Record(date or today, commit, command, machine, figures, tables))
    print(
        f"recorded {len(figures)} figures and {len(tables)} tables of {result['benchmark']} at {commit}",
        file=sys.stderr,
    )


def write(records: Records) -> None:
    """Bring the page of all figures, and every quote, up to date; say what was changed."""
    for page in pages(ROOT):
        if page != ROOT / PAGE:
            try:
                _replace(page, updated(page.read_text(), records))
            except ValueError as error:
                raise SystemExit(f"{page.relative_to(ROOT)}, {error}") from None
    _replace(ROOT / PAGE, figures_page(records, ROOT))


def _replace(page: Path, text: str) -> None:
    if not page.exists() or page.read_text() != text:
        page.write_text(text)
        print(f"wrote {page.relative_to(ROOT)}: read its prose again", file=sys.stderr)


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


if __name__ == "__main__":
    sys.exit(main())
