"""The lock of a package: its dependencies, each with one version and the hashes of its wheels.

Called when a package is packed and before it is installed. A lock is a requirements file of pip in its hash mode,
reduced to what needs no decision: `name==version` and `--hash=sha256:...`. Options, URLs, paths and markers are refused
by name, so pip reads nothing that this file has not read. It uses no index and installs nothing.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from shoal.errors import ConfigError

MAX_LOCK_BYTES = 1 << 20
MAX_REQUIREMENTS = 512
"""Dependencies of a package."""

HEAVY = ("torch", "tensorflow", "jax", "jaxlib", "vllm", "triton", "deepspeed", "xformers", "flash-attn")
"""Packages of gigabytes, or that need an accelerator. Environments with these stay with the host."""
HEAVY_PREFIXES = ("nvidia-", "tensorflow-", "cupy-", "jax-cuda", "torch-")

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)(?:\[[A-Za-z0-9._, -]{0,100}\])?"
    r" ?== ?(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63})(?P<hashes>(?: +--hash=sha256:[0-9a-f]{64})+)",
    re.ASCII,
)
_HASH = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


class Requirement(NamedTuple):
    """One dependency."""

    name: str
    """Normalised: lower case, with hyphens."""
    version: str
    hashes: tuple[str, ...]
    """SHA-256 of each wheel that may be installed, hex."""


def read_lock(text: str, source: str = "lock.txt") -> tuple[Requirement, ...]:
    """The dependencies that a lock names. Raises `ConfigError` with the line that is not in this form."""
    if len(text) > MAX_LOCK_BYTES:
        raise ConfigError(
            f"{source} has more than {MAX_LOCK_BYTES} characters (MAX_LOCK_BYTES): lock fewer dependencies"
        )
    found: dict[str, Requirement] = {}
    for number, line in _lines(text):
        read = _LINE.fullmatch(line)
        if read is None:  # guard: plain-locks
            raise ConfigError(
                f"{source} line {number}: {line[:80]!r} is not name==version with --hash=sha256:... . Make the lock with "
                "`pip-compile --generate-hashes` for one Python and platform, without options, URLs and markers"
            )
        name = normal_name(read["name"])
        if name in found:
            raise ConfigError(f"{source} line {number}: {name} is locked twice: keep one of the two")
        found[name] = Requirement(name, read["version"], tuple(_HASH.findall(read["hashes"])))
        if len(found) > MAX_REQUIREMENTS:
            raise ConfigError(f"{source} has more than {MAX_REQUIREMENTS} dependencies: lock fewer")
    return tuple(found.values())


def normal_name(name: str) -> str:
    """The name of a distribution as a lock has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _lines(text: str) -> list[tuple[int, str]]:
    """Logical lines with the number of their last one; comments and continuations are resolved as pip does."""
    found, begun = [], ""
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*#", line):
            continue
        line = re.sub(r"\s#.*$", "", line.rstrip("\r"))
        begun += f" {line.removesuffix(chr(92)).strip()}"
        if not line.endswith("\\"):
            found.append((number, begun.strip()))
            begun = ""
    return [(number, re.sub(r"[ \t]+", " ", line)) for number, line in [*found, (0, begun.strip())] if line]


def write_lock(requirements: Sequence[Requirement]) -> str:
    """A lock in our own words, for pip to read."""
    return "".join(
        f"{r.name}=={r.version} {' '.join(f'--hash=sha256:{sha256}' for sha256 in r.hashes)}\n" for r in requirements
    )


def heavy(requirements: Sequence[Requirement]) -> tuple[str, ...]:
    """Those dependencies that a volunteer's machine should not get."""
    return tuple(r.name for r in requirements if r.name in HEAVY or r.name.startswith(HEAVY_PREFIXES))
