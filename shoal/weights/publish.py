"""Publish a checkpoint directory: cut it into chunks and describe it in a manifest.

Called by the trainer once for each version. It reads one chunk at a time, so the size of the policy does not matter, and
passes the chunks to a sink. A sink that already has a chunk may do nothing. It does not decide when to publish, and
never changes the directory.
"""

import asyncio
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import StateError, cause_of
from shoal.net.client import Client
from shoal.protocol import constants, wire
from shoal.protocol.types import FileEntry, Manifest
from shoal.weights.demands import POLICY_STREAM, is_publishable
from shoal.weights.manifest import weights_root

BIG_BYTES = 64 << 20
"""A smaller version is cut into chunks of MAX_CHUNK_BYTES: it takes a moment, and each request costs both sides time."""

SMALLEST_CHUNK_BYTES = 1 << 20
"""Of a big version. At 20 and 100 ms to the first byte, smaller chunks are slower (256 KiB: twice the time at 100 ms), and
larger ones no faster; a source of wrong bytes wastes two chunks."""

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


class HttpSink:
    """The coordinator's blobs over HTTP, for a key that may publish."""

    def __init__(self, client: Client, deadline_s: float | None = None) -> None:
        """`deadline_s`: how long to try for each chunk; None means for ever."""
        self._client, self._deadline_s = client, deadline_s

    async def put(self, digest: str, chunk: bytes) -> None:
        """Send one chunk. Raises `PeerError`."""
        await self._client.put_blob(digest, chunk, dict[str, Any], deadline_s=self._deadline_s)


async def publish(
    directory: Path,
    sink: ChunkSink,
    *,
    run: str,
    version: int,
    dtype: str,
    parents: tuple[int, ...] = (),
    chunk_bytes: int = 0,
    known: Collection[str] = (),
) -> Manifest:
    """Send the chunks of an HF-format directory and describe them; `sign_manifest` then signs the description.

    Chunks in `known` are not sent: the sink has them from the previous version. The manifest's times are 0 until it is
    signed, so it depends only on the directory. `chunk_bytes` 0 is what `chunk_bytes_for` says.

    Raises `StateError` if the directory cannot be read or has no weights, and whatever the sink raises.
    """
    root = await asyncio.to_thread(weights_root, directory)
    entries = []
    paths = await asyncio.to_thread(_published_files, directory)
    chunk_bytes = chunk_bytes or chunk_bytes_for(sum(path.stat().st_size for path in paths))
    for path in paths:
        entries.append(await _send_file(path, sink, chunk_bytes, known))
    return Manifest(
        run=run,
        stream=POLICY_STREAM,
        version=version,
        parents=parents,
        dtype=dtype,
        root=root,
        files=tuple(entries),
        chunk_bytes=chunk_bytes,
        issued=0.0,
        expires=0.0,
    )


def _published_files(directory: Path) -> list[Path]:
    """The files to publish, in order of name."""
    return sorted(path for path in directory.iterdir() if path.is_file() and is_publishable(path.name))


async def _send_file(path: Path, sink: ChunkSink, chunk_bytes: int, known: Collection[str]) -> FileEntry:
    whole, chunks, size = hashlib.sha256(), [], 0
    try:
        with path.open("rb") as file:
            one_chunk = os.fstat(file.fileno()).st_size <= chunk_bytes  # then its hash is the file's
            while chunk := await asyncio.to_thread(file.read, chunk_bytes):
                digest = wire.digest(chunk)
                if digest not in known:
                    await sink.put(digest, chunk)
                chunks.append(digest)
                size += len(chunk)
                if not one_chunk:
                    whole.update(chunk)
    except OSError as error:
        raise StateError(f"cannot read {path}: {cause_of(error)}. Make the checkpoint again") from None
    digest = chunks[0] if one_chunk and chunks else whole.hexdigest()
    return FileEntry(path=path.name, size=size, digest=digest, chunks=tuple(chunks))
