"""The base of a run's adapters: files that are the same in each version's directory, under several names of one file.

A base may have many gigabytes, so it is fetched, stored and hashed once: a file that is neither written nor replaced is
known by its place on the disk, its size and its date; of all tensors, with the files' names and the index.
"""

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from shoal.errors import PeerError, StateError
from shoal.models import lora_config
from shoal.models.hub_download import Hub
from shoal.models.hub_subprocess import fetch_apart
from shoal.models.lora_config import has_adapter
from shoal.models.safetensors_header import INDEX, Identity, files_of_base, identity_of, key_of_base, shards_of
from shoal.protocol import encoding
from shoal.protocol.messages import FileEntry, Manifest
from shoal.weights.delta.tensor_codes import Weights, coded_directory, cores, digests_of, root_of
from shoal.weights.file_ranges import Span, copy_span
from shoal.weights.manifest import is_of_base, manifests_here, root_over

OF_HUBS = ".hub"
"""Folder beside the versions for what a node fetches from a hub: there it counts as what the versions take of the disk."""

MOST_KNOWN = 4096
"""Files whose hashes are remembered. A base has a few."""

Tensors = Mapping[str, tuple[str, tuple[int, ...], str]]
"""Dtype, shape and hash of each tensor, as of `checkpoint.tensors_of`."""

K = TypeVar("K")
V = TypeVar("V")
_files: dict[Identity, str] = {}
_tensors: dict[str, Tensors] = {}
"""By `key_of_base`."""


def directory_root(directory: Path) -> str:
    """The weights root of a directory; of an adapter, over its tensors and those of its base. Raises `StateError`."""
    weights = coded_directory(directory)
    if not has_adapter(directory):
        return root_of(weights, threads=cores())
    return root_over(_digests(directory, weights))


def base_root(directory: Path) -> str:
    """The weights root of the base beside an adapter. Raises `StateError`."""
    weights = coded_directory(directory)
    return root_over({name: one for name, one in _digests(directory, weights).items() if not _is_adapters(name)})


def _digests(directory: Path, weights: Weights) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Of all tensors; those of the base are hashed once in a process."""
    base = {name: one for name, one in weights.items() if not _is_adapters(name)}
    key = key_of_base(directory)
    if key not in _tensors:
        _remember(_tensors, key, digests_of(base, threads=cores()))
    return {**_tensors[key], **digests_of({name: one for name, one in weights.items() if name not in base})}


def _is_adapters(tensor: str) -> bool:
    return tensor.startswith(lora_config.PREFIX)


def _remember(known: dict[K, V], key: K, value: V) -> None:
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[key] = value


def file_digest(path: Path) -> str:
    """The SHA-256 of a file of a base, which is hashed once in a process. Raises OSError."""
    key = identity_of(path)
    if key not in _files:
        with path.open("rb") as file:
            _remember(_files, key, hashlib.file_digest(file, "sha256").hexdigest())
    return _files[key]


def entries_of_base(manifest: Manifest) -> list[FileEntry]:
    """The files with the base's weights that a manifest of an adapter names; none for a whole policy."""
    return [entry for entry in manifest.files if is_of_base(entry.path)] if manifest.base is not None else []


def bases_here(folder: Path, manifest: Manifest, model: Path | None = None) -> dict[str, Path]:
    """Where the files of a version's base are in other versions of a folder, also of other runs, or in the directory of a
    `model`, verified, by name.

    Raises `PeerError` if a version of the same run that is here is an adapter of another base.
    """
    found: dict[str, Path] = {}
    for directory, other in reversed([*manifests_here(folder)]):
        if other.run == manifest.run and other.base is not None:
            demand_same_base(manifest, other)
        entries = {entry.path: entry for entry in entries_of_base(other)}
        for entry in entries_of_base(manifest):
            path = directory / entry.path
            if entry.path not in found and entries.get(entry.path) == entry and _is_right(path, entry):
                found[entry.path] = path
    for entry in entries_of_base(manifest):
        if model is not None and entry.path not in found and _is_right(model / entry.path, entry):
            found[entry.path] = model / entry.path
    return found


async def from_hub(manifest: Manifest, lacking: Collection[str], hub: Hub, folder: Path) -> dict[str, Path]:
    """Files of a version's base that each node gets from a hub by itself, verified, by name. What its cache here lacks is
    fetched into `folder`. Raises `StateError`; if it is cancelled, the fetch has ended when it returns."""
    stopped = threading.Event()
    fetching = asyncio.ensure_future(asyncio.to_thread(bases_of_hub, manifest, lacking, hub, folder, stopped))
    try:
        return await asyncio.shield(fetching)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait({fetching})  # guard: cancelled-fetch-has-ended
        raise


