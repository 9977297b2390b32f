"""What this machine knows of authors and versions: the first key seen of an owner, and all that it has signed since.

Called before anything of a registry is believed. The first key of an owner is taken on trust and pinned. From then on
another key needs a statement signed by the pinned one, a version keeps its digest for ever, and a list that is older than
one seen before is refused. It reads no registry; callers bring what they read.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.errors import PeerError, StateError, cause_of
from shoal.folder import held, write_atomically
from shoal.hub.catalogue import KeyChange, Opened
from shoal.hub.names import owner_of
from shoal.protocol.types.message import Message
from shoal.protocol.wire import WireError, from_json, to_json


class Seen(Message, frozen=True):
    """The newest catalogue of a package that this machine has seen."""

    serial: int
    digest: str
    releases: dict[str, str]
    """Digest of each version."""


class Known(Message, frozen=True):
    """The contents of the file."""

    keys: dict[str, str] = {}
    """Pinned key of each owner."""
    packages: dict[str, Seen] = {}


class Trust:
    """The file with what is known, `authors.json` in this machine's home. Several processes may use it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def known(self) -> Known:
        """What is known now. Raises `StateError` if the file is damaged."""
        try:
            return from_json(self.file.read_bytes(), Known)
        except FileNotFoundError:
            return Known()
        except (OSError, WireError) as error:
            reason = cause_of(error)
            raise StateError(
                f"{self.file} cannot be read: {reason}. Restore it from a backup; without it, the keys of authors count "
                "as never seen"
            ) from None

    def admit(self, opened: Opened, changes: Sequence[KeyChange], *, pin: bool = True) -> bool:
        """Believe a catalogue, and remember it. Returns whether its owner was unknown until now: without `pin`, an unknown
        owner's is not remembered.

        Raises `PeerError` if the owner's key changed without its word, if a version has another digest than before or is
        gone, or if the catalogue is older than one that this machine has seen.
        """
        if not pin and not self.file.exists():
            return True  # nothing is known and nothing will be, so a home that cannot be written serves as well
        with held(self.file.with_name(f".{self.file.name}.lock")):
            known = self.known()
            name, owner = opened.catalogue.name, owner_of(opened.catalogue.name)
            pinned = known.keys.get(owner, "")
            if pinned:
                _demand_key(owner, pinned, opened.key, changes)
            if name in known.packages:
                _demand_newer(known.packages[name], opened)
            if pin or pinned:
                releases = {release.version: release.digest for release in opened.catalogue.releases}
                seen = Seen(opened.catalogue.serial, opened.digest, releases)
                now_known = Known(known.keys | {owner: opened.key}, known.packages | {name: seen})
                if now_known != known:
                    write_atomically(self.file, msgspec.json.format(to_json(now_known)))
            return not pinned


def _demand_key(owner: str, pinned: str, key: str, changes: Sequence[KeyChange]) -> None:
    """Follow the changes of key from the pinned one."""
    at = pinned
    for _ in range(len(changes) + 1):
        if at == key:
            return
        new = {change.new for change in changes if change.old == at}
        if len(new) > 1:  # guard: one-new-key
            raise PeerError(
                f"the key {at[:16]}… of {owner} names two keys after it: it may be stolen. Ask {owner} which one is right"
            )
        if not new:
            break
        at = new.pop()
    raise PeerError(  # guard: author-is-pinned
        f"{owner} signs with the key {key[:16]}…, but is known here with {pinned[:16]}…, which does not name the other as "
        "its successor: somebody else may have signed. Ask the author, and remove the old key from ~/.shoal/authors.json "
        "if it is right"
    )


def _demand_newer(seen: Seen, opened: Opened) -> None:
    """Compare a catalogue with the newest one that was seen."""
    catalogue = opened.catalogue
    offered = {release.version: release.digest for release in catalogue.releases}
    for version, digest in seen.releases.items():
        if version in offered and offered[version] != digest:  # guard: version-keeps-its-digest
            raise PeerError(
                f"{catalogue.name} {version} was package {digest[:16]}… and is now {offered[version][:16]}…: a version "
                "never changes. Do not use this registry, and tell the author"
            )
    if catalogue.serial < seen.serial:  # guard: no-rollback
        raise PeerError(
            f"the catalogue of {catalogue.name} here has serial {catalogue.serial}, and this machine has seen "
            f"{seen.serial}: the registry is behind, or hides newer versions. Use another registry"
        )
    if catalogue.serial == seen.serial and opened.digest != seen.digest:  # guard: one-catalogue-for-a-serial
        raise PeerError(
            f"{catalogue.name} has two catalogues with serial {seen.serial}: the author published from two places, or two "
            "registries are told different things. Ask the author to publish again"
        )
    gone = seen.releases.keys() - offered.keys()
    if gone:  # guard: no-version-disappears
        raise PeerError(
            f"{catalogue.name} {min(gone)} is gone from its catalogue: versions may be withdrawn, but never removed. Ask "
            "the author to publish again"
        )
