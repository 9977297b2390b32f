"""Signed words of an author: the catalogue of a package's versions, and changes of the owner's key.

Made by `publish`, read by everyone. A catalogue lists every version of one package under one signature, with a serial that
grows with each change. So a machine that has seen a newer list notices if a registry mixes old and new lists, leaves a
version out, or brings an old list back. This file says whether the words are well formed and signed; whether the key
is the right one is for `trust` to say.
"""

from typing import Annotated, NamedTuple, TypeVar

import msgspec

from shoal.errors import PeerError
from shoal.hub.names import is_name, is_owner, is_version, order_of
from shoal.protocol.identity import Key, is_public_key, verify_signature
from shoal.protocol.types.message import Fact, Message
from shoal.protocol.wire import WireError, digest, from_json, is_digest, to_json

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


class Signed(Message, frozen=True):
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


class Opened(NamedTuple):
    """A catalogue whose signature holds."""

    catalogue: Catalogue
    key: str
    digest: str
    """SHA-256 of the signed bytes: two catalogues with one serial differ in it."""


def sign(statement: Message, key: Key, purpose: str) -> Signed:
    """Sign a statement for one purpose."""
    body = to_json(statement)
    return Signed(body, key.public, key.sign(purpose, body))


def open_signed(signed: Signed, kind: type[T], purpose: str, what: str) -> T:
    """The statement in a signed message. Raises `PeerError` if the signature or the form is wrong; `what` names it."""
    if not verify_signature(signed.key, purpose, signed.body, signed.signature):  # guard: signed-words
        raise PeerError(f"the signature of {what} does not verify: it was changed. Use another registry")
    try:
        return from_json(signed.body, kind)
    except WireError as error:
        raise PeerError(f"{what} is malformed ({error}): its author must publish it again") from None


def open_catalogue(data: bytes, name: str) -> Opened:
    """The catalogue of a package, if it is well formed, signed, and of this package. Raises `PeerError`."""
    what = f"the catalogue of {name}"
    signed = _decoded(data, Signed, MAX_CATALOGUE_BYTES, what)
    catalogue = open_signed(signed, Catalogue, CATALOGUE, what)
    if flaw := _flaw(catalogue, name):  # guard: catalogue-is-checked
        raise PeerError(f"{what} is refused: {flaw}. Use another registry, or tell its author")
    return Opened(catalogue, signed.key, digest(signed.body))


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
    for signed in _decoded(data, tuple[Signed, ...], MAX_CHANGES_BYTES, what):
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
