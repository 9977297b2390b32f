"""Chunks that a version needs, and those that are here: in its unfinished directory, or in another version of the folder.

Whatever is reused is hashed. The bytes of a chunk that is being fetched are in a file of their own
until the chunk is whole, so a killed fetch goes on within a chunk.
"""

import contextlib
import hashlib
import itertools
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shoal.errors import StateError
from shoal.net.blobs import path_of
from shoal.protocol import encoding
from shoal.protocol.messages import FileEntry, Manifest
from shoal.weights.file_ranges import Span, append_span, read_span
from shoal.weights.manifest import manifests_here

UNFINISHED = ".partial-"
"""Begins the name of a directory that is being fetched."""

_PART = ".part-"
_COPY_BYTES = 1 << 20


class NotStored(StateError):
    """The disk could not take a version. Nothing is wrong with the version."""


class NoSpace(NotStored):
    """The disk is full: once there is space, the same call works."""


class FileRange(NamedTuple):
    """Where a chunk goes."""

    path: Path
    offset: int


@dataclass(eq=False)
class Chunk:
    """A chunk that is needed, with all the places where it goes."""

    digest: str
    size: int
    places: list[FileRange] = field(default_factory=list)
    part: "PartialChunk | None" = None
    """Its first bytes, if a source or an earlier process left some and no attempt is adding to them."""

    def write(self, chunk: bytes) -> None:
        """Write the verified chunk to all its places."""
        for place in self.places:
            with place.path.open("r+b") as file:
                file.seek(place.offset)
                file.write(chunk)

    def take(self, part: Path) -> None:
        """Put the verified chunk, which is in a file, into all its places. Raises OSError."""
        for place in self.places:
            with place.path.open("r+b", buffering=0) as file:
                file.seek(place.offset)
                append_span(Span(part, 0, self.size), file.fileno())

    def matches(self, chunk: bytes) -> bool:
        """Whether these are the chunk's bytes."""
        return len(chunk) == self.size and encoding.digest(chunk) == self.digest

    def new_part(self, directory: Path) -> "PartialChunk":
        """An empty part in a new file. Raises OSError."""
        paths = (directory / f"{_PART}{self.digest}-{number}" for number in itertools.count())
        return PartialChunk(next(path for path in paths if not path.exists()))


@dataclass(eq=False)
class StoredPiece(Chunk):
    """A chunk that is to be a file of its own, as in a relay."""

    store: Callable[[str, Path], None] = lambda digest, part: None
    """Takes the hash of a verified chunk and the file that has it, and moves the file."""

    def take(self, part: Path) -> None:
        """Hand the file on."""
        self.store(self.digest, part)


class ReceivedRange(NamedTuple):
    """Bytes of a part that came from one source, up to `end`. No source: an earlier process fetched them."""

    source: str
    start: int
    end: int
    digest: str = ""
    """Of these bytes, once that is of interest."""


class PartialChunk:
    """The first bytes of a chunk, in a file, with the sources that sent them."""

    def __init__(self, path: Path) -> None:
        """Opens the file. If it has bytes, they are those of an earlier process."""
        self.path, self.size, self.segments = path, 0, list[ReceivedRange]()
        self._hash = hashlib.sha256()
        self._file: BinaryIO = path.open("a+b", buffering=0)
        self._file.seek(0)
        while data := self._file.read(_COPY_BYTES):
            self._hash.update(data)
            self.size += len(data)
        if self.size:
            self.segments.append(ReceivedRange("", 0, self.size))

    def add(self, data: bytes | memoryview, source: str) -> None:
        """Append bytes from a source. Raises OSError."""
        if not self.segments or self.segments[-1].source != source:
            self.segments.append(ReceivedRange(source, self.size, self.size))
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._hash.update(data)
        self.size += len(data)
        self.segments[-1] = self.segments[-1]._replace(end=self.size)

    def copy(self, part: "PartialChunk") -> "PartialChunk":
        """Begin `part`, which is empty, with what this one has; returns it. Raises OSError."""
        for segment in self.segments:
            for data in read_span(self._span(segment)):
                part.add(data, segment.source)
        return part

    def is_only_from(self, source: str) -> bool:
        """Whether all its bytes came from this source."""
        return all(segment.source == source for segment in self.segments)

    def matches(self, piece: Chunk) -> bool:
        """Whether it is the whole chunk."""
        return self.size == piece.size and self._hash.hexdigest() == piece.digest

    def evidence(self) -> list[ReceivedRange]:
        """Which source sent which bytes, with the digests of those bytes."""
        return [segment._replace(digest=self._digest(segment)) for segment in self.segments]

    def liars(self, evidence: list[ReceivedRange]) -> list[str]:
        """The sources whose bytes differ from this part, which is right."""
        return [one.source for one in evidence if one.source and self._digest(one) != one.digest]

    def _span(self, segment: ReceivedRange) -> Span:
        return Span(self.path, segment.start, segment.end - segment.start)

    def _digest(self, segment: ReceivedRange) -> str:
        whole = hashlib.sha256()
        for data in read_span(self._span(segment)):
            whole.update(data)
        return whole.hexdigest()

    def close(self) -> None:
        """Close the file; a later process finds it."""
        self._file.close()

    def drop(self) -> None:
        """Delete the file."""
        self.close()
        self.path.unlink(missing_ok=True)


class Wanted(NamedTuple):
    """A file that is needed, under a name of our choice."""

    name: str
    entry: FileEntry
    chunk_bytes: int


