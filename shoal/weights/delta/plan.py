"""The cheapest way to a version's weights: as a whole, or by patches from a version that is here or is fetched whole.

Costs are bytes to fetch, and for each patch what applying it takes, as bytes that the line would bring in that time.

The search goes backward from the version, cheapest first (Dijkstra, doi:10.1007/BF01386390), so it asks for no manifest
that a cheaper way makes superfluous. A version that is here counts only with the root that the patch begins at.
"""

import heapq
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal.protocol.constants import MAX_PATCH_CHAIN
from shoal.protocol.messages import Manifest, Patch
from shoal.weights.delta.patch import CODEC
from shoal.weights.manifest import is_weights, is_whole

CODECS = frozenset({CODEC})
"""Codecs of patches that this version of shoal knows."""

APPLY_SHARE = 0.02
"""What applying one patch costs, as a share of the bytes of the weights. A core applies and hashes some 500 MB a second
while a line of 100 Mb/s brings 12; a line of 10 Gb/s brings more, but there the choice matters little."""


@dataclass(frozen=True)
class PatchStep:
    """A patch on the way, and the version that it leads to."""

    version: int
    patch: Patch
    chunk_bytes: int


@dataclass(frozen=True)
class DownloadPlan:
    """How to get a version: begin with `start`, then take the hops in order."""

    start: int
    is_here: bool
    """Whether the weights of `start` are here; otherwise they are fetched whole."""
    hops: tuple[PatchStep, ...]
    cost_bytes: float


@dataclass(frozen=True)
class NeedsManifest:
    """The manifest of this version is needed to go on."""

    version: int


def plan_download(
    asked: Manifest,
    here: Mapping[int, str],
    manifests: Mapping[int, Manifest | None],
    *,
    broken: Collection[tuple[int, int]] = (),
    weights_bytes: int = 0,
    most_bytes: float = float("inf"),
) -> DownloadPlan | NeedsManifest | None:
    """The cheapest way to a version; or the manifest that the search lacks; or None if there is no way.

    `here` has the roots of the versions that are here. `manifests` are those of other versions; None marks one that nobody
    has. `broken` are patches that failed, as (base, version). `weights_bytes` is the size of the weights, where no manifest
    says it. The patches of a way and the version's files without weights have at most `most_bytes` together: they are on
    the disk at one time.
    """
    manifests = {**manifests, asked.version: asked}
    sizes = [sum(entry.size for entry in m.files) for m in manifests.values() if m is not None and is_whole(m)]
    apply_bytes = APPLY_SHARE * max([weights_bytes, *sizes])
    room_bytes = most_bytes - sum(entry.size for entry in asked.files if not is_weights(entry.path))
    cheapest_whole, order, done = float("inf"), itertools.count(), set[tuple[int, str]]()
    heap = [(0.0, next(order), _SearchState(asked.version, asked.root, False, ()))]
    while heap:
        cost, _, place = heapq.heappop(heap)
        version, root, hops = place.version, place.root, place.hops
        if place.is_whole or (here.get(version) == root and hops):
            return DownloadPlan(version, not place.is_whole, hops, cost)
        if (version, root) in done:
            continue
        done.add((version, root))
        if version not in manifests:
            return NeedsManifest(version)
        manifest = manifests[version]
        if manifest is None or manifest.root != root:  # guard: patch-from-the-signed-base
            continue
        if is_whole(manifest):
            whole = cost + sum(entry.size for entry in manifest.files)
            cheapest_whole = min(cheapest_whole, whole)
            heapq.heappush(heap, (whole, next(order), place._replace(is_whole=True)))
        for patch in manifest.patches:
            further = cost + patch.file.size + apply_bytes
            ends_here = any(version <= patch.base for version in here)
            helps = further < cheapest_whole and (ends_here or cheapest_whole == float("inf"))
            if sum(hop.patch.file.size for hop in hops) + patch.file.size > room_bytes:  # guard: patches-fit-the-disk
                continue
            if helps and patch.codec in CODECS and (patch.base, version) not in broken and len(hops) < MAX_PATCH_CHAIN:
                hop = PatchStep(version, patch, manifest.chunk_bytes)
                heapq.heappush(
                    heap, (further, next(order), _SearchState(patch.base, patch.base_root, False, (hop, *hops)))
                )
    return None


class _SearchState(NamedTuple):
    """Where the search is: at a version, which is fetched whole or not, with the hops from there to the end."""

    version: int
    root: str
    is_whole: bool
    hops: tuple[PatchStep, ...]
