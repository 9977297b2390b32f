"""What names, versions and paths of packages look like: plain enough that no two of them can be taken for each other.

All of them are ASCII, so no character can look like another one or have two encodings.
"""

import re
from typing import NamedTuple

from shoal.errors import ConfigError

MAX_PATH_CHARS = 200
"""Characters of a path in a package."""

MAX_DEPTH = 16
"""Folders above a file of a package, and the file itself."""

_WORD = r"[a-z0-9](?:[a-z0-9-]{0,37}[a-z0-9])?"
_NUMBER = r"(?:0|[1-9][0-9]{0,5})"
_NAME = re.compile(rf"{_WORD}/{_WORD}", re.ASCII)
_OWNER = re.compile(_WORD, re.ASCII)
_VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}", re.ASCII)
_REFERENCE = re.compile(rf"(?P<name>{_WORD}/{_WORD})(?:@(?P<version>{_NUMBER}\.{_NUMBER}\.{_NUMBER}))?", re.ASCII)
_PINNED = re.compile(r"pkg:(?P<digest>[0-9a-f]{64})", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", re.ASCII)

_REGISTRY = re.compile(
    rf"names\.json|packages/[0-9a-f]{{64}}|names/{_WORD}/keys\.json|names/{_WORD}/{_WORD}/catalogue\.json"
    rf"|names/{_WORD}/{_WORD}/{_NUMBER}\.{_NUMBER}\.{_NUMBER}/attestations\.json",
    re.ASCII,
)

COMPILED = (".pyc", ".pyo")
"""Python would run these instead of the source that a reader sees, so no package holds them."""


class PackageReference(NamedTuple):
    """What a person or a run file calls a package."""

    name: str
    """Owner and name, such as ann/guess-number; empty if it is named by its digest."""
    version: str
    """Empty means the newest, or that it is named by its digest."""
    digest: str = ""


def read_reference(text: str) -> PackageReference:
    """Owner/name, owner/name@1.2.3, or pkg: and a digest. Raises `ConfigError` for anything else."""
    pinned = _PINNED.fullmatch(text)
    if pinned:
        return PackageReference("", "", pinned["digest"])
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not the name of a package: write owner/name or owner/name@1.2.3, in lower case")
    return PackageReference(found["name"], found["version"] or "")


def names_one_package(text: str) -> bool:
    """Whether a text is owner/name@1.2.3 or pkg: and a digest, as run files name packages."""
    found = _REFERENCE.fullmatch(text)
    return bool(_PINNED.fullmatch(text)) or (found is not None and bool(found["version"]))


def is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text))


def is_owner(text: str) -> bool:
    return bool(_OWNER.fullmatch(text))


def is_version(text: str) -> bool:
    """Whether a text is three numbers, such as 1.0.2: their order is the order of versions."""
    return bool(_VERSION.fullmatch(text))


def is_registry_path(text: str) -> bool:
    """Whether a path is that of a file of a registry: no other is ever read or served."""
    return bool(_REGISTRY.fullmatch(text))


def order_of(version: str) -> tuple[int, ...]:
    """What versions are sorted by: 1.10.0 comes after 1.9.0."""
    return tuple(map(int, version.split(".")))


def owner_of(name: str) -> str:
    return name.partition("/")[0]


def flaw_of_path(path: str) -> str:
    """Why a path may not be in a package; empty if it may."""
    parts = path.split("/")
    if len(path) > MAX_PATH_CHARS or len(parts) > MAX_DEPTH:
        return f"has more than {MAX_PATH_CHARS} characters or {MAX_DEPTH} parts"
    if not all(_PART.fullmatch(part) and not part.endswith(".") for part in parts):  # guard: plain-paths
        return "has a part that is empty, begins or ends with a dot, or holds other characters than A-Z a-z 0-9 _ . + -"
    if "__pycache__" in parts or path.endswith(COMPILED):  # guard: no-compiled-code
        return "is compiled code, which would run instead of the source"
    return ""
