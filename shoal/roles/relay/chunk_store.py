"""What a relay has: verified chunks and manifests of a run, as files named by their hashes, within a limit of the disk.

A chunk is served only if this process has verified it. It knows no network and no other node.
"""

import hashlib
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

from shoal.errors import NothingYet
from shoal.net.blobs import FileAnswer, path_of
from shoal.protocol import encoding
from shoal.protocol.encoding import is_digest
from shoal.protocol.messages import Manifest
from shoal.run_folder import write_atomically
from shoal.weights.fetch.chunks import StoredPiece, sized_chunks, take_up_parts
from shoal.weights.fetch.relay_sources import holdings_of
from shoal.weights.manifest import content_of

IN_HAND_BYTES = 32 << 20
"""This much of the disk is left for chunks that are not whole yet."""

BLOCK_BYTES = 4096
"""A file takes whole blocks of the disk, however small it is."""

MOST_HELD = 1 << 19
"""Limit on the number of chunks, because each takes some 250 bytes of memory: each counts as at least this part of the
disk limit."""

KEPT_MANIFESTS, MOST_NAMES = 64, 1 << 20
"""Limits on the manifests about which clients may ask what is here, and on the chunks that these name together."""


class ChunkStore:
    """The chunks of one run on the disk of a relay."""

    def __init__(self, folder: Path, max_bytes: int, seed: int) -> None:
        """`seed` decides which chunks are kept if not all fit: another part for each relay. Raises OSError."""
        self.folder, self.parts = folder / "chunks", folder / "parts"
        self._max_bytes, self._seed = max(0, max_bytes - IN_HAND_BYTES), seed
        self._least_bytes = max(BLOCK_BYTES, self._max_bytes // MOST_HELD)
        self.held: dict[str, int] = {}
        """Sizes of the chunks that were verified since the start."""
        self._chunks: dict[str, list[str]] = {}
        """Of manifests, by their content; the latest last."""
        self.parts.mkdir(parents=True, exist_ok=True)

    @property
    def held_bytes(self) -> int:
        """Bytes of all chunks here."""
        return sum(list(self.held.values()))  # a copy: another thread may add one meanwhile

    def verify(self) -> None:
        """Hash what an earlier process left, and delete what is damaged. Blocks."""
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            with path.open("rb") as file:
                good = is_digest(path.name) and hashlib.file_digest(file, "sha256").hexdigest() == path.name
            if good:
                self.held[path.name] = path.stat().st_size
            else:
                path.unlink()  # guard: damaged-since-the-last-start

    # --- for clients ---

    def serve(self, name: str) -> FileAnswer:
        """A verified chunk or manifest as an answer. Raises `NothingYet`."""
        if name in self.held:  # guard: verified-before-it-is-served
            try:
                return FileAnswer(path_of(self.folder, name), name)
            except FileNotFoundError:
                self.held.pop(name, None)
        raise NothingYet(f"{name[:16]!r} is not here, or not yet: ask another source")

    def holdings(self, content: str) -> bytes:
        """Which chunks of a version are here, a bit each; nothing for a version that is not known, or not yet."""
        return holdings_of(self._chunks[content], self.held) if content in self._chunks else b""

    # --- for the filler ---

    def keep(self, manifest: Manifest) -> None:
        """Answer what is here of a version from now on."""
        content = content_of(manifest)
        self._chunks.pop(content, None)
        self._chunks[content] = list(sized_chunks(manifest))
        # guard: few-names-of-a-host
        while len(self._chunks) > KEPT_MANIFESTS or sum(map(len, self._chunks.values())) > MOST_NAMES:
            del self._chunks[next(iter(self._chunks))]

    def missing(self, fresh: Iterable[tuple[bytes, Manifest]]) -> list[StoredPiece]:
        """The chunks to fetch next: of these versions, the most important first, what fits on the disk and is not here.
        Stores the manifests, as they were signed, that fit.

        Deletes chunks of other versions if their room is needed. An answer that sends such a chunk ends well, because its
        file is open. Raises OSError.
        """
        self.parts.mkdir(parents=True, exist_ok=True)  # somebody may have deleted everything meanwhile
        wanted, room = dict[str, int](), min(self._max_bytes, self._used_bytes() + self._free_bytes())
        manifests = dict[str, bytes]()
        for signed, manifest in fresh:
            manifests[encoding.digest(signed)] = signed
            chunks = list(sized_chunks(manifest).items())
            random.Random(self._seed).shuffle(chunks)
            for name, size in [(encoding.digest(signed), len(signed)), *chunks]:
                if name not in wanted and self._cost(size) <= room:
                    wanted[name] = size
                    room -= self._cost(size)
        lacking = {name: size for name, size in wanted.items() if name not in self.held}
        self._make_room(sum(map(self._cost, lacking.values())), wanted)
        for name in [name for name in manifests if name in lacking]:
            write_atomically(path_of(self.folder, name), manifests[name])
            self.held[name] = lacking.pop(name)
        pieces = [StoredPiece(name, size, store=self.take) for name, size in lacking.items()]
        take_up_parts(self.parts, list(pieces))
        return pieces

    def take(self, name: str, part: Path) -> None:
        """Keep a chunk that was just verified; its file is moved. Raises OSError."""
        path = path_of(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        size = part.stat().st_size
        os.replace(part, path)
        self.held[name] = size

    def _make_room(self, need_bytes: int, wanted: Iterable[str]) -> None:
        """Delete chunks that are not wanted, oldest first."""
        over_bytes = self._used_bytes() + need_bytes - self._max_bytes
        over_bytes = max(over_bytes, need_bytes - self._free_bytes())
        for name in [name for name in list(self.held) if name not in wanted]:  # guard: bounded-disk
            if over_bytes <= 0:
                return
            over_bytes -= self._cost(self.held.pop(name, 0))
            path_of(self.folder, name).unlink(missing_ok=True)

    def _cost(self, size: int) -> int:
        """What a chunk counts for: a host could publish millions of chunks of one byte."""
        return max(self._least_bytes, -(-size // BLOCK_BYTES) * BLOCK_BYTES)  # guard: small-chunks-count

    def _used_bytes(self) -> int:
        return sum(map(self._cost, list(self.held.values())))

    def _free_bytes(self) -> int:
        return max(0, shutil.disk_usage(self.parts).free - IN_HAND_BYTES)
