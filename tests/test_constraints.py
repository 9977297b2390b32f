"""What pip installs for shoal is what it is tested with: each package of each extra has its version in constraints.txt."""

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

OF_GPUS = re.compile(r"nvidia-|triton$|cuda-")
"""What torch for CUDA names itself; torch for CPUs has none of it."""


def named(line: str, extras: Iterable[str] = ()) -> Requirement | None:
    """The package in a line, if this machine and these extras ask for it."""
    found = Requirement(line)
    asked = found.marker is None or any(found.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    return found if asked else None


def installed_for(line: str) -> set[str]:
    """The package with what it needs, and so on, as far as it is installed here."""
    names, todo = set[str](), [named(line)]
    while todo:
        if (package := todo.pop()) is None or (name := canonicalize_name(package.name)) in names:
            continue
        names.add(name)
        try:
            todo += [named(inner, package.extras) for inner in requires(name) or ()]
        except PackageNotFoundError:
            continue
    return names


def test_each_package_of_an_extra_and_what_it_needs_has_a_version() -> None:
    lines = {line for extra in EXTRAS.values() for line in extra} | set(PROJECT["dependencies"])
    names = {name for line in lines for name in installed_for(line) if not OF_GPUS.match(name)}
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(names) > 60 and names - {canonicalize_name(name) for name in pinned} == set()


def test_make_installs_extras_that_there_are() -> None:
    lists = re.findall(r"-e '\.\[([a-z,]+)\]'", (ROOT / "Makefile").read_text())
    assert {extra for one in lists for extra in one.split(",")} - set(EXTRAS) == set() and "browser" in lists
