"""Sets of integers as bits: the gaps between members, in Golomb-Rice codes (doi:10.1109/TIT.1966.1053907).

The reader takes bytes from strangers: every count is compared with its limit before anything is
allocated, each thing has one encoding only, and anything else raises `BadBits`.

    number     LEB128: 7 bits a byte, lowest first, the high bit set on all bytes but the last
    bits       values of known widths, lowest bits first, filled up with zeros to whole bytes
    sets       of all members of all sets, the gaps between neighbours: first the high parts in unary (as many zeros, then
               a one), filled up with zeros to whole bytes, then the low parts as bits. If a set has more members than not,
               its non-members take their place. The reader knows how many members each set has, and of how many integers

A set of k members drawn at random from n costs about the entropy of that draw, 0 to 4 % above it. Sets are coded together
because numpy has a price for each call.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MOST = 1 << 48
"""Limit of every number, so that sums stay below 2^63."""


class BadBits(ValueError):
    """Bytes that this module does not write."""


class BitReader:
    """A position in some bytes, which only moves forward."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = memoryview(data), 0

    def take(self, size: int) -> memoryview:
        """The next bytes, exactly `size`."""
        if size > len(self._data) - self._at:  # guard: patch-ends-early
            raise BadBits(f"ends {size - len(self._data) + self._at} bytes early")
        self._at += size
        return self._data[self._at - size : self._at]

    def ahead(self, size: int) -> memoryview:
        """The next bytes, at most `size`, without moving."""
        return self._data[self._at : self._at + size]

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self._at

    def finish(self) -> None:
        """Demand that nothing is left."""
        if self._at != len(self._data):  # guard: patch-ends-late
            raise BadBits(f"has {len(self._data) - self._at} bytes too many")


