"""Learning: batches for the trainer, and the versions that come of them, as manifests of files.

How a manifest is signed and opened is in `weights`.
"""

from shoal.protocol.types.message import Message


class BatchGroup(Message, frozen=True):
    """A member of a batch, by hash."""

    version: int
    slot: int
    submission: str
    index: int
    """Its place in the submission."""
    digest: str
    """Of the group's bytes."""
    rewards: tuple[float, ...]


class Batch(Message, frozen=True):
    """`GET /v1/batches/{step}`: a value, not a moment."""

    step: int
    groups: tuple[BatchGroup, ...]


# --- weights ---


class FileEntry(Message, frozen=True):
    """A file of a checkpoint: a safe relative name and the chunks that make it up, in order."""

    path: str
    size: int
    digest: str
    chunks: tuple[str, ...]


class Manifest(Message, frozen=True):
    """What a policy version consists of. Signed as bytes, inside `SignedManifest`."""

    run: str
    stream: str
    version: int
    parents: tuple[int, ...]
    dtype: str
    root: str
    """Weights root: Merkle root over the published tensors only."""
    files: tuple[FileEntry, ...]
    chunk_bytes: int
    issued: float
    expires: float


class SignedManifest(Message, frozen=True):
    """The manifest's bytes as signed, with the key and signature in hex."""

    body: bytes
    key: str
    signature: str
