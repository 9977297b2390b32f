"""A plugin of pytest for `make light`: what needs a package that the light environment lacks is skipped, by its import.

    python -m pytest -p tests.light tests/protocol

So tests of light rooms run on another version of Python in seconds, without torch. A test that skips itself so runs in the
whole suite.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pytest

HEAVY = ("torch", "transformers", "jsonschema_rs", "re2", "math_verify", "pyarrow", "wandb", "trackio", "matplotlib")
LEAST = 100
"""Tests that must pass: with fewer, what is light has become heavy."""


class _Missing(MetaPathFinder):
    """Skips the test, or the file of tests, that imports a heavy package which is not installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if fullname in MISSING:
            pytest.skip(f"needs {fullname}", allow_module_level=True)
        return None


MISSING = frozenset(name for name in HEAVY if importlib.util.find_spec(name) is None)


def pytest_configure(config: pytest.Config) -> None:
    """Of pytest."""
    sys.meta_path.insert(0, _Missing())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of pytest: fails a run in which nearly everything was skipped."""
    passed = session.testscollected - session.testsfailed - len(_skipped)
    if session.exitstatus == 0 and passed < LEAST:
        print(f"\nerror: {passed} light tests passed, at least {LEAST} must")
        session.exitstatus = 1


_skipped = list[str]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of pytest."""
    if report.skipped:
        _skipped.append(report.nodeid)
