"""Directories of versions in a folder: made from patches or from blobs of this machine, verified, named and deleted.

A directory appears under its name whole, or not at all. It is not made durable: the next fetch verifies it again, and
fetches what a power cut damaged.
"""

import hashlib
import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import StateError
from shoal.net.blobs import path_of
from shoal.protocol import encoding
from shoal.protocol.messages import Manifest
from shoal.run_folder import free_below, held_below
from shoal.weights.base_model import bases_here, directory_root, fault_of_base, link_base
from shoal.weights.delta.patch import PatchStep, apply_patch
from shoal.weights.delta.tensor_codes import coded_directory, cores
from shoal.weights.fetch.chunks import UNFINISHED, Wanted, clear_parts, files_of
from shoal.weights.file_ranges import Span, append_span
from shoal.weights.manifest import MANIFEST_FILE, is_weights, is_whole, manifests_here


def directory_name(manifest: Manifest) -> str:
    """Name of a version's directory. It identifies the content, so versions of different runs do not collide."""
    return f"v{manifest.version:06d}-{manifest.root[:12]}"


def finish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Verify the whole directory, and give it its name. Raises `StateError`."""
    clear_parts(partial)
    fault = fault_of(partial, manifest, trusted=True)
    if fault:
        shutil.rmtree(partial)
        raise StateError(
            f"version {manifest.version}: {fault}, though each chunk has its promised hash: the publisher is at fault. "
            "Tell the run's host"
        )
    name_directory(partial, target, manifest)


def name_directory(whole: Path, target: Path, manifest: Manifest) -> None:
    """Give a verified directory its name, with the manifest that it was made from."""
    (whole / MANIFEST_FILE).write_bytes(encoding.to_json(manifest))
    shutil.rmtree(target, ignore_errors=True)
    whole.rename(target)


def fault_of(directory: Path, manifest: Manifest, *, trusted: bool) -> str:
    """How a directory differs from what the manifest promises; empty if it does not.

    The root covers all that counts in files of weights. `trusted`: every other chunk was just verified, so a file of one
    chunk needs no second hash.
    """
    for entry in manifest.files:
        path = directory / entry.path
        if not path.is_file():
            return f"{entry.path} is missing"
        if is_weights(entry.path) or (trusted and len(entry.chunks) == 1):
            continue
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.digest:
                return f"{entry.path} has another hash"
    try:
        root = directory_root(directory)
        if fault := fault_of_base(directory, manifest):
            return fault
    except StateError as error:
        return str(error)
    # guard: patch-result-root
    return "" if root == manifest.root else f"the weights root is {root[:16]}…, not {manifest.root[:16]}…"


@dataclass(frozen=True)
class VersionFolder:
    """The folder in which a process has versions, and what it may take."""

    path: Path
    keep: int = 2
    """Versions that stay."""
    max_bytes: int | None = None
    """Of a version, and of the patches of a way: the folder takes at most `keep` + 2 times as much."""
    in_use: Path | None = None
    """The directory of a version that stays, whatever its age."""
    store: Path | None = None
    """A folder of blobs on this machine, which is looked into first."""

    def prune(self, manifest: Manifest) -> None:
        """Delete all but `keep` versions: the one just fetched, the one in use, and the newest others."""
        newest = directory_name(manifest)
        others = sorted((path for path in self.path.glob("v*") if path.name != newest and path.is_dir()), reverse=True)
        others.sort(key=lambda path: path != self.in_use)  # guard: version-in-use-stays
        for path in others[max(0, self.keep - 1) :]:
            shutil.rmtree(path, ignore_errors=True)


def versions_here(folder: Path, run: str) -> dict[int, tuple[str, Path]]:
    """The root and the directory of each whole version of a run in a folder."""
    return {known.version: (known.root, directory) for directory, known in manifests_here(folder) if known.run == run}


def root_here(directory: Path) -> str:
    """The weights root of a directory; empty if its weights cannot be read."""
    try:
        return directory_root(directory)
    except (StateError, OSError):  # damaged, or deleted meanwhile
        return ""


def weights_bytes(directory: Path) -> int:
    """The size of a version's weights."""
    return sum(path.stat().st_size for path in _weights_in(directory))


def _weights_in(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*") if is_weights(path.name)]


# --- a version from an earlier one and the patches between ---
#
# The weights are copied, so the earlier version stays as it is; a kill leaves an unfinished directory, which the next
# attempt begins anew. What comes out is verified by its root.


def files_to_fetch(manifest: Manifest, hops: Sequence[PatchStep]) -> list[Wanted]:
    """The patches of a way, and the version's files other than weights."""
    plain = [wanted for wanted in files_of(manifest) if not is_weights(wanted.name)]
    return plain + [Wanted(_patch_name(hop), hop.patch.file, hop.chunk_bytes) for hop in hops]


def follow(
    base: Path, partial: Path, target: Path, manifest: Manifest, hops: Sequence[PatchStep], aside: Sequence[Path] = ()
) -> None:
    """Copy the weights of the base, apply the patches, which are in the unfinished directory, and give that its name.

    The patches are deleted, or moved to the places `aside`. Raises `PeerError` if one cannot be applied, `StateError` if
    there is no memory for it, or if the weights are not what the manifest promises.
    """
    patches = [partial / _patch_name(hop) for hop in hops]
    for path in _weights_in(base):
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


# --- a version from the blobs of a coordinator on this machine ---
#
# The version as a whole is verified, and its chunks are not, one by one: if the whole is wrong, `fetch` verifies each.


def take_from_stock(store: Path, target: Path, manifest: Manifest) -> bool:
    """Make a version's directory from blobs, which are files named by their hashes. Returns whether that went well; if not,
    there is no such directory."""
    if not is_whole(manifest):
        return False
    made = target.with_name(f"{UNFINISHED}{target.name}.stock")
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        base = bases_here(target.parent, manifest, store.parent / "policy")  # where a run's folder has version 0
        link_base(base, made)
        for entry in (entry for entry in manifest.files if entry.path not in base):
            spans = [_blob(store, chunk) for chunk in entry.chunks]
            if sum(span.size for span in spans) != entry.size:
                return False
            with (made / entry.path).open("xb", buffering=0) as file:
                for span in spans:
                    append_span(span, file.fileno())
        if fault_of(made, manifest, trusted=False):  # guard: stock-is-verified
            return False
        name_directory(made, target, manifest)
        return True
    except OSError:  # a chunk is missing, or the disk is full: then fetching from sources fails too, and reports it
        return False
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _blob(store: Path, chunk: str) -> Span:
    path = path_of(store, chunk)
    return Span(path, 0, path.stat().st_size)


# --- the disk that versions of somebody else's run may take ---
#
# Beside the versions that are kept there is one that is being made, from a copy of the weights before and from patches,
# which may take as much as a version. A manifest may repeat one chunk many times, so what is downloaded does not bound what
# is written.


def room_for_version(limit_bytes: int, keep: int) -> int:
    """Bytes that one version may have, so that `keep` versions and one that is being made with its patches stay within the
    limit."""
    return max(0, limit_bytes) // (keep + 2)


def disk_limit(folder: Path, max_disk_mb: int = 0) -> int:
    """Bytes that a node may take: `max_disk_mb`; if it is 0, half of what is free or taken by the versions in `folder`."""
    if max_disk_mb:
        return max_disk_mb * 1_000_000
    return (free_below(folder) + held_below(folder)) // 2
