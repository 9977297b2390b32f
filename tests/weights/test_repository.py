"""Attacks of a source on its clients, each refused by its own name; the honest repository is accepted."""

import msgspec
import pytest

from shoal.errors import PeerError
from shoal.protocol import constants, encoding
from shoal.protocol.messages import FileEntry, SignedManifest
from shoal.protocol.signing import Key
from shoal.weights.manifest import MOST_FILES, ManifestError, content_of, weights_root
from tests.weights.checkpoints import KEY, NOW, Chunks, Lying
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


# --- rollback ---


def test_an_older_version_for_the_newest_is_a_rollback(repository):
    assert refused(repository, 3, repository.stored[2]) == "rollback"


def test_an_older_version_is_a_rollback_also_for_a_client_without_the_log(repository):
    assert refused(repository, 3, repository.stored[0], **UNKNOWN) == "rollback"


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


def test_a_newer_version_than_asked_for_is_a_fast_forward(repository):
    assert refused(repository, 2, repository.stored[3]) == "fast-forward"


def test_a_version_far_ahead_of_the_log_is_a_fast_forward(repository):
    assert refused(repository, 3, changed(repository, 3, version=2**31), **UNKNOWN) == "fast-forward"


def test_a_manifest_that_is_dated_ahead_to_outlive_others_is_a_fast_forward(repository):
    ahead = {"issued": NOW + WEEK, "expires": NOW + 2 * WEEK}
    assert refused(repository, 3, changed(repository, 3, **ahead)) == "fast-forward"


def test_a_refused_fast_forward_does_not_block_the_honest_manifest(repository):
    assert refused(repository, 3, changed(repository, 3, issued=NOW + WEEK, expires=NOW + WEEK)) == "fast-forward"
    repository.serve = repository.stored.__getitem__
    assert repository.open(3).version == 3


# --- freeze ---


def test_a_source_that_stopped_is_expired_after_a_week(repository):
    repository.now += WEEK + 1
    assert refused(repository, 3, repository.stored[3]) == "expired"


def test_a_source_that_withholds_the_renewal_is_expired(repository):
    first = repository.stored[3]
    repository.now += WEEK / 2
    repository.renew(3)
    repository.now += WEEK * 0.75
    assert refused(repository, 3, first) == "expired"


def test_a_manifest_that_never_expires_is_refused_as_expired(repository):
    assert refused(repository, 3, changed(repository, 3, expires=NOW * 10)) == "expired"


# --- mix-and-match ---


def test_another_runs_manifest_is_mixed(repository):
    assert refused(repository, 3, changed(repository, 3, run="run-2"), logged=None) == "mixed"


def test_another_streams_manifest_is_mixed(repository):
    assert refused(repository, 3, changed(repository, 3, stream="critic"), logged=None) == "mixed"


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


# --- keys and signatures ---


def test_a_manifest_by_another_key_is_refused_as_wrong_key(repository):
    assert refused(repository, 3, signed(repository.manifests[3], OTHER)) == "wrong-key"


def test_another_keys_signature_under_the_publishers_name_does_not_verify(repository):
    forged = encoding.from_json(signed(repository.manifests[3], OTHER), SignedManifest)
    data = encoding.to_json(msgspec.structs.replace(forged, key=KEY.public))
    assert refused(repository, 3, data) == "signature"


def test_a_signature_for_another_purpose_does_not_verify(repository):
    assert refused(repository, 3, signed(repository.manifests[3], purpose="receipt")) == "signature"


def test_an_unsigned_manifest_does_not_verify(repository):
    unsigned = msgspec.structs.replace(encoding.from_json(repository.stored[3], SignedManifest), signature="")
    assert refused(repository, 3, encoding.to_json(unsigned)) == "signature"


def test_the_body_of_another_version_under_a_good_signature_does_not_verify(repository):
    good, other = (encoding.from_json(repository.stored[version], SignedManifest) for version in (3, 2))
    swapped = msgspec.structs.replace(good, body=other.body)
    assert refused(repository, 3, encoding.to_json(swapped)) == "signature"


def test_the_same_manifest_in_other_bytes_is_refused(repository):
    assert refused(repository, 3, repository.stored[3] + b" ") == "signature"


# --- over-length ---


def test_more_bytes_than_a_manifest_may_have_are_too_long(repository):
    assert refused(repository, 3, b"{" * (constants.MAX_MANIFEST_BYTES + 1)) == "too-long"


def test_more_files_than_a_version_may_have_are_too_long(repository):
    empty = FileEntry(path="", size=0, digest=encoding.digest(b""), chunks=())
    files = tuple(msgspec.structs.replace(empty, path=f"{i}.json") for i in range(MOST_FILES + 1))
    assert refused(repository, 3, changed(repository, 3, files=files)) == "too-long"


def test_a_version_that_is_larger_than_this_node_takes_is_too_long(repository):
    assert refused(repository, 3, repository.stored[3], max_bytes=1000) == "too-long"


def test_a_plain_file_of_many_gigabytes_is_too_long(repository):
    chunks = ("0" * 64,) * 20
    entry = FileEntry(path="config.json", size=20 * (8 << 20), digest="0" * 64, chunks=chunks)
    assert refused(repository, 3, changed(repository, 3, files=(entry,), chunk_bytes=8 << 20)) == "too-long"


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


def test_the_same_content_with_dates_that_the_log_lacks_is_unlogged(repository):
    again = changed(repository, 3, issued=NOW - 1, expires=NOW - 1 + WEEK)
    assert refused(repository, 3, again) == "unlogged"


# --- what is nobody's attack by name ---


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"[" * 1000, b"\xff" * 100])
def test_garbage_is_malformed(repository, data):
    assert refused(repository, 3, data) == "malformed"


def test_a_client_goes_on_beside_a_lying_source(repository):
    liar = repository.chunks.other(Lying, "http://liar")
    assert weights_root(repository.load(3, liar, repository.chunks)) == repository.roots[3]
