"""What a worker or a validator shares of the weights that it has, if its user asked for that: `--share`.

It serves verified chunks from the versions on disk, also from one that is still being fetched, with the calls of a relay.
The last patches are kept for that. Clients ask this node only if the coordinator reached it at its URL.
"""

import contextlib
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.errors import NothingYet
from shoal.net.blobs import FileAnswer
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits, connections_that_fit
from shoal.net.server_address import listen
from shoal.protocol.messages import Manifest, Patch
from shoal.protocol.signing import Key
from shoal.roles.node.serve_chunks import application, serving
from shoal.weights.fetch.chunks import UNFINISHED, Wanted, files_of, pieces_of, sized_chunks
from shoal.weights.fetch.relay_sources import holdings_of
from shoal.weights.fetch.version_directory import directory_name
from shoal.weights.manifest import content_of

SHARED_VERSIONS = 8
"""The last versions of which something is shared."""

SHARED_PART = 8
"""Of the disk that a node may take of a volunteer's machine, patches to share get at most an eighth."""

PATCHES = ".patches"
"""Names the folder of patches, beside the versions."""


@dataclass(frozen=True)
class WeightSharing:
    """How a node shares."""

    key: Key
    port: int
    bind: str = "0.0.0.0"
    url: str = ""
    """Where others reach it; empty: at the address from which it calls the host."""


class _SharedFile(NamedTuple):
    version: str
    file: str
    offset: int
    size: int


class SharedVersions:
    """Verified chunks within the files of versions, and of the patches that led to them."""

    def __init__(self, folder: Path, most_bytes: int = 0) -> None:
        """Patches take at most `most_bytes`. What an earlier process left of them is deleted."""
        self.folder, self.most_bytes = folder, most_bytes
        self.is_on = False
        """Whether anything is shared: only then it is worth finding out what is here."""
        self._places: OrderedDict[str, dict[str, _SharedFile]] = OrderedDict()
        """Of each version, by its content: where its chunks are, or will be."""
        self._chunks: dict[str, list[str]] = {}
        """All chunks that its manifest names, in order."""
        self._held: dict[str, set[str]] = {}
        self._patches: OrderedDict[Path, int] = OrderedDict()
        """Sizes of the files of patches, oldest first."""
        self._latest: Manifest | None = None
        self._content = ""
        shutil.rmtree(folder / PATCHES, ignore_errors=True)

    def hold(self, manifest: Manifest, chunks: Collection[str]) -> None:
        """These chunks of a version were verified, and are in its directory."""
        self._held[self._known(manifest)].update(chunks)

    def begin(self, manifest: Manifest) -> None:
        """A version is fetched from its beginning: what its files held before is gone."""
        if (held := self._held.get(content_of(manifest))) is not None:
            held.clear()

    def aside(self, manifest: Manifest, patch: Patch) -> Path:
        """Where the file of a patch to a version goes. Older ones are deleted if their room is needed. Raises OSError."""
        path = self._path(self._known(manifest), patch)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._patches.pop(path, None)
        if patch.file.size <= self.most_bytes:
            while sum(self._patches.values()) + patch.file.size > self.most_bytes:  # guard: few-patches-aside
                self._drop(next(iter(self._patches)))
            self._patches[path] = patch.file.size
        return path

    def hold_patch(self, manifest: Manifest, patch: Patch) -> None:
        """The file of a patch was verified, and is in its place."""
        content = content_of(manifest)
        path = self._path(content, patch)
        if path not in self._patches:
            path.unlink(missing_ok=True)  # there was no room, or others came after it
            return
        for piece in pieces_of([Wanted(path.name, patch.file, manifest.chunk_bytes)], Path(), manifest.version):
            self._places[content][piece.digest] = _SharedFile(PATCHES, path.name, piece.places[0].offset, piece.size)
            self._held[content].add(piece.digest)

    def serve(self, name: str) -> FileAnswer:
        """A verified chunk as an answer. Raises `NothingYet`."""
        for content, held in self._held.items():
            if name in held:  # guard: shared-chunks-are-verified
                version, file, offset, size = self._places[content][name]
                for directory in (version, f"{UNFINISHED}{version}"):
                    with contextlib.suppress(FileNotFoundError):
                        return FileAnswer(self.folder / directory / file, name, offset=offset, size=size)
                held.discard(name)  # the file was deleted
        raise NothingYet(f"{name[:16]!r} is not here, or not yet: ask another source")

    def holdings(self, content: str) -> bytes:
        """Which chunks of a version are here, a bit each. Blocks a little, as it looks for the files."""
        places, chunks, held = self._places.get(content), self._chunks.get(content), self._held.get(content)
        if not places or not chunks or not held:
            return b""
        files = {places[name][:2] for name in list(held)}
        here = {
            (version, file)
            for version, file in files
            if any((self.folder / directory / file).exists() for directory in (version, f"{UNFINISHED}{version}"))
        }
        return holdings_of(chunks, {name for name in list(held) if places[name][:2] in here})

    def _known(self, manifest: Manifest) -> str:
        """The content of a version, of which it is known now where its chunks would be."""
        if manifest is not self._latest:
            self._latest, self._content = manifest, content_of(manifest)
        content = self._content
        if content not in self._places:
            name = directory_name(manifest)
            self._places[content] = {
                piece.digest: _SharedFile(name, piece.places[0].path.name, piece.places[0].offset, piece.size)
                for piece in pieces_of(files_of(manifest), Path(), manifest.version)
            }
            self._chunks[content] = list(sized_chunks(manifest))
            self._held[content] = set()
            if len(self._places) > SHARED_VERSIONS:
                oldest, _ = self._places.popitem(last=False)
                del self._held[oldest], self._chunks[oldest]
                for path in [path for path in self._patches if path.name.startswith(oldest)]:
                    self._drop(path)
        return content

    def _path(self, content: str, patch: Patch) -> Path:
        return self.folder / PATCHES / f"{content}-{patch.base}"

    def _drop(self, patch: Path) -> None:
        """Delete the file of a patch."""
        del self._patches[patch]
        patch.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def sharing(share: WeightSharing | None, client: Client, shared: SharedVersions) -> AsyncIterator[None]:
    """Serve what is shared, and offer it to the coordinator, meanwhile. Raises `StateError` if the port cannot be used."""
    if share is None:
        yield
        return
    shared.is_on = True
    app, limits = application(shared, share.key, client.run, time.time), ServerLimits(total=connections_that_fit())
    with listen(share.bind, share.port, key="--share-port") as listener:
        async with serving(app, listener, client, public_url=share.url, limits=limits):
            yield
