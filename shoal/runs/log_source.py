"""The source of a run: its folder, without a server; or a coordinator's URL, without a key.

It gives the log, blobs and weights, whose hashes are verified, and metrics, status and tokenizer. It only reads, so the
folder may be that of a live run. What comes from a URL is a stranger's: the client limits each answer, and it is decoded
strictly here.
"""

import contextlib
import logging
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Protocol, TypeVar

import httpx

from shoal.chat.isolated import RendererLimits
from shoal.chat.renderer import FILES, Renderer
from shoal.errors import ConfigError, NothingYet, Overreach, PeerError, ShoalError, StateError
from shoal.ledger.event import event_hash
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.state import State
from shoal.net.blobs import path_of
from shoal.net.client import Client
from shoal.net.server_address import reader_url
from shoal.protocol import messages as t
from shoal.protocol.constants import (
    MAX_EVENTS,
    MAX_EVENTS_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_SUBMISSION_BYTES,
)
from shoal.protocol.encoding import digest
from shoal.run_folder import RunFolder, is_url
from shoal.runs.log_follower import newest_event
from shoal.runs.remote_status import MetricsPages
from shoal.runs.retention_rule import Expiry, expiry_of
from shoal.step_metrics import MetricsFollower, MetricsLine, clean_metrics
from shoal.weights.engine_loader import contained
from shoal.weights.fetch.chunks import NotStored
from shoal.weights.fetch.fetch import fetch_version
from shoal.weights.fetch.transfer import TransferEvents
from shoal.weights.fetch.version_directory import VersionFolder, disk_limit, room_for_version
from shoal.weights.manifest import ManifestError, ManifestTrust, open_manifest
from shoal.weights.memory_limit import share_of_free_mb

S = TypeVar("S")

log = logging.getLogger(__name__)

Rows = list[tuple[bytes, str]]
"""Stored events with their hashes, in order."""

ANSWER_S = 30.0
"""How long to wait for a coordinator's answer."""

STATUS_S = 2.0
"""The same for its status; it is asked for often."""

EVENT_BYTES, EVENT_COPIES = 200, 5
"""An auditor takes this many times an event's stored bytes, counted with the objects around them. Measured: 5.0 times."""


class PublicRun(Protocol):
    """What a run publishes."""

    name: str

    def expiry(self, state: State) -> Expiry | None:
        """What the run deletes by its own rule; None if nobody here knows, or if it keeps all."""
        ...

    async def oldest_served(self, state: State) -> int:
        """The oldest version from which on the weights are served, as far as probes show; 0 where `expiry` says it."""
        ...

    async def rows(self, most: int | None = None) -> Rows:
        """The whole log, or its first events. Raises `ConfigError`, `PeerError`, `StateError`."""
        ...

    async def page(self, after: int) -> Rows:
        """The events that follow the one of this number, at most MAX_EVENTS; none at the end, or if there is no log yet.
        Raises as `rows`."""
        ...

    async def newer(self, after: int) -> Rows:
        """The events that follow the one of this number, as many as there are now. Raises as `rows`."""
        ...

    async def blob(self, name: str) -> bytes:
        """Bytes by their hash. Raises `NothingYet` if they are not there, `StateError` if they have another hash."""
        ...

    async def manifest(self, version: int, name: str) -> bytes:
        """The signed manifest of a version; `name` is its hash, from the log. Raises as `blob`."""
        ...


