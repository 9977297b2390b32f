"""The relay: serves the weights of somebody's run to others, while it fetches them and after.

It trusts nobody and earns nothing. It needs no torch, and runs nothing of the run's. Each chunk can be served as soon as it
is here, so a further relay delays it by one chunk and not by a whole version.
"""

import asyncio
import contextlib
import logging
import random
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import uvloop

from shoal.errors import NothingYet, PeerError, ShoalError, cause_of
from shoal.ledger.constants import RULES_VERSION
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits, connections_that_fit
from shoal.net.key_files import load_or_make_key
from shoal.net.server_address import Stopping, listen
from shoal.protocol.constants import MAX_MANIFEST_BYTES, MAX_PATCH_CHAIN
from shoal.protocol.messages import Manifest, RunInfo
from shoal.protocol.signing import Key
from shoal.roles.node.serve_chunks import application, serving
from shoal.roles.relay.chunk_store import ChunkStore
from shoal.weights.fetch.relay_sources import Relays, expected
from shoal.weights.fetch.sources import ORIGIN, sources_of
from shoal.weights.fetch.transfer import Transfer, TransferEvents
from shoal.weights.fetch.version_directory import disk_limit
from shoal.weights.manifest import ManifestTrust, chunks_of, chunks_of_patches, is_whole, open_manifest

log = logging.getLogger("relay")

LOCAL_PROXIES = ("127.0.0.1", "::1")
"""A proxy with TLS on this machine: its X-Forwarded-For is believed."""

RUN = re.compile(r"[0-9a-f]{32}", re.ASCII)


def main(url: str, home: Path, bind: str, port: int, public_url: str = "", max_disk_mb: int = 0) -> None:
    """Relay the run at `url` until told to stop. Raises `PeerError`, `StateError`."""
    key = load_or_make_key(home / "node.key")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(url, key, home, bind, port, public_url, max_disk_mb))


async def _run(url: str, key: Key, home: Path, bind: str, port: int, public_url: str, max_disk_mb: int) -> None:
    stopping = Stopping()
    async with Client(url, key) as client:
        with stopping.at_signals(), listen(bind, port) as listener:
            log.info("asking %s for its run", client.base_url)
            info = await stopping.unless(_info(client))
            if info is None:
                log.info("stopped before the host answered")
                return
            client.run = info.run
            folder = _only(home / "runs", info.run)
            seed = int.from_bytes(bytes.fromhex(key.public)[:8], "big")
            store = ChunkStore(folder, disk_limit(home, max_disk_mb), seed)
            await asyncio.to_thread(store.verify)
            log.info(
                "relaying run=%s port=%d held_mb=%.0f", info.name, listener.getsockname()[1], store.held_bytes / 1e6
            )
            limits = ServerLimits(total=connections_that_fit(), trusted=LOCAL_PROXIES)
            app = application(store, key, info.run, time.time)
            filler = ChunkFetcher(client, info, store, Relays(client, but=key.public), time.time)
            async with serving(app, listener, client, public_url=public_url, limits=limits):
                await stopping.unless(filler.run())


async def _info(client: Client) -> RunInfo:
    await client.demand_versions(RULES_VERSION)
    info = await client.get_json("/v1/run", RunInfo)
    if not RUN.fullmatch(info.run):  # guard: run-names-a-folder
        raise PeerError(f"the run has the id {info.run[:40]!r}, which is not 32 hex digits: tell the host")
    return info


def _only(folder: Path, run: str) -> Path:
    """The folder of a run. Those of other runs are deleted: a relay's disk is bounded."""
    if folder.is_dir():
        for other in folder.iterdir():
            if other.name != run:
                log.info("deleting the chunks of another run=%s", other.name)
                shutil.rmtree(other, ignore_errors=True)
    path = folder / run
    path.mkdir(parents=True, exist_ok=True)
    return path


# --- versions ---


ASK_EVERY_S = 2.0
"""Least time from the beginning of one question to that of the next."""

REST_S = 10.0
"""After a question that failed."""


class VersionWatch:
    """The run as the coordinator told it last. It holds each question until there is a newer version, if it has a place."""

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


# --- chunks ---


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
            signed, ManifestTrust(self._news.info.run, self._news.info.all_publishers), now=now, version=version
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
            pieces,
            sources,
            self._store.parts,
            rng=random.Random(secrets.randbits(64)),
            events=TransferEvents(
                on_progress=lambda line: log.info("version=%d %s", newest_first[0][1].version, line),
                on_lie=self._relays.lied,
            ),
        )
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
