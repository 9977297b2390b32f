"""NF4 against the quantiles that it is made of, and against values worked by hand."""

import math
from statistics import NormalDist

import pytest
import torch

from shoal.models.nf4 import BLOCK, GROUP, NUMBERS, Nf4, coded, constants_coded, constants_decoded, decoded


def test_the_16_numbers_are_quantiles_of_a_normal_distribution():
    last, normal = 1 - (1 / 32 + 1 / 30) / 2, NormalDist()

    def quantiles(count: int) -> list[float]:
        return [normal.inv_cdf(last + (0.5 - last) * i / count) / normal.inv_cdf(last) for i in range(count)]

    assert sorted([*(-q for q in quantiles(7)), 0.0, *quantiles(8)]) == pytest.approx(NUMBERS, abs=1e-6)


def test_a_block_worked_by_hand():
    # The largest is 2, so the shares are 1, -0.5, 0.1, 0 and -1. Nearest are 1.0 (code 15), -0.52507 (2),
    # 0.07958 (8; the middle to 0.16093 is 0.12), 0.0 (7) and -1.0 (0). Pairs: 15 + 16 * 2, 8 + 16 * 7, 0.
    found = coded(torch.tensor([2.0, -1.0, 0.2, 0.0, -2.0]))
    assert found.pairs.tolist() == [47, 120, 0] and found.c_b.tolist() == [2.0] and found.n == 5
    expected = [2.0, 2 * NUMBERS[2], 2 * NUMBERS[8], 0.0, -2.0]
    assert decoded(found).tolist() == pytest.approx(expected, rel=1e-6)


def test_each_weight_becomes_the_nearest_number_times_the_largest_of_its_block():
    w_n = torch.randn(3 * BLOCK + 7, generator=torch.Generator().manual_seed(0)) * 0.02
    found, table = coded(w_n), torch.tensor(NUMBERS)
    assert found.pairs.dtype == torch.uint8 and len(found.pairs) == math.ceil(len(w_n) / 2) and len(found.c_b) == 4
    for b, (block, got) in enumerate(zip(w_n.split(BLOCK), decoded(found).split(BLOCK), strict=True)):
        assert found.c_b[b] == block.abs().max()
        nearest = table[(block[:, None] / found.c_b[b] - table).abs().argmin(1)] * found.c_b[b]
        torch.testing.assert_close(got, nearest, rtol=0, atol=0)


def test_of_two_numbers_as_near_the_lower_is_taken():
    table = torch.tensor(NUMBERS, dtype=torch.float64)
    middle_n = ((table[:-1] + table[1:]) / 2).float()
    for i, middle in enumerate(middle_n):
        assert int(coded(torch.stack([middle, torch.tensor(1.0)])).pairs[0] & 15) == i


def test_coding_what_was_decoded_changes_nothing():
    found = coded(torch.randn(1000, generator=torch.Generator().manual_seed(1)))
    again = coded(decoded(found))
    assert again.pairs.equal(found.pairs) and again.c_b.equal(found.c_b)


def test_a_block_of_zeros_stays_zero():
    assert decoded(coded(torch.zeros(100))).tolist() == [0.0] * 100


def test_normal_weights_use_all_codes_about_alike_and_err_by_a_tenth():
    w_n = torch.randn(64 * 4096, generator=torch.Generator().manual_seed(2))
    found = coded(w_n)
    code_n = torch.stack([found.pairs & 15, found.pairs >> 4], 1).view(-1)
    share_16 = torch.bincount(code_n.int(), minlength=16) / len(w_n)
    assert share_16.min() > 0.01 and share_16.max() < 0.12
    assert ((decoded(found) - w_n).norm() / w_n.norm()).item() == pytest.approx(0.09, abs=0.02)


def test_constants_in_8_bits_worked_by_hand():
    # Mean 3, so the rest is -2, 0 and 2; the scale is 2 / 127, and the codes are -127, 0 and 127.
    found = constants_coded(torch.tensor([1.0, 3.0, 5.0]))
    assert found.code_b.tolist() == [-127, 0, 127] and found.mean.tolist() == [3.0]
    assert found.c2_g.tolist() == pytest.approx([2 / 127])
    assert constants_decoded(found).tolist() == pytest.approx([1.0, 3.0, 5.0])


def test_double_quantisation_moves_a_weight_by_less_than_a_hundredth_of_its_block():
    w_n = torch.randn(BLOCK * (GROUP + 3), generator=torch.Generator().manual_seed(3))
    plain = coded(w_n)
    doubled = Nf4(plain.pairs, constants_decoded(constants_coded(plain.c_b)), plain.n)
    assert len(constants_coded(plain.c_b).c2_g) == 2
    moved_bB = (decoded(doubled) - decoded(plain)).abs().view(-1, BLOCK)
    assert (moved_bB.amax(1) < 0.01 * plain.c_b).all()


def test_constants_that_are_all_the_same_are_kept():
    assert constants_decoded(constants_coded(torch.full((5,), 0.25))).tolist() == [0.25] * 5
