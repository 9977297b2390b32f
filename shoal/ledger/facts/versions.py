"""Policy versions: published by the trainer, and their secret links revealed once they are retired; and who publishes."""

from shoal.ledger.entry import Entry
from shoal.ledger.state import State
from shoal.ledger.state_records import VersionRecord
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.types import Message, Publishers, Rotation


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


class PublisherChanged(Message, frozen=True):
    """The root key named another publisher, from a version on: the fields of a `Rotation`, without the run."""

    key: str
    since: int
    serial: int
    created: int
    signature: str
    stream: str = MAIN_STREAM

    def rotation(self, run: str) -> Rotation:
        """What the root signed."""
        return Rotation(run, self.stream, self.key, self.since, self.serial, self.created, self.signature)


def apply_checkpoint_published(body: CheckpointPublished, state: State, entry: Entry) -> None:
    versions = state.streams[body.stream].versions
    if body.version in versions:  # signed again
        versions[body.version].manifest = body.manifest
    else:
        versions[body.version] = VersionRecord(body.root, body.manifest)


def apply_link_revealed(body: LinkRevealed, state: State, entry: Entry) -> None:
    state.streams[body.stream].versions[body.version].revealed = True


def apply_publisher_changed(body: PublisherChanged, state: State, entry: Entry) -> None:
    known = state.publishers
    state.named = Publishers(known.first, (*known.rotations, body.rotation(state.run)))
    state.trainer_key = body.key


EVENTS = {
    "publisher_changed": (PublisherChanged, apply_publisher_changed),
    "checkpoint_published": (CheckpointPublished, apply_checkpoint_published),
    "link_revealed": (LinkRevealed, apply_link_revealed),
}
