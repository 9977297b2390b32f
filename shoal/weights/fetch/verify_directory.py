"""Verification of a fetched directory, and files that this machine has already."""

import hashlib
import shutil
from pathlib import Path

from shoal.errors import StateError
from shoal.net.blobs import path_of
from shoal.protocol import encoding
from shoal.protocol.messages import Manifest
from shoal.weights.base_model import bases_here, directory_root, fault_of_base, link_base
from shoal.weights.fetch.chunks import MANIFEST_FILE, UNFINISHED, clear_parts
from shoal.weights.file_ranges import Span, append_span
from shoal.weights.manifest import is_whole

# --- The end of a fetch ---
#
# The whole directory is verified and named, and old versions are deleted.
#
# A directory appears under its name whole, or not at all. It is not made durable: the next fetch verifies it again, and
# fetches what a power cut damaged.


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
        if entry.path.endswith(".safetensors") or (trusted and len(entry.chunks) == 1):
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


def prune(folder: Path, manifest: Manifest, keep: int, in_use: Path | None = None) -> None:
    """Delete all but `keep` versions: the one just fetched, the one in use, and the newest others."""
    newest = directory_name(manifest)
    others = sorted((path for path in folder.glob("v*") if path.name != newest and path.is_dir()), reverse=True)
    others.sort(key=lambda path: path != in_use)  # guard: version-in-use-stays
    for path in others[max(0, keep - 1) :]:
        shutil.rmtree(path, ignore_errors=True)


# --- A version from the blobs of a coordinator on this machine, without asking anybody ---
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
