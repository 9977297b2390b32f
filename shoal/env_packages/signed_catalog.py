"""Catalogs of an author's packages, signed, and the pinned keys of owners."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from shoal.env_packages.package_reference import is_name, is_owner, is_version, order_of, owner_of
from shoal.errors import PeerError, StateError, cause_of
from shoal.protocol.encoding import WireError, digest, from_json, is_digest, to_json
from shoal.protocol.field_types import Fact, Message
from shoal.protocol.signing import Key, is_public_key, verify_signature
from shoal.run_folder import held, write_atomically

# --- Signed words of an author ---
#
# The catalogue of a package's versions, and changes of the owner's key.
#
# A catalogue lists every version of one package under one signature, with a serial that grows with each change. So a
# machine that has seen a newer list notices if a registry mixes old and new lists, leaves a version out, or brings an old
# list back. This file says whether the words are well formed and signed; whether the key is the right one is for
# `PinnedKeys` to say.


T = TypeVar("T")

CATALOGUE, KEY_CHANGE = "hub catalogue", "hub key change"
"""The purpose strings of their signatures."""

MAX_CATALOGUE_BYTES = 1 << 20
MAX_RELEASES = 1000
"""Versions of a package."""

MAX_CHANGES_BYTES = 1 << 16
MAX_CHANGES = 64
"""Changes of one owner's key."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class SignedBytes(Message, frozen=True):
    """Bytes as they were signed, with the key and signature in hex."""

    body: bytes
    key: str
    signature: str


class Release(Message, frozen=True, omit_defaults=True):
    """One version of a package."""

    version: str
    digest: str
    size_bytes: Count
    """Of its archive."""
    created: Count
    """When the author published it, seconds since the epoch by the author's clock."""
    withdrawn: Fact = ""
    """Why the author advises against it; empty if the author does not."""


class Catalogue(Message, frozen=True):
    """All versions of a package, in order."""

    name: str
    serial: Count
    """Grows by one with each change."""
    created: Count
    releases: tuple[Release, ...]

    def release(self, version: str) -> Release | None:
        """The release of this version; without a version, the newest that is not withdrawn."""
        for release in reversed(self.releases):
            if release.version == version or (not version and not release.withdrawn):
                return release
        return None

    def lacks(self, version: str) -> str:
        """What to say if there is no such release."""
        known = ", ".join(one.version for one in self.releases[-8:])
        if not known:
            return f"{self.name} has no versions: ask its author"
        if version:
            return f"{self.name} has no version {version}: it has {known}"
        return f"its author withdrew all versions of {self.name}: name one of {known} if you want it nevertheless"


class KeyChange(Message, frozen=True):
    """The owner's old key names the new one. All catalogues of the owner are signed with the new key from then on."""

    owner: str
    old: str
    new: str
    created: Count


class VerifiedCatalog(NamedTuple):
    """A catalogue whose signature holds."""

    catalogue: Catalogue
    key: str
    digest: str
    """SHA-256 of the signed bytes: two catalogues with one serial differ in it."""


def sign(statement: Message, key: Key, purpose: str) -> SignedBytes:
    """Sign a statement for one purpose."""
    body = to_json(statement)
    return SignedBytes(body, key.public, key.sign(purpose, body))


def open_signed(signed: SignedBytes, kind: type[T], purpose: str, what: str) -> T:
    """The statement in a signed message. Raises `PeerError` if the signature or the form is wrong; `what` names it."""
    if not verify_signature(signed.key, purpose, signed.body, signed.signature):  # guard: signed-words
        raise PeerError(f"the signature of {what} does not verify: it was changed. Use another registry")
    try:
        return from_json(signed.body, kind)
    except WireError as error:
        raise PeerError(f"{what} is malformed ({error}): its author must publish it again") from None


