"""Which versions' weights some node may still need, where versions are published as patches.

Called by `kept` before it deletes weights. Pure. An *anchor* is a version that is published whole. A node that has no
version fetches the newest anchor and all patches after it; slow ones may still be fetching earlier anchors.
"""

import itertools
from collections.abc import Iterable, Mapping

from shoal.protocol.constants import MAX_PATCH_CHAIN
from shoal.protocol.types import Manifest
from shoal.weights.demands import is_whole

SLOWEST_LINE_BYTES_PER_S = 6_250_000
"""Of a node that the run waits for: 50 Mb/s, 37 minutes for a policy of 7B parameters in bfloat16."""


def needed(manifests: Mapping[int, Manifest], used: Iterable[int], now: float) -> set[int]:
    """The versions whose weights must stay, if those in `used` must be loadable.

    These are the versions themselves with what their patches begin at, back to whole ones; the newest anchor with all after
    it; and each earlier anchor with all after it, until the slowest node that began with it has fetched it and the patches
    that lead to the newest version. An anchor from which no chain of patches leads there is of no use to such a node.
    """
    stay = set[int]()
    waiting = [version for version in used if version in manifests]
    while waiting:
        version = waiting.pop()
        if version not in stay:
            stay.add(version)
            bases = [] if is_whole(manifests[version]) else [patch.base for patch in manifests[version].patches]
            waiting += [base for base in bases if base in manifests]
    anchors = [version for version in sorted(manifests) if is_whole(manifests[version])]
    if anchors:
        first = anchors[-1]
        for anchor, following in itertools.pairwise(anchors):
            last_began, chain_bytes = manifests[following].issued, _chain_bytes(manifests, anchor)
            if chain_bytes is not None and now < last_began + chain_bytes / SLOWEST_LINE_BYTES_PER_S:
                first = min(first, anchor)
        stay |= {version for version in manifests if version >= first}  # guard: anchors-stay
    return stay


def _chain_bytes(manifests: Mapping[int, Manifest], anchor: int) -> float | None:
    """The bytes of an anchor and of the patches from it to the newest version; None if no chain leads there."""
    newest = max(manifests)
    size_bytes = {anchor: (sum(file.size for file in manifests[anchor].files), 0)}
    for version in range(anchor + 1, newest + 1):
        patches = manifests[version].patches if version in manifests else ()
        ways = [
            (before + patch.file.size, steps + 1)
            for patch in patches
            for before, steps in [size_bytes.get(patch.base, (0, MAX_PATCH_CHAIN))]
            if steps < MAX_PATCH_CHAIN
        ]
        if ways:
            size_bytes[version] = min(ways)
    return size_bytes[newest][0] if newest in size_bytes else None
