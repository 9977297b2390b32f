"""The dependencies of a package: wheels that pip downloads by hash, verified and unpacked by us.

Called by `install`. pip only chooses and downloads: it builds nothing (`--only-binary :all:`), follows no dependency
(`--no-deps`) and takes nothing without a hash of the lock (`--require-hashes`). We compare the hashes again, and unpack the
wheels ourselves, because a wheel is a zip archive by a stranger: its names and sizes are checked before anything is
written. No interpreter is started on what was unpacked.
"""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.errors import PeerError, StateError, cause_of
from shoal.hub.lock import Requirement, write_lock

MAX_WHEEL_FILES = 50_000
"""Files of all dependencies together."""

MAX_UNPACKED_RATIO = 20
"""Beyond FREE_UNPACKED_BYTES, the dependencies may take this many times the size of their wheels."""
FREE_UNPACKED_BYTES = 64 << 20

LOOK_S = 0.2
"""How often we look at how much pip has downloaded."""

_PIP = (
    "import resource, runpy, sys; size = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)); "
    "sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__')"
)
"""pip, which cannot write a file larger than its first argument says."""

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

    Raises `PeerError` if one cannot be had or has another hash, or if they have more than `max_bytes` together.
    """
    into.mkdir()
    lock = into / "lock.txt"
    lock.write_text(write_lock(requirements))
    command = [
        sys.executable, "-I", "-c", _PIP, str(max_bytes), "download", "--quiet", "--disable-pip-version-check",
        "--no-input", "--no-cache-dir", *pip_options, "--only-binary", ":all:", "--require-hashes", "--no-deps",
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
                            f"the dependencies have more than {max_bytes >> 20} MB: raise --max-mb"
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
    num_files = left = 0
    left = max_bytes
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                num_files += len(members)
                left -= sum(member.file_size for member in members)
                if num_files > MAX_WHEEL_FILES or left < 0:  # guard: size-of-unpacked-wheels
                    raise PeerError(
                        f"{wheel.name} unpacks to more than the limit of {max_bytes >> 20} MB or {MAX_WHEEL_FILES} files: "
                        "nothing was installed"
                    )
                for member in members:
                    _unpack(archive, member, wheel, folder)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise PeerError(f"{wheel.name} is not a sound wheel ({cause_of(error)}): nothing was installed") from None
    return sum(1 for path in folder.rglob("*") if path.is_file())


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
