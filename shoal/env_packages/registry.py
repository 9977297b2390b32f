"""Registries of packages: a folder or a web address."""

import asyncio
import contextlib
import errno
import io
import os
import secrets
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import httpx
import msgspec

from shoal.env_packages.package_reference import is_name, is_version, owner_of
from shoal.errors import ConfigError, NothingYet, PeerError, StateError, cause_of
from shoal.net.outbound_proxy import proxy_for
from shoal.net.retryable_errors import RetryableError
from shoal.net.safe_http import KNOWN, Answer, HardenedTransport, get
from shoal.protocol.encoding import is_digest
from shoal.run_folder import name_file, write_atomically

# --- A registry behind HTTP ---
#
# Any web server that serves the registry's folder, or a coordinator.
#
# It follows no redirect, so a registry cannot make this machine call an address that its user did not give. Its methods
# block, and need a thread without an event loop of its own.


ATTEMPTS = 3
"""How often a request is made, if its answer does not come or ends early."""

PAUSE_S = 1.0
"""Between two attempts."""

SILENCE_S, SLOWEST_BYTES_PER_S = 30.0, 20_000
"""A whole answer, headers and the end of its last chunk included, may take so long, and the time of its bytes at this rate.
"""


class WebRegistry:
    """A registry at a URL."""

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises `ConfigError` for a URL that is not http or https."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is not a URL ({error}): write https://host/path") from None
        if (
            parsed.scheme not in ("http", "https")
            or not parsed.host
            or parsed.userinfo
            or parsed.query
            or parsed.fragment
        ):
            raise ConfigError(
                f"{url!r} cannot be the URL of a registry: write https://host/path, without user, query and fragment"
            )
        self.place = url.rstrip("/")
        self._transport, self._sleep = transport, sleep
        self._proxy = proxy_for(parsed.scheme, parsed.host)
        self._tls = ssl.create_default_context() if parsed.scheme == "https" else False

    def read(self, path: str, cap: int) -> bytes:
        into = io.BytesIO()
        self._ask(path, cap, into, exactly=False)
        return into.getvalue()

    def copy(self, path: str, size: int, into: BinaryIO) -> None:
        self._ask(path, size, into, exactly=True)

    def _ask(self, path: str, most: int, into: BinaryIO, exactly: bool) -> None:
        """Write the answer into a file. Raises `PeerError`."""
        start = into.tell()
        for attempt in range(1, ATTEMPTS + 1):
            into.seek(start)
            into.truncate()
            try:
                self._demand_file(asyncio.run(self._answer(path, most, into)).status, path)
                if exactly and into.tell() - start < most:
                    raise RetryableError(f"{path} ended after {into.tell() - start} of {most} bytes")
                return
            except RetryableError as trouble:
                if attempt == ATTEMPTS:
                    raise PeerError(f"{self.place} gave no usable answer in {ATTEMPTS} attempts: {trouble}") from None
                self._sleep(PAUSE_S)

    async def _answer(self, path: str, most: int, into: BinaryIO) -> Answer:
        url, limit_s = httpx.URL(f"{self.place}/{path}"), SILENCE_S + most / SLOWEST_BYTES_PER_S
        network = self._transport or HardenedTransport(verify=self._tls, proxy=self._proxy)
        return await get(url, cap=most, deadline_s=limit_s, address=KNOWN, take=into.write, transport=network)

    def _demand_file(self, status: int, path: str) -> None:
        if status in (404, 410):
            raise NothingYet(f"{self.place} has no {path}: check the name, or use another registry")
        if status in (408, 429) or status >= 500:
            raise RetryableError(f"HTTP {status}")
        if status != 200:
            raise PeerError(f"{self.place} answered {path} with HTTP {status}: check the registry's URL")


# --- A registry ---
#
# Signed lists and archives in a fixed layout, in a folder or behind any web server that serves this folder.
#
#       names.json                                  names of all packages; unsigned, only for looking around
#       names/OWNER/keys.json                       changes of the owner's key
#       names/OWNER/NAME/catalogue.json             all versions, signed
#       names/OWNER/NAME/VERSION/attestations.json  who says that a version passes its check, each signed
#       packages/DIGEST                             archives
#
# A registry is never trusted: it can only withhold. Paths are made here, from names and digests that were checked, so
# nothing that a registry says leads to another address or file.


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
