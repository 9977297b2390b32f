"""What a manifest must fulfil, beside its signature, and the name of each attack that it may be instead.

Called by `manifest`. Pure. Tests and logs tell the attacks apart by `ManifestError.code`; the text is for people.
"""

import re
from typing import Literal

from shoal.errors import ConfigError, PeerError
from shoal.policy import adapterspec
from shoal.policy.hub import parse_ref
from shoal.protocol import constants
from shoal.protocol.types import AdapterBase, FileEntry, Manifest, Patch
from shoal.protocol.wire import is_digest

Attack = Literal[
    "rollback", "fast-forward", "expired", "mixed", "wrong-key", "signature", "too-long", "unlogged", "malformed"
]
"""rollback: an older version or renewal than asked for or known. fast-forward: a newer version, or a date in the future.
expired: a source that is frozen. mixed: of another run, or parts of different versions. wrong-key: signed by a key that may
not publish. signature: changed after it was signed. too-long: more bytes than allowed. unlogged: not in the run's log.
malformed: nothing that a publisher of ours signs."""


class ManifestError(PeerError):
    """A manifest is refused."""

    def __init__(self, code: Attack, text: str) -> None:
        super().__init__(text)
        self.code: Attack = code


POLICY_STREAM = "policy"
"""The stream that the manifests of a run with one policy name. The log names the same stream `MAIN_STREAM`."""

DTYPES = ("float32", "bfloat16", "int8")
"""Dtypes in which a policy may be published."""

MAX_PLAIN_BYTES = 64 << 20
"""Largest file of a version that holds no weights."""

MOST_FILES = 1000
"""Files of a version: each takes a block of the disk and some time, however small it is."""

MOST_PATCHES = 8
"""Patches of one version, each from another base."""

_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(\.[A-Za-z0-9_-]{1,40}){0,4}\.(json|safetensors|jinja|txt|model)", re.ASCII
)
_PATCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.patch", re.ASCII)


def is_publishable(name: str) -> bool:
    """Whether a file of a checkpoint directory is published. Its name must be that of plain data in the directory itself.

    Code (.py) and pickles (.bin, .pt) are never published, nor is a name that is hidden or could lead out of the directory.
    """
    return bool(_NAME.fullmatch(name))


def is_whole(manifest: Manifest) -> bool:
    """Whether the version's weights are among its files, so that nothing else is needed."""
    return any(entry.path.endswith(".safetensors") for entry in manifest.files)


def chunks_of(manifest: Manifest) -> set[str]:
    """All chunks that a manifest names: of its files and of its patches."""
    return {chunk for entry in manifest.files for chunk in entry.chunks} | chunks_of_patches(manifest)


def chunks_of_patches(manifest: Manifest) -> set[str]:
    """The chunks of the patches that a manifest names."""
    return {chunk for patch in manifest.patches for chunk in patch.file.chunks}


def demand_identity(manifest: Manifest, run: str, version: int | None) -> None:
    """Compare what the manifest is of with what was requested."""
    if (manifest.run, manifest.stream) != (run, POLICY_STREAM):
        raise ManifestError(
            "mixed",
            f"manifest is of run {manifest.run[:16]!r}, stream {manifest.stream[:16]!r}; this node takes part in "
            f"{run[:16]!r}, {POLICY_STREAM!r}: check the URL of the source",
        )
    if version is not None and manifest.version != version:
        raise ManifestError(
            "rollback" if manifest.version < version else "fast-forward",
            f"manifest is of version {manifest.version}, not of the requested {version}: use another source",
        )
    if manifest.version < 0:
        raise ManifestError("malformed", f"manifest is of version {manifest.version}: versions count from 0")
    if any(not 0 <= parent < manifest.version for parent in manifest.parents):
        raise ManifestError(
            "malformed",
            f"manifest of version {manifest.version} names parents {manifest.parents}: they must be older",
        )


def demand_time(manifest: Manifest, now: float | None, issued_since: float) -> None:
    """Refuse a manifest that is expired, from the future, valid for longer than the protocol allows, or older than one
    that this node has seen of the version."""
    if not 0 <= manifest.expires - manifest.issued <= constants.MANIFEST_LIFETIME_S:
        raise ManifestError(
            "expired", "manifest claims a longer life than MANIFEST_LIFETIME_S: the publisher must issue it again"
        )
    if manifest.issued < issued_since:  # guard: older-renewal
        raise ManifestError(
            "rollback",
            f"manifest of version {manifest.version} was issued {issued_since - manifest.issued:.0f} s before one that "
            "this node has seen: use another source",
        )
    if now is None:
        return
    if manifest.expires <= now:
        raise ManifestError(
            "expired",
            f"manifest of version {manifest.version} expired {now - manifest.expires:.0f} s ago: the source is frozen, "
            "or this machine's clock is ahead; use another source or set the clock",
        )
    if manifest.issued > now + constants.SIGNATURE_WINDOW_S:
        raise ManifestError(
            "fast-forward",
            f"manifest of version {manifest.version} was issued {manifest.issued - now:.0f} s in the future: set this "
            "machine's clock",
        )


def is_from_hub(entry: FileEntry, manifest: Manifest) -> bool:
    """Whether each node gets a file from a hub by itself: the base's weights, if the manifest says where they are."""
    is_base = entry.path.endswith(".safetensors") and entry.path != adapterspec.WEIGHTS
    return manifest.base is not None and manifest.base.source != "" and is_base


