"""AdamW with 8-bit moments, and learning rates, against hand-worked numbers."""

import pytest
import torch

from shoal.config import TrainConfig
from shoal.train import optimiser as adamw8_file
from shoal.train.optimiser import BLOCK, EightBitValues, adamw8, coded, decoded, learning_rate, no_moments, numbers

SETTINGS = {"lr": 0.1, "betas": (0.9, 0.95), "decay": 0.1}


def test_the_tables_are_the_papers():
    signed, unsigned = numbers(True), numbers(False)
    for table in (signed, unsigned):
        assert len(set(table)) == 256 and list(table) == sorted(table) and table[-1] == 1.0
    # One part of the lowest power of ten with signs, two without; 64 and 128 of the highest.
    assert signed[127:129] == (0.0, pytest.approx(5.5e-7)) and unsigned[:2] == (0.0, pytest.approx(3.25e-7))
    assert unsigned[2] == pytest.approx(7.75e-7)
    assert signed[-2] == -signed[0] == pytest.approx(1 - 0.9 / 128) and unsigned[-2] == pytest.approx(1 - 0.9 / 256)


@pytest.mark.parametrize("signed", [True, False])
def test_each_value_becomes_the_nearest_number_times_the_largest_of_its_block(signed):
    table = torch.tensor(numbers(signed))
    value_n = torch.randn(3 * BLOCK + 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 3, 775)
    value_n = value_n if signed else value_n.abs()
    found = coded(value_n, signed=signed)
    assert found.code_n.dtype == torch.uint8 and len(found.a_b) == 4
    for b, block in enumerate(value_n.split(BLOCK)):
        assert found.a_b[b] == block.abs().max()
        nearest = table[(block[:, None] / found.a_b[b] - table).abs().argmin(1)] * found.a_b[b]
        got = decoded(found, signed=signed)[b * BLOCK : (b + 1) * BLOCK]
        lowest = 0.0 if signed else numbers(False)[1] * found.a_b[b]
        torch.testing.assert_close(got, nearest.clamp(min=lowest) if not signed else nearest, rtol=1e-6, atol=0)


def test_of_two_codes_as_near_the_lower_is_taken():
    signed = torch.tensor(numbers(True), dtype=torch.float64)
    middle_n = ((signed[:-1] + signed[1:]) / 2).float()
    for i in (0, 100, 127, 128, 200, 254):
        assert coded(torch.stack([middle_n[i], torch.tensor(1.0)]), signed=True).code_n[0] == i


