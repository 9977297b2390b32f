"""A registry: signed lists and archives in a fixed layout, in a folder or behind any web server that serves this folder.

    names.json                                  names of all packages; unsigned, only for looking around
    names/OWNER/keys.json                       changes of the owner's key
    names/OWNER/NAME/catalogue.json             all versions, signed
    names/OWNER/NAME/VERSION/attestations.json  who says that a version passes its check, each signed
    packages/DIGEST                             archives

Called by `publish`, `install` and `show`. A registry is never trusted: it can only withhold. Paths are made here, from
names and digests that were checked, so nothing that a registry says leads to another address or file.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from shoal.errors import ConfigError, NothingYet, PeerError, StateError, cause_of
from shoal.folder import name_file, write_atomically
from shoal.hub.names import is_name, is_version, owner_of
from shoal.protocol.wire import is_digest

NAMES = "names.json"
MAX_NAMES_BYTES = 1 << 20

_PART_BYTES = 1 << 20


class Registry(Protocol):
    """Where packages come from."""

    place: str
    """For people: a URL or a folder."""

    def read(self, path: str, cap: int) -> bytes:
        """A small file of at most `cap` bytes. Raises `NothingYet` if there is none, `PeerError` otherwise."""
        ...

    def copy(self, path: str, size: int, into: BinaryIO) -> None:
        """Write a file of exactly `size` bytes into another. Raises as `read`; OSError if the disk cannot take it."""
        ...


def open_registry(place: str) -> Registry:
    """The registry at a URL or in a folder. Raises `ConfigError`."""
    if "://" in place:
        from shoal.hub.web import WebRegistry

        return WebRegistry(place)
    if not Path(place).is_dir():
        raise ConfigError(f"there is no registry at {place}: give its folder, or its URL with https://")
    return FolderRegistry(Path(place))


def own_registry(place: str, make: bool = False) -> "FolderRegistry":
    """The registry in a folder of this machine, to write into. `make` it if it is missing. Raises `ConfigError`."""
    if "://" in place:
        raise ConfigError(f"a registry is written in its folder, not over HTTP ({place}): give that folder")
    if make:
        Path(place).mkdir(parents=True, exist_ok=True)
    if not Path(place).is_dir():
        raise ConfigError(f"there is no registry at {place}: give its folder")
    return FolderRegistry(Path(place))


def names_of(registry: Registry) -> tuple[str, ...]:
    """Names of the packages that a registry says it has. Malformed names are left out."""
    try:
        names = msgspec.json.decode(registry.read(NAMES, MAX_NAMES_BYTES), type=tuple[str, ...])
    except NothingYet:
        return ()
    except msgspec.DecodeError as error:
        raise PeerError(f"{registry.place}/{NAMES} is malformed ({error}): use another registry") from None
    return tuple(name for name in names if is_name(name))


def catalogue_path(name: str) -> str:
    assert is_name(name)
    return f"names/{name}/catalogue.json"


def keys_path(name: str) -> str:
    assert is_name(name)
    return f"names/{owner_of(name)}/keys.json"


def attestations_path(name: str, version: str) -> str:
    assert is_name(name) and is_version(version)
    return f"names/{name}/{version}/attestations.json"


def archive_path(digest: str) -> str:
    assert is_digest(digest)
    return f"packages/{digest}"


class FolderRegistry:
    """A registry in a folder of this machine. Also the only kind that is written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = str(folder)

    def read(self, path: str, cap: int) -> bytes:
        with self._open(path) as file:
            data = file.read(cap + 1)
        if len(data) > cap:
            raise PeerError(f"{self.place}/{path} has more than {cap} bytes: it was not read")
        return data

    def copy(self, path: str, size: int, into: BinaryIO) -> None:
        with self._open(path) as file:
            left = size
            while left and (part := file.read(min(left, _PART_BYTES))):
                into.write(part)
                left -= len(part)
            if left or file.read(1):
                raise PeerError(
                    f"{self.place}/{path} does not have the {size} bytes of its catalogue: use another registry"
                )

    def write(self, path: str, data: bytes) -> None:
        """Put a small file, whole or not at all. Raises `StateError`."""
        try:
            write_atomically(self.folder / path, data)
        except OSError as error:
            raise self.cannot_write(error) from None

    @contextlib.contextmanager
    def aside(self) -> Iterator[BinaryIO]:
        """A new file on the registry's disk, for `add`. Its user holds the registry's lock, so every other such file was
        left by a kill. Raises `StateError`."""
        for leftover in self.folder.glob(".new-*"):
            leftover.unlink(missing_ok=True)
        path = self.folder / f".new-{secrets.token_hex(8)}"
        try:
            file = path.open("xb")
        except OSError as error:
            raise self.cannot_write(error) from None
        try:
            with file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def add(self, path: str, file: BinaryIO) -> None:
        """Give a complete file of `aside` its place. Raises `StateError`."""
        try:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.chmod(file.fileno(), 0o644)
            name_file(file, Path(file.name), self.folder / path)
        except OSError as error:
            raise self.cannot_write(error) from None

    def cannot_write(self, error: OSError) -> StateError:
        """What to say when a file of the registry cannot be written."""
        return StateError(
            f"cannot write to the registry {self.place}: {cause_of(error)}. Free some space, or make it writable"
        )

    def _open(self, path: str) -> BinaryIO:
        try:
            descriptor = os.open(self.folder / path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise NothingYet(f"{self.place} has no {path}: check the name, or use another registry") from None
            raise PeerError(f"cannot read {self.place}/{path}: {cause_of(error)}. Use another registry") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # guard: registry-of-plain-files
            os.close(descriptor)
            raise PeerError(f"{self.place}/{path} is not a file: use another registry")
        return os.fdopen(descriptor, "rb")
