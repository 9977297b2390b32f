"""Sets as bits: what is written is read again, costs about its entropy, and nothing else is accepted."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.weights.delta.golomb_rice import (
    MOST,
    BadBits,
    BitReader,
    read_bits,
    read_flags,
    read_number,
    read_sets,
    write_bits,
    write_flags,
    write_number,
    write_sets,
)


def words(values):
    return np.array(values, np.uint64)


def members(values):
    return np.array(sorted(values), np.int64)


def read_all(data, sets, universes):
    reader = BitReader(data)
    found = read_sets(reader, [len(one) for one in sets], universes)
    reader.finish()
    return found


# --- what is written is read ---


@given(st.integers(0, MOST))
def test_a_number_is_read_as_it_was_written(value):
    reader = BitReader(write_number(value))
    assert read_number(reader, MOST) == value
    reader.finish()


@given(st.lists(st.tuples(st.integers(0, 56), st.integers(0, 2**56 - 1)), max_size=80))
def test_bits_are_read_as_they_were_written(pairs):
    widths = words([width for width, _ in pairs])
    values = words([value % (1 << width) for width, value in pairs])
    data = write_bits(values, widths)
    assert len(data) == -(-sum(width for width, _ in pairs) // 8)
    reader = BitReader(data)
    assert read_bits(reader, widths).tolist() == values.tolist()
    reader.finish()


SETS = st.integers(0, 60).flatmap(lambda n: st.tuples(st.sets(st.integers(0, max(n - 1, 0)), max_size=n), st.just(n)))


@given(st.lists(SETS, max_size=6))
def test_sets_are_read_as_they_were_written(pairs):
    sets, universes = [members(one) for one, n in pairs], [n for _, n in pairs]
    found = read_all(write_sets(sets, universes), sets, universes)
    assert [one.tolist() for one in found] == [one.tolist() for one in sets]


def test_the_bytes_of_a_set_are_those_of_the_format():
    # 3 of 40: mean gap 37/3, so 3 low bits. Gaps 1, 8, 20 = 0|1, 1|0, 2|4: unary 1, 01, 001 and low parts 1, 0, 4.
    assert write_sets([members([1, 10, 31])], [40]) == bytes([0b00100101, 0b00000001, 0b00000001])


@pytest.mark.parametrize("share", [0.0003, 0.003, 0.012, 0.1, 0.3, 0.5, 0.8, 0.99])
def test_a_random_set_costs_at_most_4_percent_more_than_its_entropy(share):
    n = 1 << 20
    drawn = np.flatnonzero(np.random.RandomState(0).random_sample(n) < share)
    p = len(drawn) / n
    entropy_bits = -n * (p * math.log2(p) + (1 - p) * math.log2(1 - p))
    assert entropy_bits < 8 * len(write_sets([drawn], [n])) < 1.04 * entropy_bits + 16


# --- strangers' bytes ---


def refused(read, *parts):
    with pytest.raises(BadBits) as caught:
        read(*parts)
    return str(caught.value)


def test_bytes_that_end_early_or_late_are_refused():
    assert "3 bytes early" in refused(BitReader(b"12").take, 5)
    reader = BitReader(b"12")
    reader.take(1)
    assert "1 bytes too many" in refused(reader.finish)


def test_a_number_has_a_limit_an_end_and_one_spelling():
    assert refused(read_number, BitReader(write_number(41)), 40) == "gives 41 for a number of at most 40"
    assert "at most" in refused(read_number, BitReader(b"\x85\x00"), 40)
    assert "without an end" in refused(read_number, BitReader(b"\xff" * 20), MOST)
    assert "early" in refused(read_number, BitReader(b"\x80"), 40)


def test_bits_are_filled_up_with_zeros_only():
    assert read_bits(BitReader(b"\x1f"), words([5])).tolist() == [31]
    assert "with ones" in refused(read_bits, BitReader(b"\x3f"), words([5]))


def test_flags_are_bits_of_width_1():
    flags = np.array([True, False, False, True, True])
    assert write_flags(flags) == write_bits(words(flags), words([1] * 5)) == b"\x19"
    assert read_flags(BitReader(b"\x19"), 5).tolist() == flags.tolist()
    assert "with ones" in refused(read_flags, BitReader(b"\x39"), 5)


def test_a_set_is_filled_up_with_zeros_only():
    good = write_sets([members([1, 10, 31])], [40])
    assert "with ones" in refused(read_sets, BitReader(bytes([good[0] | 128, *good[1:]])), [3], [40])


def test_a_set_with_fewer_gaps_than_members_is_refused():
    assert "before the last of 3 gaps" in refused(read_sets, BitReader(b"\x05\x00\x00"), [3], [40])


def test_a_member_beyond_its_universe_is_refused():
    data = write_sets([members([1, 10, 31])], [40])
    assert refused(read_sets, BitReader(data), [3], [31]) == "names member 31 of 31"
