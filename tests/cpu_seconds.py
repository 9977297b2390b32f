"""A plugin of pytest for `make test`: CPU-seconds of each test and file, with the processes that they ended, in a file.

Files with few tests go first: they hold whole runs, which wait, and at the end nothing else would use the cores.
The garbage collector skips what was imported and collected: that saves a tenth of the CPU-seconds.

python -m pytest -p tests.cpu_seconds tests/ledger      # then read .cache/cpu_seconds.txt
"""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(".cache/cpu_seconds.txt")
NAME = "cpu_seconds"
NUM_SLOWEST = 50

_spent = Counter[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of pytest: orders the files for `--no-loadscope-reorder`."""
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (num_tests[item.path], item.path))


def pytest_collection_finish() -> None:
    """Of pytest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):  # type: ignore[no-untyped-def]
    """Of pytest: in the process that runs the test."""
    item.stash[_BEGUN] = sum(os.times()[:4])
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item):  # type: ignore[no-untyped-def]
    """Of pytest: the report of the teardown takes the figure to the process that writes the file."""
    done = yield
    item.user_properties.append((NAME, sum(os.times()[:4]) - item.stash[_BEGUN]))
    return done


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of pytest."""
    _spent[report.nodeid] += dict(report.user_properties).get(NAME, 0.0) if report.when == "teardown" else 0.0


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of pytest: writes the slowest tests, and all files, slowest first."""
    if hasattr(session.config, "workerinput") or not _spent:
        return
    files = Counter[str]()
    for test, seconds in _spent.items():
        files[test.partition("::")[0]] += seconds  # type: ignore[assignment]
    lines = [f"{seconds:8.2f} {name}\n" for name, seconds in (*_spent.most_common(NUM_SLOWEST), *files.most_common())]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("".join(lines))


_BEGUN = pytest.StashKey[float]()
