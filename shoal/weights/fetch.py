"""Fetch the version that a manifest describes into a checkpoint directory, and verify every byte.

Called by workers, validators and auditors with a signed manifest. It takes chunks from several sources at once (a run
has one today, see `sources_of`); one that sends a wrong byte is blamed and left. A fetch that was cut short goes on
where it stopped; the directory appears under its name whole, or not at all. It trusts no source and does not depend on
any role. One process uses a folder.

A chunk comes from the first of these that has it: the unfinished directory, a version already here, a source.
"""

import asyncio
import hashlib
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from shoal.errors import PeerError, StateError, cause_of
from shoal.folder import name_folder
from shoal.net.client import Client
from shoal.protocol import wire
from shoal.protocol.types import Manifest, RunInfo
from shoal.weights.manifest import open_manifest, weights_root

CHUNK_DEADLINE_S = 60.0
"""A source that takes longer than this for a chunk is dropped for this fetch."""

STRAGGLER_S = 10.0
"""If a source takes longer than this for a chunk, an idle source is asked for it too."""

log = logging.getLogger(__name__)


class NotStored(StateError):
    """The disk could not take a version. Nothing is wrong with the version."""


class Source(Protocol):
    """A source of chunks."""

    name: str
    """For blame: a URL."""

    async def chunk(self, digest: str, size: int) -> bytes:
        """The source's bytes for a hash, unverified, at most `size`. Raises `PeerError`."""
        ...


class HttpSource:
    """The `/v1/blobs` of a coordinator."""

    def __init__(self, client: Client, deadline_s: float = CHUNK_DEADLINE_S) -> None:
        self.name = client.base_url
        self._client, self._deadline_s = client, deadline_s

    async def chunk(self, digest: str, size: int) -> bytes:
        """One chunk of at most `size` bytes, retried until the deadline. Raises `PeerError`."""
        return await self._client.get(f"/v1/blobs/{digest}", cap=size, deadline_s=self._deadline_s)


def sources_of(info: RunInfo, client: Client) -> list[Source]:
    """Where the weights of a run come from: the coordinator that `client` calls.

    A further kind of source is a class like `HttpSource`, returned from here by what a field of `RunInfo` says.
    """
    return [HttpSource(client)]


def tell_blame(source: str, reason: str) -> None:
    """Log that a source is dropped; the default for `on_blame`."""
    log.warning("source=%s left=true reason=%s", source, reason)


async def fetch_version(
    data: bytes,
    version: int,
    sources: Sequence[Source],
    folder: Path,
    *,
    run: str,
    publisher: str,
    now: float | None,
    root: str = "",
    max_bytes: int | None = None,
    keep: int = 2,
    on_blame: Callable[[str, str], None] = tell_blame,
) -> Path:
    """The directory of a version by its signed manifest, both verified.

    `publisher` is the run's trainer key; `now` and `max_bytes` are as of `open_manifest`, `keep` and `on_blame` as of
    `fetch`. Raises as both, and `StateError` where a `root` is given and the manifest names another.
    """
    manifest = open_manifest(data, run=run, keys=(publisher,), now=now, version=version, max_bytes=max_bytes)
    if root and manifest.root != root:
        raise StateError(f"the manifest of version {version} names another weights root than the log")
    return await fetch(manifest, sources, folder, keep=keep, on_blame=on_blame)


async def fetch(
    manifest: Manifest,
    sources: Sequence[Source],
    folder: Path,
    *,
    keep: int = 2,
    on_blame: Callable[[str, str], None] = tell_blame,
) -> Path:
    """Fetch and verify a version; returns its directory in `folder`, where the `keep` newest versions stay.

    `on_blame` gets (source, reason) when a source is dropped. Raises `PeerError`, naming each source's fault, if the
    sources together cannot serve everything. Raises `NotStored` if the disk is full, `StateError` if the chunks do not make
    the weights that the manifest promises.
    """
    target, partial = folder / directory_name(manifest), folder / f"{_PARTIAL}{directory_name(manifest)}"
    try:
        await asyncio.to_thread(_forget_unfinished, folder, partial)
        if target.exists():
            if await asyncio.to_thread(_fault, target, manifest, trusted=False) == "":
                return target
            shutil.rmtree(partial, ignore_errors=True)
            target.replace(partial)  # damaged since it was made: reuse its good chunks
        missing = await asyncio.to_thread(_prepare, folder, partial, manifest)
        await _fetch_pieces(missing, sources, on_blame)
        await asyncio.to_thread(_finish, partial, target, manifest)
    except OSError as error:
        raise NotStored(
            f"cannot store version {manifest.version} in {folder}: {cause_of(error)}. Free some space or use "
            "another folder; what was fetched is kept"
        ) from None
    _prune(folder, manifest, keep)
    return target


