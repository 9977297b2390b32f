"""Takes out one guard after another and runs the test that must then fail: `python -m tests.mutate [ROOM ...] [-k NAME]`.

Each worker has a copy of the tree, in which it mutates one file at a time (tests/mutants.py). A test runs in a fork of the
worker, which has imported the packages of others and nothing of shoal: that saves most of a test's time.
"""

import argparse
import contextlib
import gc
import importlib
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutants import ROOT, Guard, Place, guards, marked, mutant

PACKAGES = (
    "pytest", "hypothesis", "xdist.plugin", "numpy", "msgspec", "psutil", "rich.console", "rich.table", "httpx", "uvicorn",
    "starlette.applications", "starlette.testclient", "jinja2", "sqlalchemy", "tokenizers", "safetensors.torch",
    "cryptography.hazmat.primitives.asymmetric.ed25519", "torch", "torch.distributed", "transformers",
)  # fmt: skip
OURS = {"shoal", "tests", "recipes", "examples", "benchmarks", "deploy"}
LIMIT_S = 300.0
SLIPS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError", "fixture '")
"""Signs that a mutant broke the program, not the guard."""
_TIMES = itertools.count(1)
"""Of mutated files: each has one of its own, so that Python takes no file that it compiled of another mutant."""


class Outcome(NamedTuple):
    """What a mutant's test said of it."""

    guard: Guard
    problem: str
    """Empty: the test failed, as it must."""
    seconds: float
    output: str


def outcomes(chosen: Sequence[Guard], workers: int) -> Iterator[Outcome]:
    """Of each guard, in order."""
    _import_packages()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled files halve the time of a test
    sys.dont_write_bytecode = False
    places = dict(marked(ROOT))
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(workers, fork, _begin, (folder,)) as pool:
            yield from pool.map(_outcome, chosen, [places[guard.name] for guard in chosen])


def _import_packages() -> None:
    """Those that tests need most. None of them starts a thread when imported."""
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # pytest collects garbage after each test, and need not look through these


def _begin(folder: str) -> None:
    """A worker goes into a copy of the tree."""
    copy = Path(folder) / str(os.getpid())
    shutil.copytree(ROOT, copy, ignore=_left_out)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]


def _left_out(folder: str, names: list[str]) -> set[str]:
    made = {"runs", "build", "dist", "site"} if Path(folder) == ROOT else set()
    return {name for name in names if name.startswith(".") or name == "__pycache__" or name in made}


def _outcome(guard: Guard, place: Place) -> Outcome:
    began = time.monotonic()
    file, said = Path.cwd() / place.file, Path.cwd() / "said"
    source, stat = file.read_text(), file.stat()
    try:
        file.write_text(mutant(guard, source, place.line))
        os.utime(file, (next(_TIMES),) * 2)
        code = _tested(guard.test, said)
    finally:
        file.write_text(source)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    output = said.read_text(errors="replace")
    return Outcome(guard, problem_of(code, output), time.monotonic() - began, output)


def problem_of(code: int | None, output: str) -> str:
    """Why a test's end does not show that it needs the guard; empty if it does."""
    if code == 0:
        return "survives"
    if code is None:
        return f"runs for more than {LIMIT_S:.0f} s"
    if code != 1:
        return f"cannot be tested (pytest ended with {code})"
    slip = next((slip for slip in SLIPS if slip in output), "")
    return f"breaks the program ({slip})" if slip else ""


def _tested(test: str, said: Path) -> int | None:
    """The exit code of a test in a process of its own; nothing for one that does not end."""
    child = os.fork()
    if child == 0:
        _test(test, said)
    ends = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < ends:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the test started ends, too
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _test(test: str, said: Path) -> None:
    """Runs a test and ends this process, in which the tree's modules are those of the copy."""
    code = 70
    try:
        os.setsid()
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        import pytest

        code = pytest.main(["-x", "--tb=short", "-m", "slow or not slow", f"--basetemp={Path.cwd() / 'tmp'}", test])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes out one guard after another: a test must fail each time.")
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help="such as ledger; default: all")
    parser.add_argument("-k", default="", metavar="TEXT", help="only guards whose names contain it")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="so many at a time (default: 1)")
    parser.add_argument("-v", action="store_true", help="print each guard, and the output of tests that pass")
    asked = parser.parse_args()
    places = dict(marked(ROOT))
    unknown = set(asked.rooms) - {place.room for place in places.values()}
    if unknown:
        parser.error(f"no guards are in {', '.join(sorted(unknown))}")
    chosen = [
        guard
        for guard in guards()
        if asked.k in guard.name and (not asked.rooms or places[guard.name].room in asked.rooms)
    ]
    total, killed = Counter(places[guard.name].room for guard in chosen), Counter[str]()
    for outcome in outcomes(chosen, asked.n):
        guard, problem = outcome.guard, outcome.problem
        killed[places[guard.name].room] += not problem
        if problem:
            print(f"{guard.name} {problem}: {guard.test}", flush=True)
            print(outcome.output[-4000:] * asked.v, end="", flush=True)
        elif asked.v:
            print(f"{guard.name} is needed ({outcome.seconds:.1f} s)", flush=True)
    for room in sorted(total):
        print(f"{room:12} {killed[room]:5} of {total[room]:5} guards are needed")
    print(f"{'all':12} {killed.total():5} of {total.total():5}")
    return int(killed != total)


if __name__ == "__main__":
    sys.exit(main())
