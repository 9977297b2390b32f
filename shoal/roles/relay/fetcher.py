"""What the coordinator says of the run, asked so that a relay hears of a version when it is published.

The coordinator holds each question until there is a newer version. One that does not hold it, because it is older, has no
place, or is hostile, is asked every `ASK_EVERY_S`.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from shoal.errors import NothingYet, PeerError, ShoalError, cause_of
from shoal.net.client import Client
from shoal.protocol.constants import MAX_MANIFEST_BYTES, MAX_PATCH_CHAIN
from shoal.protocol.messages import Manifest, RunInfo
from shoal.roles.relay.chunk_store import ChunkStore
from shoal.weights.fetch.fetch import tell_blame
from shoal.weights.fetch.relay_sources import Relays, expected
from shoal.weights.fetch.sources import ORIGIN, sources_of
from shoal.weights.fetch.transfer import Transfer
from shoal.weights.manifest import chunks_of, chunks_of_patches, is_whole, open_manifest

log = logging.getLogger("relay")

ASK_EVERY_S = 2.0
"""Least time from the beginning of one question to that of the next."""

REST_S = 10.0
"""After a question that failed."""


class VersionWatch:
    """The run as the coordinator told it last."""

    def __init__(
        self,
        client: Client,
        info: RunInfo,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.info = info
        self._client, self._clock, self._sleep = client, clock, sleep
        self._bell = asyncio.Event()

    async def follow(self) -> None:
        """Ask until cancelled. What goes wrong is told, and asked again."""
        while True:
            began = self._clock()
            try:
                self._take(await self._client.get_json(f"/v1/run?after={self.info.version}", RunInfo))
            except ShoalError as error:
                log.warning("%s", error)
                await self._sleep(REST_S)
            await self._sleep(max(0.0, began + ASK_EVERY_S - self._clock()))  # guard: questions-apart

    def _take(self, told: RunInfo) -> None:
        if told.run != self.info.run:  # guard: relays-one-run
            raise PeerError("the host serves another run now: start the relay again to serve that one")
        self.info = told
        self._bell.set()

    async def wait(self, seen: int | None, limit_s: float) -> None:
        """Return as soon as the newest version is another than the one seen (None: none), or after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.info.version == seen:
                    self._bell.clear()
                    await self._bell.wait()


# --- Fills a relay ---
#
# Follows the run's versions, and fetches their chunks from the origin and from other relays.
#
# Each chunk can be served as soon as it is here, so a further relay delays it by one chunk and not by a whole version.
# Which versions there are it hears from `news`.


LOOK_EVERY_S = 2.0
"""Time between two looks at what is missing, unless a version is published."""

LIST_WHILE_FILLING_S, LIST_AT_LEAST_EVERY_S = 10.0, 600.0
"""Time between two questions for other relays while chunks are missing. It doubles each time new relays restart a transfer,
until the next version: else relays that come and go could restart it without end."""

MOST_FRESH = 64
"""Versions that workers may sample with; a host that names more is served no further back."""

MANIFESTS_BYTES = 64 << 20
"""Limit on all manifests together, which take some three times as much in memory. Older versions beyond it are not
served."""

READ_AGAIN_S = 60.0
"""Least time between two questions for a manifest that has expired."""


class _Known(NamedTuple):
    """A version's manifest."""

    signed: bytes
    manifest: Manifest
    read_at: float


