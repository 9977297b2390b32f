"""Policy versions: published by the trainer, and their secret links revealed once they are retired."""

from dataclasses import dataclass, field

from shoal.ledger.entry import Entry
from shoal.ledger.state import State, VersionRecord
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.types import Message


class CheckpointPublished(Message, frozen=True):
    """A new version; or a known one, with the same root, whose manifest was signed again with a later date."""

    version: int
    root: str
    manifest: str
    """Digest of the signed manifest's bytes, which are kept as a blob."""
    stream: str = MAIN_STREAM


class LinkRevealed(Message, frozen=True):
    version: int
    link: str
    audit_link: str
    stream: str = MAIN_STREAM


@dataclass(frozen=True)
class Publish:
    """The trainer's new version, its chunks already kept."""

    key: str
    version: int
    root: str
    manifest: str
    links: dict[int, tuple[str, str]] = field(repr=False)
    """(link, audit link) of the versions that this may retire: secret until then."""
    now: float
    stream: str = MAIN_STREAM


def apply_checkpoint_published(body: CheckpointPublished, state: State, entry: Entry) -> None:
    versions = state.streams[body.stream].versions
    if body.version in versions:  # signed again
        versions[body.version].manifest = body.manifest
    else:
        versions[body.version] = VersionRecord(body.root, body.manifest)


def apply_link_revealed(body: LinkRevealed, state: State, entry: Entry) -> None:
    state.streams[body.stream].versions[body.version].revealed = True


EVENTS = {
    "checkpoint_published": (CheckpointPublished, apply_checkpoint_published),
    "link_revealed": (LinkRevealed, apply_link_revealed),
}
