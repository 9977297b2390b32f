"""Attestations: signed statements that `shoal env check` passed on a version of a package.

Signed by anyone, put into a registry by its owner, shown by `shoal env show`. The signature says who says so, and proves
nothing more, because keys are free. One key has one attestation of a version, the latest; a version has at most
MAX_ATTESTATIONS.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.env_packages.package_reference import PackageReference
from shoal.env_packages.publish import read_catalogue
from shoal.env_packages.registry import FolderRegistry, Registry, attestations_path
from shoal.env_packages.signed_catalog import Count, PinnedKeys, Release, SignedBytes, open_signed, sign
from shoal.errors import ConfigError, NothingYet, PeerError
from shoal.protocol.encoding import WireError, from_json, to_json
from shoal.protocol.field_types import Fact, Message
from shoal.protocol.signing import Key
from shoal.run_folder import held

PURPOSE = "hub attestation"
MAX_ATTESTATIONS = 1000
MAX_ATTESTATIONS_BYTES = 4 << 20
MAX_ATTESTATION_BYTES = 4096


class Attestation(Message, frozen=True):
    """What is signed: that all checks passed on these files, where and when."""

    name: str
    version: str
    digest: str
    created: Count
    machine: Fact
    """System, processor and version of Python."""
    num_checks: Count


class SignedAttestation(NamedTuple):
    """An attestation whose signature holds."""

    attestation: Attestation
    signed: SignedBytes


def read_attestations(registry: Registry, name: str, release: Release) -> tuple[SignedAttestation, ...]:
    """The attestations of a version, the latest of each key. Those that are wrong, or of other files, are left out."""
    try:
        data = registry.read(attestations_path(name, release.version), MAX_ATTESTATIONS_BYTES)
        signed = from_json(data, tuple[SignedBytes, ...])
    except NothingYet:
        return ()
    except WireError as error:
        raise PeerError(
            f"the attestations of {name} {release.version} are malformed ({error}): use another registry"
        ) from None
    return tuple(_latest(_sound(signed[:MAX_ATTESTATIONS], name, release)))


def _sound(signed: Sequence[SignedBytes], name: str, release: Release) -> Iterator[SignedAttestation]:
    for one in signed:
        if len(one.body) > MAX_ATTESTATION_BYTES:  # guard: short-attestations
            continue
        try:
            found = open_signed(one, Attestation, PURPOSE, "an attestation")
        except PeerError:
            continue  # one stranger's attestation must not hide the others
        if (found.name, found.version, found.digest) == (
            name,
            release.version,
            release.digest,
        ):  # guard: attestations-of-these-files
            yield SignedAttestation(found, one)


def _latest(found: Iterator[SignedAttestation]) -> Iterator[SignedAttestation]:
    latest: dict[str, SignedAttestation] = {}
    for one in found:
        known = latest.get(one.signed.key)
        if known is None or known.attestation.created < one.attestation.created:  # guard: one-attestation-for-a-key
            latest[one.signed.key] = one
    yield from latest.values()


def make_attestation(name: str, release: Release, machine: str, num_checks: int, key: Key, now: float) -> SignedBytes:
    """A signed attestation. Raises `ConfigError` if it is too long."""
    signed = sign(
        Attestation(name, release.version, release.digest, int(now), machine, num_checks), key, PURPOSE
    )  # fmt: skip
    try:
        open_signed(signed, Attestation, PURPOSE, "the attestation")
    except PeerError as error:
        raise ConfigError(f"{error}: shorten it, in printable characters") from None
    return signed


def open_attestation(data: bytes) -> tuple[SignedBytes, Attestation]:
    """An attestation that somebody sent as a file. Raises `PeerError` if its form or its signature is wrong."""
    try:
        signed = from_json(data[: 4 * MAX_ATTESTATION_BYTES], SignedBytes)
    except WireError as error:
        raise PeerError(f"this is not an attestation ({error}): `shoal env attest --out FILE` writes one") from None
    return signed, open_signed(signed, Attestation, PURPOSE, "the attestation")


def put_attestation(registry: FolderRegistry, name: str, release: Release, signed: SignedBytes) -> None:
    """Put an attestation of a version into a registry. Raises `ConfigError` if it is of other files, or if there are too
    many."""
    if not any(_sound([signed], name, release)):  # guard: attestations-of-this-registry
        raise ConfigError(
            f"the attestation is too long, or of another package than {name} {release.version} in {registry.place}"
        )
    with held(registry.folder / ".lock"):
        kept = [one.signed for one in read_attestations(registry, name, release)]
        kept = [one.signed for one in _latest(_sound([*kept, signed], name, release))]
        if len(kept) > MAX_ATTESTATIONS:
            raise ConfigError(
                f"{name} {release.version} has {MAX_ATTESTATIONS} attestations, the limit: delete some of them from the "
                "registry"
            )
        registry.write(attestations_path(name, release.version), to_json(kept))


def find_release(registry: Registry, reference: PackageReference, home: Path) -> Release:
    """The release of a registry that is attested. Raises `ConfigError` if it has no such version."""
    catalogue = read_catalogue(registry, reference.name, PinnedKeys(home / "authors.json"), pin=False).opened.catalogue
    if not reference.version:
        raise ConfigError(f"say which version: {reference.name}@VERSION, as `shoal env show` lists them")
    release = catalogue.release(reference.version)
    if release is None:
        raise ConfigError(catalogue.lacks(reference.version))
    return release


def num_witnesses(registry: Registry, name: str, release: Release, author: str) -> int:
    """Keys other than the author's that attest that a version passes its check."""
    keys = {one.signed.key for one in read_attestations(registry, name, release)}
    return len(keys - {author})  # guard: author-is-no-witness


def lines_of(attestations: Sequence[SignedAttestation], author: str) -> list[str]:
    """What people read about a version. `author` is the key that signed it: its attestation is marked."""
    return [
        f"passed {one.num_checks} checks on {one.machine}  "
        f"({'the author' if signed.key == author else f'key {signed.key[:16]}…'})"
        for one, signed in attestations
    ]
