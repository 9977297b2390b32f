"""Rank and select agree with counting."""

import numpy as np
import pytest

from shoal.weights.delta.encoding import PositionSet, select


def members_of(mask):
    padded = np.concatenate([mask, np.zeros(-len(mask) % 64, bool)])
    return PositionSet(np.packbits(padded, bitorder="little").view("<u8"))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000])
@pytest.mark.parametrize("share", [0.002, 0.3, 0.98, 1.0])
def test_rank_and_select_are_those_of_the_list_of_members(size, share):
    mask = np.random.RandomState(size).random_sample(size) < share
    members, positions = members_of(mask), np.flatnonzero(mask)
    assert members.count == len(positions)
    assert members.rank(np.arange(size)).tolist() == (np.cumsum(mask) - mask).tolist()
    assert select(*members.locate(np.arange(len(positions)))).tolist() == positions.tolist()


def test_select_takes_what_several_sets_located():
    one, other = members_of(np.arange(200) % 3 == 0), members_of(np.arange(200) % 7 == 6)
    located = zip(one.locate(np.array([0, 5, 66])), other.locate(np.array([1, 27])), strict=True)
    assert select(*(np.concatenate(column) for column in located)).tolist() == [0, 15, 198, 13, 195]