def demand_file(entry: FileEntry, manifest: Manifest) -> None:
    """Refuse an unsafe name, and sizes and hashes that do not match."""
    if not is_publishable(entry.path):
        raise ManifestError(
            "malformed",
            f"manifest names the file {entry.path[:80]!r}: only plain data files in the directory itself are published",
        )
    if is_from_hub(entry, manifest):
        if entry.chunks or entry.size <= 0 or not is_digest(entry.digest):
            raise ManifestError("malformed", f"manifest gives {entry.path} of a hub an invalid size, hash or chunks")
    else:
        _demand_chunks(entry, manifest.chunk_bytes)
    if not entry.path.endswith(".safetensors") and entry.size > MAX_PLAIN_BYTES:  # guard: plain-file-size
        raise ManifestError(
            "too-long",
            f"manifest gives {entry.path} {entry.size} bytes, limit {MAX_PLAIN_BYTES} for a file without weights",
        )


def demand_patch(patch: Patch, manifest: Manifest, max_bytes: int | None) -> None:
    """Refuse a patch from a version that it cannot begin at, and one whose file is not a patch's."""
    if (
        not manifest.version - constants.MAX_PATCH_CHAIN <= patch.base < manifest.version or patch.base < 0
    ):  # guard: patch-base
        raise ManifestError(
            "mixed",
            f"manifest of version {manifest.version} has a patch from version {patch.base}: limit are the "
            f"{constants.MAX_PATCH_CHAIN} versions before it",
        )
    if not _PATCH_NAME.fullmatch(patch.file.path) or not is_digest(patch.base_root):
        raise ManifestError(
            "malformed", f"manifest names a patch {patch.file.path[:80]!r} from root {patch.base_root[:16]!r}"
        )
    _demand_chunks(patch.file, manifest.chunk_bytes)
    if max_bytes is not None and patch.file.size > max_bytes:  # guard: patch-size
        raise ManifestError(
            "too-long",
            f"a patch to version {manifest.version} has {patch.file.size} bytes, limit of this node {max_bytes}: allow "
            "more (--max-memory, --max-disk), or leave the run",
        )


def _demand_chunks(entry: FileEntry, chunk_bytes: int) -> None:
    """Refuse sizes and hashes that do not match."""
    if not 1 <= chunk_bytes <= constants.MAX_CHUNK_BYTES:
        raise ManifestError(
            "malformed", f"manifest has chunks of {chunk_bytes} bytes, limits 1 to {constants.MAX_CHUNK_BYTES}"
        )
    if entry.size < 0 or len(entry.chunks) != -(-entry.size // chunk_bytes):
        raise ManifestError(
            "malformed",
            f"manifest gives {entry.path} {entry.size} bytes in {len(entry.chunks)} chunks of {chunk_bytes}: they do "
            "not match; the publisher must issue it again",
        )
    if not all(is_digest(text) for text in (entry.digest, *entry.chunks)):
        raise ManifestError(
            "malformed", f"manifest gives {entry.path} an invalid hash: the publisher must issue it again"
        )
    if len(entry.chunks) == 1 and entry.digest != entry.chunks[0]:
        raise ManifestError(
            "malformed", f"manifest gives {entry.path} one chunk with another hash: the publisher must issue it again"
        )


def _demand_base(manifest: Manifest, base: AdapterBase) -> None:
    """Refuse an adapter that is not beside the files of its base, or that patches lead to."""
    try:
        fits = is_digest(base.root) and (not base.source or parse_ref(base.source).is_pinned)
    except ConfigError:
        fits = False
    if not fits:
        raise ManifestError(
            "malformed", f"manifest names the base {base.root[:16]!r} of {base.source[:100]!r}: invalid"
        )
    weights = [entry.path for entry in manifest.files if entry.path.endswith(".safetensors")]
    if adapterspec.WEIGHTS not in weights or len(weights) < 2 or manifest.patches:
        raise ManifestError(
            "malformed",
            f"manifest of version {manifest.version} is of an adapter, and lacks it or its base, or has patches",
        )


def demand_whole(manifest: Manifest, max_bytes: int | None) -> None:
    """Check what concerns all files together."""
    if len(manifest.files) > MOST_FILES:  # guard: files-of-a-version
        raise ManifestError(
            "too-long", f"manifest names {len(manifest.files)} files, limit {MOST_FILES}: use fewer, larger shards"
        )
    names = [entry.path.lower() for entry in manifest.files]
    if len(set(names)) != len(names) or not names:
        raise ManifestError("malformed", "manifest has no file, or has one twice: the publisher must issue it again")
    if manifest.dtype not in DTYPES or not is_digest(manifest.root):
        raise ManifestError(
            "malformed",
            f"manifest has dtype {manifest.dtype[:16]!r} and root {manifest.root[:16]!r}: one of them is invalid",
        )
    if manifest.base is not None:
        _demand_base(manifest, manifest.base)
    if len(manifest.patches) > MOST_PATCHES:  # guard: patches-of-a-version
        raise ManifestError("too-long", f"manifest has {len(manifest.patches)} patches, limit {MOST_PATCHES}")
    if len({patch.base for patch in manifest.patches}) != len(manifest.patches):
        raise ManifestError("malformed", "manifest has two patches from one version: the publisher must issue it again")
    size_bytes = sum(entry.size for entry in manifest.files)
    if max_bytes is not None and size_bytes > max_bytes:
        raise ManifestError(
            "too-long",
            f"version {manifest.version} has {size_bytes} bytes, limit of this node {max_bytes}: allow more (--max-memory, "
            "--max-disk), free some space on its disk, or leave the run",
        )