class FolderRun:
    """The run in a folder of this machine: starting, live, dead or ended."""

    def __init__(self, root: Path, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network to the folder's coordinator, in tests. Raises `ConfigError` without a run."""
        self.name, self.folder = str(root), RunFolder(root)
        if not (self.folder.log.is_file() or self.folder.run_file.is_file()):
            raise ConfigError(f"{root} holds no run: give a run's folder, such as runs/wordle, or its URL")
        self._tail, self._whole = (MetricsFollower(self.folder.metrics, clean_metrics) for _ in range(2))
        self._told_unread = False
        self._transport = transport

    def expiry(self, state: State) -> Expiry | None:
        try:
            storage = self.folder.config().storage
        except (ConfigError, StateError):
            return None
        return expiry_of(state, storage, self._has)

    async def oldest_served(self, state: State) -> int:
        return 0

    def _has(self, blob: str) -> bool:
        return path_of(self.folder.blobs, blob).is_file()

    async def page(self, after: int) -> Rows:
        rows = self._read(after, MAX_EVENTS)
        if not rows and after < 0:
            demand_log(self.folder)
        return rows

    def _read(self, after: int, most: int | None) -> Rows:
        if not self.folder.log.is_file():
            return []
        with contextlib.closing(Store(sqlite_url(self.folder.log), read_only=True)) as store:
            return list(store.read(after, most))

    async def rows(self, most: int | None = None) -> Rows:
        rows = self._read(-1, most)
        if not rows:
            demand_log(self.folder)
            raise StateError(
                f"the log {self.folder.log} holds no event: start the run again, or restore it from a copy"
            )
        return rows

    async def newer(self, after: int) -> Rows:
        return self._read(after, None)

    async def blob(self, name: str) -> bytes:
        try:
            return verified(path_of(self.folder.blobs, name).read_bytes(), name)
        except FileNotFoundError:
            raise NothingYet(f"blob {name[:16]} is not here: it is no longer kept (storage.retain)") from None

    async def manifest(self, version: int, name: str) -> bytes:
        return await self.blob(name)

    async def newest(self) -> int:
        """The number of the newest event that there is, as far as anyone says; -1 if nobody does."""
        with contextlib.suppress(ShoalError):
            return newest_event(self.folder.log)
        return -1

    async def new_metrics(self) -> list[MetricsLine]:
        """Lines of metrics that are new since the last call, or repeat a step. Raises `ShoalError`."""
        return self._metrics_of(self._tail, self._tail.read)

    async def all_metrics(self) -> list[MetricsLine]:
        """One line for each step, in order. Raises `ShoalError`."""
        return list(self._metrics_of(self._whole, self._whole.lines))

    def _metrics_of(self, tail: MetricsFollower, read: Callable[[], S]) -> S:
        try:
            lines = read()
        except OSError as error:
            raise StateError(f"{self.folder.metrics} cannot be read: {error}. Check the disk") from None
        if tail.unread and not self._told_unread:
            self._told_unread = True
            log.warning("not shown: %d lines of %s that cannot be read", tail.unread, self.folder.metrics)
        return lines

    async def status(self) -> t.Status | None:
        """What the coordinator says now; None if none answers."""
        with contextlib.suppress(ShoalError):
            if url := reader_url(self.folder.address, self.folder.config().host.bind):
                async with Client(url, transport=self._transport, on_wait=lambda line: None) as client:
                    return await client.get_json("/v1/status", t.Status, deadline_s=STATUS_S)
        return None

    async def renderer(self, state: State) -> Renderer:
        """The tokenizer of the run. Raises `ShoalError`, `NothingYet` if there is none yet."""
        if not self.folder.policy.is_dir():
            raise NothingYet(f"{self.folder.policy} is not there yet: the trainer makes it when it starts")
        return Renderer.from_directory(self.folder.policy, state.sampling.stops)

    async def close(self) -> None:
        """Let go of connections and temporary files."""


def demand_log(folder: RunFolder) -> None:
    """Raise `StateError`, of a folder whose log has no event, if its run has begun: the log is gone."""
    begun = folder.metrics.exists() or folder.trainer.exists()
    if begun and any(folder.keys.glob("*.key")):  # a run in one process has neither keys nor a log
        raise StateError(f"the log {folder.log} is missing or empty, though the run has begun: restore it from a copy")


class UrlRun:
    """The run that the server at a URL serves: a coordinator, or a stranger that poses as one. See `FolderRun`."""

    def __init__(self, client: Client, max_memory_mb: int = 0) -> None:
        """`max_memory_mb` limits what the log takes, because its length is the host's choice; 0 is half of what is free."""
        self.name, self.client = client.base_url, client
        self._limit_mb = max_memory_mb or share_of_free_mb()
        self._read_bytes = 0
        """What the events that were read took."""
        self.claim = t.StateHash(-1, "", "")
        """What the coordinator said of its state when the log was read."""
        self._pages = MetricsPages(self.client, deadline_s=ANSWER_S)
        self._home: tempfile.TemporaryDirectory[str] | None = None

    def expiry(self, state: State) -> Expiry | None:
        return None  # a host that deletes what it must answer for could name any rule

    async def oldest_served(self, state: State) -> int:
        """By halves, because a run deletes the oldest first. One that leaves gaps is found when it lacks what is drawn."""
        gone, served = -1, state.main.version + 1
        while served - gone > 1:
            version = (gone + served) // 2
            try:
                await self.manifest(version, state.main.versions[version].manifest)
                served = version
            except NothingYet:
                gone = version
        return served

    async def rows(self, most: int | None = None) -> Rows:
        self.claim = await self.client.get_json("/v1/state", t.StateHash, deadline_s=ANSWER_S)
        due = self.claim.seq + 1 if most is None else min(most, self.claim.seq + 1)
        if due < 1:  # guard: empty-log
            raise PeerError(f"{self.name} says that its log is empty, which no run's log is: ask for the log elsewhere")
        rows: Rows = []
        self._read_bytes = 0
        while len(rows) < due:
            page = await self.page(len(rows) - 1)
            self._count(page, len(rows))
            rows += page
            if len(rows) < due and not is_full(page):  # guard: log-as-long-as-claimed
                raise PeerError(f"{self.name} serves {len(rows)} events but says that there are {self.claim.seq + 1}")
        return rows[:due]

    async def newer(self, after: int) -> Rows:
        rows: Rows = []
        while True:
            page = await self.page(after + len(rows))
            self._count(page, after + 1 + len(rows))
            rows += page
            if not is_full(page):  # guard: newer-events-end
                return rows

    def _count(self, page: Rows, fit: int) -> None:
        """Count a page that follows `fit` events. Raises `Overreach`."""
        self._read_bytes += sum(len(line) + EVENT_BYTES for line, _ in page)
        if EVENT_COPIES * self._read_bytes > self._limit_mb * 1_000_000:  # guard: log-fits-memory
            raise Overreach(
                f"the log of {self.name} has {max(self.claim.seq + 1, fit + len(page))} events, and {fit} of them fit into "
                f"the {self._limit_mb} MB that they may take (--max-memory, by default half of what is free): allow more"
            )

    async def page(self, after: int) -> Rows:
        """The hashes are of these bytes, and nothing is compared with them."""
        path = f"/v1/events?after={after}"
        page = await self.client.get(path, cap=MAX_SUBMISSION_BYTES, deadline_s=ANSWER_S)
        *lines, rest = page.split(b"\n", MAX_EVENTS)
        if rest:  # guard: events-of-a-page
            raise PeerError(f"{self.name} serves more than {MAX_EVENTS} events at once (MAX_EVENTS), or half of one")
        return [(line, event_hash(line)) for line in lines]

    async def blob(self, name: str) -> bytes:
        data = await self.client.get(f"/v1/blobs/{name}", cap=MAX_SUBMISSION_BYTES, deadline_s=ANSWER_S)
        return verified(data, name)

    async def manifest(self, version: int, name: str) -> bytes:
        path = f"/v1/manifests/{version}"
        return verified(await self.client.get(path, cap=MAX_MANIFEST_BYTES, deadline_s=ANSWER_S), name)

    async def newest(self) -> int:
        with contextlib.suppress(PeerError):
            return (await self.client.get_json("/v1/state", t.StateHash, deadline_s=STATUS_S)).seq
        return -1

    async def new_metrics(self) -> list[MetricsLine]:
        return await self._pages.new()

    async def all_metrics(self) -> list[MetricsLine]:
        return await MetricsPages(self.client, overlap_steps=0, deadline_s=ANSWER_S).all()

    async def status(self) -> t.Status | None:
        with contextlib.suppress(PeerError):
            return await self.client.get_json("/v1/status", t.Status, deadline_s=STATUS_S)
        return None

    async def renderer(self, state: State) -> Renderer:
        """Fetch the files that the tokenizer is made of, without any weights, and open them in a child process."""
        if state.main.version < 0:
            raise NothingYet(f"{self.name} has published no version yet")
        version, record = state.main.version, state.main.versions[state.main.version]
        data = await self.manifest(version, record.manifest)
        manifest = open_manifest(
            data, ManifestTrust(state.run, state.publishers), now=None, version=version, root=record.root
        )
        self._home = home = tempfile.TemporaryDirectory(prefix="shoal-watch-")
        await fetch_tokenizer(self, manifest, state.sampling.stops, Path(home.name))
        return contained(RendererLimits(), state.sampling.stops)(
            Path(home.name)
        )  # guard: watched-tokenizer-is-contained

    async def close(self) -> None:
        await self.client.close()
        if self._home is not None:
            self._home.cleanup()


async def fetch_tokenizer(run: UrlRun, manifest: t.Manifest, stops: str, home: Path) -> None:
    """Fetch the files of a version that its tokenizer is made of into a folder. Raises `ShoalError`."""
    for entry in manifest.files:
        if entry.path not in FILES[stops]:
            continue
        file = b"".join([await run.blob(chunk) for chunk in entry.chunks])
        if digest(file) != entry.digest:
            raise PeerError(f"{run.name} serves another {entry.path} than its manifest names: do not trust it")
        (home / entry.path).write_bytes(file)
        (home / entry.path).chmod(0o644)  # the sandbox's user reads it, whatever the umask


def is_full(page: Rows) -> bool:
    """Whether more events may follow. A page that is not full reaches the log's end, as the protocol says."""
    return len(page) >= MAX_EVENTS or sum(len(line) + 1 for line, _ in page) > MAX_EVENTS_BYTES


def verified(data: bytes, name: str) -> bytes:
    if digest(data) != name:
        raise StateError(f"the bytes kept as {name[:16]} have another hash: they were edited or damaged")
    return data


@contextlib.asynccontextmanager
async def open_run(source: str, max_memory_mb: int = 0) -> AsyncIterator[PublicRun]:
    """The run at a URL or in a folder. `max_memory_mb` is as of `UrlRun`."""
    if is_url(source):
        async with Client(source) as client:
            yield UrlRun(client, max_memory_mb)
    else:
        yield FolderRun(Path(source))


class Unavailable(PeerError):
    """The weights of a version are not available here. That does not mean that they are wrong."""

    def __init__(self, text: str, gone: bool = False) -> None:
        """`gone`: the run does not keep them any more."""
        super().__init__(text)
        self.gone = gone


async def fetch_weights(run: PublicRun, state: State, version: int, into: Path) -> Path:
    """Fetch the checkpoint of a version into a directory below `into`; the log says which weights root it must have.

    Raises `Unavailable` if it is no longer kept, cannot be reached or does not fit on the disk, `StateError` or `PeerError`
    if it is not what the log promises.
    """
    record, chunks = state.main.versions[version], _Chunks(run)

    try:
        data = await run.manifest(version, record.manifest)
    except PeerError as error:
        gone = isinstance(error, NothingYet)
        raise Unavailable(_gone(version) if gone else f"cannot fetch version {version}: {error}", gone) from None
    trust = ManifestTrust(state.run, state.publishers)
    open_manifest(data, trust, now=None, version=version)
    room_bytes = room_for_version(disk_limit(into), 1)

    async def signed_of(number: int) -> bytes:
        return data if number == version else await run.manifest(number, state.main.versions[number].manifest)

    try:
        folder = VersionFolder(into, 1, room_bytes)  # guard: room-for-audited-weights
        silent = TransferEvents(on_blame=lambda name, reason: None)
        return await fetch_version(version, [chunks], folder, trust, signed_of, root=record.root, events=silent)
    except NotStored as error:
        raise Unavailable(str(error)) from None
    except PeerError as error:
        if isinstance(error, ManifestError) and error.code == "too-long":
            raise Unavailable(f"version {version}, or what its patches begin at, has too many bytes ({error}): only "
                              f"{room_bytes} may be used in {into.parent}; free some space, or set TMPDIR to a larger disk"
                              ) from None  # fmt: skip
        missing = chunks.missing or (error if isinstance(error, NothingYet) else None)
        if missing:
            gone = isinstance(missing, NothingYet)
            raise Unavailable(_gone(version) if gone else f"cannot fetch version {version}: {error}", gone) from None
        raise


def _gone(version: int) -> str:
    return f"the weights of version {version} are gone (storage.retain)"


class _Chunks:
    """A run as a source of `weights.fetch`."""

    def __init__(self, run: PublicRun) -> None:
        self.name, self.rank, self._run = run.name, 0, run
        self.missing: PeerError | None = None
        """Why a chunk did not come."""

    async def parts(self, digest: str, start: int, size: int) -> AsyncGenerator[bytes, None]:
        try:
            yield (await self._run.blob(digest))[start:]
        except PeerError as error:
            self.missing = error
            raise
        except StateError as error:
            raise PeerError(str(error)) from None

    async def close(self) -> None:
        pass


def demand_whole_log(state: State, folder: RunFolder) -> None:
    """Raise `StateError` if the log lacks versions that the folder has: it is gone, or an old copy was put back. A new one
    would begin with the same run and keys, and nodes would see a fork.

    A trainer saves a version before it publishes it, and makes the next one after that. So a kill leaves it one version
    ahead of the log at most, and none ahead of a log that is not there, which is begun before the trainer starts.
    """
    places = (folder.trainer, "v*"), (folder.trainer / "journal", "v*.step"), (folder.checkpoints, "v*")
    names = [path.stem[1:] for place, pattern in places for path in place.glob(pattern)]
    newest = max((int(name) for name in names if name.isdecimal()), default=-1)
    if newest > state.main.version + (state.seq >= 0):  # guard: log-of-the-folder
        found = f"ends at version {state.main.version}" if state.main.version >= 0 else "has no version"
        raise StateError(
            f"the trainer in {folder.root} has reached version {newest}, and {folder.log.name} {found}: the log is gone or "
            f"an old copy. Restore {folder.log.name} from a backup of the last stop, or begin a new run from the newest "
            f"folder in {folder.checkpoints} (--set policy.path=FOLDER --out DIR)"
        )
