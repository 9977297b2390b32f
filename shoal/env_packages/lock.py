"""The lock of a package's dependencies, and the wheels that it names."""

import errno
import hashlib
import io
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ConfigError, PeerError, ShoalError, StateError, cause_of

# --- The lock of a package ---
#
# Its dependencies, each with one version and the hashes of its wheels.
#
# A lock is a requirements file of pip in its hash mode, reduced to what needs no decision: `name==version` and
# `--hash=sha256:...`. Options, URLs, paths and markers are refused by name, so pip reads nothing that this file has not
# read. It uses no index and installs nothing.


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


# --- The dependencies of a package ---
#
# Wheels that pip downloads by hash, verified and unpacked by us.
#
# pip only chooses and downloads: it builds nothing (`--only-binary :all:`), follows no dependency (`--no-deps`) and takes
# nothing without a hash of the lock (`--require-hashes`). We compare the hashes again, and unpack the wheels ourselves,
# because a wheel is a zip archive by a stranger: its names and sizes are checked before anything is written. No
# interpreter is started on what was unpacked.


MAX_WHEEL_FILES = 50_000
"""Files of all dependencies together."""

MAX_UNPACKED_RATIO = 20
"""Beyond FREE_UNPACKED_BYTES, the dependencies may take this many times the size of their wheels."""
FREE_UNPACKED_BYTES = 64 << 20

MAX_DIRECTORY_BYTES = 16 << 20
"""Of a wheel's list of its files: 50,000 entries with paths of 200 characters take 12 MB. `zipfile` reads the list before
we can count it, and needs ten times its size in memory."""

COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""What the wheel format allows. `zipfile` unpacks any other in one piece: 1.6 kB of bzip2 take 4 GB of memory."""

LOOK_S = 0.2
"""How often we look at how much pip has downloaded."""

MAX_PIP_BYTES = 1 << 30
"""Of pip's memory: it reads the description in a wheel whole, and 3 MB may unpack to gigabytes."""

_DIE_WITH_US = "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); "  # guard: pip-dies-with-us
"""PR_SET_PDEATHSIG. Alone, pip would go on, and nobody would look at how much it downloads."""

_PIP = (
    "import ctypes, resource, runpy, sys; size, memory = int(sys.argv.pop(1)), int(sys.argv.pop(1)); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)); resource.setrlimit(resource.RLIMIT_AS, (memory, memory)); "
    f"{_DIE_WITH_US}sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__')"
)
"""pip, with two arguments before its own: how large a file it may write, and how much memory it may take."""

_PLACED = re.compile(r"[^/]+\.data/(?P<scheme>[a-z]+)/(?P<rest>.+)", re.ASCII)


def download(
    requirements: Sequence[Requirement],
    into: Path,
    *,
    max_bytes: int,
    pip_options: Sequence[str] = (),
    limit_s: float = 900.0,
) -> dict[str, Path]:
    """The wheel of each dependency, by name, verified. `pip_options` may name an index, or a folder of wheels.

    Raises `PeerError` if one cannot be downloaded or has another hash, or if together they have more than `max_bytes`.
    """
    into.mkdir()
    lock = into / "lock.txt"
    lock.write_text(write_lock(requirements))
    limits = (str(max_bytes), str(MAX_PIP_BYTES))  # guard: memory-of-pip
    command = [
        sys.executable, "-I", "-c", _PIP, *limits, "download", "--quiet", "--disable-pip-version-check", "--no-input",
        "--no-cache-dir", *pip_options, "--only-binary", ":all:", "--require-hashes", "--no-deps",
        "--dest", str(into / "wheels"), "--requirement", str(lock),
    ]  # fmt: skip
    _run(command, into, max_bytes, limit_s)
    return verified(requirements, into / "wheels")


def _run(command: Sequence[str], folder: Path, max_bytes: int, limit_s: float) -> None:
    """Run pip with its temporary files in `folder`, as long as they stay below the limits of size and time."""
    scratch = folder / "scratch"
    scratch.mkdir()
    errors = folder / "errors"
    until = time.monotonic() + limit_s
    with errors.open("wb") as said:
        process = subprocess.Popen(
            ["env", "-u", "PIP_NO_BINARY", f"TMPDIR={scratch}", *command],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, cwd=scratch,
        )  # fmt: skip
        try:
            while True:
                try:
                    code = process.wait(LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    # pip has a wheel twice while it moves it.
                    if _size_of(folder) > 2 * max_bytes:  # guard: size-of-wheels
                        raise PeerError(
                            f"the dependencies have more than {max_bytes / 1e6:.0f} MB: `shoal env install --max-mb MB` "
                            "takes more"
                        ) from None
                    if time.monotonic() > until:
                        raise PeerError(
                            f"pip did not download the dependencies in {limit_s:.0f} s: try again"
                        ) from None
        finally:
            process.kill()
            process.wait()
    if code:
        lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        last = next((line for line in lines if "ERROR" in line), lines[-1] if lines else f"exit code {code}")
        if "No module named pip" in last:
            raise StateError("this Python has no pip, which downloads dependencies: run python -m ensurepip")
        if lines and lines[-1].startswith("MemoryError"):
            raise PeerError(
                f"a dependency takes pip more than {MAX_PIP_BYTES / 1e6:.0f} MB of memory: nothing was installed"
            )
        raise PeerError(f"pip cannot download the dependencies: {last[:300]}. Nothing was installed")


def _size_of(folder: Path) -> int:
    total = 0
    for above, _, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(above) / name).lstat().st_size
            except FileNotFoundError:
                continue  # pip moved it
    return total


