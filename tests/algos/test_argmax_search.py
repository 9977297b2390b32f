"""The search for the winner gives the bits of the plain way, which makes all noise."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.algos.noise import argmax_search as searching
from shoal.algos.noise.argmax_search import MOST, _with_all_noise, gaps_of, gumbel_max
from shoal.algos.noise.philox import gumbel, gumbel_at, noise_of, seed_words
from shoal.protocol import noise
from shoal.protocol.seed_chain import sample_seed


@pytest.fixture(autouse=True)
def every_size_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "SMALLEST", 0)


def drawn(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << 32, (rows, 4), generator=generator), torch.randint(
        0, 1 << 20, (rows,), generator=generator
    )


def logits(rows: int, vocabulary: int) -> Iterator[Tensor]:
    """From flat to peaked; with a few words far above the others, as trained policies have; and full of equal scores."""
    generator = torch.Generator().manual_seed(vocabulary)
    plain_NV = torch.randn(rows, vocabulary, generator=generator)
    yield torch.zeros(rows, vocabulary)
    for width in (0.02, 1.0, 4.0, 9.0, 40.0):
        yield plain_NV * width
    high_NV = plain_NV.clone()
    high_NV[:, :: max(1, vocabulary // 7)] += 18
    yield high_NV
    yield (plain_NV * 3).round() * 2**25  # float32 loses the noise, so that many tokens have the largest score
    yield torch.where(plain_NV > 0.5, plain_NV * 5, -torch.inf).index_fill(1, torch.tensor([vocabulary - 1]), 0.0)


@pytest.mark.parametrize(("rows", "vocabulary"), [
    (4000, 1), (4000, 64), (300, 1000), (200, 1026), (20, 32768), (3, 151936),
])  # fmt: skip
def test_the_winner_and_its_score_are_those_of_all_noise(rows: int, vocabulary: int, monkeypatch) -> None:
    monkeypatch.setattr(searching, "HELD_VALUES", rows * vocabulary // 3 + 1)  # several pieces
    words_N4, positions_N = drawn(rows, vocabulary)
    for scaled_NV in logits(rows, vocabulary):
        wanted, found = (way(scaled_NV, words_N4, positions_N) for way in (_with_all_noise, gumbel_max))
        assert torch.equal(wanted[0], found[0]) and torch.equal(wanted[1], found[1])


def test_gaps_are_those_of_all_noise() -> None:
    words_N4, positions_N = drawn(50)
    for scaled_NV in logits(50, 2053):
        tokens_N = torch.randint(0, 2053, (50,))
        noisy_NV = scaled_NV + gumbel(words_N4, positions_N, 2053)
        wanted_N = noisy_NV.amax(-1) - noisy_NV.gather(1, tokens_N[:, None]).squeeze(1)
        assert torch.equal(gaps_of(scaled_NV, words_N4, positions_N, tokens_N), wanted_N)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_give_what_they_always_gave(odd: float) -> None:
    scaled_NV, (words_N4, positions_N) = torch.randn(4, 3000), drawn(4)
    scaled_NV[1, 2500] = scaled_NV[2, 7] = odd
    wanted, found = (way(scaled_NV, words_N4, positions_N) for way in (_with_all_noise, gumbel_max))
    assert torch.equal(wanted[1], found[1]) and torch.equal(wanted[0].isnan(), found[0].isnan())


def test_the_noise_of_one_token_is_that_of_the_reference() -> None:
    seeds = [sample_seed(b"one", index) for index in range(200)]
    tokens_N, positions_N = torch.randint(0, 999, (200,)), torch.arange(200) * 31
    expected_N = noise.gumbel(seeds, positions_N.numpy(), 999)[np.arange(200), tokens_N.numpy()]
    assert (gumbel_at(seed_words(seeds), positions_N, tokens_N).numpy() == expected_N).all()


def test_no_noise_is_larger_than_the_most_and_it_rises_with_the_bits() -> None:
    assert noise_of(torch.tensor([2**32 - 1])).item() < MOST
    steps = torch.arange(0, 2**32, 4099)
    for bits in (steps, torch.arange(10**6), 2**32 - 1 - torch.arange(10**6).flip(0)):
        assert (noise_of(bits).diff() >= 0).all()
