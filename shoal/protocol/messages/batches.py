"""Batches for the trainer, the versions that it makes of them as manifests of files, and relays of these files."""

import msgspec

from shoal.protocol.field_types import Fact, Message, Response, Url
from shoal.protocol.messages.responses import LrFactor
from shoal.protocol.messages.verdicts import StepRewards

# --- batches ---


class BatchGroup(Message, frozen=True, omit_defaults=True):
    """A group of a batch, named by its hash."""

    version: int
    slot: int
    submission: str
    index: int
    """Its place in the submission."""
    digest: str
    """SHA-256 of the group's bytes, hex."""
    rewards: tuple[float, ...]
    continuations: tuple[float, ...] = ()
    """Rewards of the group's continuations, in their order; empty if there are none."""
    steps: tuple[StepRewards, ...] = ()
    """What the turns or steps of each rollout earn; empty if the run's credit does not ask for it."""
    faults: tuple[int, ...] = ()
    """Indices of the rollouts on which the environment failed, which count in nothing."""
    faulted_continuations: tuple[int, ...] = ()
    """Indices of such continuations."""


class SolveRate(Message, frozen=True):
    """How much of one environment was solved, in the groups accepted since the batch before."""

    rate: float | None
    """Share of rollouts that are solved; null if there are no groups."""
    groups: int
    weight: float
    """Of the environment, in the newest draw table."""


class Batch(Message, frozen=True):
    """`GET /v1/batches/{step}`: the same value whenever it is asked for, but for solve rates."""

    step: int
    groups: tuple[BatchGroup, ...]
    solved: dict[str, SolveRate] = {}
    """By label of an environment. Missing after a restart, and for batches that were formed long ago."""
    lr_factor: LrFactor | msgspec.UnsetType = msgspec.UNSET
    """What the step's learning rate is multiplied by; sent only if the host has lowered it."""


# --- weights ---


class FileEntry(Message, frozen=True):
    """A file of a checkpoint: a safe relative name, and the chunks that it consists of, in order."""

    path: str
    size: int
    digest: str
    chunks: tuple[str, ...]


class Patch(Message, frozen=True):
    """A way to a version's weights from those of an earlier version, which the node has."""

    base: int
    """The earlier version."""
    base_root: str
    """Its weights root."""
    codec: Fact
    """How the file is coded. A node that does not know the codec leaves the patch out."""
    file: FileEntry
    """Cut in chunks as the version's files. It is never stored beside them."""


class AdapterBase(Message, frozen=True):
    """The model that a version is an adapter of. Its files are among the version's, and the same in all versions."""

    root: str
    """Weights root of its tensors alone."""
    source: str = ""
    """hf:OWNER/NAME@REVISION, if each node gets its weights from a hub; they then come in no chunks."""


class Manifest(Message, frozen=True, omit_defaults=True):
    """What a policy version consists of. Signed as bytes, inside `SignedManifest`."""

    run: str
    stream: str
    version: int
    parents: tuple[int, ...]
    dtype: str
    root: str
    """Weights root: the Merkle root over the published tensors and nothing else."""
    files: tuple[FileEntry, ...]
    """Those of the checkpoint directory; without weights if the version is only published as patches."""
    chunk_bytes: int
    issued: float
    expires: float
    patches: tuple[Patch, ...] = ()
    """Other ways to the same weights; sent only if there are some."""
    base: AdapterBase | None = None
    """Sent only if the version is an adapter."""


class SignedManifest(Message, frozen=True):
    """The manifest's bytes as signed, with the key and signature in hex."""

    body: bytes
    key: str
    signature: str


# --- relays, which serve weights that they fetched ---


class RelayOffer(Message, frozen=True):
    """`POST /v1/relays`: the relay whose key signs the request serves chunks at this URL."""

    url: Url = ""
    """Empty: http, at `port` of the address that the request comes from."""
    port: int = 0


class RelayStanding(Response, frozen=True):
    """Answer to an offer."""

    url: str
    listed: bool
    """Whether clients are told of it."""
    reason: str
    """Why not, or not yet."""
    retry_s: float
    """When to offer again. An offer that is not repeated lapses."""


class RelayProof(Response, frozen=True):
    """`GET /.well-known/shoal-relay/{nonce}` of a relay: who serves there."""

    key: str
    signature: str
    """Over the run and the nonce."""


class RelayEntry(Response, frozen=True):
    """One of `GET /v1/relays`."""

    url: str
    address: str
    """The network address at which the proof was read. Only this one is asked."""
    key: str