def open_catalogue(data: bytes, name: str) -> VerifiedCatalog:
    """The catalogue of a package, if it is well formed, signed, and of this package. Raises `PeerError`."""
    what = f"the catalogue of {name}"
    signed = _decoded(data, SignedBytes, MAX_CATALOGUE_BYTES, what)
    catalogue = open_signed(signed, Catalogue, CATALOGUE, what)
    if flaw := _flaw(catalogue, name):  # guard: catalogue-is-checked
        raise PeerError(f"{what} is refused: {flaw}. Use another registry, or tell its author")
    return VerifiedCatalog(catalogue, signed.key, digest(signed.body))


def _flaw(catalogue: Catalogue, name: str) -> str:
    if catalogue.name != name or not is_name(name):
        return f"it is that of {catalogue.name[:80]!r}"
    if len(catalogue.releases) > MAX_RELEASES:
        return f"it has {len(catalogue.releases)} versions, limit {MAX_RELEASES}"
    if not all(is_version(release.version) and is_digest(release.digest) for release in catalogue.releases):
        return "a version or a digest in it is malformed"
    versions = [order_of(release.version) for release in catalogue.releases]
    return "" if versions == sorted(set(versions)) else "its versions are not sorted, or one is listed twice"


def with_release(catalogue: Catalogue | None, name: str, release: Release, now: float) -> Catalogue:
    """The next catalogue, with one more version, or with one that is withdrawn."""
    others = [known for known in (catalogue.releases if catalogue else ()) if known.version != release.version]
    releases = sorted([*others, release], key=lambda one: order_of(one.version))
    return Catalogue(name, catalogue.serial + 1 if catalogue else 1, int(now), tuple(releases))


def open_changes(data: bytes, owner: str) -> tuple[KeyChange, ...]:
    """The changes of an owner's key, each signed by the key before. Raises `PeerError`."""
    what = f"the list of keys of {owner}"
    changes = []
    for signed in _decoded(data, tuple[SignedBytes, ...], MAX_CHANGES_BYTES, what):
        change = open_signed(signed, KeyChange, KEY_CHANGE, what)
        # guard: old-key-names-the-new
        if change.owner != owner or change.old != signed.key or not is_owner(owner) or not is_public_key(change.new):
            raise PeerError(f"{what} is refused: a change in it is not signed by the key that it replaces")
        changes.append(change)
    if len(changes) > MAX_CHANGES:
        raise PeerError(f"{what} has {len(changes)} changes, limit {MAX_CHANGES}")
    return tuple(changes)


def _decoded(data: bytes, kind: type[T], cap: int, what: str) -> T:
    if len(data) > cap:
        raise PeerError(f"{what} has {len(data)} bytes, limit {cap}: use another registry")
    try:
        return from_json(data, kind)
    except WireError as error:
        raise PeerError(f"{what} is malformed ({error}): use another registry") from None


# --- What this machine knows of authors and versions ---
#
# The first key seen of an owner, and all that it has signed since.
#
# The first key of an owner is taken on trust and pinned. From then on another key needs a statement signed by the pinned
# one, a version keeps its digest for ever, and a list that is older than one seen before is refused. It reads no
# registry; callers bring what they read.


class PinnedCatalog(Message, frozen=True):
    """The newest catalogue of a package that this machine has seen."""

    serial: int
    digest: str
    releases: dict[str, str]
    """Digest of each version."""


class Known(Message, frozen=True):
    """The contents of the file."""

    keys: dict[str, str] = {}
    """Pinned key of each owner."""
    packages: dict[str, PinnedCatalog] = {}


class PinnedKeys:
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

    def admit(self, opened: VerifiedCatalog, changes: Sequence[KeyChange], *, pin: bool = True) -> bool:
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
                seen = PinnedCatalog(opened.catalogue.serial, opened.digest, releases)
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


def _demand_newer(seen: PinnedCatalog, opened: VerifiedCatalog) -> None:
    """Compare a catalogue with the newest one that was seen."""
    catalogue = opened.catalogue
    offered = {release.version: release.digest for release in catalogue.releases}
    for version, before in seen.releases.items():
        if version in offered and offered[version] != before:  # guard: version-keeps-its-digest
            raise PeerError(
                f"{catalogue.name} {version} was package {before[:16]}… and is now {offered[version][:16]}…: a version "
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