def files_of(manifest: Manifest) -> list[Wanted]:
    """The files of a version's directory."""
    return [Wanted(entry.path, entry, manifest.chunk_bytes) for entry in manifest.files]


def pieces_of(files: Iterable[Wanted], directory: Path, version: int) -> list[Chunk]:
    """The chunks of some files, with their places in a directory. A repeated chunk comes once.

    Raises `StateError` if one hash is to be of two sizes: no source could serve both.
    """
    pieces: dict[str, Chunk] = {}
    for name, entry, chunk_bytes in files:
        for index, digest in enumerate(entry.chunks):
            offset = index * chunk_bytes
            size = min(chunk_bytes, entry.size - offset)
            piece = pieces.setdefault(digest, Chunk(digest, size))
            if piece.size != size:  # guard: one-size-a-chunk
                raise StateError(
                    f"version {version}: chunk {digest[:16]}… has {piece.size} bytes in one place and {size} in "
                    "another: the publisher is at fault. Tell the run's host"
                )
            piece.places.append(FileRange(directory / name, offset))
    return list(pieces.values())


def sized_chunks(manifest: Manifest) -> dict[str, int]:
    """The sizes of a version's chunks by hash, each once, those of patches last; else in the order of the manifest.

    Raises `StateError` as `pieces_of`.
    """
    patches = [Wanted(patch.file.path, patch.file, manifest.chunk_bytes) for patch in manifest.patches]
    return {piece.digest: piece.size for piece in pieces_of([*files_of(manifest), *patches], Path(), manifest.version)}


def forget_unfinished(folder: Path, but: Collection[Path]) -> None:
    """Delete what other fetches left unfinished. A host could let one version after another fail, and fill the disk."""
    for path in folder.glob(f"{UNFINISHED}v*"):
        if path not in but:
            shutil.rmtree(path, ignore_errors=True)  # guard: one-unfinished-version


def prepare(
    folder: Path,
    partial: Path,
    files: Sequence[Wanted],
    version: int,
    *,
    store: Path | None = None,
    extra_bytes: int = 0,
) -> list[Chunk]:
    """Make the unfinished directory, copy in the chunks that this machine has, and return the missing pieces.

    `store` is a folder of blobs that also has chunks, such as that of a coordinator on this machine. Raises `NoSpace` if
    the rest and `extra_bytes` do not fit on the disk.
    """
    pieces = pieces_of(files, partial, version)
    partial.mkdir(parents=True, exist_ok=True)
    wanted = {name: entry.size for name, entry, _ in files}
    for path in partial.iterdir():
        is_shared = path.stat().st_nlink > 1  # with another version, or with the cache of a hub
        if is_shared or (
            path.name not in wanted and not path.name.startswith(_PART)
        ):  # guard: shared-file-is-not-written
            path.unlink()
    begun = {path for path in partial.iterdir() if path.stat().st_size}
    for name, size in wanted.items():
        with (partial / name).open("ab") as file:
            file.truncate(size)
    here = _chunks_here(folder)
    missing = []
    for piece in pieces:
        if all(place.path in begun and piece.matches(_read(place, piece.size)) for place in piece.places):
            continue
        known = here.get((piece.digest, piece.size))
        if known is None and store is not None:
            known = FileRange(path_of(store, piece.digest), 0)
        if known and piece.matches(chunk := _read(known, piece.size)):
            piece.write(chunk)
        else:
            missing.append(piece)
    need_bytes = sum(piece.size * len(piece.places) for piece in missing) + extra_bytes
    free_bytes = shutil.disk_usage(partial).free
    if need_bytes > free_bytes:
        raise NoSpace(
            f"version {version} needs {need_bytes} more bytes in {folder}, {free_bytes} are free: free some "
            "space or use another folder"
        )
    take_up_parts(partial, missing)
    return missing


def _chunks_here(folder: Path) -> dict[tuple[str, int], FileRange]:
    """Where this folder's versions store their chunks, by their manifests. Chunks are verified when read."""
    here: dict[tuple[str, int], FileRange] = {}
    for directory, manifest in manifests_here(folder):
        with contextlib.suppress(StateError):  # damaged: its chunks are fetched again
            for piece in pieces_of(files_of(manifest), directory, manifest.version):
                here[piece.digest, piece.size] = piece.places[0]
    return here


def chunks_here(manifest: Manifest, directory: Path) -> set[str]:
    """The chunks of a version's files that its directory has, verified. Blocks, as it hashes the files."""
    pieces = pieces_of(files_of(manifest), directory, manifest.version)
    return {piece.digest for piece in pieces if piece.matches(_read(piece.places[0], piece.size))}


def _read(place: FileRange, size: int) -> bytes:
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            return file.read(size)
    except OSError:  # then it is fetched
        return b""


def take_up_parts(partial: Path, missing: list[Chunk]) -> None:
    """Give each missing piece the longest part that an earlier process left of it. The other parts are deleted."""
    by_digest = {piece.digest: piece for piece in missing}
    left = sorted(partial.glob(f"{_PART}*"), key=lambda path: -path.stat().st_size)
    for path in left:
        piece = by_digest.get(path.name.removeprefix(_PART).partition("-")[0])
        if piece is None or piece.part is not None or not 0 < path.stat().st_size <= piece.size:
            path.unlink()
        else:
            piece.part = PartialChunk(path)


def clear_parts(partial: Path) -> None:
    """Delete the files of parts: the directory is whole."""
    for path in partial.glob(f"{_PART}*"):
        path.unlink()
