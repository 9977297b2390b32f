"""The changed values of a piece of a tensor, as few bytes: what a patch consists of.

An optimiser's step is about as large for every weight, so a weight that is
twice as large changes half as often once it is rounded: how likely a change is depends on the exponent and on little else.
Most changes move a value to its neighbour. Thus

    piece       number of groups; of each, the lowest and the highest exponent (a byte each) and the number of values in
                it; counts of each group and of the crossings; places and sizes as sets; directions and remainders as
                bits
    crossings   the values whose change leaves their group
    counts      how many values change; how many of these by 2 units or more, by 4 or more, and so on, to 0
    places      which values change, numbered within the group, or within the piece if they are crossings
    sizes       which changes are by 2 units or more, of all; which by 4 or more, of these; and so on
    directions  a bit for each change, 1 if it is down
    remainders  of each change by 2 units or more, the bits of its size below the highest

with numbers, sets and bits as in `weights/delta/golomb_rice`. Exponents are the base's. A jump is a difference of places in
the order of `weights/delta/tensor_codes`. The encoder chooses the groups, which are in order and do not overlap.

A piece can be stepped back: a change within a group leaves every value in its group, so the groups are the same in both
versions once the crossings are undone. Forward, crossings come last; back, they come first.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.weights.delta.golomb_rice import (
    BadBits,
    BitReader,
    Ints,
    read_bits,
    read_flags,
    read_number,
    read_sets,
    write_bits,
    write_flags,
    write_number,
    write_sets,
)
from shoal.weights.delta.tensor_codes import Codes, Kind, at_places, exponents, places, signs

Words = NDArray[np.uint64]

PIECE_VALUES = 1 << 21
"""Most values in a piece. It limits the memory that a stranger's bytes can make us use: 0.7 GB if all values are float32
and change by much; a usual step takes 15 MB."""

MOST_GROUPS = 32
"""Most groups in a piece: each costs a pass over the piece."""

_BLOCK_VALUES = 1 << 18
"""Values handled at a time: as many as fit a CPU's cache. A multiple of 64, and no part of the format."""

_FEWEST_CHANGES, _USUAL_GROUPS = 200, 8
"""A group has at least this many changes and this part of them all: fewer are not worth its bytes and its pass."""


class ExponentGroup(NamedTuple):
    """The values of a piece whose exponents are in a range, both ends included."""

    low: int
    high: int


def write_changes(old: Codes, new: Codes, kind: Kind) -> bytes:
    """What changes from one version of a piece to another; nothing if nothing does. At most `PIECE_VALUES` values."""
    changed = np.flatnonzero(old != new)
    if len(changed) == 0:
        return b""
    was, now = old[changed], new[changed]
    jumps = places(now, kind) - places(was, kind)
    before = exponents(was, kind)
    groups = _choose_groups(before)
    group_of = _group_of(groups)
    group = group_of[before]
    group[_leaves(was, now, kind, group_of)] = len(groups)  # crossings come last
    order = np.argsort(group, kind="stable")
    changed, jumps = changed[order], jumps[order]
    found = np.split(changed, np.searchsorted(group[order], np.arange(1, len(groups) + 1)))
    within = _members(old, kind, groups)
    values = [members.count for members in within]
    header = [bytes(one) + write_number(count) for one, count in zip(groups, values, strict=True)]
    *inside, crossing = found
    ranks = [members.rank(at) for members, at in zip(within, inside, strict=True)]
    rest = _write_places_and_jumps([*ranks, crossing], [*values, len(old)], jumps)
    return write_number(len(groups)) + b"".join(header) + rest


