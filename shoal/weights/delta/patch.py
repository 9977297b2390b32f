"""Patches: the way from one version of a policy to another with the same tensors, without loss, in few bytes.

A patch has no signature and no hash of its own. The caller compares the weights root of what it makes, as
`weights/fetch/version_directory` does, so a patch from a stranger can waste a moment and cannot pass off other weights. The
same patch leads back from the later version to the earlier.

    patch    the 8 bytes of `MAGIC`; the SHA-256 of the layout; the pieces
    layout   [name, dtype, shape] of each tensor, sorted by name, as canonical JSON
    pieces   of each tensor in that order, cut into runs of at most `PIECE_VALUES` values: the number of bytes of its
             changes, and these, as in `weights/delta/encoding`; 0 if nothing changes

A version with new, missing or reshaped tensors has no patch, and must be sent as a whole. So must one of which most values
change, or change by much: `make_patch` says when.
"""

import hashlib
import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import PeerError, StateError
from shoal.protocol import encoding
from shoal.protocol.constants import MAX_PATCH_CHAIN
from shoal.protocol.messages import Manifest, Patch
from shoal.weights.delta.encoding import PIECE_VALUES, apply_changes, write_changes
from shoal.weights.delta.golomb_rice import BadBits, BitReader, read_number, write_number
from shoal.weights.delta.tensor_codes import KINDS, Codes, Kind, Weights
from shoal.weights.manifest import is_weights, is_whole

CODEC, MAGIC = "gaps-1", b"shoalp1\n"
"""The format's name in a manifest, and how its bytes begin."""

WORTH_IT = 0.25
"""A patch of this share of the full size, or more, is not made: it costs its maker and its users more CPU than it saves."""


def make_patch(base: Weights, new: Weights, *, worth_it: float = WORTH_IT, threads: int = 1) -> bytes | None:
    """The patch from `base` to `new`; None if it is not worth it, so the version must be sent as a whole.

    It is not worth it at `worth_it` times the size of all tensors. Raises `StateError` if the two do not have the same
    tensors.
    """
    _demand_same_layout(base, new)
    most_bytes = worth_it * sum(tensor.codes.nbytes for tensor in new.values())
    parts, size_bytes = [MAGIC, _layout(base)], 0
    pairs = list(zip(_pieces(base), _pieces(new), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        for changes in pool.map(lambda pair: write_changes(pair[0].codes, pair[1].codes, pair[0].kind), pairs):
            parts += [write_number(len(changes)), changes]
            size_bytes += len(changes)
            if size_bytes >= most_bytes:
                pool.shutdown(cancel_futures=True)
                return None
    return b"".join(parts)


def apply_patch(weights: Weights, patch: bytes, *, back: bool = False, threads: int = 1) -> None:
    """Turn the patch's base into the version that it leads to, in place; with `back`, that version into the base.

    Raises `PeerError` as `open_patch` before anything is changed, and later if the changes of a piece are damaged or for
    another version. The weights are then torn. Without an error they may still be wrong: compare their root.
    """
    changed = open_patch(weights, patch)
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda pair: _apply(*pair, back=back), changed):
            pass  # raises what a piece raised


def open_patch(weights: Weights, patch: bytes) -> list[tuple["ChangedRun", memoryview]]:
    """The pieces of the weights that a patch changes, with the changes of each.

    Raises `PeerError` if it is not a whole patch, or is for other tensors. The changes themselves are not yet read.
    """
    reader = BitReader(patch)
    try:
        magic, layout = bytes(reader.take(len(MAGIC))), bytes(reader.take(32))
        if magic != MAGIC:  # guard: patch-magic
            raise BadBits("is in another format")
        if layout != _layout(weights):  # guard: patch-layout
            raise BadBits("is for tensors of other names, dtypes or shapes")
        found = [(piece, reader.take(read_number(reader, len(patch)))) for piece in _pieces(weights)]
        reader.finish()
    except BadBits as error:
        raise PeerError(f"patch cannot be used: it {error}. Fetch the whole version, or use another source") from None
    return [(piece, changes) for piece, changes in found if len(changes)]


class ChangedRun(NamedTuple):
    """A run of a tensor's values: a view of their codes."""

    name: str
    kind: Kind
    codes: Codes


def _pieces(weights: Weights) -> Iterator[ChangedRun]:
    for name, tensor in sorted(weights.items()):
        for start in range(0, len(tensor.codes), PIECE_VALUES):
            yield ChangedRun(name, KINDS[tensor.dtype], tensor.codes[start : start + PIECE_VALUES])


def _apply(piece: ChangedRun, changes: memoryview, *, back: bool) -> None:
    try:
        apply_changes(piece.codes, changes, piece.kind, back=back)
    except BadBits as error:
        raise PeerError(
            f"patch of {piece.name} cannot be used: it {error}. Fetch the whole version, or use another source"
        ) from None


def _layout(weights: Weights) -> bytes:
    rows = [[name, tensor.dtype, list(tensor.shape)] for name, tensor in sorted(weights.items())]
    return hashlib.sha256(encoding.to_json(rows)).digest()


def _demand_same_layout(base: Weights, new: Weights) -> None:
    """Refuse versions that no patch leads between."""
    for name in sorted(base.keys() | new.keys()):
        a, b = base.get(name), new.get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            was, now = ("missing" if one is None else f"{one.dtype}{list(one.shape)}" for one in (a, b))
            raise StateError(
                f"no patch leads to this version: {name} was {was} and is {now}. Publish the whole version"
            )


# --- The cheapest way to a version's weights: as a whole, or by patches from one that is here or is fetched whole ---
#
# Costs are bytes to fetch, and for each patch what applying it takes, as bytes that the line would bring in that time.
#
# The search goes backward from the version, cheapest first (Dijkstra, doi:10.1007/BF01386390), so it asks for no manifest
# that a cheaper way makes superfluous. A version that is here counts only with the root that the patch begins at.


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