def directory_name(manifest: Manifest) -> str:
    """Name of a version's directory. It identifies the content, so versions of different runs do not collide."""
    return f"v{manifest.version:06d}-{manifest.root[:12]}"


_PARTIAL = ".partial-"
_MANIFEST = ".manifest"
"""A file in each directory: the manifest it was made from, so that a later version can reuse its chunks unread."""


# --- what is needed, and what is already here ---


class _Place(NamedTuple):
    path: Path
    offset: int


@dataclass
class _Piece:
    """A chunk that is needed, with all the places where it goes."""

    digest: str
    size: int
    places: list[_Place] = field(default_factory=list)

    def write(self, chunk: bytes) -> None:
        for place in self.places:
            with place.path.open("r+b") as file:
                file.seek(place.offset)
                file.write(chunk)

    def matches(self, chunk: bytes) -> bool:
        return len(chunk) == self.size and wire.digest(chunk) == self.digest


def _pieces(manifest: Manifest, directory: Path) -> Iterator[_Piece]:
    """The chunks of a version, with their places in a directory. A repeated chunk comes once."""
    pieces: dict[tuple[str, int], _Piece] = {}
    for entry in manifest.files:
        for index, digest in enumerate(entry.chunks):
            offset = index * manifest.chunk_bytes
            size = min(manifest.chunk_bytes, entry.size - offset)
            piece = pieces.setdefault((digest, size), _Piece(digest, size))
            piece.places.append(_Place(directory / entry.path, offset))
    return iter(pieces.values())


def _forget_unfinished(folder: Path, but: Path) -> None:
    """Delete what other fetches left unfinished. A host could let one version after another fail, and fill the disk."""
    for path in folder.glob(f"{_PARTIAL}v*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)  # guard: one-unfinished-version


def _prepare(folder: Path, partial: Path, manifest: Manifest) -> list[_Piece]:
    """Make the unfinished directory, copy in the chunks that this machine has, and return the missing pieces."""
    partial.mkdir(parents=True, exist_ok=True)
    wanted = {entry.path: entry.size for entry in manifest.files}
    for path in partial.iterdir():
        if path.name not in wanted:
            path.unlink()
    begun = {path for path in partial.iterdir() if path.stat().st_size}
    for name, size in wanted.items():
        with (partial / name).open("ab") as file:
            file.truncate(size)
    here = _chunks_here(folder)
    missing = []
    for piece in _pieces(manifest, partial):
        if all(place.path in begun and piece.matches(_read(place, piece.size)) for place in piece.places):
            continue
        known = here.get((piece.digest, piece.size))
        if known and piece.matches(chunk := _read(known, piece.size)):
            piece.write(chunk)
        else:
            missing.append(piece)
    need_bytes = sum(piece.size * len(piece.places) for piece in missing)
    free_bytes = shutil.disk_usage(partial).free
    if need_bytes > free_bytes:
        raise NotStored(
            f"version {manifest.version} needs {need_bytes} more bytes in {folder}, {free_bytes} are free: free some "
            "space or use another folder"
        )
    return missing


def _chunks_here(folder: Path) -> dict[tuple[str, int], _Place]:
    """Where this folder's versions store their chunks, by their manifests. Chunks are verified when read."""
    here: dict[tuple[str, int], _Place] = {}
    for known in folder.glob(f"v*/{_MANIFEST}"):
        try:
            manifest = wire.from_json(known.read_bytes(), Manifest)
        except wire.WireError:
            continue  # damaged: its chunks are fetched again
        here |= {(piece.digest, piece.size): piece.places[0] for piece in _pieces(manifest, known.parent)}
    return here


def _read(place: _Place, size: int) -> bytes:
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


# --- from the sources ---


class _Pool:
    """The missing pieces, shared by the sources."""

    def __init__(self, missing: list[_Piece], num_sources: int) -> None:
        self.waiting = deque(missing)
        self.asked: dict[str, float] = {}
        """When each requested piece was last asked for, by hash: seconds of the loop's clock."""
        self.pieces = {piece.digest: piece for piece in missing}
        self.num_sources = num_sources
        self.faults: list[str] = []
        self.changed = asyncio.Condition()

    def over(self) -> bool:
        return not self.pieces or self.num_sources == 0

    def next(self, now: float) -> _Piece | None:
        """A piece that nobody has been asked for, else one that is slow."""
        while self.waiting:
            piece = self.waiting.popleft()
            if piece.digest in self.pieces:
                self.asked[piece.digest] = now
                return piece
        for digest, asked in self.asked.items():
            if now - asked >= STRAGGLER_S:
                self.asked[digest] = now
                return self.pieces[digest]
        return None


async def _fetch_pieces(missing: list[_Piece], sources: Sequence[Source], on_blame: Callable[[str, str], None]) -> None:
    """Use all sources until nothing is missing. Raises `PeerError` if the last source is dropped before that."""
    pool = _Pool(missing, len(sources))
    failures: list[OSError] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_draw(source, pool, on_blame, failures)) for source in sources]
        async with pool.changed:
            await pool.changed.wait_for(lambda: pool.over() or failures)
        for task in tasks:
            task.cancel()
    if failures:
        raise failures[0]
    if pool.pieces:
        raise PeerError(
            f"{len(pool.pieces)} of {len(missing)} chunks not fetched: {'; '.join(pool.faults) or 'no source'}. Try "
            "again later, or use another source; what was fetched is kept"
        )