def apply_changes(codes: Codes, data: bytes | memoryview, kind: Kind, *, back: bool = False) -> None:
    """Turn the old version of a piece into the new one, in place; with `back`, the new into the old.

    Raises `BadBits` for anything that `write_changes` does not write for a piece of this size, and for most pieces that the
    changes are not meant for. The piece may then be changed in part. Without an error it may still be wrong: compare its
    hash.
    """
    reader = BitReader(data)
    groups: list[ExponentGroup] = []
    values: list[int] = []
    for _ in range(read_number(reader, MOST_GROUPS)):
        group = ExponentGroup(*reader.take(2))
        if not (groups[-1].high if groups else -1) < group.low <= group.high:  # guard: patch-groups-in-order
            raise BadBits("has groups that overlap or are not in order")
        groups.append(group)
        values.append(read_number(reader, len(codes) - sum(values)))
    (*ranks, crossing), jumps = _read_places_and_jumps(reader, [*values, len(codes)], kind)
    reader.finish()
    group_of = _group_of(groups)
    split = len(jumps) - len(crossing)
    if back:
        _jump(codes, crossing, jumps[split:], kind, group_of, back=True, crosses=True)
    within = _members(codes, kind, groups)
    if [members.count for members in within] != values:  # guard: patch-fits-base
        raise BadBits("counts other exponents than these weights have: it is for another version")
    found = [members.locate(rank) for members, rank in zip(within, ranks, strict=True)]
    if found:
        at = select(*(np.concatenate(column) for column in zip(*found, strict=True)))
        _jump(codes, at, jumps[:split], kind, group_of, back=back, crosses=False)
    if not back:
        _jump(codes, crossing, jumps[split:], kind, group_of, back=False, crosses=True)


def _jump(
    codes: Codes, at: Ints, jumps: Codes, kind: Kind, group_of: NDArray[np.uint8], *, back: bool, crosses: bool
) -> None:
    """Move some values by their jumps, and demand that they leave their groups or stay, as the format says."""
    old = codes[at]
    moved = places(old, kind)
    moved = moved - jumps if back else moved + jumps
    new = at_places(moved, kind)
    if (_leaves(old, new, kind, group_of) != crosses).any():  # guard: patch-stays-in-group
        raise BadBits("moves a value out of its group, or keeps one in it that should leave")
    codes[at] = new


# --- rank and select ---


class PositionSet:
    """Some of the positions 0 .. N - 1, with rank and select.

    One bit for each position, with the number of members up to each word of 64 bits (G. Jacobson,
    doi:10.1109/SFCS.1989.63533). Building that costs less than 0.1 ns a position, so it is made whenever it is needed.

    Axes: W words, P requested positions or ranks.
    """

    def __init__(self, word_W: Words) -> None:
        """The bits, lowest first; those after the last position are zeros."""
        self._word_W = word_W
        self._upto_W = np.cumsum(np.bitwise_count(word_W), dtype=np.int64)
        """Members in each word and those before it."""
        self.count = int(self._upto_W[-1])

    def rank(self, position_P: Ints) -> Ints:
        """How many members come before each position."""
        word_P = position_P >> 6
        here_P = self._word_W[word_P]
        before_P = here_P & ((np.uint64(1) << (position_P & 63).astype(np.uint64)) - np.uint64(1))
        return self._upto_W[word_P] - np.bitwise_count(here_P) + np.bitwise_count(before_P)

    def locate(self, rank_P: Ints) -> tuple[Ints, Words, Ints]:
        """For each rank, 0 .. `count` - 1: the number of its word, the word, and the rank within the word.

        `select` then finds the positions. It takes what several sets located at once, because it is made of many short
        steps.
        """
        word_P = np.searchsorted(self._upto_W, rank_P, side="right")
        here_P = self._word_W[word_P]
        return word_P, here_P, rank_P - self._upto_W[word_P] + np.bitwise_count(here_P)


def select(word_P: Ints, here_P: Words, rank_P: Ints) -> Ints:
    """The positions of what `locate` found: each word is halved six times."""
    position_P, rest_P, left_P = word_P << 6, here_P, rank_P.astype(np.uint8)
    for width in (32, 16, 8, 4, 2, 1):
        low_P = np.bitwise_count(rest_P & np.uint64((1 << width) - 1))
        high_P = left_P >= low_P
        left_P = left_P - low_P * high_P
        step_P = high_P * np.uint8(width)
        rest_P = rest_P >> step_P
        position_P += step_P
    return position_P


# --- groups ---


