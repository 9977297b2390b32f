"""Versions of the policy: published checkpoints, revealed seeds, and the rotation of publishers."""

from collections.abc import Iterator

from shoal.ledger.commands import Publish, Rotate, Tick
from shoal.ledger.draw_table_changes import PoolsChanged, change_pools
from shoal.ledger.errors import Refused
from shoal.ledger.event import Body, Entry
from shoal.ledger.replay_context import LogPosition, Table, Trigger
from shoal.ledger.state import State
from shoal.ledger.state_records import StreamRecord, VersionRecord
from shoal.protocol.constants import MAIN_STREAM, SIGNATURE_WINDOW_S
from shoal.protocol.host_signatures import flaw_of_next
from shoal.protocol.messages import Message, Publishers, Rotation

# --- Policy versions ---


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


# --- When a policy version may be published, who publishes it, and when its secret links come out ---


def decide_publish(command: Publish, state: State) -> list[Body]:
    if command.key != state.trainer_key:
        raise Refused("not_admitted", f"{command.key[:12]} is not the trainer key of this run")
    stream = state.streams.get(command.stream)
    if stream is None:
        raise Refused("unknown", f"this run has no stream {command.stream[:32]!r}")
    published = CheckpointPublished(command.version, command.root, command.manifest, stream.name)
    if command.version <= stream.version:
        known = stream.versions[command.version]
        if known.root == command.root:  # signed again, or sent again  # guard: version-published-once
            return [] if known.manifest == command.manifest else [published]
        raise Refused("conflict", f"version {command.version} is published with another weights root: a version is "
                      "published once; load it instead of rebuilding it")  # fmt: skip
    if command.version != stream.version + 1:
        raise Refused("conflict", f"the next version is {stream.version + 1}, not {command.version}")
    if command.version > 0 and command.version - 1 not in stream.batches:
        raise Refused("conflict", f"version {command.version} needs batch {command.version - 1}, which is not formed")
    events: list[Body] = [published, *change_pools(state, stream, command.version, command.links)]
    ended = command.version >= state.rules.steps
    retired = command.version if ended else command.version - state.rules.max_staleness - 1
    unjudged = _unjudged(state, stream)
    for version, (link, audit_link) in sorted(command.links.items()):
        hidden = version == command.version or not stream.versions[version].revealed
        # guard: secret-while-in-use, secret-while-unjudged
        if version <= retired and hidden and version not in unjudged:
            events.append(LinkRevealed(version, link, audit_link, stream.name))
    return events


def decide_rotate(command: Rotate, state: State) -> list[Body]:
    """The root names another publisher, from the next version on: what is published stays as it was signed."""
    rotation, known = command.rotation, state.publishers
    if rotation in known.rotations[-1:]:  # sent again
        return []
    if state.phase == "ended":
        raise Refused("ended", "the run has ended: nobody publishes any more")
    if flaw := flaw_of_next(rotation, known, state.root, state.run, MAIN_STREAM):  # guard: rotation-is-sound
        raise Refused("not_rotated", flaw)
    if rotation.since != state.main.version + 1:  # guard: rotation-from-the-next-version
        when = "back in time" if rotation.since <= state.main.version else "too early"
        raise Refused("conflict", f"{when}: the rotation holds from version {rotation.since}, and the next version is "
                      f"{state.main.version + 1}: sign it for that one")  # fmt: skip
    if abs(rotation.created - command.now) > SIGNATURE_WINDOW_S:  # guard: rotation-is-new
        raise Refused("clock", f"the rotation was signed {command.now - rotation.created:+.0f} s ago by the host's clock, "
                      f"limit {SIGNATURE_WINDOW_S} s: set the clocks, or sign it again")  # fmt: skip
    if rotation.key in state.members or rotation.key in state.validators:  # guard: publisher-is-nobody-else
        raise Refused("conflict", f"{rotation.key[:12]} has another role in this run: name a key of its own")
    return [
        PublisherChanged(
            rotation.key, rotation.since, rotation.serial, rotation.created, rotation.signature, rotation.stream
        )
    ]


def _unjudged(state: State, stream: StreamRecord) -> set[int]:
    """Versions with submissions to judge. Their links would tell the first validator whether a second one will look."""
    leases = (state.lease_of(state.submissions[name]) for name in state.pending)
    return {lease.version for lease in leases if lease.stream == stream.name}


def reveal_rest(state: State, links: dict[int, tuple[str, str]]) -> Iterator[Body]:
    """An ended run publishes no more versions: the remaining links come out once what they hide is judged."""
    if state.phase == "ended":
        stream = state.main
        unjudged = _unjudged(state, stream)
        for version, (link, audit_link) in sorted(links.items()):
            if not stream.versions[version].revealed and version not in unjudged:
                yield LinkRevealed(version, link, audit_link, stream.name)


def cause_of_checkpoint_published(body: CheckpointPublished, here: LogPosition) -> Trigger:
    known = {v: links for v, links in here.links.items() if v <= body.version}
    for entry in here.entries[here.place + 1 : here.place + 2]:
        # It names a link that may be revealed later; `verify` checks that it is of the chain.
        if isinstance(entry.body, PoolsChanged) and entry.body.link:
            retired = body.version - here.state.rules.max_staleness - 1
            known[retired] = entry.body.link, known.get(retired, ("", ""))[1]
    key = here.state.trainer_key
    return Trigger(Publish(key, body.version, body.root, body.manifest, known, here.now, body.stream))


def cause_of_link_revealed(body: LinkRevealed, here: LogPosition) -> Trigger:
    hidden = [v for v, version in here.state.streams[body.stream].versions.items() if not version.revealed]
    return Trigger(Tick(here.now, {v: links for v, links in here.links.items() if v in hidden}))


def cause_of_publisher_changed(body: PublisherChanged, here: LogPosition) -> Trigger:
    return Trigger(Rotate(body.rotation(here.state.run), here.now))


COMMANDS: Table = {Publish: decide_publish, Rotate: decide_rotate}
CAUSES: Table = {
    CheckpointPublished: cause_of_checkpoint_published,
    LinkRevealed: cause_of_link_revealed,
    PublisherChanged: cause_of_publisher_changed,
}
