"""Fetch of the version that a manifest describes into a checkpoint directory, with every byte verified.

A fetch that was cut short goes on where it stopped. It trusts no source. One process uses a folder.

A version comes whole, or by patches from another version; `delta/patch` says which is cheapest. A chunk comes from the
first of these that has it: the unfinished directory, a version already here (`chunks`), a source (`transfer`). The
directory appears under its name whole, or not at all (`version_directory`).
"""

import asyncio
import logging
import random
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from shoal.errors import DISK_FULL, NothingYet, PeerError, StateError, cause_of
from shoal.models.hub_download import Hub
from shoal.protocol.constants import MAX_PATCH_CHAIN
from shoal.protocol.messages import Manifest, Patch
from shoal.weights.base_model import bases_here, entries_of_base, forget_fetched, from_hub, link_base
from shoal.weights.delta.patch import DownloadPlan, NeedsManifest, plan_download
from shoal.weights.fetch.chunks import (
    UNFINISHED,
    Chunk,
    NoSpace,
    NotStored,
    Wanted,
    chunks_here,
    files_of,
    forget_unfinished,
    pieces_of,
    prepare,
)
from shoal.weights.fetch.relay_sources import expected
from shoal.weights.fetch.sources import ChunkSource, is_filling
from shoal.weights.fetch.transfer import NO_EVENTS, Transfer, TransferEvents
from shoal.weights.fetch.version_directory import (
    VersionFolder,
    directory_name,
    fault_of,
    files_to_fetch,
    finish,
    follow,
    root_here,
    take_from_stock,
    versions_here,
    weights_bytes,
)
from shoal.weights.manifest import MANIFEST_FILE, ManifestError, ManifestTrust, chunks_of, open_manifest

log = logging.getLogger(__name__)

MOST_MANIFESTS, MOST_NAMES = 2 * MAX_PATCH_CHAIN, 1 << 18
"""Manifests of earlier versions that a fetch asks for, and the chunks that they may name together. A chain needs one for
each of its patches; a host could name thousands, of 4 MiB each."""


class SharingHooks(Protocol):
    """What a node shares with others of the versions that it fetches."""

    def begin(self, manifest: Manifest) -> None:
        """A version is fetched from its beginning: what was here of it does not count any more."""
        ...

    def hold(self, manifest: Manifest, chunks: Collection[str]) -> None:
        """These chunks of a version are here, verified."""
        ...

    def aside(self, manifest: Manifest, patch: Patch) -> Path:
        """Where the file of a patch to a version is put when it was applied. There is room for it."""
        ...

    def hold_patch(self, manifest: Manifest, patch: Patch) -> None:
        """The file is there, verified."""
        ...


async def fetch_version(
    version: int,
    sources: Sequence[ChunkSource],
    folder: VersionFolder,
    trust: ManifestTrust,
    signed_of: Callable[[int], Awaitable[bytes]],
    *,
    root: str = "",
    events: TransferEvents = NO_EVENTS,
) -> Path:
    """The directory of a version of the past by its signed manifest, both verified.

    `signed_of` gives the signed manifests of this and of earlier versions; `root` is the version's in the log. Raises as
    `open_manifest` and `fetch`.
    """
    trust = trust._replace(max_bytes=folder.max_bytes)

    async def manifest_of(earlier: int) -> Manifest:
        return open_manifest(await signed_of(earlier), trust, now=None, version=earlier)

    manifest = open_manifest(await signed_of(version), trust, now=None, version=version, root=root)
    return await fetch(manifest, sources, folder, manifest_of=manifest_of, events=events)


async def fetch(
    manifest: Manifest,
    sources: Sequence[ChunkSource],
    folder: VersionFolder,
    *,
    manifest_of: Callable[[int], Awaitable[Manifest]] | None = None,
    events: TransferEvents = NO_EVENTS,
    shared: SharingHooks | None = None,
    rng: random.Random | None = None,
) -> Path:
    """Fetch and verify a version; returns its directory in the folder.

    `manifest_of` gives the manifests of earlier versions, opened, or raises `PeerError`. Without it, only patches from a
    version that is here are used. `shared` is told which chunks are here, verified. `rng` decides the order of the chunks
    and who is asked. The sources are closed at the end.

    Raises `PeerError`, naming each source's fault, if the sources together cannot serve everything. Raises `NoSpace` if
    the disk is full, `NotStored` if it takes nothing for another reason, `StateError` if the chunks do not make the weights
    that the manifest promises.
    """

    def log_progress(line: str) -> None:
        log.info("version=%d %s", manifest.version, line)

    async def transfer(
        missing: Sequence[Chunk], of: Sequence[Manifest], directory: Path, on_chunk: Callable[[str], None]
    ) -> None:
        versions = expected(of)
        for source in sources:
            if is_filling(source):
                source.expect(versions)
        told = replace(events, on_chunk=on_chunk, on_progress=events.on_progress or log_progress)
        order = rng or random.Random(secrets.randbits(64))
        await Transfer(missing, sources, directory, rng=order, events=told).run()

    try:
        directory = await _Fetch(folder, transfer, manifest_of or _unknown, shared, Hub()).version(manifest)
    except OSError as error:
        raise (NoSpace if error.errno in DISK_FULL else NotStored)(
            f"cannot store version {manifest.version} in {folder.path}: {cause_of(error)}. Free some space or use "
            "another folder; what was fetched is kept"
        ) from None
    finally:
        for source in sources:
            await source.close()
    folder.prune(manifest)
    return directory


