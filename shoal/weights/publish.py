"""Publication of a checkpoint directory: cut into chunks, which go to a sink, and described in a manifest.

One chunk is read at a time, so the size of the policy does not matter. The directory is never changed.
"""

import asyncio
import hashlib
import mmap
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

from shoal.errors import StateError, cause_of
from shoal.models.safetensors_header import Identity, identity_of
from shoal.net.client import Client
from shoal.protocol import constants, encoding
from shoal.protocol.messages import AdapterBase, FileEntry, Manifest, Patch
from shoal.run_folder import sync_file
from shoal.weights.base_model import directory_root, file_digest
from shoal.weights.delta.patch import CODEC, make_patch
from shoal.weights.delta.tensor_codes import Weights, coded_directory, cores
from shoal.weights.file_ranges import Span, copy_span
from shoal.weights.manifest import MOST_FILES, POLICY_STREAM, is_of_base, is_publishable, is_weights

BIG_BYTES = 64 << 20
"""A smaller version is cut into chunks of MAX_CHUNK_BYTES: it takes a moment, and each request costs both sides time."""

SMALLEST_CHUNK_BYTES = 1 << 20
"""Of a big version. At 20 and 100 ms to the first byte, smaller chunks are slower (256 KiB: twice the time at 100 ms), and
larger ones no faster; a source of wrong bytes wastes two chunks."""

_SMALL_BYTES = 1 << 16
"""So little is hashed sooner than a thread is asked to."""

MOST_CHUNKS = 4096
"""Versions of more than MOST_CHUNKS of the smallest chunks have larger ones, so that manifests stay below 400 kB."""


def chunk_bytes_for(size_bytes: int) -> int:
    """The size of the chunks of a version."""
    chunk_bytes = SMALLEST_CHUNK_BYTES
    while chunk_bytes < constants.MAX_CHUNK_BYTES and (
        size_bytes < BIG_BYTES or size_bytes > MOST_CHUNKS * chunk_bytes
    ):
        chunk_bytes *= 2
    return chunk_bytes


class ChunkSink(Protocol):
    """The receiver of chunks."""

    async def put(self, digest: str, chunk: bytes) -> None:
        """Store a chunk under its SHA-256; it is durable on return. Putting it twice changes nothing."""
        ...


class FileSink(ChunkSink, Protocol):
    """A receiver on this machine, which can take bytes of a file without reading them."""

    async def put_span(self, digest: str, span: Span) -> None:
        """Store a chunk that is in a file, as `put` does. Nobody changes the file any more."""
        ...


def takes_files(sink: ChunkSink) -> TypeGuard[FileSink]:
    """Whether a receiver is a `FileSink`."""
    return hasattr(sink, "put_span")


class FolderSink:
    """A folder in which a coordinator on this machine finds the chunks of the manifest that it is sent next.

    The bytes of a chunk are durable when it is there. Its name is not: the coordinator gives it another.
    """

    def __init__(self, folder: Path) -> None:
        """Chunks that were left there are deleted: no manifest named them."""
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder

    async def put(self, digest: str, chunk: bytes) -> None:
        """Write one chunk. Raises `StateError`."""
        await self._keep(digest, chunk)

    async def put_span(self, digest: str, span: Span) -> None:
        """See `FileSink`. A chunk that is a whole file gets another name of that file. Raises `StateError`."""
        await self._keep(digest, span)

    async def _keep(self, digest: str, chunk: bytes | Span) -> None:
        try:
            await asyncio.to_thread(self._write, self._folder / digest, chunk)
        except OSError as error:
            raise StateError(f"cannot write chunks to {self._folder}: {cause_of(error)}. Free some space") from None

    def _write(self, path: Path, chunk: bytes | Span) -> None:
        if path.exists():
            return  # and never written to again: it may be another name of a file
        self._folder.mkdir(parents=True, exist_ok=True)
        if isinstance(chunk, Span):
            copy_span(chunk, path)
        else:
            path.write_bytes(chunk)
        sync_file(path)


class HttpSink:
    """The coordinator's blobs over HTTP, for a key that may publish."""

    def __init__(self, client: Client, deadline_s: float | None = None) -> None:
        """`deadline_s`: how long to try for each chunk; None means for ever."""
        self._client, self._deadline_s = client, deadline_s

    async def put(self, digest: str, chunk: bytes) -> None:
        """Send one chunk. Raises `PeerError`."""
        await self._client.put_blob(digest, chunk, dict[str, Any], deadline_s=self._deadline_s)


@dataclass(frozen=True)
class PatchBase:
    """An earlier version, from which a patch may lead to the new one."""

    version: int
    root: str
    weights: Weights


class PublishSettings(NamedTuple):
    """What a directory is published as."""

    run: str
    version: int
    dtype: str
    chunk_bytes: int = 0
    """0: what `chunk_bytes_for` says."""