def write_number(value: int) -> bytes:
    """One number from 0 to `MOST`."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def read_number(reader: BitReader, limit: int) -> int:
    """The next number, at most `limit`."""
    value = 0
    for shift in range(0, MOST.bit_length() + 7, 7):
        (byte,) = reader.take(1)
        value |= (byte & 127) << shift
        if byte < 128:
            if value > limit or (byte == 0 and shift):  # guard: patch-number-limit
                raise BadBits(f"gives {value} for a number of at most {limit}")
            return value
    raise BadBits("has a number without an end")


def write_bits(values: NDArray[np.uint64], widths: NDArray[np.uint64]) -> bytes:
    """Each value in so many bits, 0 to 56; it must fit."""
    ends = np.cumsum(widths)
    starts = ends - widths
    num_words = -(-int(ends[-1]) // 64) if len(ends) else 0
    words = np.zeros(num_words + 1, "<u8")
    word, shift = (starts >> np.uint64(6)).astype(np.int64), starts & np.uint64(63)
    firsts = np.flatnonzero(np.diff(word, prepend=-1))
    if len(firsts):
        words[word[firsts]] = np.add.reduceat(values << shift, firsts)
    over = np.flatnonzero(shift + widths > 64)
    words[word[over] + 1] += values[over] >> (np.uint64(64) - shift[over])
    return words.tobytes()[: -(-int(ends[-1]) // 8)] if num_words else b""


def read_bits(reader: BitReader, widths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The next values of these widths, 0 to 56."""
    ends = np.cumsum(widths)
    num_bits = int(ends[-1]) if len(ends) else 0
    data = bytes(reader.take(-(-num_bits // 8)))
    if num_bits % 8 and data[-1] >> num_bits % 8:  # guard: patch-padding
        raise BadBits("fills up a byte with ones")
    word_at_byte = np.ndarray(len(data) + 1, "<u8", data + bytes(8), strides=(1,))
    starts = ends - widths
    words = word_at_byte.take((starts >> np.uint64(3)).astype(np.int64)) >> (starts & np.uint64(7))
    return words & ((np.uint64(1) << widths) - np.uint64(1))


def write_flags(flags: NDArray[np.bool_]) -> bytes:
    """What `write_bits` gives for values of one bit each, faster."""
    return np.packbits(flags, bitorder="little").tobytes()


def read_flags(reader: BitReader, count: int) -> NDArray[np.uint8]:
    """The next values of one bit each: what `read_bits` gives for such widths, faster."""
    flat = np.unpackbits(np.frombuffer(reader.take(-(-count // 8)), np.uint8), bitorder="little")
    if flat[count:].any():  # guard: patch-padding-of-flags
        raise BadBits("fills up a byte with ones")
    return flat[:count]


def write_sets(sets: Sequence[Ints], universes: Sequence[int]) -> bytes:
    """Sets, each of some integers of 0 .. its universe - 1, strictly ascending."""
    pairs = list(zip(sets, universes, strict=True))
    listed = [members if 2 * len(members) <= n else _others(members, n) for members, n in pairs]
    shape = _Shape([len(members) for members in listed], universes)
    flat = np.concatenate(listed) if listed else np.empty(0, np.int64)
    before = np.concatenate([[-1], flat[:-1]])[: len(flat)]
    before[shape.firsts] = -1
    gaps = (flat - before - 1).astype(np.uint64)
    high = gaps >> shape.widths
    ones = np.cumsum(high.astype(np.int64) + 1) - 1
    unary = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, np.uint8)
    unary[ones] = 1
    low = write_bits(gaps - (high << shape.widths), shape.widths)
    return np.packbits(unary, bitorder="little").tobytes() + low


def read_sets(reader: BitReader, counts: Sequence[int], universes: Sequence[int]) -> list[Ints]:
    """The next sets: of each, so many integers of 0 .. its universe - 1, strictly ascending."""
    shape = _Shape([min(count, n - count) for count, n in zip(counts, universes, strict=True)], universes)
    high = _read_unary(reader, shape)
    low = read_bits(reader, shape.widths)
    members = np.cumsum((high << shape.widths | low).astype(np.int64) + 1)  # as if all sets were one
    sets, first, before = [], 0, 0
    for count, universe, end in zip(counts, universes, shape.ends.tolist(), strict=True):
        listed = members[first:end] - (before + 1)
        if end > first:
            before = int(members[end - 1])
            if listed[-1] >= universe:  # guard: patch-member-limit
                raise BadBits(f"names member {listed[-1]} of {universe}")
        sets.append(listed if 2 * count <= universe else _others(listed, universe))
        first = end
    return sets


class _Shape:
    """What follows from the counts of some sets: where the gaps of each begin and end, and the widths of low parts."""

    def __init__(self, num_listed: Sequence[int], universes: Sequence[int]) -> None:
        pairs = list(zip(num_listed, universes, strict=True))
        counts = np.array(num_listed, np.int64)
        self.ends = np.cumsum(counts)
        self.firsts = (self.ends - counts)[counts > 0]
        width_of_set = [_low_bits(count, n) if count else 0 for count, n in pairs]
        self.widths = np.repeat(np.array(width_of_set, np.uint64), counts)
        self.most_bits = sum(
            count + (n - count >> width) for (count, n), width in zip(pairs, width_of_set, strict=True)
        )


def _read_unary(reader: BitReader, shape: _Shape) -> NDArray[np.uint64]:
    """The high parts of all gaps."""
    total = len(shape.widths)
    if total == 0:
        return np.empty(0, np.uint64)
    flat = np.unpackbits(np.frombuffer(reader.ahead(-(-shape.most_bits // 8)), np.uint8), bitorder="little")
    ones = np.flatnonzero(flat.view(bool))  # numpy is several times as fast for bool
    if len(ones) < total:  # guard: patch-set-whole
        raise BadBits(f"ends before the last of {total} gaps")
    num_bytes = int(ones[total - 1]) // 8 + 1
    if len(ones) > total and ones[total] < 8 * num_bytes:  # guard: patch-padding-of-sets
        raise BadBits("fills up a byte with ones")
    reader.take(num_bytes)
    return (np.diff(ones[:total], prepend=-1) - 1).astype(np.uint64)


def _low_bits(count: int, universe: int) -> int:
    """Width of the low parts that makes a set of so many members shortest, if they were drawn at random.

    Such gaps have a geometric distribution of mean mu = (universe - count) / count. The best width is then
    1 + floor(log2(0.481 (mu + 1/2))), and 0 below that (A. Kiely, "Selecting the Golomb Parameter in Rice Coding", JPL
    Progress Report 42-159, for large mu). In integers, so that every machine finds the same.
    """
    return (481 * (2 * universe - count) // (2000 * count)).bit_length()


def _others(members: Ints, universe: int) -> Ints:
    rest = np.ones(universe, bool)
    rest[members] = False
    return np.flatnonzero(rest)
