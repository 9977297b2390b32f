"""A rotation is the root's word and goes on from the last one. Each attack has its own name."""

import re

import msgspec
import pytest

from shoal.protocol.host_signatures import CLOCKS_S, chain_flaw, flaw_of_next, flaw_of_signer, sign_rotation
from shoal.protocol.messages import Publishers, Rotation
from shoal.protocol.signing import Key

ROOT, FIRST, SECOND, THIRD, STRANGER = (Key(bytes([n]) * 32) for n in range(1, 6))
RUN, STREAM = "ab" * 16, "main"


def rotation(key=SECOND, since=4, serial=1, created=1000, run=RUN, stream=STREAM, root=ROOT):
    return sign_rotation(Rotation(run, stream, key.public, since, serial, created, ""), root)


def flaw(made, *known):
    return flaw_of_next(made, Publishers(FIRST.public, known), ROOT.public, RUN, STREAM)


ONE = rotation()
TWO = rotation(THIRD, since=6, serial=2, created=2000)
NAMED = Publishers(FIRST.public, (ONE, TWO))


def test_rotations_that_the_root_signed_in_order_are_taken():
    assert flaw(ONE) == "" and flaw(TWO, ONE) == "" and chain_flaw(NAMED, ROOT.public, RUN, STREAM) == ""


@pytest.mark.parametrize(
    ("made", "known", "named"),
    [
        (rotation(root=STRANGER), (), "the root key .* did not sign"),
        (rotation(root=FIRST), (), "the root key .* did not sign"),
        (msgspec.structs.replace(ONE, since=3), (), "did not sign"),
        (msgspec.structs.replace(ONE, key=STRANGER.public), (), "did not sign"),
        (msgspec.structs.replace(ONE, signature=""), (), "did not sign"),
        (rotation(run="cd" * 16), (), "is of run cdcdcdcdcdcd"),
        (rotation(stream="other"), (), "stream 'other'"),
        (ONE, (ONE,), "rollback: rotation 1 is in the log"),
        (ONE, (ONE, TWO), "rollback: rotation 1 is in the log"),
        (TWO, (), "one is missing"),
        (rotation(THIRD, since=3, serial=2, created=2000), (ONE,), "back in time"),
        (rotation(THIRD, since=6, serial=2, created=999), (ONE,), "back in time"),
        (rotation(FIRST), (), "is no new key"),
        (sign_rotation(Rotation(RUN, STREAM, "x" * 64, 4, 1, 1000, ""), ROOT), (), "is no new key"),
        (rotation(FIRST, since=6, serial=2, created=2000), (ONE,), "is no new key"),
    ],
)
def test_each_wrong_rotation_is_refused_by_its_name(made, known, named):
    assert re.search(named, flaw(made, *known))


def test_a_chain_with_a_rotation_left_out_or_swapped_is_refused():
    assert "one is missing" in chain_flaw(Publishers(FIRST.public, (TWO,)), ROOT.public, RUN, STREAM)
    assert chain_flaw(Publishers(FIRST.public, (TWO, ONE)), ROOT.public, RUN, STREAM)
    assert "did not sign" in chain_flaw(NAMED, STRANGER.public, RUN, STREAM)


@pytest.mark.parametrize(
    ("key", "version", "issued", "said"),
    [
        (FIRST, 3, 500.0, ""),
        (FIRST, 3, 1000.0 + CLOCKS_S, ""),
        (SECOND, 4, 1500.0, ""),
        (SECOND, 5, 1500.0, ""),
        (SECOND, 3, 1500.0, ""),  # signed again by a later publisher
        (THIRD, 0, 9e9, ""),
        (THIRD, 6, 9e9, ""),
        (STRANGER, 3, 500.0, "is not a publisher"),
        (ROOT, 3, 500.0, "is not a publisher"),
        (FIRST, 4, 500.0, "only before version 4"),
        (SECOND, 6, 1500.0, "only before version 6"),
        (FIRST, 3, 1001.0 + CLOCKS_S, "had replaced it"),
        (SECOND, 5, 2001.0 + CLOCKS_S, "had replaced it"),
    ],
)
def test_each_publisher_signs_its_versions_and_none_after_it_was_replaced(key, version, issued, said):
    found = flaw_of_signer(NAMED, key.public, version, issued)
    assert (said in found) if said else found == ""


def test_without_rotations_only_the_first_publisher_signs():
    named = Publishers(FIRST.public)
    assert flaw_of_signer(named, FIRST.public, 100, 9e9) == "" and named.newest == FIRST.public
    assert flaw_of_signer(named, SECOND.public, 100, 9e9)