@dataclass
class PublishHistory:
    """What a publisher remembers from one version to the next."""

    sent: Collection[str] = ()
    """Chunks that the sink has: they are not sent again."""
    base: PatchBase | None = None
    """The newest version, from which a patch may lead to the next."""
    described: dict[Identity, FileEntry] = field(default_factory=dict)
    """What was said of files that stay the same: those of the base of adapters are read once."""


async def publish(
    directory: Path,
    sink: ChunkSink,
    release: PublishSettings,
    history: PublishHistory | None = None,
    *,
    whole: bool = True,
    adapts: AdapterBase | None = None,
) -> Manifest:
    """Send the chunks of an HF-format directory and describe them; `sign_manifest` then signs the description.

    If the history has the version before, a patch from it is offered, if it is worth it; without `whole`, the weights are
    then sent as that patch only. The manifest's times are 0 until it is signed, so it depends only on the directory, the
    base and `whole`. `adapts` is the model that the directory's adapter belongs to; its files are in the directory, too.

    Raises `StateError` if the directory cannot be read or has no weights, and whatever the sink raises.
    """
    run, version, dtype, chunk_bytes = release
    history = history or PublishHistory()
    known, base = history.sent, history.base
    paths = await asyncio.to_thread(_published_files, directory)
    chunk_bytes = chunk_bytes or chunk_bytes_for(sum(path.stat().st_size for path in paths))
    root = await asyncio.to_thread(directory_root, directory)
    patches = []
    if (
        base is not None
        and base.version == version - 1
        and (data := await asyncio.to_thread(_patch, base.weights, directory)) is not None
    ):
        file = await _send(f"{base.version:06d}.patch", data, sink, chunk_bytes, known)
        patches.append(Patch(base.version, base.root, CODEC, file))
    if patches and not whole:
        paths = [path for path in paths if not is_weights(path.name)]
    return Manifest(
        run=run,
        stream=POLICY_STREAM,
        version=version,
        parents=(version - 1,) if version else (),
        dtype=dtype,
        root=root,
        files=tuple(
            [
                await asyncio.to_thread(_named, path)
                if adapts and adapts.source and is_of_base(path.name)
                else await _send_file(path, sink, chunk_bytes, history)
                for path in paths
            ]
        ),
        chunk_bytes=chunk_bytes,
        issued=0.0,
        expires=0.0,
        patches=tuple(patches),
        base=adapts,
    )


def _patch(base: Weights, directory: Path) -> bytes | None:
    return make_patch(base, coded_directory(directory), threads=cores())


def _named(path: Path) -> FileEntry:
    """A file that each node gets from a hub: it is described, and not sent."""
    return FileEntry(path=path.name, size=path.stat().st_size, digest=file_digest(path), chunks=())


def _published_files(directory: Path) -> list[Path]:
    """The files to publish, in order of name."""
    return sorted(path for path in directory.iterdir() if path.is_file() and is_publishable(path.name))


async def _send_file(path: Path, sink: ChunkSink, chunk_bytes: int, history: PublishHistory) -> FileEntry:
    try:
        of = identity_of(path)
        described = history.described
        if of in described and {*described[of].chunks} <= {*history.sent}:
            return described[of]
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        entry = await _send(path.name, data, sink, chunk_bytes, history.sent, path)
        if is_weights(path.name):
            if len(described) > MOST_FILES:
                described.clear()
            described[of] = entry
        return entry
    except OSError as error:
        raise StateError(f"cannot read {path}: {cause_of(error)}. Make the checkpoint again") from None


async def _send(
    name: str,
    data: bytes | mmap.mmap,
    sink: ChunkSink,
    chunk_bytes: int,
    known: Collection[str],
    path: Path | None = None,
) -> FileEntry:
    """Send a file's chunks; `path` is the file, if it is on the disk. The file of one chunk has the chunk's hash, so its
    bytes are hashed once."""
    whole, chunks, view = hashlib.sha256(), [], memoryview(data)
    for start in range(0, len(view), chunk_bytes):
        chunk = view[start : start + chunk_bytes]
        digest = (
            await asyncio.to_thread(encoding.digest, chunk) if len(chunk) > _SMALL_BYTES else encoding.digest(chunk)
        )
        if digest not in known:
            if path is not None and takes_files(sink):
                await sink.put_span(digest, Span(path, start, len(chunk)))
            else:
                await sink.put(digest, bytes(chunk))
        chunks.append(digest)
        if len(view) > chunk_bytes:
            await asyncio.to_thread(whole.update, chunk)
    digest = chunks[0] if len(chunks) == 1 else whole.hexdigest()
    return FileEntry(path=name, size=len(view), digest=digest, chunks=tuple(chunks))
