"""Manifests: the signed list of what a policy version consists of. Makes them, and refuses wrong ones.

Called by publishers (`weights/publish`) and by everyone who fetches. It uses no network and no clock. The weights root
covers only the published tensors, so it depends on the policy and nothing else. The manifest around it says in which
files and chunks they come, who signs for that, and until when.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from shoal.errors import PeerError
from shoal.policy.files import tensors_of
from shoal.protocol import constants, wire
from shoal.protocol.identity import Key, verify_signature
from shoal.protocol.merkle import merkle_root
from shoal.protocol.types import FileEntry, Manifest, SignedManifest

PURPOSE = "manifest"
"""The purpose string of a manifest's signature."""

POLICY_STREAM = "policy"
"""The stream of a run with one policy."""

DTYPES = ("float32", "bfloat16")
"""Dtypes in which a policy may be published."""

MAX_PLAIN_BYTES = 64 << 20
"""Largest file of a version that holds no weights."""

MOST_FILES = 1000
"""Files of a version: each takes a block of the disk and some time, however small it is."""

_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(\.[A-Za-z0-9_-]{1,40}){0,4}\.(json|safetensors|jinja|txt|model)", re.ASCII
)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


def is_publishable(name: str) -> bool:
    """Whether a file of a checkpoint directory is published. Its name must be that of plain data in the directory itself.

    Code (.py) and pickles (.bin, .pt) are never published, nor is a name that is hidden or could lead out of the directory.
    """
    return bool(_NAME.fullmatch(name))


def weights_root(directory: Path) -> str:
    """Merkle root, hex, over (name, dtype, shape, SHA-256 of the data) of each tensor, sorted by name.

    Raises `StateError` if the directory's weights cannot be read.
    """
    return root_over(tensors_of(directory))


