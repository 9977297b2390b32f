"""Makes a version's directory from that of an earlier version and the patches between.

It knows no network. The weights are copied, so the earlier version stays as it is; a kill leaves an unfinished directory,
which the next attempt begins anew. What comes out is verified by its root.
"""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import StateError
from shoal.protocol import encoding
from shoal.protocol.messages import Manifest
from shoal.weights.base_model import directory_root
from shoal.weights.delta.patch import apply_patch
from shoal.weights.delta.plan import PatchStep
from shoal.weights.delta.tensor_codes import coded_directory, cores
from shoal.weights.fetch.chunks import MANIFEST_FILE, Wanted, files_of
from shoal.weights.fetch.verify_directory import finish

WEIGHTS = "*.safetensors"


def versions_here(folder: Path, run: str) -> dict[int, tuple[str, Path]]:
    """The root and the directory of each whole version of a run in a folder."""
    here = {}
    for known in sorted(folder.glob(f"v*/{MANIFEST_FILE}")):
        try:
            manifest = encoding.from_json(known.read_bytes(), Manifest)
        except encoding.WireError:
            continue  # damaged: as if it were not here
        if manifest.run == run:
            here[manifest.version] = (manifest.root, known.parent)
    return here


def root_here(directory: Path) -> str:
    """The weights root of a directory; empty if its weights cannot be read."""
    try:
        return directory_root(directory)
    except (StateError, OSError):  # damaged, or deleted meanwhile
        return ""


def weights_bytes(directory: Path) -> int:
    """The size of a version's weights."""
    return sum(path.stat().st_size for path in directory.glob(WEIGHTS))


def files_to_fetch(manifest: Manifest, hops: Sequence[PatchStep]) -> list[Wanted]:
    """The patches of a way, and the version's files other than weights."""
    plain = [wanted for wanted in files_of(manifest) if not Path(wanted.name).match(WEIGHTS)]
    return plain + [Wanted(_patch_name(hop), hop.patch.file, hop.chunk_bytes) for hop in hops]


def follow(
    base: Path, partial: Path, target: Path, manifest: Manifest, hops: Sequence[PatchStep], aside: Sequence[Path] = ()
) -> None:
    """Copy the weights of the base, apply the patches, which are in the unfinished directory, and give that its name.

    The patches are deleted, or moved to the places `aside`. Raises `PeerError` if one cannot be applied, `StateError` if
    there is no memory for it, or if the weights are not what the manifest promises.
    """
    patches = [partial / _patch_name(hop) for hop in hops]
    for path in base.glob(WEIGHTS):
        shutil.copyfile(path, partial / path.name)
    weights = coded_directory(partial, writable=True)
    try:
        for patch in patches:
            apply_patch(weights, patch.read_bytes(), threads=cores())
    except MemoryError:  # a hostile patch needs 0.7 GB a core
        raise StateError("a patch takes more memory than this node may use") from None  # guard: patch-without-memory
    for place, patch in itertools.zip_longest(aside, patches):
        if place is None:
            patch.unlink()
        else:
            patch.replace(place)
    finish(partial, target, manifest)


def _patch_name(hop: PatchStep) -> str:
    return f"{hop.version:06d}.patch"