async def _draw(source: Source, pool: _Pool, on_blame: Callable[[str, str], None], failures: list[OSError]) -> None:
    """One source's work: piece after piece, until nothing is missing or the source fails."""
    clock = asyncio.get_running_loop().time
    while not pool.over():
        piece = pool.next(clock())
        if piece is None:
            await _wait_for_work(pool)
            continue
        try:
            chunk, fault = await _verified(source, piece), ""
        except PeerError as error:
            fault = str(error)
        async with pool.changed:
            if fault:
                pool.waiting.append(piece)
                pool.num_sources -= 1
                pool.faults.append(f"{source.name}: {fault}")
            elif pool.pieces.pop(piece.digest, None):
                pool.asked.pop(piece.digest, None)
                try:
                    piece.write(chunk)
                except OSError as error:
                    failures.append(error)
            pool.changed.notify_all()
        if fault:
            on_blame(source.name, fault)
            return


async def _verified(source: Source, piece: _Piece) -> bytes:
    """A piece from a source, with one retry, since it may be damaged on the way. Raises `PeerError`."""
    for _ in range(2):
        chunk = await source.chunk(piece.digest, piece.size)
        if piece.matches(chunk):
            return chunk
    raise PeerError(f"sent wrong bytes for chunk {piece.digest[:16]}…")


async def _wait_for_work(pool: _Pool) -> None:
    """Wait until a piece is given back, all pieces are here, or a source may have become slow."""
    try:
        async with asyncio.timeout(STRAGGLER_S), pool.changed:
            await pool.changed.wait_for(lambda: pool.waiting or pool.over())
    except TimeoutError:
        pass  # time to look for slow sources


# --- the end ---


def _finish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Verify the whole directory, make it durable, and give it its name."""
    fault = _fault(partial, manifest, trusted=True)
    if fault:
        shutil.rmtree(partial)
        raise StateError(
            f"version {manifest.version}: {fault}, though each chunk has its promised hash: the publisher is at fault. "
            "Tell the run's host"
        )
    (partial / _MANIFEST).write_bytes(wire.to_json(manifest))
    name_folder(partial, target)


def _fault(directory: Path, manifest: Manifest, *, trusted: bool) -> str:
    """How a directory differs from what the manifest promises; empty if it does not.

    `trusted`: every chunk was just verified, so a file of one chunk needs no second hash.
    """
    for entry in manifest.files:
        path = directory / entry.path
        if not path.is_file():
            return f"{entry.path} is missing"
        if trusted and len(entry.chunks) == 1:
            continue
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.digest:
                return f"{entry.path} has another hash"
    try:
        root = weights_root(directory)
    except StateError as error:
        return str(error)
    return "" if root == manifest.root else f"the weights root is {root[:16]}…, not {manifest.root[:16]}…"


def _prune(folder: Path, manifest: Manifest, keep: int) -> None:
    """Delete all but the newest versions, never the one just fetched."""
    newest = directory_name(manifest)
    finished = sorted((path for path in folder.glob("v*") if path.name != newest and path.is_dir()), reverse=True)
    for path in finished[max(0, keep - 1) :]:
        shutil.rmtree(path, ignore_errors=True)