def root_over(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """The weights root, hex, from the dtype, the shape and the SHA-256 of each tensor."""
    leaves = [
        wire.to_json([name, dtype, list(shape), digest]) for name, (dtype, shape, digest) in sorted(tensors.items())
    ]
    return merkle_root(leaves).hex()


def sign_manifest(manifest: Manifest, key: Key, *, now: float) -> SignedManifest:
    """Issue a manifest now and sign it. To renew an expired one, sign the same content again later."""
    issued = msgspec.structs.replace(manifest, issued=now, expires=now + constants.MANIFEST_LIFETIME_S)
    body = wire.to_json(issued)
    return SignedManifest(body=body, key=key.public, signature=key.sign(PURPOSE, body))


def renew_at(manifest: Manifest) -> float:
    """When the publisher must sign it again: half of its life is then left for those who fetch it."""
    return manifest.issued + constants.MANIFEST_LIFETIME_S / 2


def is_renewal(manifest: Manifest, known: Manifest) -> bool:
    """Whether a manifest promises the same as a known one for clearly longer; less is not worth a line in the log."""
    longer = manifest.issued >= known.issued + constants.MANIFEST_LIFETIME_S / 4
    return longer and content_of(manifest) == content_of(known)


def content_of(manifest: Manifest) -> str:
    """Digest of a manifest without its dates: the same for all manifests that an honest trainer signs of one version."""
    return wire.digest(wire.to_json(msgspec.structs.replace(manifest, issued=0.0, expires=0.0)))


def open_manifest(
    data: bytes,
    *,
    run: str,
    keys: Collection[str],
    now: float | None,
    version: int | None = None,
    max_bytes: int | None = None,
) -> Manifest:
    """Decode a `SignedManifest` and return its manifest, if everything about it is right.

    `keys` may publish. `version` is the requested one, None if any will do. `now` is None for history, where nothing
    expires. `max_bytes` is the most that this node will download. Raises `PeerError` saying what is wrong.
    """
    if len(data) > constants.MAX_MANIFEST_BYTES:
        raise PeerError(f"manifest of {len(data)} bytes: more than {constants.MAX_MANIFEST_BYTES} (MAX_MANIFEST_BYTES)")
    try:
        signed = wire.from_json(data, SignedManifest)
        if signed.key not in keys:
            raise PeerError(
                f"manifest signed by {signed.key[:16]!r}…, which may not publish for this run: use another source"
            )
        if not verify_signature(signed.key, PURPOSE, signed.body, signed.signature):
            raise PeerError("manifest's signature does not verify: it was changed on the way; use another source")
        manifest = wire.from_json(signed.body, Manifest)
    except wire.WireError as error:
        raise PeerError(f"manifest is malformed ({error}): fetch it from another source") from None
    if wire.to_json(signed) != data:
        raise PeerError("manifest is not in canonical form: it was changed on the way; use another source")
    _demand_identity(manifest, run, version)
    _demand_time(manifest, now)
    for entry in manifest.files:
        _demand_file(entry, manifest.chunk_bytes)
    _demand_whole(manifest, max_bytes)
    return manifest


def _demand_identity(manifest: Manifest, run: str, version: int | None) -> None:
    """Compare what the manifest is of with what was requested."""
    if (manifest.run, manifest.stream) != (run, POLICY_STREAM):
        raise PeerError(
            f"manifest is of run {manifest.run[:16]!r}, stream {manifest.stream[:16]!r}; this node takes part in "
            f"{run[:16]!r}, {POLICY_STREAM!r}: check the URL of the source"
        )
    if version is not None and manifest.version != version:
        raise PeerError(
            f"manifest is of version {manifest.version}, not of the requested {version}: use another source"
        )
    if manifest.version < 0:
        raise PeerError(f"manifest is of version {manifest.version}: versions count from 0")
    if any(not 0 <= parent < manifest.version for parent in manifest.parents):
        raise PeerError(f"manifest of version {manifest.version} names parents {manifest.parents}: they must be older")


def _demand_time(manifest: Manifest, now: float | None) -> None:
    """Refuse a manifest that is expired, from the future, or valid for longer than the protocol allows."""
    if not 0 <= manifest.expires - manifest.issued <= constants.MANIFEST_LIFETIME_S:
        raise PeerError("manifest claims a longer life than MANIFEST_LIFETIME_S: the publisher must issue it again")
    if now is None:
        return
    if manifest.expires <= now:
        raise PeerError(
            f"manifest of version {manifest.version} expired {now - manifest.expires:.0f} s ago: the source is frozen, "
            "or this machine's clock is ahead; use another source or set the clock"
        )
    if manifest.issued > now + constants.SIGNATURE_WINDOW_S:
        raise PeerError(
            f"manifest of version {manifest.version} was issued {manifest.issued - now:.0f} s in the future: set this "
            "machine's clock"
        )


def _demand_file(entry: FileEntry, chunk_bytes: int) -> None:
    """Refuse an unsafe name, and sizes and hashes that do not match."""
    if not is_publishable(entry.path):
        raise PeerError(
            f"manifest names the file {entry.path[:80]!r}: only plain data files in the directory itself are published"
        )
    if not 1 <= chunk_bytes <= constants.MAX_CHUNK_BYTES:
        raise PeerError(f"manifest has chunks of {chunk_bytes} bytes, limits 1 to {constants.MAX_CHUNK_BYTES}")
    if entry.size < 0 or len(entry.chunks) != -(-entry.size // chunk_bytes):
        raise PeerError(
            f"manifest gives {entry.path} {entry.size} bytes in {len(entry.chunks)} chunks of {chunk_bytes}: they do "
            "not match; the publisher must issue it again"
        )
    if not entry.path.endswith(".safetensors") and entry.size > MAX_PLAIN_BYTES:  # guard: plain-file-size
        raise PeerError(
            f"manifest gives {entry.path} {entry.size} bytes, limit {MAX_PLAIN_BYTES} for a file without weights"
        )
    if not all(_HASH.fullmatch(text) for text in (entry.digest, *entry.chunks)):
        raise PeerError(f"manifest gives {entry.path} an invalid hash: the publisher must issue it again")
    if len(entry.chunks) == 1 and entry.digest != entry.chunks[0]:
        raise PeerError(f"manifest gives {entry.path} one chunk with another hash: the publisher must issue it again")


def _demand_whole(manifest: Manifest, max_bytes: int | None) -> None:
    """Check what concerns all files together."""
    if len(manifest.files) > MOST_FILES:  # guard: files-of-a-version
        raise PeerError(f"manifest names {len(manifest.files)} files, limit {MOST_FILES}: use fewer, larger shards")
    names = [entry.path.lower() for entry in manifest.files]
    if len(set(names)) != len(names) or not names:
        raise PeerError("manifest has no file, or has one twice: the publisher must issue it again")
    if manifest.dtype not in DTYPES or not _HASH.fullmatch(manifest.root):
        raise PeerError(
            f"manifest has dtype {manifest.dtype[:16]!r} and root {manifest.root[:16]!r}: one of them is invalid"
        )
    size_bytes = sum(entry.size for entry in manifest.files)
    if max_bytes is not None and size_bytes > max_bytes:
        raise PeerError(
            f"version {manifest.version} has {size_bytes} bytes, limit of this node {max_bytes}: allow more (--max-memory, "
            "--max-disk), or leave the run"
        )
