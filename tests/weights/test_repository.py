"""Attacks of a source on its clients, each refused by its own name; the honest repository is accepted."""

import msgspec
import pytest

from shoal.errors import PeerError
from shoal.protocol import constants, encoding
from shoal.protocol.messages import SignedManifest
from shoal.protocol.signing import Key
from shoal.weights.manifest import ManifestError, content_of, weights_root
from tests.weights.checkpoints import NOW, Chunks
from tests.weights.repository import Repository, signed

OTHER = Key(b"\x02" * 32)
WEEK = float(constants.MANIFEST_LIFETIME_S)
UNKNOWN = {"logged": None, "root": ""}
"""For a client that knows nothing of the log but the version that it asks for."""


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository(tmp_path)


def refused(repository: Repository, version: int, data: bytes, **options: object) -> str:
    """The name under which a client refuses what the relay serves."""
    repository.serve = lambda _: data
    with pytest.raises(ManifestError) as caught:
        repository.open(version, **options)
    assert "\n" not in str(caught.value)
    return caught.value.code


def changed(repository: Repository, of: int, **fields: object) -> bytes:
    """The version's manifest with other fields, signed by the publisher."""
    return signed(msgspec.structs.replace(repository.manifests[of], **fields))


# --- honest ---


@pytest.mark.parametrize("version", range(4))
def test_every_version_of_an_honest_repository_is_loaded(repository, version):
    assert weights_root(repository.load(version)) == repository.roots[version]


def test_a_renewed_manifest_is_accepted_before_and_after_its_first_expires(repository):
    first = repository.open(3)
    repository.now += WEEK / 2
    repository.renew(3)
    assert content_of(repository.open(3)) == content_of(first)
    repository.now += WEEK * 0.75
    assert repository.open(3).issued > first.issued


def test_history_is_readable_after_it_has_expired(repository):
    repository.now += 10 * WEEK
    assert repository.open(1, now=None).version == 1


# --- one manifest that is wrong ---


def resigned(repository: Repository, **fields: object) -> bytes:
    """The signed manifest of version 3 with other fields around the same signature."""
    return encoding.to_json(msgspec.structs.replace(encoding.from_json(repository.stored[3], SignedManifest), **fields))


AHEAD, AGAIN = {"issued": NOW + WEEK, "expires": NOW + 2 * WEEK}, {"issued": NOW - 1, "expires": NOW - 1 + WEEK}


@pytest.mark.parametrize(
    ("code", "version", "data", "options"),
    [
        ("rollback", 3, lambda r: r.stored[2], {}),
        ("rollback", 3, lambda r: r.stored[0], UNKNOWN),
        ("fast-forward", 2, lambda r: r.stored[3], {}),
        ("fast-forward", 3, lambda r: changed(r, 3, version=2**31), UNKNOWN),
        ("fast-forward", 3, lambda r: changed(r, 3, **AHEAD), {}),
        ("expired", 3, lambda r: changed(r, 3, expires=NOW * 10), {}),
        ("mixed", 3, lambda r: changed(r, 3, run="run-2"), {"logged": None}),
        ("mixed", 3, lambda r: changed(r, 3, stream="critic"), {"logged": None}),
        ("signature", 3, lambda r: resigned(r, signature=""), {}),
        ("signature", 3, lambda r: resigned(r, body=encoding.from_json(r.stored[2], SignedManifest).body), {}),
        ("signature", 3, lambda r: r.stored[3] + b" ", {}),
        ("unlogged", 3, lambda r: changed(r, 3, **AGAIN), {}),
    ],
)
def test_a_wrong_manifest_is_refused_by_the_name_of_its_attack(repository, code, version, data, options):
    assert refused(repository, version, data(repository), **options) == code


# --- rollback ---


def test_an_older_renewal_than_one_that_was_seen_is_a_rollback(repository):
    first = repository.stored[3]
    repository.now += WEEK / 2
    repository.renew(3)
    repository.open(3)
    assert refused(repository, 3, first) == "rollback"


def test_an_expired_renewal_still_counts_against_older_ones(repository):
    repository.now += WEEK / 2
    first = repository.stored[3]
    repository.renew(3)
    repository.open(3)
    repository.now += 2 * WEEK
    assert refused(repository, 3, first) == "rollback"


# --- fast-forward ---


def test_a_refused_fast_forward_does_not_block_the_honest_manifest(repository):
    assert refused(repository, 3, changed(repository, 3, issued=NOW + WEEK, expires=NOW + WEEK)) == "fast-forward"
    repository.serve = repository.stored.__getitem__
    assert repository.open(3).version == 3


# --- freeze ---


def test_a_source_that_withholds_the_renewal_is_expired(repository):
    first = repository.stored[3]
    repository.now += WEEK / 2
    repository.renew(3)
    repository.now += WEEK * 0.75
    assert refused(repository, 3, first) == "expired"


# --- mix-and-match ---


def test_another_weights_root_than_the_logs_is_mixed(repository):
    assert refused(repository, 3, signed(repository.made(3, seed=9)), logged=None) == "mixed"


def test_files_of_an_older_version_under_the_root_of_the_newest_make_no_version(repository):
    """The publisher signed it, so only the bytes show it."""
    mixed = msgspec.structs.replace(repository.manifests[3], files=repository.manifests[2].files)
    repository.log(3, signed(mixed))
    assert content_of(mixed) != repository.grant(3)
    with pytest.raises(ValueError, match="the weights root is"):
        repository.load(3)


def test_chunks_of_another_version_are_blamed_on_their_source(repository):
    class Mixing(Chunks):
        def spoil(self, chunk: bytes) -> bytes:
            """Another chunk of the same size; the configuration's is alone of its size, and stays."""
            return next((other for other in self.held.values() if len(other) == len(chunk) and other != chunk), chunk)

    with pytest.raises(PeerError, match="sent wrong bytes"):
        repository.load(3, repository.chunks.other(Mixing, "http://mixing"))


# --- over-length ---


def test_a_chunk_that_never_ends_is_cut_at_its_size(repository):
    class Endless(Chunks):
        async def parts(self, digest, start, size):
            while True:
                yield bytes(size)

    with pytest.raises(PeerError, match="sent more than"):
        repository.load(3, repository.chunks.other(Endless, "http://endless"))


# --- the log ---


def test_a_manifest_that_the_publisher_signed_for_one_client_is_unlogged(repository):
    assert refused(repository, 3, signed(repository.made(3, seed=9)), root="") == "unlogged"
