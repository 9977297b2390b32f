"""What a worker or a validator shares of the weights that it has, if its user asked for that: `--share`.

Called by the roles around their work. It serves verified chunks from the versions on disk, also from one that is still
being fetched, with the calls of a relay. Clients ask this node only if the coordinator reached it at its URL.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.errors import NothingYet
from shoal.net.client import Client
from shoal.net.connections import Limits, connections_that_fit, http_server
from shoal.net.file_answer import FileAnswer
from shoal.net.listening import listen
from shoal.protocol.identity import Key
from shoal.protocol.types import Manifest
from shoal.roles.offering import application, offer
from shoal.weights.finish import directory_name
from shoal.weights.manifest import content_of
from shoal.weights.pieces import UNFINISHED, files_of, pieces_of, sized_chunks
from shoal.weights.relays import holdings_of

SHARED_VERSIONS = 4


@dataclass(frozen=True)
class Share:
    """How a node shares."""

    key: Key
    port: int
    bind: str = "0.0.0.0"


class _Place(NamedTuple):
    version: str
    file: str
    offset: int
    size: int


class SharedVersions:
    """Verified chunks within the files of versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_on = False
        """Whether anything is shared: only then it is worth finding out what is here."""
        self._places: OrderedDict[str, dict[str, _Place]] = OrderedDict()
        """Of each version, by its content: where its chunks are, or will be."""
        self._chunks: dict[str, list[str]] = {}
        """All chunks that its manifest names, in order."""
        self._held: dict[str, set[str]] = {}
        self._latest: Manifest | None = None
        self._content = ""

    def hold(self, manifest: Manifest, chunks: Collection[str]) -> None:
        """These chunks of a version were verified, and are in its directory."""
        if manifest is not self._latest:
            self._latest, self._content = manifest, content_of(manifest)
        content = self._content
        if content not in self._places:
            name = directory_name(manifest)
            self._places[content] = {
                piece.digest: _Place(name, piece.places[0].path.name, piece.places[0].offset, piece.size)
                for piece in pieces_of(files_of(manifest), Path(), manifest.version)
            }
            self._chunks[content] = list(sized_chunks(manifest))
            self._held[content] = set()
            if len(self._places) > SHARED_VERSIONS:
                oldest, _ = self._places.popitem(last=False)
                del self._held[oldest], self._chunks[oldest]
        self._held[content].update(chunks)

    def begin(self, manifest: Manifest) -> None:
        """A version is fetched from its beginning: its files are empty for now, whatever they held before."""
        if (held := self._held.get(content_of(manifest))) is not None:
            held.clear()

    def serve(self, name: str) -> FileAnswer:
        """A verified chunk as an answer. Raises `NothingYet`."""
        for content, held in self._held.items():
            if name in held:  # guard: shared-chunks-are-verified
                version, file, offset, size = self._places[content][name]
                for directory in (version, f"{UNFINISHED}{version}"):
                    with contextlib.suppress(FileNotFoundError):
                        return FileAnswer(self.folder / directory / file, name, offset=offset, size=size)
                held.discard(name)  # the version was deleted
                break
        raise NothingYet(f"{name[:16]!r} is not here, or not yet: ask another source")

    def holdings(self, content: str) -> bytes:
        """Which chunks of a version are here, a bit each."""
        held = self._held.get(content)
        return holdings_of(self._chunks[content], held) if held else b""


@contextlib.asynccontextmanager
async def sharing(share: Share | None, client: Client, shared: SharedVersions) -> AsyncIterator[None]:
    """Serve what is shared, and offer it to the coordinator, meanwhile. Raises `StateError` if the port cannot be used."""
    if share is None:
        yield
        return
    shared.is_on = True
    with listen(share.bind, share.port, key="--share-port") as listener:
        app = application(shared, share.key, client.run, time.time)
        server = http_server(app, Limits(total=connections_that_fit()))
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        tasks = [
            asyncio.create_task(server.serve(sockets=[listener])),
            asyncio.create_task(offer(client, "", listener.getsockname()[1])),
        ]
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