def verified(requirements: Sequence[Requirement], folder: Path) -> dict[str, Path]:
    """The downloaded wheels by name of their dependency, each with a hash of the lock."""
    found: dict[str, Path] = {}
    by_hash = {sha256: requirement.name for requirement in requirements for sha256 in requirement.hashes}
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        name = by_hash.get(_sha256(path), "")
        if not name or path.suffix != ".whl" or name in found:  # guard: only-locked-wheels
            raise PeerError(f"pip brought {path.name}, which the lock does not name: nothing was installed")
        found[name] = path
    missing = [requirement.name for requirement in requirements if requirement.name not in found]
    if missing:
        raise PeerError(f"pip did not bring {missing[0]}: nothing was installed")
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack_wheels(wheels: Sequence[Path], folder: Path, max_bytes: int) -> int:
    """Unpack wheels into a folder that this makes; returns the number of files. A later wheel wins over an earlier one.

    Raises `PeerError` if a wheel is damaged, or goes beyond the limits of size and number.
    """
    folder.mkdir()
    num_files, left = 0, max_bytes
    for wheel in wheels:
        with _opened(wheel) as archive:
            members = [member for member in archive.infolist() if not member.filename.endswith("/")]
            num_files += len(members)
            left -= sum(member.file_size for member in members)
            if num_files > MAX_WHEEL_FILES or left < 0:  # guard: size-of-unpacked-wheels
                raise PeerError(
                    f"{wheel.name} unpacks to more than the limit of {max_bytes / 1e6:.0f} MB or {MAX_WHEEL_FILES} files: "
                    "nothing was installed"
                )
            for member in members:
                _unpack(archive, member, wheel, folder)
    return sum(1 for path in folder.rglob("*") if path.is_file())


class _InParts(io.FileIO):
    """A wheel of which nobody reads much at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY_BYTES:  # guard: size-of-a-wheels-directory
            raise zipfile.BadZipFile(f"its list of files has {size} bytes, limit {MAX_DIRECTORY_BYTES}")
        return super().read(size) or b""


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """A wheel. What `zipfile` says about a stranger's bytes becomes a `PeerError`; a full disk stays an OSError."""
    try:
        with _InParts(wheel) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except ShoalError:
        raise
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, LookupError, ArithmeticError,
            OSError) as error:  # fmt: skip
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.ENAMETOOLONG):
            raise
        # guard: torn-wheels
        raise PeerError(f"{wheel.name} is damaged ({cause_of(error)}): nothing was installed") from None


def most_unpacked(wheels: Sequence[Path], max_bytes: int) -> int:
    """How many bytes the wheels may unpack to."""
    return min(max_bytes, FREE_UNPACKED_BYTES + MAX_UNPACKED_RATIO * sum(wheel.stat().st_size for wheel in wheels))


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, wheel: Path, folder: Path) -> None:
    """Write one file, if it belongs on `sys.path`. Scripts, headers and data of the system are left out."""
    path = member.filename
    placed = _PLACED.fullmatch(path)
    if placed:
        if placed["scheme"] not in ("purelib", "platlib"):
            return
        path = placed["rest"]
    parts = path.split("/")
    # guard: plain-paths-in-wheels
    if not all(part not in ("", ".", "..") and "\\" not in part and part.isprintable() for part in parts):
        raise PeerError(
            f"{wheel.name} holds the path {member.filename[:100]!r}, which leads elsewhere: nothing was installed"
        )
    if stat.S_ISLNK(member.external_attr >> 16):  # guard: no-links-in-wheels
        raise PeerError(f"{wheel.name} holds the link {member.filename[:100]!r}: nothing was installed")
    if member.compress_type not in COMPRESSIONS:  # guard: no-bombs-in-wheels
        raise PeerError(
            f"{wheel.name} has {path[:100]} compressed by method {member.compress_type}; wheels are only deflated: nothing "
            "was installed"
        )
    target = folder.joinpath(*parts)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member) as source, target.open("wb") as into:
            shutil.copyfileobj(source, into, 1 << 20)  # never more than `file_size`
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise PeerError(f"{wheel.name} has a file where another wheel has a folder, {path[:100]}: nothing was "
                        "installed") from None  # fmt: skip


Downloader = Callable[[Sequence[Requirement], Path, int], "dict[str, Path]"]
"""Downloads the wheels of dependencies into a folder that it makes. The last argument limits their bytes."""
