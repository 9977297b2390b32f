"""Manifests: the signed list of what a policy version consists of. Makes them, and refuses wrong ones.

Called by publishers (`weights/publish`) and by everyone who fetches. It uses no network and no clock. The weights root
covers only the published tensors, so it depends on the policy and nothing else. The manifest around it says in which
files and chunks they come, who signs for that, and until when. `demands` says what its fields must fulfil.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from shoal.policy.files import tensors_of
from shoal.protocol import constants, wire
from shoal.protocol.identity import Key, verify_signature
from shoal.protocol.merkle import merkle_root
from shoal.protocol.publishers import flaw_of_signer
from shoal.protocol.types import Manifest, Publishers, SignedManifest
from shoal.weights.demands import (
    ManifestError,
    demand_file,
    demand_identity,
    demand_patch,
    demand_time,
    demand_whole,
)

PURPOSE = "manifest"
"""The purpose string of a manifest's signature."""


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


def signer_of(data: bytes) -> str:
    """The key that a signed manifest names, not verified; empty if the bytes are none."""
    try:
        return wire.from_json(data, SignedManifest).key if len(data) <= constants.MAX_MANIFEST_BYTES else ""
    except wire.WireError:
        return ""


def open_manifest(
    data: bytes,
    *,
    run: str,
    keys: Collection[str] | Publishers,
    now: float | None,
    version: int | None = None,
    max_bytes: int | None = None,
    root: str = "",
    logged: Collection[str] | None = None,
    issued_since: float = 0.0,
) -> Manifest:
    """Decode a `SignedManifest` and return its manifest, if everything about it is right.

    `keys` may publish; of `Publishers`, each what it may. `version` is the requested one, None if any will do. `now` is
    None for history, where nothing expires. `max_bytes` is the most that this node will download. `root`, if given, is the
    version's in the log, and `logged` the digests of the signed manifests that the log names for it. `issued_since` is the
    newest date of issue that this node has seen of the version. Raises `ManifestError` saying what is wrong.
    """
    if len(data) > constants.MAX_MANIFEST_BYTES:
        raise ManifestError(
            "too-long",
            f"manifest of {len(data)} bytes: more than {constants.MAX_MANIFEST_BYTES} (MAX_MANIFEST_BYTES)",
        )
    try:
        signed = wire.from_json(data, SignedManifest)
        if signed.key not in (keys.keys if isinstance(keys, Publishers) else keys):
            raise ManifestError(
                "wrong-key",
                f"manifest signed by {signed.key[:16]!r}…, which may not publish for this run: use another source",
            )
        if not verify_signature(signed.key, PURPOSE, signed.body, signed.signature):
            raise ManifestError(
                "signature", "manifest's signature does not verify: it was changed on the way; use another source"
            )
        manifest = wire.from_json(signed.body, Manifest)
    except wire.WireError as error:
        raise ManifestError("malformed", f"manifest is malformed ({error}): fetch it from another source") from None
    if wire.to_json(signed) != data:
        raise ManifestError(
            "signature", "manifest is not in canonical form: it was changed on the way; use another source"
        )
    demand_identity(manifest, run, version)
    if isinstance(keys, Publishers):
        _demand_publisher(signed.key, keys, manifest)  # guard: manifest-by-its-publisher
    demand_time(manifest, now, issued_since)
    for entry in manifest.files:
        demand_file(entry, manifest)
    demand_whole(manifest, max_bytes)
    for patch in manifest.patches:
        demand_patch(patch, manifest, max_bytes)
    if root and manifest.root != root:  # guard: root-of-the-log
        raise ManifestError(
            "mixed", f"the manifest of version {manifest.version} names another weights root than the log"
        )
    if logged is not None and wire.digest(data) not in logged:  # guard: digest-of-the-log
        raise ManifestError(
            "unlogged",
            f"manifest of version {manifest.version} is not in the run's log, though a key of the run signed it: keep it "
            "as evidence, and use another source",
        )
    return manifest


def _demand_publisher(key: str, publishers: Publishers, manifest: Manifest) -> None:
    """Refuse what a key signed that the root named for other versions, or had replaced."""
    if flaw := flaw_of_signer(publishers, key, manifest.version, manifest.issued):
        raise ManifestError(
            "wrong-key", f"manifest of version {manifest.version}: its signer {key[:16]} {flaw}; use another source"
        )