def bases_of_hub(
    manifest: Manifest, lacking: Collection[str], hub: Hub, folder: Path, stopped: threading.Event
) -> dict[str, Path]:
    """As `from_hub`; it ends when `stopped` is set."""
    if manifest.base is None or not manifest.base.source:
        return {}
    entries = {entry.path: entry for entry in entries_of_base(manifest) if entry.path in lacking}
    if not entries:
        return {}
    source, sizes = manifest.base.source, {name: entry.size for name, entry in entries.items()}
    ours = _of_hub(folder, source)
    found = fetch_apart(hub, source, sizes, ours, stopped)
    for name, path in found.items():
        if not _is_right(path, entries[name]):  # guard: hub-files-of-the-manifest
            remedy = f"Delete {path} and try again"
            if path.is_relative_to(ours.resolve()):
                path.unlink()
                remedy = "It was deleted: try again"
            raise StateError(
                f"{source}: {name} has another hash than in the run's manifest: the run's base is not that model, or the "
                f"file is damaged. {remedy}, or tell the host"
            )
    return found


def forget_fetched(folder: Path, but: Manifest | None = None) -> None:
    """Delete what was fetched from hubs into a folder, except for this version. Whole versions have names of their own for
    these files."""
    kept = _of_hub(folder, but.base.source) if but is not None and but.base is not None else None
    for path in (folder / OF_HUBS).glob("*"):
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)  # guard: one-base-of-a-hub


def _of_hub(folder: Path, source: str) -> Path:
    return folder / OF_HUBS / encoding.digest(source.encode())[:16]


def demand_same_base(manifest: Manifest, other: Manifest) -> None:
    """Raise `PeerError` if two versions of a run are adapters of different models.

    Its root is only claimed until the files are here, so the files and where they come from are compared as well: else a
    host could have a node fetch another model with each version.
    """
    one, two = manifest.base, other.base
    if (one and one.root) != (two and two.root):  # guard: one-base-a-run
        names = [f"an adapter of {base.root[:12]}" if base else "a whole policy" for base in (one, two)]
        raise PeerError(
            f"version {manifest.version} is {names[0]}, and version {other.version} of the same run is {names[1]}: a run "
            "has one base. Nothing was fetched; tell the host, or leave the run"
        )
    sources = [base.source if base else "" for base in (one, two)]
    files = [{(e.path, e.size, e.digest) for e in entries_of_base(version)} for version in (manifest, other)]
    if sources[0] != sources[1] or files[0] != files[1]:  # guard: one-source-a-run, same-files-of-the-base
        raise PeerError(
            f"versions {manifest.version} and {other.version} of the same run name other files or another source for one "
            "base. Nothing was fetched; tell the host, or leave the run"
        )


def _is_right(path: Path, entry: FileEntry) -> bool:
    try:
        return path.stat().st_size == entry.size and file_digest(path) == entry.digest
    except OSError:
        return False


def link_base(files: Mapping[str, Path], directory: Path) -> None:
    """Give files of a base their names in a directory, where they may be already. Raises OSError."""
    for name, path in files.items():
        target = directory / name
        if not (target.exists() and target.samefile(path)):
            target.unlink(missing_ok=True)
            copy_span(Span(path, 0, path.stat().st_size), target)


def link_from(model: Path, directory: Path) -> None:
    """Give a directory with an adapter the weights of its base, and their index. Raises OSError."""
    link_base({path.name: path for path in files_of_base(model)}, directory)
    if shards_of(model) is not None:
        shutil.copyfile(model / INDEX, directory / INDEX)


def fault_of_base(directory: Path, manifest: Manifest) -> str:
    """How a directory's base differs from the one that the manifest names; empty if it does not."""
    if (manifest.base is not None) != has_adapter(directory):
        return "it has an adapter and names no base" if manifest.base is None else "it names a base and has no adapter"
    if manifest.base is None:
        return ""
    found = base_root(directory)
    # guard: base-of-the-adapter
    return (
        ""
        if found == manifest.base.root
        else (f"its adapter belongs to base {manifest.base.root[:16]}…, and its files hold base {found[:16]}…")
    )


def base_of(model: Path, source: str = "") -> lora_config.LoraBase:
    """What names a directory's model as the base of adapters. Raises `StateError`."""
    return lora_config.LoraBase(root_of(coded_directory(model), threads=cores()), source)
