"""Which versions' weights some node may still need, where versions are published as patches.

Called by `kept` before it deletes weights. Pure. An *anchor* is a version that is published whole. A node that has no
version fetches the newest anchor and all patches after it; a slow one may still be fetching the anchor before.
"""

from collections.abc import Iterable, Mapping

from shoal.protocol.types import Manifest
from shoal.weights.demands import is_whole

SLOWEST_LINE_BYTES_PER_S = 6_250_000
"""Of a node that the run waits for: 50 Mb/s, 37 minutes for a policy of 7B parameters in bfloat16."""


def needed(manifests: Mapping[int, Manifest], used: Iterable[int], now: float) -> set[int]:
    """The versions whose weights must stay, if those in `used` must be loadable.

    These are the versions themselves with what their patches begin at, back to whole ones; the newest anchor with all after
    it; and the anchor before with all after it, until the slowest node has fetched it and its patches.
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
        newest, first = anchors[-1], anchors[-1]
        if len(anchors) > 1 and now < manifests[newest].issued + _slowest_fetch_s(manifests, anchors[-2]):
            first = anchors[-2]
        stay |= {version for version in manifests if version >= first}  # guard: anchors-stay
    return stay


def _slowest_fetch_s(manifests: Mapping[int, Manifest], anchor: int) -> float:
    """How long the slowest node takes to fetch an anchor and all patches after it."""
    size_bytes = sum(file.size for file in manifests[anchor].files)
    size_bytes += sum(p.file.size for v, manifest in manifests.items() if v > anchor for p in manifest.patches)
    return size_bytes / SLOWEST_LINE_BYTES_PER_S
