"""Weights in place: always a version that someone published, or torn."""

import numpy as np
import pytest

from shoal.errors import PeerError, StateError
from shoal.weights.codes import root_of
from shoal.weights.inplace import InPlace
from shoal.weights.patch import make_patch
from tests.weights.versions import copied, equal, framed, sections_of, versions


@pytest.fixture
def run():
    """A version, the next, and the patch between them."""
    old, new = versions()
    return old, new, make_patch(old, new)


def roots(old, new):
    return {"base": root_of(old), "result": root_of(new)}


def test_weights_step_to_the_next_version_and_back(run):
    old, new, made = run
    weights = copied(old)
    held = InPlace(weights, threads=2)
    assert held.root == root_of(old) and not held.torn
    held.step(made, **roots(old, new))
    assert held.root == root_of(new) and equal(weights, new)
    held.step(made, **roots(old, new), back=True)
    assert held.root == root_of(old) and equal(weights, old)


def test_a_patch_from_another_version_changes_nothing(run):
    old, new, made = run
    weights = copied(new)
    held = InPlace(weights)
    with pytest.raises(StateError, match="the patch begins at root"):
        held.step(made, **roots(old, new))
    assert held.root == root_of(new) and equal(weights, new)


def test_a_patch_that_leads_elsewhere_leaves_the_weights_torn_and_a_whole_version_repairs_them(run):
    old, new, made = run
    other, _ = versions(seed=5)
    held = InPlace(copied(old))
    with pytest.raises(PeerError, match="the manifest promises"):
        held.step(made, base=root_of(old), result=root_of(other))
    assert held.torn
    with pytest.raises(StateError, match="torn"):
        _ = held.root
    with pytest.raises(StateError, match="torn"):
        held.step(made, **roots(old, new))
    with pytest.raises(StateError, match="has root"):
        held.rebuild(other, root_of(new))
    assert held.torn
    held.rebuild(new, root_of(new))
    assert held.root == root_of(new)


def test_a_patch_that_fails_halfway_leaves_the_weights_torn(run):
    old, new, made = run
    head, sections = sections_of(made)
    held = InPlace(weights := copied(old))
    with pytest.raises(PeerError, match=r"patch of layers\.0\.up cannot be used: it has 1 bytes too many"):
        held.step(framed(head, [*sections[:-1], sections[-1] + b"\0"]), **roots(old, new))
    assert held.torn and not equal(weights, old)


def test_a_version_with_other_tensors_is_not_loaded(run):
    old, new, _ = run
    held = InPlace(copied(old))
    with pytest.raises(StateError, match="other tensors"):
        held.rebuild({"head": new["head"]}, root_of(new))
    assert held.root == root_of(old) and np.array_equal(old["head"].codes, held._weights["head"].codes)
