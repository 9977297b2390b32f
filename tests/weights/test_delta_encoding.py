"""The changes of a piece: exact for all codes, both ways; damaged ones are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.weights.delta import encoding
from shoal.weights.delta.encoding import MOST_GROUPS, apply_changes, write_changes
from shoal.weights.delta.golomb_rice import BadBits, write_number
from shoal.weights.delta.tensor_codes import KINDS, at_places, exponents, places
from tests.weights.versions import as_stored, random_codes

BF16 = KINDS["BF16"]


def goes_both_ways(old, new, kind):
    data = write_changes(old, new, kind)
    codes = old.copy()
    if data:
        apply_changes(codes, data, kind)
    assert np.array_equal(codes, new)
    if data:
        apply_changes(codes, data, kind, back=True)
    assert np.array_equal(codes, old)
    return data


def step(dtype="BF16", size=20_000, lr=1e-6, seed=0):
    """A piece before and after a step."""
    rng = np.random.RandomState(seed)
    values = rng.standard_normal(size) * 0.02
    return as_stored(values, dtype).codes, as_stored(values + lr * rng.standard_normal(size), dtype).codes


@pytest.mark.parametrize("lr", [1e-6, 1e-2])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_step_goes_both_ways_bit_for_bit(dtype, lr):
    goes_both_ways(*step(dtype, lr=lr), KINDS[dtype])


@pytest.mark.parametrize("dtype", sorted(KINDS))
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_any_codes_may_become_any_others(dtype, share):
    rng = np.random.RandomState(len(dtype))
    old, other = random_codes(dtype, 3000, rng), random_codes(dtype, 3000, rng)
    goes_both_ways(old, np.where(rng.random_sample(len(old)) < share, other, old), KINDS[dtype])


CODES = st.sampled_from([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7F7F, 0x7FC1, 0xFFFF, 0x7FFF, 0x3F80, 0x3F7F, 0xBF80])


@given(st.lists(st.tuples(CODES, CODES), min_size=1, max_size=70))
def test_zeros_infinities_and_nans_are_exact(pairs):
    old, new = (np.array(column, "<u2") for column in zip(*pairs, strict=True))
    goes_both_ways(old, new, BF16)


def test_a_step_over_a_power_of_two_goes_both_ways():
    old = np.arange(0x3C00, 0x3D00, dtype="<u2").repeat(30)
    new = old + np.tile(np.array([0, 0, 1, 0, 0xFFFF], "<u2"), len(old) // 5)
    assert (exponents(old, BF16) != exponents(new, BF16)).sum() > 20
    goes_both_ways(old, new, BF16)


@pytest.mark.parametrize("block", [64, 1024])
def test_the_block_is_no_part_of_the_format(monkeypatch, block):
    old, new = step()
    whole = write_changes(old, new, BF16)
    monkeypatch.setattr(encoding, "_BLOCK_VALUES", block)
    assert goes_both_ways(old, new, BF16) == whole


def test_nothing_changes_nothing():
    old, _ = step(size=100)
    assert write_changes(old, old.copy(), BF16) == b""


# --- damaged bytes ---


def refused(codes, data, back=False):
    with pytest.raises(BadBits) as caught:
        apply_changes(codes.copy(), data, BF16, back=back)
    return str(caught.value)


def groups_of(*triples):
    """The beginning of a piece: (lowest, highest, number of values) of each group."""
    return write_number(len(triples)) + b"".join(bytes([a, b]) + write_number(n) for a, b, n in triples)


def test_groups_that_overlap_or_are_in_another_order_are_refused():
    codes = np.full(64, 0x3C00, "<u2")
    for triples in [((5, 9, 3), (9, 9, 3)), ((9, 9, 3), (5, 5, 3)), ((9, 5, 3),)]:
        assert "not in order" in refused(codes, groups_of(*triples) + bytes(9))


def test_more_groups_than_the_limit_are_refused():
    triples = [(e, e, 0) for e in range(MOST_GROUPS + 1)]
    assert "at most 32" in refused(np.full(64, 0x3C00, "<u2"), groups_of(*triples) + bytes(MOST_GROUPS + 2))


def test_groups_with_more_values_than_the_piece_are_refused():
    assert "at most 14" in refused(np.full(64, 0x3C00, "<u2"), groups_of((1, 1, 50), (2, 2, 50)) + bytes(9))


def test_more_changes_than_there_are_bits_are_refused():
    codes = np.full(6400, 0x3C00, "<u2")
    data = groups_of((0, 255, 6400)) + write_number(6400) + b"\x00\x00"
    assert "counts 6400 changes in 0 bytes" in refused(codes, data)


def test_a_jump_wider_than_a_code_is_refused():
    data = groups_of((0x78, 0x78, 64)) + write_number(1) * 17 + bytes(40)
    assert "more than 16 bits" in refused(np.full(64, 0x3C00, "<u2"), data)


def test_changes_for_a_piece_with_other_exponents_are_refused_both_ways():
    old, new = step()
    data = write_changes(old, new, BF16)
    assert "for another version" in refused(np.full(len(old), 0x3C00, "<u2"), data)
    assert "for another version" in refused(old[::-1] ^ np.uint16(0x0200), data)


def test_a_change_that_does_not_stay_in_its_group_is_refused():
    old = np.full(640, 0x3C7F, "<u2")  # one below the next exponent
    down, up = old.copy(), old.copy()
    down[5], up[5] = 0x3C7E, 0x3C80
    within = write_changes(old, down, BF16)
    assert "out of its group" in refused(old, within[:-1] + bytes([within[-1] & 0xFE]))  # up instead of down
    crossing = write_changes(old, up, BF16)
    assert "out of its group" in refused(old, crossing[:-1] + bytes([crossing[-1] | 1]))


# --- Codes of numbers: their order and their exponents ---


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3", "F8_E5M2", "I16", "U8"])
def test_places_and_codes_are_one_to_one(name):
    kind = KINDS[name]
    codes = np.arange(1 << kind.bits).astype(kind.codes)
    assert np.array_equal(at_places(places(codes, kind), kind), codes)
    assert len(np.unique(places(codes, kind))) == len(codes)


def test_places_ascend_by_one_from_value_to_value():
    codes = np.arange(1 << 16).astype("<u2")
    values = codes.view("<f2").astype(np.float64)
    finite = np.isfinite(values)
    order = np.argsort(places(codes[finite], KINDS["F16"]))
    assert np.all(np.diff(values[finite][order]) >= 0)
    assert np.all(np.diff(places(codes[finite], KINDS["F16"])[order]) == 1)
    zeros = np.array([-0.0, 0.0], "<f4").view("<u4")
    assert places(zeros, KINDS["F32"]).tolist() == [0x7FFFFFFF, 0x80000000]


def test_exponents_are_those_of_the_values():
    values = np.array([1.0, -1.5, 0.02, -3e38, 0.0, np.inf, np.nan], "<f4")
    assert exponents(values.view("<u4"), KINDS["F32"]).tolist() == [127, 127, 121, 254, 0, 255, 255]
    assert exponents((values.view("<u4") >> 16).astype("<u2"), KINDS["BF16"]).tolist() == [
        127,
        127,
        121,
        254,
        0,
        255,
        255,
    ]
    assert exponents(np.array([1.0, -2.0, 6e-8], "<f2").view("<u2"), KINDS["F16"]).tolist() == [15, 16, 0]
    assert exponents(np.array([200, 3], "<u2"), KINDS["U16"]).tolist() == [0, 0]
