"""A manifest is taken from the publisher of its version, or from one that the root named later; from no key it replaced."""

import msgspec
import pytest

from shoal.errors import PeerError
from shoal.protocol.encoding import to_json
from shoal.protocol.host_signatures import CLOCKS_S
from shoal.protocol.messages import Publishers, Rotation
from shoal.protocol.signing import Key
from shoal.weights.manifest import ManifestTrust, open_manifest, sign_manifest, signer_of
from tests.weights.checkpoints import KEY, NOW, RUN, Chunks, make_checkpoint, published

NEW = Key(b"\x07" * 32)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """Of version 3."""
    return published(make_checkpoint(tmp_path_factory.mktemp("weights") / "checkpoint"), Chunks())


def replaced(since):
    """The first publisher's key was replaced now. Signatures of rotations are not the manifest's business."""
    return Publishers(KEY.public, (Rotation(RUN, "main", NEW.public, since, 1, int(NOW), ""),))


def opened(manifest, key, publishers, now=NOW, at=NOW):
    data = to_json(sign_manifest(manifest, key, now=at))
    assert signer_of(data) == key.public
    return open_manifest(data, ManifestTrust(RUN, publishers), now=now, version=manifest.version)


def test_versions_from_before_a_rotation_stay_as_signed_and_later_ones_are_the_new_publishers(manifest):
    assert opened(manifest, KEY, replaced(4)).version == 3
    assert opened(manifest, NEW, replaced(3)).version == 3
    assert opened(manifest, NEW, replaced(4)).version == 3, "a later publisher signs an older version again"
    assert opened(manifest, KEY, Publishers(KEY.public)).version == 3


def test_a_replaced_key_signs_no_later_version(manifest):
    for now in (NOW, None):
        with pytest.raises(PeerError, match="published only before version 3"):
            opened(manifest, KEY, replaced(3), now)


def test_a_replaced_key_renews_nothing(manifest):
    later = NOW + CLOCKS_S + 1
    for now in (later, None):
        with pytest.raises(PeerError, match="after rotation 1 had replaced it"):
            opened(manifest, KEY, replaced(4), now, later)


def test_a_key_that_nobody_named_signs_nothing(manifest):
    with pytest.raises(PeerError, match="may not publish"):
        opened(manifest, Key(b"\x09" * 32), replaced(4))


def test_bytes_that_are_no_manifest_have_no_signer(manifest):
    assert signer_of(b"{}") == "" and signer_of(b"\xff" * 10) == ""
    assert msgspec.json.decode(to_json(sign_manifest(manifest, KEY, now=NOW)))["key"] == KEY.public
