"""A version from the blobs of a coordinator on this machine, without asking anybody.

Called by `fetch` for the host's own nodes. The version as a whole is verified, and its chunks are not, one by one: if the
whole is wrong, `fetch` verifies each.
"""

import shutil
from pathlib import Path

from shoal.net.blobs import path_of
from shoal.protocol.types import Manifest
from shoal.weights.bases import bases_here, link_base
from shoal.weights.demands import is_whole
from shoal.weights.finish import fault_of, name_directory
from shoal.weights.pieces import UNFINISHED
from shoal.weights.spans import Span, append_span


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
