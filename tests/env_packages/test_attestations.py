"""Attestations of versions: signed, one for a key, of these very files, bounded, and safe to print."""

from pathlib import Path

import pytest

from shoal.env_packages import attestations
from shoal.env_packages.attestations import Attestation, lines_of, make_attestation, num_witnesses, read_attestations
from shoal.env_packages.registry import FolderRegistry, attestations_path
from shoal.env_packages.signed_catalog import Release, SignedBytes, sign
from shoal.errors import ConfigError, PeerError
from shoal.protocol.encoding import to_json
from shoal.protocol.signing import Key
from tests.env_packages.author import attest

NAME, RELEASE = "ann/parrot", Release("0.1.0", "a" * 64, 100, 1)
PATH = attestations_path(NAME, "0.1.0")


@pytest.fixture
def registry(tmp_path: Path) -> FolderRegistry:
    return FolderRegistry(tmp_path)


def machines(registry: FolderRegistry) -> list[str]:
    return [one.attestation.machine for one in read_attestations(registry, NAME, RELEASE)]


def test_attestations_are_shown_with_who_says_so(registry: FolderRegistry) -> None:
    ann, bob = Key.generate(), Key.generate()
    attest(registry, NAME, RELEASE, ann, machine="Linux x86_64 Python 3.11")
    attest(registry, NAME, RELEASE, bob)
    assert lines_of(read_attestations(registry, NAME, RELEASE), ann.public) == [
        "passed 9 checks on Linux x86_64 Python 3.11  (the author)",
        f"passed 9 checks on Linux  (key {bob.public[:16]}…)",
    ]


def test_the_latest_attestation_of_a_key_replaces_the_earlier(registry: FolderRegistry) -> None:
    key = Key.generate()
    for created, machine in ((1.0, "first"), (3.0, "third"), (2.0, "second")):
        attest(registry, NAME, RELEASE, key, machine, created)
    assert machines(registry) == ["third"]


def test_forged_attestations_and_those_of_other_files_are_left_out(registry: FolderRegistry) -> None:
    attest(registry, NAME, RELEASE, Key.generate(), "kept")
    [kept] = [one.signed for one in read_attestations(registry, NAME, RELEASE)]
    other = sign(Attestation(NAME, "0.1.0", "b" * 64, 9, "other", 9), Key.generate(), attestations.PURPOSE)
    elsewhere = sign(Attestation("ann/other", "0.1.0", "a" * 64, 9, "other", 9), Key.generate(), attestations.PURPOSE)
    forged = sign(Attestation(NAME, "0.1.0", "a" * 64, 9, "other", 9), Key.generate(), "another purpose")
    registry.write(PATH, to_json([other, forged, elsewhere, kept]))
    assert machines(registry) == ["kept"]


def test_an_authors_own_attestation_does_not_count(registry: FolderRegistry) -> None:
    ann, bob, carl = (Key.generate() for _ in range(3))
    for key in (ann, bob, carl, carl):
        attest(registry, NAME, RELEASE, key)
    assert num_witnesses(registry, NAME, RELEASE, ann.public) == 2


@pytest.mark.parametrize("machine", ["a\x1b[2Jb", "x" * 65])
def test_an_attestation_that_nobody_would_read_is_not_written(machine: str) -> None:
    with pytest.raises(ConfigError):
        make_attestation(NAME, RELEASE, machine, 9, Key.generate(), 1.0)


def test_a_long_attestation_that_somebody_else_wrote_is_left_out(registry: FolderRegistry) -> None:
    key, body = Key.generate(), to_json(Attestation(NAME, "0.1.0", "a" * 64, 9, "Linux", 9))
    for padding, heard in ((b"", ["Linux"]), (b" " * attestations.MAX_ATTESTATION_BYTES, [])):
        signed = SignedBytes(body + padding, key.public, key.sign(attestations.PURPOSE, body + padding))
        registry.write(PATH, to_json([signed]))
        assert machines(registry) == heard


def test_the_number_of_attestations_is_limited(registry: FolderRegistry, monkeypatch) -> None:
    monkeypatch.setattr(attestations, "MAX_ATTESTATIONS", 3)
    for _ in range(3):
        attest(registry, NAME, RELEASE, Key.generate())
    with pytest.raises(ConfigError, match="has 3 attestations, the limit"):
        attest(registry, NAME, RELEASE, Key.generate())


def test_malformed_and_huge_attestations_are_refused(registry: FolderRegistry) -> None:
    registry.write(PATH, b"[" * 100)
    with pytest.raises(PeerError, match="malformed"):
        machines(registry)
    registry.write(PATH, b" " * (attestations.MAX_ATTESTATIONS_BYTES + 1))
    with pytest.raises(PeerError, match="more than"):
        machines(registry)
