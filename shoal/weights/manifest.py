"""Manifests: what a version of the policy consists of, signed by its publisher, and the checks before anything is
fetched."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from shoal.errors import ConfigError, PeerError
from shoal.models import lora_config
from shoal.models.checkpoint import tensors_of
from shoal.models.hub_download import parse_ref
from shoal.protocol import constants, encoding
from shoal.protocol.encoding import is_digest, merkle_root
from shoal.protocol.host_signatures import flaw_of_signer
from shoal.protocol.messages import AdapterBase, FileEntry, Manifest, Patch, Publishers, SignedManifest
from shoal.protocol.signing import Key, verify_signature

# --- What a manifest must fulfil, beside its signature, and the name of each attack that it may be instead ---
#
# Tests and logs tell the attacks apart by `ManifestError.code`; the text is for people.


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

MANIFEST_FILE = ".manifest"
"""A file in each directory: the manifest it was made from, so that a later version can reuse its chunks unread."""

_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(\.[A-Za-z0-9_-]{1,40}){0,4}\.(json|safetensors|jinja|txt|model)", re.ASCII
)
_PATCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.patch", re.ASCII)


def is_publishable(name: str) -> bool:
    """Whether a file of a checkpoint directory is published. Its name must be that of plain data in the directory itself.

    Code (.py) and pickles (.bin, .pt) are never published, nor is a name that is hidden or could lead out of the directory.
    """
    return bool(_NAME.fullmatch(name))


def is_weights(name: str) -> bool:
    """Whether a file of a version holds weights."""
    return name.endswith(".safetensors")


def is_whole(manifest: Manifest) -> bool:
    """Whether the version's weights are among its files, so that nothing else is needed."""
    return any(is_weights(entry.path) for entry in manifest.files)


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


def is_of_base(name: str) -> bool:
    """Whether a file of an adapter's version holds weights of its base."""
    return is_weights(name) and name != lora_config.WEIGHTS


def is_from_hub(entry: FileEntry, manifest: Manifest) -> bool:
    """Whether each node gets a file from a hub by itself: the base's weights, if the manifest says where they are."""
    return manifest.base is not None and manifest.base.source != "" and is_of_base(entry.path)


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
    if not is_weights(entry.path) and entry.size > MAX_PLAIN_BYTES:  # guard: plain-file-size
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
    weights = [entry.path for entry in manifest.files if is_weights(entry.path)]
    if lora_config.WEIGHTS not in weights or len(weights) < 2 or manifest.patches:
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


# --- Manifests ---
#
# The weights root covers only the published tensors, so it depends on the policy and nothing else. The manifest around it
# says in which files and chunks they come, who signs for that, and until when.


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
        encoding.to_json([name, dtype, list(shape), digest]) for name, (dtype, shape, digest) in sorted(tensors.items())
    ]
    return merkle_root(leaves).hex()


def sign_manifest(manifest: Manifest, key: Key, *, now: float) -> SignedManifest:
    """Issue a manifest now and sign it. To renew an expired one, sign the same content again later."""
    issued = msgspec.structs.replace(manifest, issued=now, expires=now + constants.MANIFEST_LIFETIME_S)
    body = encoding.to_json(issued)
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
    return encoding.digest(encoding.to_json(msgspec.structs.replace(manifest, issued=0.0, expires=0.0)))


def signer_of(data: bytes) -> str:
    """The key that a signed manifest names, not verified; empty if the bytes are none."""
    try:
        return encoding.from_json(data, SignedManifest).key if len(data) <= constants.MAX_MANIFEST_BYTES else ""
    except encoding.WireError:
        return ""


class ManifestTrust(NamedTuple):
    """Whose manifests a node takes: those of a run, by keys that may publish for it."""

    run: str
    keys: Collection[str] | Publishers
    """Of `Publishers`, each signs what it may."""
    max_bytes: int | None = None
    """The most that this node will download."""


def open_manifest(
    data: bytes,
    trust: ManifestTrust,
    *,
    now: float | None,
    version: int | None = None,
    root: str = "",
    logged: Collection[str] | None = None,
    issued_since: float = 0.0,
) -> Manifest:
    """Decode a `SignedManifest` and return its manifest, if everything about it is right.

    `version` is the requested one, None if any will do. `now` is None for history, where nothing expires. `root`, if given,
    is the version's in the log, and `logged` the digests of the signed manifests that the log names for it. `issued_since`
    is the newest date of issue that this node has seen of the version. Raises `ManifestError` saying what is wrong.
    """
    run, keys, max_bytes = trust
    if len(data) > constants.MAX_MANIFEST_BYTES:
        raise ManifestError(
            "too-long",
            f"manifest of {len(data)} bytes: more than {constants.MAX_MANIFEST_BYTES} (MAX_MANIFEST_BYTES)",
        )
    try:
        signed = encoding.from_json(data, SignedManifest)
        if signed.key not in (keys.keys if isinstance(keys, Publishers) else keys):
            raise ManifestError(
                "wrong-key",
                f"manifest signed by {signed.key[:16]!r}…, which may not publish for this run: use another source",
            )
        if not verify_signature(signed.key, PURPOSE, signed.body, signed.signature):
            raise ManifestError(
                "signature", "manifest's signature does not verify: it was changed on the way; use another source"
            )
        manifest = encoding.from_json(signed.body, Manifest)
    except encoding.WireError as error:
        raise ManifestError("malformed", f"manifest is malformed ({error}): fetch it from another source") from None
    if encoding.to_json(signed) != data:
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
    if logged is not None and encoding.digest(data) not in logged:  # guard: digest-of-the-log
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


def manifests_here(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """The directories of whole versions in a folder, by name, and their manifests. Damaged ones are left out."""
    for known in sorted(folder.glob(f"v*/{MANIFEST_FILE}")):
        try:
            manifest = encoding.from_json(known.read_bytes(), Manifest)
        except (encoding.WireError, OSError):  # or deleted meanwhile
            continue
        yield known.parent, manifest