class ChunkFetcher:
    """Keeps a store filled with the versions that nodes may still need."""

    def __init__(
        self, client: Client, info: RunInfo, store: ChunkStore, relays: Relays, clock: Callable[[], float]
    ) -> None:
        self._client, self._store, self._relays, self._clock = client, store, relays, clock
        self._news = VersionWatch(client, info)
        self._seen: int | None = None
        """The newest version at the last look that was not broken off."""
        self._manifests: dict[int, _Known] = {}
        self._read: list[Manifest] = []
        """What was read, newest first, and is not known to the store yet."""
        self._list_every_s = LIST_WHILE_FILLING_S

    async def run(self) -> None:
        """Fill until cancelled. What goes wrong is told, and tried again."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._news.follow())
            await self._fill_on()

    async def _fill_on(self) -> None:
        told = -1
        while True:
            try:
                await self._look()
                if not await self._fill():
                    continue
                newest = max(self._manifests, default=-1)
                if newest > told:
                    told = newest
                    log.info("version=%d is here whole=%s held_mb=%.0f", newest, self._has_all(newest), self._held_mb())
                await self._news.wait(self._seen, LOOK_EVERY_S)
            except ShoalError as error:
                log.warning("%s", error)
                await asyncio.sleep(REST_S)
            except OSError as error:
                log.warning("cannot store chunks in %s: %s. Free some space, or lower --max-disk; what is here is served",
                            self._store.folder, cause_of(error))  # fmt: skip
                await asyncio.sleep(REST_S)

    async def _look(self) -> bool:
        """Read the manifests of the versions that nodes may need. Returns whether there is a new one."""
        info = self._news.info
        before = set(self._manifests)
        # guard: few-versions-of-a-host
        first = max(0, info.version - min(info.rules.max_staleness, MOST_FRESH))
        version, left_bytes = info.version, MANIFESTS_BYTES
        oldest = version + 1
        # newest first; the patches of the oldest fresh one begin at an earlier version
        while version >= max(0, first - MAX_PATCH_CHAIN) and (version >= first or self._is_patch(version + 1)):
            await self._read_manifest(version, self._clock() if version >= first else None)
            left_bytes -= len(self._manifests[version].signed) if version in self._manifests else 0
            if left_bytes < 0:  # guard: few-bytes-of-manifests
                break
            oldest, version = version, version - 1
        self._manifests = {v: kept for v, kept in self._manifests.items() if oldest <= v <= info.version}
        while self._read:
            self._store.keep(self._read.pop())
        self._seen = info.version
        return not set(self._manifests) <= before

    def _is_patch(self, version: int) -> bool:
        return version in self._manifests and not is_whole(self._manifests[version].manifest)

    async def _read_manifest(self, version: int, now: float | None) -> None:
        """Keep a version's manifest, if the coordinator has it, unless it is here. `now` is as of `open_manifest`."""
        known = self._manifests.get(version)
        if known is not None and (now is None or known.manifest.expires > now or now - known.read_at < READ_AGAIN_S):
            return
        try:
            signed = await self._client.get(f"/v1/manifests/{version}", cap=MAX_MANIFEST_BYTES)
        except NothingYet:
            return
        manifest = open_manifest(
            signed, run=self._news.info.run, keys=self._news.info.all_publishers, now=now, version=version
        )
        self._read.append(manifest)
        self._manifests[version] = _Known(signed, manifest, self._clock())

    async def _fill(self) -> bool:
        """Fetch what is missing of the fresh versions, patches first. Begin anew when another is published, as the newest
        comes first, and when there are more relays. Returns whether nothing is missing."""
        newest_first = [self._manifests[version][:2] for version in sorted(self._manifests, reverse=True)]
        missing = await asyncio.to_thread(self._store.missing, newest_first)
        if not missing:
            return True
        of_patches = {chunk for _, manifest in newest_first for chunk in chunks_of_patches(manifest)}
        pieces = [piece for piece in missing if piece.digest in of_patches] or missing  # most nodes wait for a patch
        lacking = {piece.digest for piece in pieces}
        versions = expected(manifest for _, manifest in newest_first if not lacking.isdisjoint(chunks_of(manifest)))
        others = await self._relays.sources(rank_of_few=ORIGIN)
        for other in others:
            other.expect(versions)
        sources = self._relays.usable(sources_of(self._news.info, self._client, others, spare_origin=False))
        transfer = Transfer(
            pieces, sources, self._store.parts, rng=random.Random(secrets.randbits(64)), on_blame=tell_blame,
            on_progress=lambda line: log.info("version=%d %s", newest_first[0][1].version, line),
            on_lie=self._relays.lied,
        )  # fmt: skip
        fetching, looking = asyncio.create_task(transfer.run()), asyncio.create_task(self._until_new())
        try:
            await asyncio.wait((fetching, looking), return_when=asyncio.FIRST_COMPLETED)
            if fetching.done():
                fetching.result()
            return fetching.done() and len(pieces) == len(missing)
        finally:
            for task in (fetching, looking):
                task.cancel()
            await asyncio.gather(fetching, looking, return_exceptions=True)
            for source in sources:
                await source.close()

    async def _until_new(self) -> None:
        while True:
            await self._news.wait(self._seen, LOOK_EVERY_S)
            try:
                if await self._look():
                    self._list_every_s = LIST_WHILE_FILLING_S
                    return
                if await self._relays.refresh(self._list_every_s):
                    self._list_every_s = min(2 * self._list_every_s, LIST_AT_LEAST_EVERY_S)  # guard: begins-anew-seldom
                    return
            except ShoalError as error:
                log.warning("%s", error)
                await asyncio.sleep(REST_S)  # guard: bad-news-seldom

    def _has_all(self, version: int) -> bool:
        return chunks_of(self._manifests[version].manifest) <= self._store.held.keys()

    def _held_mb(self) -> float:
        return self._store.held_bytes / 1e6
