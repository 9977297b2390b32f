"""What a package says about itself in `environment.toml`: name, version, entry, what it needs, and under which licence.

Its text may be a stranger's.
"""

import re
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import NamedTuple

from shoal.env_packages.archive import ABOUT, Index
from shoal.env_packages.lock import Requirement, read_lock
from shoal.env_packages.package_reference import flaw_of_path, is_name, is_version
from shoal.errors import ConfigError, cause_of
from shoal.protocol.field_types import Fact
from shoal.typed_toml import Section, from_tree

MAX_ABOUT_BYTES = 16 << 10
"""Size of `environment.toml`. The time that `tomllib` takes for a key in many parts grows with the square of its length:
1.4 s for this many bytes, 21 s for four times as many."""

_ENTRY = re.compile(r"(?P<file>[^:]+\.py):(?P<function>[A-Za-z_][A-Za-z0-9_]*)", re.ASCII)
_CLAUSE = re.compile(r"(?P<sign>>=|<|==) ?3\.(?P<minor>[0-9]{1,3})", re.ASCII)
_PLATFORM = re.compile(r"[a-z0-9]+(?:-[a-z0-9_.]+)*", re.ASCII)


class About(Section, frozen=True):
    """The contents of `environment.toml`."""

    name: str
    """Owner and name, such as ann/guess-number. The owner's key signs each version."""
    version: str
    """Three numbers, such as 0.1.0. A version never changes once it is pushed."""
    licence: Fact
    """Its licence, as an SPDX identifier such as Apache-2.0."""
    entry: str = "environment.py:environment"
    """File, and the function in it that makes the environment."""
    summary: str = ""
    """One sentence, at most 200 characters, for those who look for an environment."""
    python: str = ">=3.11"
    """Versions of Python that it runs on, such as >=3.11,<3.14."""
    platforms: tuple[str, ...] = ()
    """Machines that it runs on, such as linux-x86_64; empty is any."""
    lock: str = ""
    """File with its dependencies and their hashes; empty means that it has none."""
    data: tuple[str, ...] = ()
    """Files that it reads. Packing fails if one is missing."""
    reproducible: bool = True
    """Whether the same actions always give the same replies and scores. If not, it stays with the host."""

    @property
    def entry_file(self) -> str:
        return self.entry.partition(":")[0]

    @property
    def function(self) -> str:
        return self.entry.partition(":")[2]


class Described(NamedTuple):
    """A folder of a package, read."""

    about: About
    requirements: tuple[Requirement, ...]


def read_about(text: bytes, source: str = ABOUT) -> About:
    """Parse and check `environment.toml`. Raises `ConfigError` that names the key."""
    if len(text) > MAX_ABOUT_BYTES:
        raise ConfigError(f"{source} has {len(text)} bytes, limit {MAX_ABOUT_BYTES} (MAX_ABOUT_BYTES): shorten it")
    try:
        tree = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {str(error)[:200]}") from None
    try:
        about = from_tree(tree, About, source)
    except ConfigError as error:
        raise ConfigError(str(error)[:400]) from None  # a key of a stranger may be as long as the file
    for key, value, fits, wanted in (
        ("name", about.name, is_name(about.name), "owner/name in lower case, with digits and hyphens"),
        ("version", about.version, is_version(about.version), "three numbers, such as 0.1.0"),
        ("licence", about.licence, bool(about.licence.strip()), "an SPDX identifier, such as Apache-2.0"),
        (
            "summary",
            about.summary,
            about.summary.isprintable() and len(about.summary) <= 200,
            "one line of 200 characters",
        ),
        ("entry", about.entry, bool(_ENTRY.fullmatch(about.entry)), "file.py:function"),
        ("python", about.python, _clauses(about.python) is not None, "such as >=3.11,<3.14"),
        ("platforms", about.platforms, all(map(_PLATFORM.fullmatch, about.platforms)), 'such as ["linux-x86_64"]'),
    ):
        if not fits:
            raise ConfigError(f"{source}: {key} = {str(value)[:100]!r}; write {wanted}")
    for path in (about.entry_file, *about.data, *filter(None, [about.lock])):
        if flaw := flaw_of_path(path):
            raise ConfigError(f"{source}: the path {path[:200]!r} {flaw}")
    return about


def read_package(folder: Path, index: Index) -> Described:
    """What a package in a folder says about itself, if all that it names is there. Raises `ConfigError`."""
    about = read_about(_read(folder / ABOUT, MAX_ABOUT_BYTES), f"{folder.name}/{ABOUT}")
    held = {file.path for file in index.files}
    for key, path in (("entry", about.entry_file), *(("data", path) for path in about.data), ("lock", about.lock)):
        if path and path not in held:
            raise ConfigError(f"{about.name}: {key} names {path}, which is not in the package: add it, or name another")
    if not about.lock:
        return Described(about, ())
    text = _read(folder / about.lock, 4 << 20)
    try:
        return Described(about, read_lock(text.decode(), about.lock))
    except UnicodeDecodeError:
        raise ConfigError(f"{about.name}: {about.lock} is not text: make it with pip-compile") from None


def unfit(about: About) -> str:
    """Why this machine cannot run a package; empty if it can."""
    minor = sys.version_info[1]
    tests = {
        ">=": lambda wanted: minor >= wanted,
        "<": lambda wanted: minor < wanted,
        "==": lambda wanted: minor == wanted,
    }
    if not all(tests[sign](wanted) for sign, wanted in _clauses(about.python) or ()):
        return f"it needs Python {about.python}, and this is 3.{minor}"
    if about.platforms and sysconfig.get_platform() not in about.platforms:
        return f"it runs on {', '.join(about.platforms)}, and this is {sysconfig.get_platform()}"
    return ""


def _clauses(text: str) -> list[tuple[str, int]] | None:
    """The clauses of a range of Python versions; None if it is not one."""
    found = [_CLAUSE.fullmatch(part.strip()) for part in text.split(",")]
    return [(clause["sign"], int(clause["minor"])) for clause in found if clause] if all(found) else None


def _read(path: Path, cap: int) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(cap + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}. Make a package with `shoal env init`") from None
    if len(text) > cap:
        raise ConfigError(f"{path} has more than {cap} bytes: shorten it")
    return text