@pytest.mark.parametrize("signed", [True, False])
def test_the_look_up_of_codes_is_the_search_in_the_table(signed):
    """For the first and last values of all upper bits, two between, and the middles of the table with their neighbours."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    for lower in (0, 1, 0x7FFF, 0xFFFF):
        bits = (upper << 16) + lower
        share_n = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)
        share_n = share_n[(share_n.abs() <= 1) if signed else (share_n >= 0) & (share_n <= 1)]
        expected = torch.bucketize(share_n, adamw8_file._between(signed, share_n.device))
        assert adamw8_file._nearest(share_n, signed).long().equal(expected)
    middle_n = adamw8_file._between(signed, share_n.device)
    for place_n in (middle_n, middle_n.nextafter(torch.tensor(2.0)), middle_n.nextafter(torch.tensor(-2.0))):
        expected = torch.bucketize(place_n, middle_n)
        assert adamw8_file._nearest(place_n, signed).long().equal(expected)


def test_a_denominator_that_is_small_in_its_block_does_not_vanish():
    found = coded(torch.tensor([1.0, 1e-12, 0.0]), signed=False)
    assert found.code_n.tolist() == [255, 1, 0]
    # Coded as 0, the next step with a gradient of 0 would be lr * m / eps.
    held = no_moments(2, torch.device("cpu"))
    theta_n, held = adamw8(torch.zeros(2), torch.tensor([1e4, 1e-4]), held, step=1, **SETTINGS)
    moved_n, _ = adamw8(theta_n, torch.zeros(2), held, step=2, **SETTINGS)
    assert (moved_n - theta_n).abs().max() < 0.1


def test_two_steps_are_those_worked_out_by_hand():
    theta_n, g_n = torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.1])
    theta_n, held = adamw8(theta_n, g_n, no_moments(2, torch.device("cpu")), step=1, **SETTINGS)
    # m = 0.1 g and v = 0.05 g², so the corrected ratio is 1: theta = 0.99 - 0.1.
    torch.testing.assert_close(theta_n, torch.tensor([0.89, 0.89]))
    # The second is 0.2 of the first. Near 0.2, a signed table has parts of 0.9 / 64, an unsigned one of 0.9 / 128.
    torch.testing.assert_close(decoded(held.m, signed=True), torch.tensor([0.05, 0.05 * 0.20546875]))
    r = 0.5 * 0.05**0.5
    torch.testing.assert_close(decoded(held.r, signed=False), torch.tensor([r, r * 0.201953125]))
    theta_n, _ = adamw8(theta_n, torch.tensor([-0.1, 0.0]), held, step=2, **SETTINGS)
    # First: m = 0.9 * 0.05 - 0.01 = 0.035, v = 0.95 * 0.0125 + 0.05 * 0.01 = 0.012375; 0.8811 - 0.1 * 0.18421 / 0.35626.
    # Second: m = 0.9 * 0.010273438, r = sqrt(0.95) * 0.022579; 0.8811 - 0.1 * 0.048664 / 0.070481.
    torch.testing.assert_close(theta_n, torch.tensor([0.8293935, 0.8120545]), atol=2e-6, rtol=0)


def test_a_step_of_pieces_is_the_step_of_the_whole():
    generator = torch.Generator().manual_seed(1)
    theta_n, g_n = torch.randn(5 * BLOCK, generator=generator), torch.randn(5 * BLOCK, generator=generator)
    whole_n, held = adamw8(theta_n, g_n, no_moments(5 * BLOCK, theta_n.device), step=1, **SETTINGS)
    parts = [
        adamw8(theta, g, no_moments(len(g), g.device), step=1, **SETTINGS)
        for theta, g in zip(theta_n.split(2 * BLOCK), g_n.split(2 * BLOCK), strict=True)
    ]
    assert torch.cat([theta for theta, _ in parts]).equal(whole_n)
    for kind in (0, 1):
        joined = EightBitValues(*(torch.cat([moments[kind][field] for _, moments in parts]) for field in (0, 1)))
        assert joined.code_n.equal(held[kind].code_n) and joined.a_b.equal(held[kind].a_b)


# --- Learning rates ---


def rates(shape, ts, warmup_steps=4, steps=15):
    config = TrainConfig(schedule=shape, warmup_steps=warmup_steps)
    return [learning_rate(t, config, peak=2.0, steps=steps) for t in ts]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_parts_to_the_peak(shape):
    assert rates(shape, range(5)) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_constant_stays_at_the_peak():
    assert rates("constant", [4, 9, 14, 99]) == [2.0] * 4


def test_linear_falls_to_a_tenth_at_the_last_step():
    # x = (t - 4) / 10: 0, 0.5, 1
    assert rates("linear", [4, 9, 14]) == pytest.approx([2.0, 1.1, 0.2])


def test_cosine_falls_to_a_tenth_at_the_last_step():
    # 2 (0.1 + 0.45 (1 + cos(pi x))): x = 0.2 gives cos = 0.809017
    assert rates("cosine", [4, 6, 9, 14]) == pytest.approx([2.0, 2 * (0.1 + 0.45 * 1.809017), 1.1, 0.2])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_steps_beyond_the_last_keep_its_rate(shape):
    assert rates(shape, [99]) == pytest.approx([0.2])


def test_no_warm_up_and_a_single_step_give_the_peak():
    assert rates("linear", [0], warmup_steps=0, steps=1) == [2.0]