async def _unknown(version: int) -> Manifest:
    raise NothingYet(f"nobody is asked for the manifest of version {version}")


@dataclass
class _Fetch:
    """Brings a version into a folder. Options are as of `fetch`."""

    folder: VersionFolder
    transfer: Callable[[Sequence[Chunk], Sequence[Manifest], Path, Callable[[str], None]], Awaitable[None]]
    manifest_of: Callable[[int], Awaitable[Manifest]]
    shared: SharingHooks | None
    hub: Hub
    known: dict[int, Manifest | None] = field(default_factory=dict)
    """Manifests of earlier versions; None for those that could not be fetched."""
    too_long: ManifestError | None = None
    """Why an earlier version is not fetched, if it is larger than this node takes."""

    async def version(self, asked: Manifest) -> Path:
        """A version by the cheapest way; if its patches fail, by the next one."""
        broken, dropped, problem = set[tuple[int, int]](), set[int](), None
        await asyncio.to_thread(forget_fetched, self.folder.path, asked)
        if await asyncio.to_thread(self._is_here, asked):
            return await self._held(asked)
        if self.folder.store is not None and await asyncio.to_thread(
            take_from_stock, self.folder.store, self._target(asked), asked
        ):
            return await self._held(asked)
        self._begin(asked)
        while (way := await self._way(asked, broken)) is not None:
            begun = asked if way.is_here or not way.hops else self._begins_with(way)
            await asyncio.to_thread(forget_unfinished, self.folder.path, [self._unfinished(begun)])
            if not way.hops:
                return await self._whole(asked)
            try:
                return await self._by_patches(asked, way)
            except NotStored:
                raise
            except (PeerError, StateError) as error:
                log.warning("version=%d patched=false reason=%r", asked.version, str(error))
                problem = error
                blameless = way.is_here and way.start not in dropped
                if blameless and not await asyncio.to_thread(self._is_sound, way.start, asked.run):
                    dropped.add(way.start)  # the patches may be right
                else:
                    broken |= {(hop.patch.base, hop.version) for hop in way.hops}
        if problem is None and await self._way(asked, broken, is_bounded=False) is not None:
            self.too_long = ManifestError(
                "too-long",
                f"the patches that lead to version {asked.version} have more than {self.folder.max_bytes} bytes, limit of "
                "this node: allow more (--max-memory, --max-disk), free some space on its disk, or leave the run",
            )
        nothing = NothingYet(
            f"version {asked.version} is published as patches, and no version that they start from could be fetched: try "
            "again later, or use another source"
        )
        raise problem or self.too_long or nothing

    def _begins_with(self, way: DownloadPlan) -> Manifest:
        """The version that is fetched whole before its patches are applied."""
        start = self.known[way.start]
        assert start is not None, "the way begins at a version whose manifest is known"
        return start

    def _on_the_way(self, asked: Manifest, way: DownloadPlan) -> list[Manifest]:
        """The versions to which the patches of a way lead; the last one is asked for."""
        known = [self.known[hop.version] for hop in way.hops[:-1]]
        return [*(manifest for manifest in known if manifest is not None), asked]

    async def _held(self, manifest: Manifest) -> Path:
        """The directory of a version that is here; what of it can be shared is told."""
        directory = self._target(manifest)
        if self.shared is not None:
            self._tell(manifest, await asyncio.to_thread(chunks_here, manifest, directory))
        return directory

    def _tell(self, manifest: Manifest, chunks: Collection[str]) -> None:
        if self.shared is not None:
            self.shared.hold(manifest, chunks)

    def _begin(self, manifest: Manifest) -> None:
        if self.shared is not None:
            self.shared.begin(manifest)  # guard: begun-again-is-not-shared

    def _target(self, manifest: Manifest) -> Path:
        return self.folder.path / directory_name(manifest)

    def _unfinished(self, manifest: Manifest) -> Path:
        return self.folder.path / f"{UNFINISHED}{directory_name(manifest)}"

    def _is_here(self, manifest: Manifest) -> bool:
        """Whether a version is here, undamaged. If it is damaged, it becomes an unfinished one."""
        target, unfinished = self._target(manifest), self._unfinished(manifest)
        if not target.exists():
            return False
        if fault_of(target, manifest, trusted=False) == "":
            forget_unfinished(self.folder.path, ())
            return True
        shutil.rmtree(unfinished, ignore_errors=True)
        target.replace(unfinished)  # damaged since it was made: reuse its good chunks
        return False

    def _is_sound(self, version: int, run: str) -> bool:
        """Whether the weights of a version that is here are still what they were. If not, they are deleted."""
        root, directory = versions_here(self.folder.path, run).get(version, ("", self.folder.path))
        if not root:
            return False
        if root_here(directory) == root:
            return True
        if directory == self.folder.in_use:  # guard: version-in-use-is-not-deleted
            (directory / MANIFEST_FILE).unlink()  # it is no base any more, but its other files are read
        else:
            shutil.rmtree(directory)  # guard: damaged-base-goes
        return False

    async def _way(
        self, asked: Manifest, broken: Collection[tuple[int, int]], *, is_bounded: bool = True
    ) -> DownloadPlan | None:
        """The cheapest way that is not broken; if it `is_bounded`, one that fits on the disk."""
        most_bytes = self.folder.max_bytes if is_bounded and self.folder.max_bytes is not None else float("inf")
        here = await asyncio.to_thread(versions_here, self.folder.path, asked.run) if asked.patches else {}
        roots = {version: root for version, (root, _) in here.items()}
        sizes = [weights_bytes(directory) for _, directory in here.values()]
        while isinstance(
            found := plan_download(
                asked, roots, self.known, broken=broken, weights_bytes=max(sizes, default=0), most_bytes=most_bytes
            ),
            NeedsManifest,
        ):
            self.known[found.version] = await self._earlier(asked, found.version)
        return found

    async def _earlier(self, asked: Manifest, version: int) -> Manifest | None:
        """The manifest of an earlier version; None if it cannot be had, or if enough of them were asked for."""
        names = sum(len(chunks_of(manifest)) for manifest in self.known.values() if manifest is not None)
        if len(self.known) >= MOST_MANIFESTS or names > MOST_NAMES:  # guard: few-manifests-a-fetch
            return None
        try:
            return await self.manifest_of(version)
        except PeerError as error:
            log.info("version=%d manifest_of=%d missing=%r", asked.version, version, str(error))
            if isinstance(error, ManifestError) and error.code == "too-long":
                self.too_long = error
            return None

    async def _whole(self, manifest: Manifest) -> Path:
        target, unfinished = self._target(manifest), self._unfinished(manifest)
        self._begin(manifest)
        base = await asyncio.to_thread(bases_here, self.folder.path, manifest)
        lacking = [entry.path for entry in entries_of_base(manifest) if entry.path not in base]
        base |= await from_hub(manifest, lacking, self.hub, self.folder.path)
        files = [wanted for wanted in files_of(manifest) if wanted.name not in base]
        await self._bring(manifest, unfinished, files, on_held=partial(self._tell, manifest))
        await asyncio.to_thread(link_base, base, unfinished)
        await asyncio.to_thread(finish, unfinished, target, manifest)
        await asyncio.to_thread(forget_fetched, self.folder.path)
        return target

    async def _by_patches(self, asked: Manifest, way: DownloadPlan) -> Path:
        """A version from one that is here, or that is fetched whole first."""
        target, unfinished = self._target(asked), self._unfinished(asked)
        if way.is_here:
            _, base = versions_here(self.folder.path, asked.run).get(way.start, ("", None))
            if base is None:
                raise StateError(f"version {way.start} is not in {self.folder.path} any more")
        else:
            start = self._begins_with(way)
            base = await self._whole(start)
            await asyncio.to_thread(self.folder.prune, start)  # guard: room-for-the-patched
        files, manifests = files_to_fetch(asked, way.hops), self._on_the_way(asked, way)
        await self._bring(asked, unfinished, files, extra_bytes=weights_bytes(base), others=manifests[:-1])
        patches = [(manifest, hop.patch) for manifest, hop in zip(manifests, way.hops, strict=True)]
        shared = self.shared
        aside = [] if shared is None else [shared.aside(*patch) for patch in patches]
        await asyncio.to_thread(follow, base, unfinished, target, asked, way.hops, aside)
        if shared is not None:
            for patch in patches:
                shared.hold_patch(*patch)
        return await self._held(asked)

    async def _bring(
        self,
        manifest: Manifest,
        directory: Path,
        files: Sequence[Wanted],
        extra_bytes: int = 0,
        others: Sequence[Manifest] = (),
        on_held: Callable[[Collection[str]], None] = lambda chunks: None,
    ) -> None:
        """Files into an unfinished directory: what is on this machine, then the rest. `others` are the manifests, beside
        the version's own, that name some of the chunks."""
        version = manifest.version
        fill = partial(
            prepare, self.folder.path, directory, files, version, store=self.folder.store, extra_bytes=extra_bytes
        )
        missing = await asyncio.to_thread(fill)
        on_held({piece.digest for piece in pieces_of(files, directory, version)} - {piece.digest for piece in missing})
        if missing:
            of = [manifest, *others]
            await self.transfer(missing, of, directory, lambda chunk: on_held((chunk,)))