def _leaves(old: Codes, new: Codes, kind: Kind, group_of: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which of some values are in another group than before."""
    leaves = exponents(old ^ new, kind) != 0
    moved = np.flatnonzero(leaves)  # few, and many of these stay within a wide group
    leaves[moved] = group_of[exponents(old[moved], kind)] != group_of[exponents(new[moved], kind)]
    return leaves


def _members(codes: Codes, kind: Kind, groups: list[ExponentGroup]) -> list[PositionSet]:
    """Which values of a piece are in each group."""
    packed = np.zeros((len(groups), -(-len(codes) // 64) * 8), np.uint8)
    mask, above = np.empty(_BLOCK_VALUES, bool), np.empty(_BLOCK_VALUES, np.uint8)
    for start in range(0, len(codes), _BLOCK_VALUES):
        block = exponents(codes[start : start + _BLOCK_VALUES], kind)
        mask, above = mask[: len(block)], above[: len(block)]
        for row, (low, high) in zip(packed, groups, strict=True):
            if low == high:
                np.equal(block, low, out=mask)
            else:
                np.less_equal(np.subtract(block, np.uint8(low), out=above), np.uint8(high - low), out=mask)
            bits = np.packbits(mask, bitorder="little")
            row[start // 8 : start // 8 + len(bits)] = bits
    return [PositionSet(row.view("<u8")) for row in packed]


def _group_of(groups: list[ExponentGroup]) -> NDArray[np.uint8]:
    """The number of the group of each exponent, 255 for none."""
    numbers = np.full(256, 255, np.uint8)
    for number, (low, high) in enumerate(groups):
        numbers[low : high + 1] = number
    return numbers


def _choose_groups(before: NDArray[np.uint8]) -> list[ExponentGroup]:
    """Neighbouring exponents in one group, until it has its share of the changes."""
    changed_E = np.bincount(before, minlength=256)
    fewest = max(_FEWEST_CHANGES, len(before) // _USUAL_GROUPS)
    groups: list[ExponentGroup] = []
    low, changed = -1, 0
    for exponent in np.flatnonzero(changed_E).tolist():
        low, changed = low if changed else exponent, changed + int(changed_E[exponent])
        if changed >= fewest:
            groups.append(ExponentGroup(low, exponent))
            changed = 0
    if changed:  # too few for a group of their own
        low = groups.pop().low if groups else low
        groups.append(ExponentGroup(low, exponent))
    return groups


# --- places and jumps, as sets and bits ---


def _write_places_and_jumps(found: list[Ints], universes: list[int], jumps: Codes) -> bytes:
    """Everything after the groups. `jumps` has those of all places, in their order."""
    down = signs(jumps)
    sizes = (jumps ^ down) - down
    counts, sets, sets_of = b"", list(found), list(universes)
    for rest in np.split(sizes, np.cumsum([len(one) for one in found])[:-1]):
        counts += write_number(len(rest))
        while len(rest):
            rest = rest >> rest.dtype.type(1)
            above = np.flatnonzero(rest > 0)
            counts += write_number(len(above))
            sets.append(above)
            sets_of.append(len(rest))
            rest = rest[above]
    large = sizes[sizes > 1].astype(np.uint64)
    widths = (np.frexp(large.astype(np.float64))[1] - 1).astype(np.uint64)
    directions = write_flags(down.astype(bool))
    return counts + write_sets(sets, sets_of) + directions + write_bits(large - (np.uint64(1) << widths), widths)


def _read_places_and_jumps(reader: BitReader, universes: list[int], kind: Kind) -> tuple[list[Ints], Codes]:
    """The places, and the jumps of all of them."""
    counts = [_read_counts(reader, universe, kind) for universe in universes]
    total = sum(chain[0] for chain in counts)
    if total > 8 * reader.left:  # guard: patch-memory
        raise BadBits(f"counts {total} changes in {reader.left} bytes")
    sets = read_sets(
        reader,
        [*(chain[0] for chain in counts), *(count for chain in counts for count in chain[1:])],
        [*universes, *(count for chain in counts for count in chain[:-1])],
    )
    widths, first, above = np.zeros(total, np.uint64), 0, iter(sets[len(counts) :])
    for chain in counts:
        rest = None
        for _ in chain[1:]:
            rest = next(above) + first if rest is None else rest[next(above)]
            widths[rest] += np.uint64(1)
        first += chain[0]
    down = -read_flags(reader, total).astype(kind.codes)
    large = np.flatnonzero(widths > 0)
    sizes = np.ones(total, kind.codes)
    sizes[large] = np.uint64(1) << widths[large] | read_bits(reader, widths[large])
    return sets[: len(counts)], (sizes ^ down) - down


def _read_counts(reader: BitReader, universe: int, kind: Kind) -> list[int]:
    """How many values change; how many of these by 2 units or more, by 4 or more, and so on. The last is 0."""
    chain = [read_number(reader, universe)]
    while chain[-1]:
        if len(chain) > kind.bits:  # guard: patch-jump-limit
            raise BadBits(f"has a jump of more than {kind.bits} bits")
        chain.append(read_number(reader, chain[-1]))
    return chain
