"""The Merkle root: a definition worked by hand, and what it protects against."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.encoding import merkle_root


def hashed(purpose: str, *parts: bytes) -> bytes:
    """The domain hash, written out once more."""
    data = b"shoal/v1/" + purpose.encode() + b"\0" + b"".join(len(p).to_bytes(8, "big") + p for p in parts)
    return hashlib.sha256(data).digest()


def leaf(data: bytes) -> bytes:
    return hashed("merkle/leaf", data)


def node(left: bytes, right: bytes) -> bytes:
    return hashed("merkle/node", left, right)


def test_small_trees_have_the_shape_of_rfc_6962():
    a, b, c, d, e = (leaf(x) for x in (b"a", b"b", b"c", b"d", b"e"))
    assert merkle_root([]) == hashed("merkle/empty")
    assert merkle_root([b"a"]) == a
    assert merkle_root([b"a", b"b"]) == node(a, b)
    assert merkle_root([b"a", b"b", b"c"]) == node(node(a, b), c)
    assert merkle_root([b"a", b"b", b"c", b"d", b"e"]) == node(node(node(a, b), node(c, d)), e)


@given(st.lists(st.binary(max_size=4), max_size=12), st.lists(st.binary(max_size=4), max_size=12))
def test_different_lists_have_different_roots(left, right):
    assert (merkle_root(left) == merkle_root(right)) == (left == right)
